"""Borders are computed without running the layers, and equal what the layers return."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._pytree import tree_flatten

from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import Inputs
from lightning_dynmo.pipeline.borders import (
    Border,
    as_arguments,
    call_layer,
    check_border,
    condition_of,
    form_of,
    infer_borders,
)
from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import WIDTH, Block, Model, Plan, blocks, start, train
from tests.pipeline.layers import Named, batch_norm_layers, half_precision, layers_with_tuples


def chain_of(layers: list[nn.Module]) -> LayerChain:
    return LayerChain(Model(layers), layers)


def forms(values: tuple[Tensor, ...]) -> list[Any]:
    return [(value.shape, value.dtype, value.requires_grad) for value in values]


def real_borders(layers: list[nn.Module], inputs: Inputs, precision: Callable[[], Any]) -> list[Any]:
    values, borders = inputs.args, []
    for layer in layers[:-1]:
        with precision():
            output = call_layer(layer, values, inputs.kwargs)
        values = as_arguments(output)
        borders.append(forms(Border.of(output, "layer").tensors))
    return borders


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, (hidden, _) = self.lstm(x[:, None])
        return output[:, 0], hidden


class Convert(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x.detach()), x


def pruned_layers() -> list[nn.Module]:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for layer in layers:
        prune.l1_unstructured(layer, "weight", amount=0.5)
    return layers


CHAINS: dict[str, Callable[[], list[nn.Module]]] = {
    "blocks": blocks,
    "tuples, integers, masks, complex numbers": layers_with_tuples,
    "batch norm": batch_norm_layers,
    "dtypes": lambda: [
        nn.Linear(WIDTH, WIDTH),
        Convert(torch.float64),
        Convert(torch.bfloat16),
        Convert(torch.int64),
        Block(),
    ],
    "recurrent": lambda: [Recurrent(), Frozen(), Block()],
    "detached": lambda: [Block(), Frozen(), Block()],
    "convolution": lambda: [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, WIDTH), Block()],
    "transposed": lambda: [nn.Linear(WIDTH, 4), nn.Unflatten(0, (1, -1)), nn.Flatten(0, 1), nn.Dropout(0.5), Block()],
    "attention": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), nn.Unflatten(1, (2, 3)), Block()],
    "weight norm": lambda: [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)],
    "spectral norm": lambda: [parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)],
    "pruned": pruned_layers,
    "keywords": lambda: [Named(), Named(), Block()],
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("precision", [nullcontext, half_precision])
@pytest.mark.parametrize("kind", CHAINS)
def test_borders_equal_real_outputs(
    kind: str, precision: Callable[[], AbstractContextManager[Any]], mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    chain = chain_of(CHAINS[kind]())
    x = torch.randn(4, WIDTH)
    inputs = Inputs((x,), {"mask": x > 0, "scale": 2.0} if kind == "keywords" else {})
    with mode():
        borders = infer_borders(chain, inputs, precision)
        expected = real_borders(list(chain.layers), inputs, precision)
    assert [forms(border.tensors) for border in borders] == expected
    assert all(value.is_meta for border in borders for value in border.tensors)


def test_borders_of_shells_equal_those_of_layers() -> None:
    for layers in (blocks(), batch_norm_layers(), pruned_layers()):
        chain = chain_of(layers)
        inputs = Inputs((torch.randn(4, WIDTH),), {})
        expected = [forms(border.tensors) for border in infer_borders(chain, inputs, nullcontext)]
        for index in range(len(chain) - 1):
            chain.let_go(index, owner=1)
        assert [forms(border.tensors) for border in infer_borders(chain, inputs, nullcontext)] == expected


class Owner:
    """Something large that a hook belongs to, and that nobody may copy."""

    def __deepcopy__(self, memo: Any) -> Owner:
        raise AssertionError("the owner of a hook was copied")

    def hook(self, *_: Any) -> None:
        raise AssertionError("a hook was run")


def test_inference_touches_neither_counters_nor_hooks_nor_statistics_nor_random_numbers() -> None:
    chain = chain_of([*batch_norm_layers(), Block(), nn.Dropout(0.5), Block()])
    for layer in chain.layers:
        for module in layer.modules():
            module.register_forward_hook(Owner().hook)
            module.register_forward_pre_hook(Owner().hook)
    before = {name: value.clone() for name, value in [*chain.root.named_parameters(), *chain.root.named_buffers()]}
    buffers = {name: id(value) for name, value in chain.root.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    infer_borders(chain, Inputs((torch.randn(3, WIDTH, generator=torch.Generator()),), {}), nullcontext)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])
    assert buffers == {name: id(value) for name, value in chain.root.named_buffers()}
    assert all(torch.equal(value, before[name]) for name, value in chain.root.named_buffers())
    assert all(layer.calls == 0 for layer in chain.layers if hasattr(layer, "calls"))
    with pytest.raises(AssertionError, match="a hook was run"):
        chain.layers[0](torch.randn(3, WIDTH))


def signature_of(inputs: Inputs, chain: LayerChain) -> tuple[Any, ...]:
    return form_of(inputs), condition_of(chain)


def test_signature_follows_shapes_dtypes_kinds_and_what_is_trainable() -> None:
    chain = chain_of(blocks())
    x = torch.randn(4, WIDTH)
    same = signature_of(Inputs((x,), {"scale": 1.0}), chain)
    assert same == signature_of(Inputs((torch.randn(4, WIDTH),), {"scale": 1.0}), chain)
    others = [
        Inputs((x[:3],), {"scale": 1.0}),
        Inputs((x.double(),), {"scale": 1.0}),
        Inputs((x,), {"scale": 2.0}),
        Inputs((x,), {}),
    ]
    assert same not in {signature_of(other, chain) for other in others}
    with torch.no_grad():
        assert same != signature_of(Inputs((x,), {"scale": 1.0}), chain)
    chain.layers[0].requires_grad_(False)
    assert same != signature_of(Inputs((x,), {"scale": 1.0}), chain)


class Filter(nn.Module):
    """Its output's shape depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("layer", [Filter(), Branch()])
