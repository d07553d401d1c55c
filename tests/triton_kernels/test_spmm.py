"""The product of a sparse weight with activations: against float64, on every pattern and type."""

from __future__ import annotations

import pytest
import torch

from lightning_dynmo import _kernels
from tests.triton_kernels.broken import with_mistake
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

from lightning_dynmo.triton_kernels import spmm as module  # noqa: E402
from lightning_dynmo.triton_kernels.configs import config_for  # noqa: E402
from lightning_dynmo.triton_kernels.sddmm import sddmm_reference  # noqa: E402
from lightning_dynmo.triton_kernels.spmm import num_panels, row_tasks, spmm, spmm_reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = list(TOLERANCES)


def error_of(product, mask, dtype, num_tokens=NUM_TOKENS, *, wide=False, transposed=False) -> float:
    """Returns the relative error of a product with a random weight that has the mask's entries."""
    num_rows, num_columns = mask.shape
    pattern = pattern_of(mask, DEVICE, wide=wide)
    weight = torch.randn(mask.shape).to(DEVICE, dtype) * mask.to(DEVICE)
    values = pattern.gather(weight)
    if transposed:
        x = torch.randn(num_rows, num_tokens).to(DEVICE, dtype)
        actual = product(values, pattern.t_row_offsets, pattern.t_columns, x, num_columns, order=pattern.t_order)
        return relative_error(actual, weight.double().T @ x.double())
    x = torch.randn(num_columns, num_tokens).to(DEVICE, dtype)
    actual = product(values, pattern.row_offsets, pattern.columns, x, num_rows)
    assert actual.dtype == dtype
    return relative_error(actual, weight.double() @ x.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", masks())
def test_equals_the_dense_product(name: str, dtype: torch.dtype) -> None:
    assert error_of(spmm, masks()[name], dtype) <= TOLERANCES[dtype]


@pytest.mark.parametrize("name", masks())
def test_equals_the_product_with_the_transpose(name: str) -> None:
    assert error_of(spmm, masks()[name], torch.float32, transposed=True) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("name", masks())
def test_the_reference_is_exact_in_float64(name: str) -> None:
    for transposed in (False, True):
        assert error_of(spmm_reference, masks()[name], torch.float64, transposed=transposed) <= 1e-15


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 64])
def test_numbers_of_tokens(num_tokens: int) -> None:
    mask = masks()["empty rows and columns"]
    assert error_of(spmm, mask, torch.bfloat16, num_tokens) <= TOLERANCES[torch.bfloat16]


def test_columns_in_32_bits() -> None:
    mask = masks()["rows of all lengths"]
    assert error_of(spmm, mask, torch.float32, wide=True) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_columns_are_added_up_in_panels(dtype: torch.dtype) -> None:
    mask = torch.zeros(3, 2500, dtype=torch.bool)
    mask[0, ::17] = True
    mask[2, 1000:1060] = True  # across the border of two panels, and nothing in the third
    pattern = pattern_of(mask, DEVICE)
    assert row_tasks(pattern.row_offsets, pattern.columns, 2500).shape == (3, 3, 3)
    assert error_of(spmm, mask, dtype, 40) <= TOLERANCES[dtype]


def test_panels_only_where_rows_have_entries_for_them() -> None:
    assert num_panels(1024, 4096, nnz=16 * 4 * 1024) == 4
    assert num_panels(1024, 4096, nnz=16 * 4 * 1024 - 1) == 1
    assert num_panels(1024, 1024, nnz=1024 * 1024) == 1
    assert num_panels(1024, 1025, nnz=1024 * 1024) == 2


def test_longest_rows_come_first_and_equal_ones_in_order() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0]], dtype=torch.bool)
    pattern = pattern_of(mask, DEVICE)
    tasks = row_tasks(pattern.row_offsets, pattern.columns, 3)
    assert tasks.dtype == torch.int32
    assert tasks.tolist() == [[[1, 1, 4], [0, 0, 1], [3, 4, 5], [2, 4, 4]]]


def test_two_runs_give_the_same_bits() -> None:
    pattern = pattern_of(masks()["rows of all lengths"], DEVICE)
    values, x = torch.randn(pattern.nnz, device=DEVICE), torch.randn(SHAPE[1], NUM_TOKENS, device=DEVICE)
    runs = [spmm(values, pattern.row_offsets, pattern.columns, x, SHAPE[0]) for _ in range(2)]
    assert torch.equal(*runs)


def test_what_no_entry_names_is_not_read() -> None:
    mask = masks()["empty rows and columns"]
    pattern = pattern_of(mask, DEVICE)
    x = torch.randn(SHAPE[1], NUM_TOKENS, device=DEVICE)
    x[(~mask.any(0)).to(DEVICE)] = torch.nan
    out = spmm(torch.randn(pattern.nnz, device=DEVICE), pattern.row_offsets, pattern.columns, x, SHAPE[0])
    assert out.isfinite().all()
    assert (out[(~mask.any(1)).to(DEVICE)] == 0).all()


