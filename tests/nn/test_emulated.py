"""Emulated layers take the time that they are given, only where something is computed, and travel with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo._torch import FakeTensorMode
from lightning_dynmo.nn import EmulatedLayer, emulated
from lightning_dynmo.pipeline.splitting import SplitBackward
from lightning_dynmo.simulation import LayerCost
from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import WIDTH, Plan, assert_same_as_loop, start, train, wide_batch

# What must not be slept would take for ever, so no bound here depends on how busy the machine is.
EVER_S, SOON_S = 60.0, 20.0


@contextmanager
def takes(seconds: float) -> Iterator[None]:
    time.sleep(2 * emulated._AT_ONCE_S)  # a device that has been idle makes up for nothing
    begin = time.perf_counter()
    yield
    assert seconds <= time.perf_counter() - begin < SOON_S


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is slept, in order; nothing really is."""
    found: list[float] = []
    monkeypatch.setattr(emulated, "_CLOCK", SimpleNamespace(sleep=lambda _, seconds: found.append(seconds)))
    return found


def layer_of(forward: float = 0.0, inputs: float = 0.0, weights: float = 0.0, trains: bool = True) -> EmulatedLayer:
    return EmulatedLayer(LayerCost(forward, inputs, weights, trains=trains), num_parameters=3)


def leaf(requires_grad: bool = True) -> Tensor:
    return torch.linspace(-1.0, 1.0, 4).requires_grad_(requires_grad)


def test_forward_and_backward_take_their_time() -> None:
    with takes(0.02):
        y = layer_of(0.02, 0.03, 0.05)(leaf())
    with takes(0.08):
        y.sum().backward()


def test_only_the_forward_takes_time_without_gradients() -> None:
    with torch.no_grad(), takes(0.02):
        layer_of(0.02, EVER_S, EVER_S)(leaf())


def test_frozen_layer_has_no_weight_gradient() -> None:
    layer = layer_of(0.0, 0.02, EVER_S, trains=False)
    with takes(0.02):
        layer(x := leaf()).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


def test_layer_behind_frozen_ones_has_no_input_gradient() -> None:
    layer = layer_of(0.0, EVER_S, 0.02)
    with takes(0.02):
        layer(leaf(requires_grad=False)).sum().backward()
    assert layer.weight.grad is not None


def test_cost_can_change_and_the_layer_freeze_and_thaw() -> None:
    layer = layer_of(EVER_S, EVER_S, EVER_S)
    layer.set_cost(LayerCost(0.01, 0.01, EVER_S, trains=False))
    with takes(0.02):
        layer(leaf()).sum().backward()
    layer.set_cost(LayerCost(0.01, 0.01, 0.01))
    with takes(0.03):
        layer(leaf()).sum().backward()
    assert layer.weight.grad is not None


def test_first_part_of_a_split_backward_leaves_out_the_weights() -> None:
    layer = layer_of(0.0, 0.02, EVER_S)
    y = layer(x := leaf())
    with takes(0.02):
        split = SplitBackward([y.sum()], [None], [x], [layer.weight])
    assert split.inputs[0] is not None
    assert layer.weight.grad is None


def test_second_part_of_a_split_backward_takes_the_weights_time() -> None:
    layers = [layer_of(0.0, 0.0, 0.02), layer_of(0.0, 0.0, 0.03)]
    x = leaf()
    split = SplitBackward([layers[1](layers[0](x)).sum()], [None], [x], [layer.weight for layer in layers])
    with takes(0.05):
        split.weights()
    assert all(layer.weight.grad is not None for layer in layers)


def test_each_part_sleeps_once_and_in_order(slept: list[float]) -> None:
    layers = [layer_of(1.0, 2.0, 4.0), layer_of(8.0, 16.0, 32.0)]
    y = layers[1](layers[0](x := leaf())).sum()
    assert slept == [1.0, 8.0]
    slept.clear()
    y.backward(retain_graph=True)
    assert slept == [16.0, 32.0, 2.0, 4.0]  # layer by layer, as profiles of real layers see it
    slept.clear()
    split = SplitBackward([y], [None], [x], [layer.weight for layer in layers])
    assert slept == [16.0, 2.0]
    slept.clear()
    split.weights()
    assert sorted(slept) == [4.0, 32.0]


def test_values_and_gradients_are_those_of_the_formula() -> None:
    layer = layer_of()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.1, 0.2, 0.6]))
    weight, x, given = layer.weight.detach().clone().requires_grad_(), leaf(), leaf()
    y, expected = layer(given), x + weight.mean()
    assert torch.equal(y, expected)
    for found, wanted in zip(
        torch.autograd.grad(y.square().sum(), [given, layer.weight]),
        torch.autograd.grad(expected.square().sum(), [x, weight]),
        strict=True,
    ):
        assert torch.equal(found, wanted)
        assert found.abs().sum() > 0


