"""Layers that take a given time and compute next to nothing: many devices on few cores.

A process that sleeps needs no core, so 8 to 24 ranks on two cores show a pipeline's real messages, waits and moves with
layers of any cost.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dynmo._torch import FakeTensor
from lightning_dynmo.simulation import LayerCost

_AT_ONCE_S = 1e-3
_MOST_LATE_S = 0.05


class _Clock:
    """The time of this process's device, which works without a break where there is always something to do.

    What follows within a millisecond counts as following at once, as on a device whose work is queued ahead: so
    neither the Python between two layers nor a sleep that took too long makes the device slower, up to a limit.
    """

    def __init__(self) -> None:
        self._free = self._awake = -math.inf

    def sleep(self, begin: float, seconds: float) -> None:
        """Returns once the device has worked for so long, from `begin` on or from when it was free."""
        if seconds == 0:
            return
        at_once = begin - self._awake < _AT_ONCE_S
        self._free = (max(self._free, begin - _MOST_LATE_S) if at_once else begin) + seconds
        while (remaining := self._free - time.perf_counter()) > 0:
            time.sleep(remaining)
        self._awake = time.perf_counter()


_CLOCK = _Clock()


class EmulatedLayer(nn.Module):
    """A layer that sleeps: in its forward, for the gradient of its input, and for those of its parameters.

    It computes ``input + mean(weight)``, so losses and gradients are real numbers that depend on every layer and
    microbatch. What autograd does not ask for takes no time: a frozen layer has no weight gradient, one behind frozen
    layers no input gradient; where a schedule runs the backward in two parts, each part takes its own time.

    The times go along when the layer moves to another rank, as any ``get_extra_state`` does.

    Args:
        cost: What it takes for one microbatch; its bytes do not count here.
        num_parameters: Elements of its weight, in float32, which travel when it moves, with their optimizer state.

    Raises:
        ValueError: If a time is negative or not finite, or there is no parameter.
    """

    def __init__(self, cost: LayerCost, num_parameters: int = 1024) -> None:
        super().__init__()
        if num_parameters < 1:
            raise ValueError(f"num_parameters must be at least 1, got {num_parameters}. Pass 1 where none matters.")
        self.weight = nn.Parameter(torch.zeros(num_parameters))
        self.set_cost(cost)

    def set_cost(self, cost: LayerCost) -> None:
        """Changes what the layer takes from now on, and whether it trains. Call it on every rank."""
        times = {name: getattr(cost, name) for name in ("forward_s", "input_gradient_s", "weight_gradient_s")}
        for name, seconds in times.items():
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"Expected {name} to be finite and not negative, got {seconds}. Pass 0 for no time.")
        self._times_s = tuple(times.values())
        self.weight.requires_grad_(cost.trains)

    @override
    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        forward_s, input_gradient_s, weight_gradient_s = self._times_s
        # Of two paths that are ready, autograd takes the one made last: the input's, for which other ranks wait.
        shift = _Mean.apply(self.weight, weight_gradient_s)  # type: ignore[no-untyped-call]
        y: Tensor = _Same.apply(x, input_gradient_s) + shift  # type: ignore[no-untyped-call]
        if not isinstance(x, FakeTensor):  # else only shapes are asked for
            _CLOCK.sleep(begin, forward_s)
        return y

    @override
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self._times_s, dtype=torch.float64)

    @override
    def set_extra_state(self, state: Tensor) -> None:
        self._times_s = tuple(state.tolist())


class _Same(torch.autograd.Function):
    """Hands on a tensor, and its gradient after a while."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _CLOCK.sleep(time.perf_counter(), ctx.seconds)
        return gradients[0], None


class _Mean(torch.autograd.Function):
    """The mean of a tensor, whose gradient takes a while."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, value.shape
        return value.mean()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        begin = time.perf_counter()
        gradient = (gradients[0] / ctx.shape.numel()).expand(ctx.shape)
        _CLOCK.sleep(begin, ctx.seconds)
        return gradient, None
