"""A model whose creation is deferred gets exactly the values of one that was created at once, and holds no memory."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo.deferred import DeferredInit

WIDTH = 64


class Empty(nn.Module):
    """A module that a test fills."""


def gpt(m: Any) -> None:
    m.embedding = nn.Embedding(300, WIDTH, padding_idx=3)
    m.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(3))
    m.head = nn.Linear(WIDTH, 300)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()

    m.apply(init)
    for name, parameter in m.named_parameters():
        if name.endswith("linear2.weight"):
            parameter.data.div_(6**0.5)


def truncated(m: Any) -> None:
    m.wide = nn.Linear(WIDTH, 4 * WIDTH)
    nn.init.trunc_normal_(m.wide.weight, std=1.0, a=-0.5, b=0.5)  # draws again what is outside, in a loop
    m.other = nn.Linear(WIDTH, 4 * WIDTH)


def orthogonal(m: Any) -> None:
    m.square = nn.Linear(WIDTH, WIDTH)
    nn.init.orthogonal_(m.square.weight, gain=2.0)
    m.convolution = nn.Conv2d(WIDTH, WIDTH, 3)
    nn.init.kaiming_normal_(m.convolution.weight, mode="fan_out")
    nn.init.eye_(m.square.weight[: WIDTH // 2].data)


def copies(m: Any) -> None:
    m.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True), 3)  # deep copies
    m.one, m.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        m.two.weight.copy_(m.one.weight.t() * 3)
        m.one.weight[5:9].mul_(2)
        m.two.weight.add_(m.one.weight)
    m.tied = nn.Linear(WIDTH, WIDTH)
    m.tied.weight = m.one.weight


def parts_of_one(m: Any) -> None:
    whole = torch.randn(3 * WIDTH, WIDTH)
    m.first, m.second = nn.Parameter(whole[:WIDTH]), nn.Parameter(whole[WIDTH:])
    whole.mul_(2)
    m.view = nn.Parameter(torch.randn(WIDTH, WIDTH).t())


def buffers(m: Any) -> None:
    angles = torch.outer(torch.arange(200.0), 10000 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
    m.register_buffer("cosines", angles.cos())
    m.register_buffer("mask", torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril(), persistent=False)
    m.register_buffer("order", torch.randperm(5000))
    m.norm = nn.BatchNorm1d(5000)
    m.dropped = nn.Parameter(torch.nn.functional.dropout(torch.ones(WIDTH, WIDTH)))


def generators(m: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    m.a, m.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    nn.init.normal_(m.a.weight, generator=generator)
    nn.init.uniform_(m.b.weight, generator=generator)


def looked_at(m: Any) -> None:
    m.a, m.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    m.a.weight.detach().numpy()[:] = 7
    m.b.weight.data *= m.b.weight.abs().max().item()
    m.plain = torch.randn(WIDTH, WIDTH)  # no buffer
    m.alias = m.b.weight.data[3:]
    m.outside = nn.Parameter(torch.from_numpy(np.arange(5000.0)))
    m.outside.data += 1
    m.mixed = nn.Parameter(torch.zeros(5000, dtype=torch.float64))
    m.mixed.data.copy_(m.outside)
    m.register_buffer("copied", copy.deepcopy(torch.full((5000,), 3.0)))
    m.listed = nn.Parameter(torch.tensor(torch.rand(5000).tolist()))
    m.pickled = pickle.loads(pickle.dumps(m.a))


def converted(m: Any) -> None:
    gpt(m)
    m.half()
    torch.set_default_dtype(torch.float64)
    try:
        m.late = nn.Linear(WIDTH, WIDTH)
    finally:
        torch.set_default_dtype(torch.float32)


BUILDS = [gpt, truncated, orthogonal, copies, parts_of_one, buffers, generators, looked_at, converted]


def build(fill: Callable[[Any], None], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = Empty()
    fill(model)
    return model


def defer(fill: Callable[[Any], None], budget_bytes: int, seed: int = 1) -> tuple[nn.Module, DeferredInit]:
    torch.manual_seed(seed)
    model = Empty()
    deferred = DeferredInit(model, min_bytes=1 << 12, budget_bytes=budget_bytes)
    with deferred:
        fill(model)
    return model, deferred


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def held_bytes(model: nn.Module) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors(model).values())


@pytest.mark.parametrize("budget_bytes", [0, 1 << 30])
@pytest.mark.parametrize("fill", BUILDS)
def test_values_and_random_state_are_those_of_a_model_created_at_once(
    fill: Callable[[Any], None], budget_bytes: int
) -> None:
    expected = build(fill)
    state = torch.get_rng_state()
    model, deferred = defer(fill, budget_bytes)
    assert torch.equal(torch.get_rng_state(), state)
    before = tensors(model)
    deferred.materialize(reversed(list(before.values())))
    assert torch.equal(torch.get_rng_state(), state)
    after = tensors(model)
    assert list(after) == list(tensors(expected))
    for name, tensor in tensors(expected).items():
        assert after[name] is before[name]  # the same object
        assert (after[name].dtype, after[name].stride()) == (tensor.dtype, tensor.stride())
        assert after[name].requires_grad == tensor.requires_grad
        assert torch.equal(after[name], tensor), name
    for name, value in vars(expected).items():
        if isinstance(value, Tensor):
            assert torch.equal(vars(model)[name], value), name


def test_another_seed_gives_other_values() -> None:
    model, deferred = defer(gpt, 0, seed=2)
    deferred.materialize(tensors(model).values())
    assert not torch.equal(model.head.weight, build(gpt).head.weight)


@pytest.mark.parametrize("fill", [gpt, truncated, orthogonal, copies, parts_of_one, generators])
def test_the_model_holds_no_memory_until_it_is_materialised(fill: Callable[[Any], None]) -> None:
    model, deferred = defer(fill, 0)
    large = [tensor for tensor in tensors(model).values() if tensor.numel() * tensor.element_size() > 1 << 12]
    assert len(large) >= 2
    for tensor in large:
        assert tensor.untyped_storage().nbytes() == tensor.element_size()
        assert tensor.isnan().all()
    one, *others = large
    deferred.materialize([one])
    assert not one.isnan().any()
    assert all(tensor.isnan().all() for tensor in others if tensor is not one)


def test_what_was_there_before_is_left_alone() -> None:
    model = Empty()
    model.before = nn.Linear(WIDTH, WIDTH)
    weight = model.before.weight.detach().clone()
    deferred = DeferredInit(model, min_bytes=1 << 12)
    assert not deferred.has_created
    with deferred:
        model.inside = nn.Linear(WIDTH, WIDTH)
    assert deferred.has_created
    assert (deferred.created(model.before), deferred.created(model.inside)) == (False, True)
    assert torch.equal(model.before.weight, weight)
    assert model.inside.weight.isnan().all()


def test_the_context_can_be_entered_again_to_convert_the_model() -> None:
    expected = build(gpt).double()
    model, deferred = defer(gpt, 0)
    with deferred:
        model.double()
    assert held_bytes(model) < held_bytes(expected) / 10
    deferred.materialize(tensors(model).values())
    for name, tensor in tensors(expected).items():
        assert torch.equal(tensors(model)[name], tensor)


def test_an_error_inside_leaves_no_mode_behind() -> None:
    model = Empty()

    def fail(m: Any) -> None:
        with DeferredInit(m, min_bytes=1 << 12):
            m.layer = nn.Linear(WIDTH, WIDTH)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(model)
    assert torch.ones(5000).untyped_storage().nbytes() == 20000
    assert model.layer.weight.isnan().all()


def test_memory_while_creating_is_that_of_few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    make_room = DeferredInit._make_room

    def watched(self: DeferredInit, used: Any) -> None:
        nonlocal largest
        make_room(self, used)
        largest = max(largest, sum(record.storage.nbytes() for record in self._records.values()))

    monkeypatch.setattr(DeferredInit, "_make_room", watched)

    def many(m: Any) -> None:
        m.layers = nn.ModuleList(nn.Linear(100, 1000) for _ in range(40))
        for layer in m.layers:
            nn.init.trunc_normal_(layer.weight)

    model, _ = defer(many, 0)
    assert 0 < largest <= 8 * 400_000  # of 16 MB
    assert held_bytes(model) < 400_000
