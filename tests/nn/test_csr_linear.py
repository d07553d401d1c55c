"""A sparse linear layer against the dense one with zeros in its place: outputs and all gradients."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_dynmo._torch import FakeTensorMode
from lightning_dynmo.nn import _products
from lightning_dynmo.nn.csr import CSRPattern
from lightning_dynmo.nn.csr_linear import csr_linear, faster_execution, time_executions
from lightning_dynmo.pipeline.splitting import SplitBackward

LARGEST_ERROR = 1e-6  # in float32, relative, by Frobenius norms
HAS_NUMBA = importlib.util.find_spec("numba") is not None
WITH_NUMBA = pytest.param("numba", marks=pytest.mark.skipif(not HAS_NUMBA, reason="needs numba"))


@pytest.fixture(params=[WITH_NUMBA, "torch"], autouse=True)
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test with numba, and as where it is not installed."""
    if request.param == "torch":
        monkeypatch.setattr(_products, "_compiled", lambda: None)
    expected = _products._NUMBA if request.param == "numba" else _products._TORCH
    assert _products.products_for(torch.zeros(1)) is expected
    return str(request.param)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def mask_of(num_rows: int, num_columns: int, density: float, seed: int = 0) -> Tensor:
    return torch.rand(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) < density


def one_row_of(num_rows: int, num_columns: int) -> Tensor:
    mask = torch.zeros(num_rows, num_columns, dtype=torch.bool)
    mask[num_rows // 2] = True
    return mask


def inputs_of(mask: Tensor, leading: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns x, a weight, a bias and a gradient."""
    torch.manual_seed(1)
    num_rows, num_columns = mask.shape
    shapes = ((*leading, num_columns), (num_rows, num_columns), (num_rows,), (*leading, num_rows))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Returns output and gradients of x, the kept weights and the bias, in float64."""
    x, weight, bias, gradient = (value.double() for value in inputs)
    x, weight, bias = x.requires_grad_(), (weight * mask).requires_grad_(), bias.requires_grad_()
    output = F.linear(x, weight, bias)
    of_x, of_weight, of_bias = torch.autograd.grad(output, [x, weight, bias], gradient)
    return [output.detach(), of_x, of_weight[mask], of_bias]


def sparse(mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    x, weight, bias, gradient = inputs
    pattern = CSRPattern.from_mask(mask)
    x, values, bias = (value.clone().requires_grad_() for value in (x, pattern.gather(weight), bias))
    output = csr_linear(x, values, pattern, bias)
    return [output.detach(), *torch.autograd.grad(output, [x, values, bias], gradient)]


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (
        float((found.detach().double() - expected).norm() / expected.norm().clamp_min(1e-300))
        if expected.numel()
        else 0.0
    )


MASKS = {
    "one": torch.ones(1, 1, dtype=torch.bool),
    "nothing": torch.zeros(5, 7, dtype=torch.bool),
    "dense": torch.ones(33, 300, dtype=torch.bool),
    "one_row": one_row_of(17, 40),
    "three_columns": torch.zeros(40, 17, dtype=torch.bool).index_fill(1, torch.tensor([0, 7, 16]), True),
    "half": mask_of(70, 290, 0.5),
    "sparse": mask_of(130, 131, 0.05),
    "many_rows": mask_of(1100, 40, 0.2),
    "wide": mask_of(9, 2500, 0.03),
    "wide_columns": mask_of(3, 40_000, 0.001),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("leading", [(), (1,), (2, 35), (64,), (193,)], ids=str)
def test_output_and_gradients_are_those_of_the_dense_layer(name: str, leading: tuple[int, ...]) -> None:
    mask = MASKS[name]
    inputs = inputs_of(mask, leading, torch.float32)
    for found, expected in zip(sparse(mask, inputs), reference(mask, inputs), strict=True):
        assert found.dtype is torch.float32
        assert error(found, expected) < LARGEST_ERROR


def test_the_comparison_notices_one_entry_in_the_wrong_column_and_a_token_left_out() -> None:
    mask = MASKS["half"]
    inputs = inputs_of(mask, (193,), torch.float32)
    expected = reference(mask, inputs)

    moved = mask.clone()
    row, column = (int(place) for place in (mask[:, :-1] & ~mask[:, 1:]).nonzero()[0])
    moved[row, column : column + 2] = torch.tensor([False, True])
    shorter = [inputs[0].clone(), *inputs[1:3], inputs[3].clone()]
    shorter[3][-1] = 0

    of_moved, of_shorter = sparse(moved, inputs), sparse(mask, shorter)
    for index in (0, 1, 2):
        assert error(of_moved[index], expected[index]) > 10 * LARGEST_ERROR
    for index in (1, 2, 3):
        assert error(of_shorter[index], expected[index]) > 10 * LARGEST_ERROR


def test_no_tokens_at_all() -> None:
    mask = MASKS["half"]
    output, of_x, of_values, of_bias = sparse(mask, inputs_of(mask, (2, 0), torch.float32))
    assert (output.shape, of_x.shape) == ((2, 0, 70), (2, 0, 290))
    assert of_values.eq(0).all()
    assert of_bias.eq(0).all()


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_by_differences(bias: bool) -> None:
    mask = mask_of(5, 7, 0.4)
    pattern = CSRPattern.from_mask(mask)
    x, weight, shift, _ = inputs_of(mask, (3,))
    leaves = [x, pattern.gather(weight), *([shift] if bias else [])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda x, values, *rest: csr_linear(x, values, pattern, *rest), leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    mask = MASKS["half"]
    inputs = inputs_of(mask, (70,), dtype)
    exact = sparse(mask, [value.float() for value in inputs])
    for found, expected in zip(sparse(mask, inputs), exact, strict=True):
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_treats_it_as_a_linear_layer(dtype: torch.dtype) -> None:
    mask = MASKS["half"]
    pattern = CSRPattern.from_mask(mask)
    x, weight, bias, gradient = inputs_of(mask, (70,), dtype)
    dense, values = (weight * mask).requires_grad_(), pattern.gather(weight).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = F.linear(x, dense, bias), csr_linear(x, values, pattern, bias)
        assert found.dtype == expected.dtype
        # A backward under autocast is unusual, but allowed.
        found.backward(gradient.to(found.dtype))
    expected.backward(gradient.to(expected.dtype))
    assert values.grad is not None
    assert dense.grad is not None
    assert values.grad.dtype == dtype
    bound = 1e-2 if dtype is torch.float32 else 1e-12
    assert error(found, expected.detach().double()) < bound
    assert error(values.grad, dense.grad[mask].double()) < bound
    exact = F.linear(x.double(), dense.detach().double(), bias.double())
    assert (error(found, exact) > 1e-4) == (dtype is torch.float32)  # it was bfloat16 indeed


@pytest.mark.parametrize("real_pattern", [True, False])
def test_tensors_without_data_give_shapes(real_pattern: bool) -> None:
    mask = MASKS["half"]
    pattern = CSRPattern.from_mask(mask)
    x, weight, bias, _ = inputs_of(mask, (2, 3), torch.bfloat16)
    values = pattern.gather(weight)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        if not real_pattern:
            names = ("row_offsets", "columns", "t_row_offsets", "t_columns", "t_order")
            pattern = CSRPattern((70, 290), *(mode.from_tensor(getattr(pattern, name)) for name in names))
        faked = [mode.from_tensor(value).requires_grad_() for value in (x, values, bias)]
        output = csr_linear(faked[0], faked[1], pattern, faked[2])
        gradients = torch.autograd.grad(output.sum(), faked)
    assert (output.shape, output.dtype, output.requires_grad) == ((2, 3, 70), torch.bfloat16, True)
    assert [gradient.shape for gradient in gradients] == [value.shape for value in (x, values, bias)]

    metas = [value.to("meta").requires_grad_() for value in (x, values, bias)]
    output = csr_linear(metas[0], metas[1], pattern, metas[2])
    assert (output.shape, output.device.type) == ((2, 3, 70), "meta")
    assert torch.autograd.grad(output.sum(), metas)[1].shape == values.shape


class Spy(_products.Products):
    """Lists what is asked of the products that it stands before."""

    def __init__(self, products: _products.Products) -> None:
        self.products = products
        self.calls: list[str] = []

    def pack(self, tokens: Tensor) -> Tensor:
        self.calls.append("pack")
        return self.products.pack(tokens)

    def multiply(
        self,
        values: Tensor,
        pattern: CSRPattern,
        panels: Tensor,
        num_tokens: int,
        bias: Tensor | None,
        transposed: bool,
    ) -> Tensor:
        self.calls.append("transposed" if transposed else "multiply")
        return self.products.multiply(values, pattern, panels, num_tokens, bias, transposed)

    def sample(self, pattern: CSRPattern, left: Tensor, right: Tensor) -> Tensor:
        self.calls.append("sample")
        return self.products.sample(pattern, left, right)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def spy(means: str, monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy(_products.products_for(torch.zeros(1)))
    monkeypatch.setattr("lightning_dynmo.nn.csr_linear.products_for", lambda _: found)
    return found


def layer_of(mask: Tensor, leading: tuple[int, ...]) -> tuple[CSRPattern, Tensor, nn.Parameter, nn.Parameter, Tensor]:
    pattern = CSRPattern.from_mask(mask)
    x, weight, bias, gradient = inputs_of(mask, leading, torch.float32)
    return pattern, x, nn.Parameter(pattern.gather(weight)), nn.Parameter(bias), gradient


def test_computes_what_is_asked_for_and_packs_once(spy: Spy) -> None:
    pattern, x, values, bias, gradient = layer_of(MASKS["half"], (70,))
    with torch.no_grad():
        csr_linear(x, values, pattern, bias)
    assert spy.take() == ["pack", "multiply"]

    x.requires_grad_()
    output = csr_linear(x, values, pattern, bias)
    assert spy.take() == ["pack", "multiply"]
    output.backward(gradient)
    assert sorted(spy.take()) == ["pack", "sample", "transposed"]

    csr_linear(x.detach(), values, pattern, bias).backward(gradient)
    assert spy.take() == ["pack", "multiply", "pack", "sample"]

    csr_linear(x, values.detach(), pattern, bias).backward(gradient)
    assert spy.take() == ["pack", "multiply", "pack", "transposed"]

    csr_linear(x.detach(), values.detach(), pattern, bias).backward(gradient)
    assert spy.take() == ["pack", "multiply"]


def test_each_part_of_a_split_backward_computes_its_own_gradients(spy: Spy) -> None:
    pattern, x, values, bias, gradient = layer_of(MASKS["half"], (70,))
    x.requires_grad_()
    of_x, of_values, of_bias = torch.autograd.grad(csr_linear(x, values, pattern, bias), [x, values, bias], gradient)

    output = csr_linear(x, values, pattern, bias)
    spy.take()
    split = SplitBackward([output], [gradient], [x], [values, bias])
    assert spy.take() == ["pack", "transposed"]
    assert values.grad is None
    assert bias.grad is None
    split.weights()
    assert spy.take() == ["pack", "sample"]
    assert torch.equal(split.inputs[0], of_x)  # type: ignore[arg-type]
    assert torch.equal(values.grad, of_values)
    assert torch.equal(bias.grad, of_bias)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_with_activation_checkpointing(use_reentrant: bool) -> None:
    pattern, x, values, bias, gradient = layer_of(MASKS["half"], (70,))
    x.requires_grad_()
    plain = torch.autograd.grad(csr_linear(x, values, pattern, bias), [x, values, bias], gradient)
    checkpoint(csr_linear, x, values, pattern, bias, use_reentrant=use_reentrant).backward(gradient)
    for leaf, expected in zip((x, values, bias), plain, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected)


def test_within_a_compiled_function() -> None:
    pattern, x, values, bias, gradient = layer_of(MASKS["half"], (70,))
    x.requires_grad_()

    def function(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        return csr_linear(x.sin(), values, pattern, bias).cos()

    expected = torch.autograd.grad(function(x, values, bias), [x, values, bias], gradient)
    compiled = torch.compile(function, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, values, bias), [x, values, bias], gradient)
    assert all(map(torch.equal, found, expected))


def test_twice_in_one_graph_and_changed_in_place_afterwards() -> None:
    mask = mask_of(40, 40, 0.3)
    pattern, x, values, bias, gradient = layer_of(mask, (70,))
    x.requires_grad_()
    dense = pattern.scatter(values.detach()).double().requires_grad_()
    inner = F.linear(x.double(), dense, bias.double())
    expected = torch.autograd.grad(F.linear(inner.relu(), dense), [x, dense], gradient.double())
    output = csr_linear(torch.relu_(csr_linear(x, values, pattern, bias)), values, pattern)
    found = torch.autograd.grad(output, [x, values], gradient)
    assert error(found[0], expected[0].double()) < 2e-6
    assert error(found[1], pattern.gather(expected[1])) < 2e-6


def test_values_that_changed_since_the_forward_are_noticed() -> None:
    pattern, x, values, bias, _ = layer_of(MASKS["half"], (3,))
    output = csr_linear(x.requires_grad_(), values, pattern, bias)
    with torch.no_grad():
        values.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_refuses_a_second_derivative() -> None:
    pattern, x, values, _, _ = layer_of(MASKS["half"], (3,))
    output = csr_linear(x.requires_grad_(), values, pattern).sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*dense layer"):
        torch.autograd.grad(output, x, create_graph=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.zeros(3, 289)}, r"Expected x of shape \[3, 290\] .*got \[3, 289\]"),
        ({"x": torch.tensor(1.0)}, r"Expected x of shape \[..., 290\]"),
        ({"values": torch.zeros(3)}, r"Expected values of shape .* got \[3\]"),
        ({"bias": torch.zeros(71)}, r"Expected bias of shape \[70\]"),
        ({"bias": torch.zeros(70, dtype=torch.float64)}, r"bias of a floating type.*got torch.float64 .*bias.to\(x\)"),
        ({"x": torch.zeros(3, 290, dtype=torch.int64)}, "x of a floating type"),
        ({"values": torch.zeros(int(MASKS["half"].sum()), device="meta")}, "got torch.float32 on meta"),
    ],
)
def test_refuses_what_does_not_go_together(change: dict[str, Any], text: str) -> None:
    pattern, x, values, bias, _ = layer_of(MASKS["half"], (3,))
    given = {"x": x, "values": values, "bias": bias, **change}
    with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
        csr_linear(given["x"], given["values"], pattern, given["bias"])


def test_times_both_executions_and_touches_nothing() -> None:
    pattern, _, values, _, _ = layer_of(MASKS["half"], (3,))
    before, state = values.detach().clone(), torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        seconds = time_executions(pattern, values, 70)
    assert set(seconds) == {"dense", "csr"}
    assert all(0 < value < 60 for value in seconds.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(values, before)
    assert values.grad is None
    assert faster_execution({"dense": 2.0, "csr": 1.0}) == "csr"
    assert {faster_execution({"dense": 1.0, "csr": csr}) for csr in (0.95, 1.0, 2.0)} == {"dense"}