def test_layer_that_depends_on_values_is_named(layer: nn.Module) -> None:
    chain = chain_of([Block(), layer, Block()])
    text = rf"layer 1 \({type(layer).__name__}\) could not be run on tensors without data.* on input shapes only"
    with pytest.raises(ValueError, match=text):
        infer_borders(chain, Inputs((torch.randn(4, WIDTH),), {}), nullcontext)


def filtering_layers() -> list[nn.Module]:
    return [Block(), Block(), Block(), Filter(), Block()]


def _train_with_filter(rank: int) -> tuple[str, int]:
    runtime = start(Plan(), (2, 2, 1))
    plan = Plan(layers=filtering_layers)
    runtime = start(plan, (2, 2, 1), runtime.groups)
    with pytest.raises(ValueError, match="without data") as info:
        train(runtime, plan, 0)
    return str(info.value), sum(int(layer.calls) for index, layer in enumerate(runtime.chain.layers) if index in (0, 1))


@pytest.mark.distributed
def test_layer_that_depends_on_values_ends_every_rank_before_anything_runs() -> None:
    results = run_distributed(_train_with_filter, 3)
    assert len({text for text, _ in results}) == 1
    assert "layer 3 (Filter)" in results[0][0]
    assert results[0][1] == 0


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), r"layer 0 \(Returns\) returns a object; only the last layer may"),
        ((torch.ones(1), {"state": {1, 2}}), r"layer 0 \(Returns\) returns a set at position \[1\]\['state'\]; only"),
    ],
    ids=["object", "set"],
)
def test_layer_that_returns_something_else_is_named_with_its_position(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        infer_borders(chain_of([Returns(value), Block()]), Inputs((torch.ones(2, WIDTH),), {}), nullcontext)
    chain = chain_of([Block(), Returns(value)])
    assert len(infer_borders(chain, Inputs((torch.ones(2, WIDTH),), {}), nullcontext)) == 1


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2),
        (torch.ones(2), None, "name", 3),
        {"x": torch.ones(2), "more": [torch.ones(1, dtype=torch.int64), None, 0.5]},
        None,
        (),
    ],
    ids=["tensor", "tuple", "dict", "nothing", "empty"],
)
def test_output_is_taken_apart_and_put_together(output: Any) -> None:
    border = Border.of(output, "layer 1")
    assert tree_flatten(border.values(border.tensors)) == tree_flatten(as_arguments(output))
    form = border.without_data()
    assert [tensor.shape for tensor in form.tensors] == [tensor.shape for tensor in border.tensors]
    check_border(border, form, "layer 1")


def test_check_of_a_border_sees_number_shape_dtype_gradient_structure_and_constants() -> None:
    good = (torch.ones(2, 3, requires_grad=True), torch.ones(2, dtype=torch.int64), 7)
    expected = Border.of(good, "layer 1").without_data()

    def check(*output: Any) -> None:
        check_border(Border.of(output, "layer 1"), expected, "layer 1")

    check(*good)
    check(good[0].detach(), *good[1:])
    wrong: list[tuple[Any, ...]] = [
        good[:1],
        (good[0][:1], good[1], 7),
        (good[0].double(), good[1], 7),
        (good[0], torch.ones(2, dtype=torch.int32), 7),
        (good[0], good[1], 8),
        (good[0], good[1], None),
        ((good[0], good[1]), 7),
    ]
    for output in wrong:
        with pytest.raises(ValueError, match=r"layer 1 returned .* expects float32\[2, 3\] with gradient, int64"):
            check(*output)
    with pytest.raises(ValueError, match="returned float32"):
        check_border(Border.of(good[0], "layer 1"), Border.of(good[0].detach(), "layer 1").without_data(), "layer 1")