def test_operands_need_not_be_contiguous() -> None:
    pattern = pattern_of(masks()["rows of all lengths"], DEVICE)
    arguments = [torch.randn(pattern.nnz, device=DEVICE), pattern.row_offsets, pattern.columns]
    x = torch.randn(SHAPE[1], NUM_TOKENS, device=DEVICE)
    strided = [torch.stack([tensor, -tensor], dim=-1)[:, 0] for tensor in arguments]
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert torch.equal(spmm(*strided, x.T.contiguous().T, SHAPE[0]), spmm(*arguments, x, SHAPE[0]))


def test_places_beyond_32_bits() -> None:
    torch.use_deterministic_algorithms(False)  # 4 GiB of memory of which only a few pages are touched
    num_columns = 2**25 + 10
    x = torch.empty(num_columns, 64, dtype=torch.float16, device=DEVICE)
    assert x.numel() > 2**31
    columns = torch.tensor([3, 2**25 + 5], dtype=torch.int32, device=DEVICE)
    x[columns.long()] = torch.tensor([[1.0], [2.0]], dtype=torch.float16, device=DEVICE)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    values = torch.tensor([10.0, 100.0], dtype=torch.float16, device=DEVICE)
    assert (spmm(values, offsets, columns, x, 1) == 210).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # one of them reads what lies behind the values
@pytest.mark.parametrize(
    ("mask", "right", "wrong"),
    [
        ("everything", "in range(start, end, BLOCK_K)", "in range(start, end - BLOCK_K, BLOCK_K)"),
        ("rows of all lengths", "kept = entries < end", "kept = entries <= end"),
        ("rows of all lengths", "task + 1)", "task + 2)"),
        ("everything", "(program // num_rows) * BLOCK_N", "0"),
        ("rows of all lengths", "if ADD:", "if not ADD:"),
    ],
)
def test_a_wrong_kernel_fails(mask: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_mistake(module, right, wrong) as broken:
        monkeypatch.setattr(module, "spmm_kernel", broken.spmm_kernel)
        assert not error_of(spmm, masks()[mask], torch.bfloat16) <= TOLERANCES[torch.bfloat16]


def test_a_lost_panel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.ones(2, 1100, dtype=torch.bool)
    assert error_of(spmm, mask, torch.bfloat16, 10) <= TOLERANCES[torch.bfloat16]
    with with_mistake(module, "if ADD:", "if False:") as broken:
        monkeypatch.setattr(module, "spmm_kernel", broken.spmm_kernel)
        assert not error_of(spmm, mask, torch.bfloat16, 10) <= TOLERANCES[torch.bfloat16]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_the_cpu_is_refused_outside_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = pattern_of(masks()["one entry"], DEVICE)
    monkeypatch.delenv("TRITON_INTERPRET")
    config_for.cache_clear()
    with pytest.raises(ValueError, match=r"spmm expects tensors on a GPU, got cpu; move them"):
        spmm(torch.ones(1), pattern.row_offsets, pattern.columns, torch.ones(SHAPE[1], 4), SHAPE[0])


def test_the_package_calls_the_kernels() -> None:
    pattern = pattern_of(masks()["rows of all lengths"], DEVICE)
    indices = (pattern.row_offsets, pattern.columns)
    values, x = torch.randn(pattern.nnz, device=DEVICE), torch.randn(SHAPE[1], 16, device=DEVICE)
    tasks = _kernels.row_tasks(*indices, SHAPE[1])
    out = spmm(values, *indices, x, SHAPE[0])
    assert torch.equal(_kernels.spmm(values, *indices, x, SHAPE[0]), out)
    assert torch.equal(_kernels.spmm(values, *indices, x, SHAPE[0], tasks=tasks), out)
    assert not torch.equal(_kernels.spmm(values, *indices, x, SHAPE[0], tasks=tasks[:, :1].expand_as(tasks)), out)
    assert torch.equal(_kernels.sddmm(*indices, out, x), sddmm_reference(*indices, out, x))


def test_errors_say_what_to_change() -> None:
    pattern = pattern_of(masks()["rows of all lengths"], DEVICE)
    values, x = torch.randn(pattern.nnz, device=DEVICE), torch.randn(SHAPE[1], NUM_TOKENS, device=DEVICE)
    indices = (pattern.row_offsets, pattern.columns)
    with pytest.raises(TypeError, match=r"torch.float32, got torch.float16; convert it with x.to\(torch.float32\)"):
        spmm(values, *indices, x.half(), SHAPE[0])
    with pytest.raises(TypeError, match=r"float32, float16, bfloat16, got float64"):
        spmm(values.double(), *indices, x.double(), SHAPE[0])
    with pytest.raises(ValueError, match=r"11 row offsets, got .* row offsets .10.; take indices and values"):
        spmm(values, *indices, x, SHAPE[0] + 1)
    with pytest.raises(ValueError, match="as many values as columns"):
        spmm(values[1:], *indices, x, SHAPE[0])
    with pytest.raises(ValueError, match=r"tasks .panels, 9, 3., got .1, 5, 3.; make them by row_tasks"):
        spmm(values, *indices, x, SHAPE[0], tasks=row_tasks(*indices, SHAPE[1])[:, :5])
    with pytest.raises(ValueError, match=r"expects an order of .* places, one for each entry"):
        spmm(values, *indices, x, SHAPE[0], order=pattern.t_order[1:])
    with pytest.raises(RuntimeError, match="call csr_spmm"):
        spmm(values.requires_grad_(), *indices, x, SHAPE[0])
