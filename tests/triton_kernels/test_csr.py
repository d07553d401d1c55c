"""The kernels as ops of torch: gradients of any order, autocast, and what torch checks of an op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.triton_kernels.patterns import (
    NUM_TOKENS,
    SHAPE,
    TOLERANCES,
    masks,
    pattern_of,
    relative_error,
    require_kernels,
)

DEVICE = require_kernels()

from lightning_dynmo.triton_kernels import csr  # noqa: E402
from lightning_dynmo.triton_kernels.csr import Rows, csr_sddmm, csr_spmm, make_rows  # noqa: E402

DTYPES = list(TOLERANCES)
OPS = torch.ops.lightning_dynmo


def rows_of(mask: Tensor) -> tuple[Rows, Rows]:
    """Returns the rows of a weight that has the mask's entries, and those of its transpose."""
    pattern = pattern_of(mask, DEVICE)
    num_rows, num_columns = mask.shape
    rows = make_rows(pattern.row_offsets, pattern.columns, num_columns)
    return rows, make_rows(pattern.t_row_offsets, pattern.t_columns, num_rows, order=pattern.t_order)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype).requires_grad_()


def dense_of(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the weight in float64, differentiable in the values."""
    weight = torch.zeros(mask.shape, dtype=torch.float64, device=DEVICE)
    return weight.masked_scatter(mask.to(DEVICE), values.double())


def gradients(product: Tensor, inputs: tuple[Tensor, Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(product, inputs, grad.to(product.dtype))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", masks())
def test_gradients_of_the_product(name: str, dtype: torch.dtype) -> None:
    mask = masks()[name]
    values, x = leaf(int(mask.sum()), dtype=dtype), leaf(SHAPE[1], NUM_TOKENS, dtype=dtype)
    grad = torch.randn(SHAPE[0], NUM_TOKENS).to(DEVICE, dtype)
    actual = gradients(csr_spmm(values, x, *rows_of(mask)), (values, x), grad)
    expected = gradients(dense_of(values, mask) @ x.double(), (values, x), grad)
    for ours, exact in zip(actual, expected, strict=True):
        assert relative_error(ours, exact) <= 1.5 * TOLERANCES[dtype]  # `exact` is rounded to the type as well


@pytest.mark.usefixtures("poisoned")
def test_gradients_of_the_product_with_the_transpose() -> None:
    mask = masks()["empty rows and columns"]
    values, x = leaf(int(mask.sum())), leaf(SHAPE[0], NUM_TOKENS)
    grad = torch.randn(SHAPE[1], NUM_TOKENS, device=DEVICE)
    rows, t_rows = rows_of(mask)
    product = csr_spmm(values, x, t_rows, rows)
    expected = dense_of(values, mask).T @ x.double()
    assert relative_error(product, expected) <= 1e-6
    for ours, exact in zip(gradients(product, (values, x), grad), gradients(expected, (values, x), grad), strict=True):
        assert relative_error(ours, exact) <= 1e-6


def test_gradients_of_gradients() -> None:
    mask = masks()["empty rows and columns"]
    values, x = leaf(int(mask.sum())), leaf(SHAPE[1], 20)
    grad = leaf(SHAPE[0], 20)

    def second(product: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(product, (values, x), grad.to(product.dtype), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        return torch.autograd.grad(penalty, (values, x, grad))

    actual = second(csr_spmm(values, x, *rows_of(mask)))
    expected = second(dense_of(values, mask) @ x.double())
    for ours, exact in zip(actual, expected, strict=True):
        assert relative_error(ours, exact) <= 2e-6


def test_only_the_gradients_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks()["one dense row"]
    values, x = leaf(int(mask.sum())), torch.randn(SHAPE[1], 8, device=DEVICE)
    product = csr_spmm(values, x, *rows_of(mask))
    monkeypatch.setattr(csr, "csr_spmm", None)  # the gradient of x would need it
    product.sum().backward()
    assert relative_error(values.grad, x.sum(1)) <= 1e-6


def test_wrong_rows_of_the_transpose_fail() -> None:
    mask = masks()["rows of all lengths"]
    rows, t_rows = rows_of(mask)
    values, x = leaf(int(mask.sum())), leaf(SHAPE[1], 20)
    # The order of the transpose's values is the usual thing to get wrong.
    wrong = t_rows._replace(order=t_rows.order.roll(1))
    (ours,) = torch.autograd.grad(csr_spmm(values, x, rows, wrong).sum(), (x,))
    (exact,) = torch.autograd.grad((dense_of(values, mask) @ x.double()).sum(), (x,))
    assert relative_error(ours, exact) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_converts_both_and_gradients_come_back_in_float32(dtype: torch.dtype) -> None:
    mask = masks()["rows of all lengths"]
    rows = rows_of(mask)
    values, x = leaf(int(mask.sum())), leaf(SHAPE[1], 20)
    with torch.autocast(DEVICE.type, dtype):
        product = csr_spmm(values, x, *rows)
        inner = csr_sddmm(product.float(), x, *rows)
    assert product.dtype == inner.dtype == dtype
    assert torch.equal(product, csr_spmm(values.to(dtype), x.to(dtype), *rows))
    product.float().square().sum().backward()
    assert values.grad.dtype == x.grad.dtype == torch.float32
    exact = torch.autograd.grad((dense_of(values, mask) @ x.double()).square().sum(), (values, x))
    for ours, right in zip((values.grad, x.grad), exact, strict=True):
        assert relative_error(ours, right) <= 2 * TOLERANCES[torch.bfloat16]


def test_rows_without_the_order_of_the_transpose_are_refused() -> None:
    mask = masks()["rows of all lengths"]
    rows, t_rows = rows_of(mask)
    values, x, g = leaf(int(mask.sum())), leaf(SHAPE[1], 20), leaf(SHAPE[0], 20)
    unordered = t_rows._replace(order=None)
    with pytest.raises(ValueError, match="in one of rows and t_rows, got it in neither; make the rows that"):
        csr_spmm(values, x, rows, unordered)
    with pytest.raises(ValueError, match="in one of rows and t_rows, got it in rows and t_rows; make the rows that"):
        csr_spmm(values, x, t_rows, t_rows)
    with pytest.raises(ValueError, match="in t_rows alone, got it in rows; make rows"):
        csr_sddmm(x, g, t_rows, rows)
    with pytest.raises(ValueError, match="in t_rows alone, got it in neither; make rows"):
        csr_sddmm(g, x, rows, unordered)


def test_matrices_with_other_rows_are_refused() -> None:
    mask = masks()["rows of all lengths"]
    rows, t_rows = rows_of(mask)
    values, x, g = leaf(int(mask.sum())), leaf(SHAPE[1], 20), leaf(SHAPE[0], 20)
    for wrong in (x[1:], x.t(), x[0]):
        with pytest.raises(ValueError, match=f"csr_spmm expects a matrix of {SHAPE[1]} rows"):
            csr_spmm(values, wrong, rows, t_rows)
        with pytest.raises(ValueError, match=f"csr_sddmm expects a matrix of {SHAPE[1]} rows"):
            csr_sddmm(g, wrong, rows, t_rows)
    with pytest.raises(ValueError, match=f"csr_sddmm expects a matrix of {SHAPE[0]} rows"):
        csr_sddmm(g[1:], x, rows, t_rows)


def test_outside_of_autocast_types_must_agree() -> None:
    mask = masks()["rows of all lengths"]
    values, x = leaf(int(mask.sum())), leaf(SHAPE[1], 20, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"convert it with x.to\(torch.float32\)"):
        csr_spmm(values, x, *rows_of(mask))


def test_torch_accepts_the_ops() -> None:
    mask = masks()["empty rows and columns"]
    rows, t_rows = rows_of(mask)
    values, x, g = leaf(int(mask.sum())), leaf(SHAPE[1], 16), leaf(SHAPE[0], 16)
    torch.library.opcheck(OPS.csr_spmm, (values, x, *rows, *t_rows))
    torch.library.opcheck(OPS.csr_spmm, (values, g, *t_rows, *rows))
    torch.library.opcheck(OPS.csr_sddmm, (g, x, *rows, *t_rows))
