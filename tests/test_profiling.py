"""Seconds go to the layer that spent them: layers here sleep for a known time in forward and backward."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo.profiling import LayerTimer

UNIT_S = 0.01
TOLERANCE_S = 0.006


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x * 1 + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, gradient.sum(), None


class Sleeper(nn.Module):
    """Sleeps for `forward` and `backward` units of time."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = (forward * UNIT_S, backward * UNIT_S)
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        return _Sleep.apply(x, self.weight, self.seconds[1])


class Skips(Sleeper):
    """Hands a second tensor on, which its own output does not depend on."""

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), skip


class Opens(Sleeper):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, x * 2


class Reads(Skips):
    """Uses the second tensor and hands it on."""

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x + skip, skip)


class Closes(Sleeper):
    def forward(self, x: Tensor, skip: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x + skip)}


def measure(layers: list[Any], num_microbatches: int = 3, loss_s: float = 0.0, hiccup: int | None = None) -> LayerTimer:
    """Runs and times layers as a stage does, one microbatch after the other."""
    timer = LayerTimer(torch.device("cpu"))
    with timer.step():
        for microbatch in range(num_microbatches):
            values: tuple[Any, ...] = (torch.zeros(4),)
            with timer.busy():
                for index, layer in enumerate(layers):
                    with timer.forward(index, microbatch):
                        if microbatch == hiccup:
                            time.sleep(10 * UNIT_S)
                        output = layer(*values)
                    timer.watch(output, index, microbatch, inputs=values)
                    values = output if isinstance(output, tuple) else (output,)
                with timer.forward(len(layers) - 1, microbatch):
                    time.sleep(loss_s)
                    out = output["logits"] if isinstance(output, dict) else values[0]
                    loss = _Sleep.apply(out, torch.zeros(()), loss_s).sum()
            with timer.busy(), timer.backward(range(len(layers)), microbatch):
                loss.backward()
    return timer


def assert_units(
    layers: list[Any],
    forward: list[float],
    backward: list[float],
    num_microbatches: int = 3,
    attempts: int = 12,
    **options: Any,
) -> None:
    """Checks the smallest seconds of several measurements, as many as it takes, since other processes share the cores.

    A sleep never ends early, so seconds that go to a wrong layer stay there in every attempt.
    """
    smallest = dict.fromkeys(((way, index) for way in ("forward", "backward") for index in range(len(layers))), 1e9)
    wrong: list[str] = []
    for _ in range(attempts):
        timer = measure(layers, num_microbatches, **options)
        wrong = []
        for (way, index), before in smallest.items():
            units = (forward if way == "forward" else backward)[index]
            seconds = smallest[way, index] = min(before, getattr(timer, f"{way}_s")(index))
            if seconds != pytest.approx(units * UNIT_S * num_microbatches, abs=TOLERANCE_S * num_microbatches):
                wrong.append(f"{way} of layer {index}: {seconds / num_microbatches / UNIT_S:.2f} units, not {units}")
        if not wrong:
            return
    raise AssertionError("; ".join(wrong))


def test_seconds_go_to_the_layer_that_sleeps() -> None:
    layers = [Sleeper(1, 3), Sleeper(0, 1), Sleeper(2, 0), Sleeper(1, 2)]
    assert_units(layers, [1, 0, 2, 1], [3, 1, 0, 2])
    with pytest.raises(AssertionError, match="backward of layer 0"):
        assert_units(layers, [1, 0, 2, 1], [1, 3, 0, 2], attempts=2)


def test_rank_is_busy_in_forward_and_backward_only() -> None:
    timer = measure([Sleeper(1, 2)])
    assert 3 * 3 * UNIT_S <= timer.busy_s() <= timer.step_s()
    with timer.step():
        time.sleep(5 * UNIT_S)
    assert timer.step_s() - timer.busy_s() >= 5 * UNIT_S


def test_frozen_prefix_has_no_backward() -> None:
    layers = [Sleeper(1, 2), Sleeper(1, 2), Sleeper(1, 2)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    assert_units(layers, [1, 1, 1], [0, 0, 2])
    timer = measure(layers)
    assert timer.backward_s(0) == timer.backward_s(1) == 0


def test_frozen_layer_behind_an_active_one_still_hands_gradients_down() -> None:
    layers = [Sleeper(1, 1), Sleeper(1, 2), Sleeper(1, 1)]
    layers[1].requires_grad_(False)
    assert_units(layers, [1, 1, 1], [1, 2, 1])


def test_loss_counts_for_the_last_layer() -> None:
    assert_units([Sleeper(1, 1), Sleeper(1, 1)], [1, 3], [1, 3], loss_s=2 * UNIT_S)


def test_skip_connection_that_passes_layers_does_not_take_their_backward() -> None:
    """The gradient of a tensor that layers hand on arrives long before, or long after, their own backward."""
    assert_units([Opens(0, 1), Skips(0, 2), Skips(0, 3), Closes(0, 1)], [0] * 4, [1, 2, 3, 1])
    assert_units([Opens(0, 1), Reads(0, 2), Reads(0, 3), Closes(0, 1)], [0] * 4, [1, 2, 3, 1])


def test_one_slow_microbatch_does_not_count() -> None:
    assert_units([Sleeper(1, 1), Sleeper(1, 1)], [1, 1], [1, 1], num_microbatches=5, hiccup=2)
    with pytest.raises(AssertionError, match="forward of layer 0"):
        assert_units([Sleeper(1, 1), Sleeper(1, 1)], [1, 1], [1, 1], num_microbatches=1, hiccup=0, attempts=2)


def test_layer_whose_time_varies_costs_its_median() -> None:
    timer = LayerTimer(torch.device("cpu"))
    for microbatch, units in enumerate((1, 1, 2, 3, 3)):
        with timer.forward(0, microbatch):
            time.sleep(units * UNIT_S)
    assert timer.forward_s(0) == pytest.approx(10 * UNIT_S, abs=2 * TOLERANCE_S)


def test_layer_that_was_not_measured_costs_nothing() -> None:
    timer = LayerTimer(torch.device("cpu"))
    assert (timer.forward_s(3), timer.backward_s(3), timer.busy_s(), timer.step_s()) == (0, 0, 0, 0)
