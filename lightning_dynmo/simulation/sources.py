"""Where a simulated training takes the costs of its layers from: the trace of a scheme, or a recorded run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from typing_extensions import override

from lightning_dynmo.simulation.costs import LayerCost
from lightning_dynmo.simulation.recording import RecordedStep, Recording
from lightning_dynmo.simulation.traces import CostTrace, FreezingTrace, PruningTrace


@dataclass(frozen=True, slots=True)
class Period:
    """Steps of a training until the next measurement that is due.

    Args:
        first_step: Steps done before it.
        last_step: The step at its end, which is measured.
        typical_step: The step whose costs stand for all of them.
    """

    first_step: int
    last_step: int
    typical_step: int


class RunCosts(ABC):
    """What the layers of a model cost while it trains, per microbatch.

    Attributes:
        num_layers: Number of layers L.
        periods: The training, from one measurement that is due to the next.
        between: Whether costs are known at the steps within a period too.
    """

    num_layers: int
    periods: Sequence[Period]
    between: bool

    @abstractmethod
    def layer_costs(self, step: int, replica: int) -> Sequence[LayerCost]:
        """Returns what each layer costs in one step of one replica, ``[L]``."""

    @abstractmethod
    def expected(self, step: int) -> Sequence[LayerCost]:
        """Returns what each layer costs on average over what chance can do, ``[L]``."""

    @abstractmethod
    def dense(self) -> Sequence[LayerCost]:
        """Returns what each layer costs without the scheme, ``[L]``."""

    @abstractmethod
    def num_parameters(self, step: int) -> Sequence[int]:
        """Returns the parameters of each layer that still cost work, ``[L]``."""

    @abstractmethod
    def state_bytes(self, step: int) -> Sequence[int]:
        """Returns the bytes of each layer that travel when it moves, ``[L]``."""

    def changed(self, before: int, step: int) -> bool:
        """Returns whether a callback has changed the model between two steps, so that older measurements are void."""
        return False

    def steps_until_change(self, step: int) -> float | None:
        """Returns after how many steps a callback will change the model next; None where nobody knows."""
        return None


@dataclass(frozen=True, eq=False)
class TraceCosts(RunCosts):
    """Costs under a scheme, in closed form.

    Args:
        trace: The scheme.
        block: Cost of a dense block.
        num_blocks: Number of blocks.
        block_parameters: Parameters of a block.
        block_bytes: Bytes that travel when a block moves.
        num_steps: Steps of the training.
        every_n_steps: Steps from one measurement to the next.
        split_blocks: Whether attention and MLP of a block are layers of their own: a third and two thirds of it.
        seed: Chooses the random course of the training.
    """

    trace: CostTrace
    block: LayerCost
    num_blocks: int
    block_parameters: int
    block_bytes: int
    num_steps: int = 10_000
    every_n_steps: int = 500
    split_blocks: bool = False
    seed: int = 0
    between = True

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """Number of layers L."""
        return self.num_blocks * (2 if self.split_blocks else 1)

    @property
    def periods(self) -> Sequence[Period]:  # type: ignore[override]
        """The training in equal parts; the last may be shorter."""
        begins = range(0, self.num_steps, self.every_n_steps)
        ends = [min(begin + self.every_n_steps, self.num_steps) for begin in begins]
        return [Period(begin, end, (begin + end) // 2) for begin, end in zip(begins, ends, strict=True)]

    @override
    def layer_costs(self, step: int, replica: int) -> Sequence[LayerCost]:
        return _drawn(self, step, replica)

    @override
    def expected(self, step: int) -> Sequence[LayerCost]:
        drawn = self.trace.layer_costs(self.block, self.num_blocks, step, self.seed_of(0))
        costs = self.trace.costs(self.num_blocks, step, self.seed_of(0))
        expected = self.trace.expected(self.num_blocks, step)
        factors = [mean / cost if cost > 0 else 1.0 for mean, cost in zip(expected, costs, strict=True)]
        return self.cut([_part(layer, factor) for layer, factor in zip(drawn, factors, strict=True)])

    @override
    def dense(self) -> Sequence[LayerCost]:
        return self.cut([self.block] * self.num_blocks)

    @override
    def num_parameters(self, step: int) -> Sequence[int]:
        densities = [1.0] * self.num_blocks
        if isinstance(self.trace, PruningTrace):
            densities = self.trace.densities(self.num_blocks, step)
        return self._divided([round(self.block_parameters * density) for density in densities])

    @override
    def state_bytes(self, step: int) -> Sequence[int]:
        return self._divided([self.block_bytes] * self.num_blocks)

    @override
    def changed(self, before: int, step: int) -> bool:
        if not isinstance(self.trace, PruningTrace | FreezingTrace):  # others change without anybody's doing
            return False
        return self._state(before) != self._state(step)

    @override
    def steps_until_change(self, step: int) -> float | None:
        if not isinstance(self.trace, PruningTrace | FreezingTrace):
            return None
        # Pruned and frozen layers stay so: once the model has changed, it does not change back.
        steps = range(step + 1, self.num_steps + 1)
        first = bisect_left(steps, True, key=lambda later: self.changed(step, later))
        return math.inf if first == len(steps) else first + 1

    def _state(self, step: int) -> tuple[Sequence[float], Sequence[int]]:
        return self.trace.expected(self.num_blocks, step), self.num_parameters(step)

    def seed_of(self, replica: int) -> int:
        """Returns the seed of a replica, which trains on data of its own."""
        return self.seed * 10_000 + replica

    def _divided(self, counts: Sequence[int]) -> Sequence[int]:
        if not self.split_blocks:
            return counts
        return [part for count in counts for part in (count // 3, count - count // 3)]

    def cut(self, blocks: Sequence[LayerCost]) -> Sequence[LayerCost]:
        """Returns the layers of blocks: themselves, or attention and MLP of each."""
        if not self.split_blocks:
            return blocks
        layers = []
        for block in blocks:
            cost = block.forward_s / self.block.forward_s if self.block.forward_s > 0 else 1.0
            attention = self.trace.attention_share(cost) if cost > 0 else 1 / 3
            layers += [_half(block, attention, 1 / 3), _half(block, 1 - attention, 2 / 3)]
        return layers


@dataclass(frozen=True, eq=False)
class RecordedCosts(RunCosts):
    """Costs as they were measured in a run; its first measurement takes the place of the dense model.

    Each measurement stands for the steps since the one before.

    Args:
        recording: The run.
        output_bytes: What a layer hands to the next, per microbatch.
    """

    recording: Recording
    output_bytes: int = 0
    between = False

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        """Number of layers L."""
        return len(self.recording.steps[0].loads)

    @property
    def periods(self) -> Sequence[Period]:  # type: ignore[override]
        """From measurement to measurement."""
        ends = sorted({step.step for step in self.recording.steps})
        return [Period(begin, end, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True) if end > begin]

    @override
    def layer_costs(self, step: int, replica: int) -> Sequence[LayerCost]:
        return self._at(step).layer_costs(self.output_bytes)

    @override
    def expected(self, step: int) -> Sequence[LayerCost]:
        return self.layer_costs(step, 0)

    @override
    def dense(self) -> Sequence[LayerCost]:
        return self.recording.steps[0].layer_costs(self.output_bytes)

    @override
    def num_parameters(self, step: int) -> Sequence[int]:
        return [load.num_parameters for load in self._at(step).loads]

    @override
    def state_bytes(self, step: int) -> Sequence[int]:
        return [load.state_bytes for load in self._at(step).loads]

    def _at(self, step: int) -> RecordedStep:
        steps = self.recording.steps
        return steps[min(bisect_left([recorded.step for recorded in steps], step), len(steps) - 1)]


@lru_cache(maxsize=4096)
def _drawn(costs: TraceCosts, step: int, replica: int) -> Sequence[LayerCost]:
    """Returns what a trace says; all plans ask for the same steps."""
    blocks = costs.trace.layer_costs(costs.block, costs.num_blocks, step, costs.seed_of(replica))
    return costs.cut(blocks)


def _part(layer: LayerCost, factor: float) -> LayerCost:
    return replace(
        layer,
        forward_s=layer.forward_s * factor,
        input_gradient_s=layer.input_gradient_s * factor,
        weight_gradient_s=layer.weight_gradient_s * factor,
    )


def _half(block: LayerCost, time: float, parameters: float) -> LayerCost:
    """Returns a part of a block, given its shares of the time and of the parameters."""
    return replace(
        _part(block, time),
        activation_bytes=round(block.activation_bytes / 2),
        gradient_bytes=round(block.gradient_bytes * parameters),
    )