def test_a_busy_device_makes_up_for_oversleeping_and_for_the_python_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def oversleep(seconds: float) -> None:
        now[0] += seconds + 0.25

    clock = emulated._Clock()
    monkeypatch.setattr(emulated, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=oversleep))
    monkeypatch.setattr(emulated, "_AT_ONCE_S", 0.125)
    monkeypatch.setattr(emulated, "_MOST_LATE_S", 0.5)
    for _ in range(10):
        clock.sleep(now[0], 2.0)
        now[0] += 0.0625
    assert now[0] == 100.0 + 10 * 2.0 + 0.25 + 0.0625  # not ten times as much
    now[0] += 0.0625  # longer than at once: the device was idle
    clock.sleep(now[0], 2.0)
    assert now[0] == 120.375 + 2.0 + 0.25
    begin = now[0]
    now[0] += 8.0  # this process was not allowed to run in the middle of its work, of which so much is made up for
    clock.sleep(begin, 2.0)
    assert now[0] == begin + 8.0
    clock.sleep(now[0], 2.0)
    assert now[0] == begin + 8.0 - 0.5 + 2.0 + 0.25


def test_sleeps_are_never_shorter_than_asked_in_all() -> None:
    clock, begin = emulated._Clock(), time.perf_counter()
    for _ in range(20):
        clock.sleep(time.perf_counter(), 0.002)
    assert time.perf_counter() - begin >= 20 * 0.002


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["forward_s", "input_gradient_s", "weight_gradient_s"])
def test_impossible_times_are_refused(name: str, seconds: float) -> None:
    times = {"forward_s": 0.0, "input_gradient_s": 0.0, "weight_gradient_s": 0.0, name: seconds}
    with pytest.raises(ValueError, match=f"Expected {name} to be finite and not negative"):
        EmulatedLayer(LayerCost(**times))


def test_layer_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parameters must be at least 1, got 0"):
        EmulatedLayer(LayerCost(0.0, 0.0, 0.0), num_parameters=0)


# In pipelines.


def ramp_of_layers() -> list[nn.Module]:
    costs = [LayerCost(1e-3 * index, 1e-3, 1e-3) for index in range(6)]
    return [EmulatedLayer(cost, num_parameters=5 + index) for index, cost in enumerate(costs)]


@pytest.mark.distributed
def test_numbers_in_a_pipeline_are_those_of_one_device() -> None:
    plan = partial(Plan, layers=ramp_of_layers, steps=4, frozen={2: (0, 1, 3)})
    assert_same_as_loop(
        [
            (plan(schedule="1f1b", moves={1: (1, 5), 3: (4, 2)}), (3, 3)),
            (plan(schedule="interleavedzerobubble", stages_per_rank=2, moves={1: (1, 3, 1, 1)}), (2, 1, 1, 2)),
        ]
    )


def _costs_after_a_move(rank: int) -> tuple[list[float], float, list[float]]:
    plan = Plan(layers=ramp_of_layers, batch=partial(wide_batch, count=2))
    runtime = start(plan, (3, 3))
    optimizer = torch.optim.AdamW(runtime.chain.root.parameters())
    runtime.optimizers = [optimizer]
    train(runtime, plan, 0)
    optimizer.step()
    if rank == 0:
        runtime.chain.layers[2].set_cost(LayerCost(0.125, 0.25, 0.5))
    migration = runtime.move_to(type(runtime.assignment)((2, 4)))
    runtime.request_profile()
    train(runtime, plan, 1)
    loads = [load.time_s for load in runtime.profile.loads]
    return runtime.chain.layers[2].get_extra_state().tolist(), migration.moved_bytes, loads


@pytest.mark.distributed
def test_cost_and_optimizer_state_move_with_a_layer_and_profiles_see_them() -> None:
    for times, moved_bytes, loads in run_distributed(_costs_after_a_move, 2):
        assert times == [0.125, 0.25, 0.5]
        assert moved_bytes == 3 * 7 * 4 + 4  # the weight, AdamW's two moments and its step count
        assert loads[2] >= 2 * (0.875 - emulated._MOST_LATE_S)


def test_looking_for_shapes_does_not_sleep() -> None:
    with FakeTensorMode() as mode, takes(0.0):
        layer = EmulatedLayer(LayerCost(EVER_S, EVER_S, EVER_S))
        assert layer(mode.from_tensor(torch.zeros(2, WIDTH))).shape == (2, WIDTH)
