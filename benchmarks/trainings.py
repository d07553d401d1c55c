"""Trainings in time lapse: pipelines of layers that sleep, at the costs of a scheme, balanced by the library or not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from emulation import EmulatedPipeline

from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.planning import Assignment, BalancingProblem, MoveWhen, PartitionBalancer
from lightning_dynmo.simulation import TRACES, FreezingTrace, LayerCost, stage_costs

NUM_PARAMETERS = 16_384
TELL_CHANGES = ("pruning", "freezing")
DENSE_EVERY = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long steps are.

    Attributes:
        num_layers: Layers.
        num_microbatches: Microbatches per step.
        dense_s: Seconds of a dense layer's forward, of its input's gradient and of its weights', each, per microbatch.
    """

    num_layers: int
    num_microbatches: int
    dense_s: float


@dataclass(slots=True)
class Times:
    """Seconds of the steps that one variant has run, and for how many steps each of them stands."""

    seconds: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)

    def add(self, seconds: float, weight: int) -> None:
        self.seconds.append(seconds)
        self.weights.append(weight)

    @property
    def mean(self) -> float:
        """Mean seconds of a step."""
        return statistics.fmean(self.seconds, self.weights)


@dataclass(slots=True)
class Result:
    """What became of one scheme.

    Attributes:
        times: By variant.
        perfect: Quotient of the slowest rank's work and the mean under the uniform split, over all steps.
        measured: Measured steps of the library's variants.
        moves: How often they moved layers.
        overhead_s: Seconds that measuring, deciding and moving took in all.
    """

    times: dict[str, Times]
    perfect: float
    measured: dict[str, int]
    moves: dict[str, int]
    overhead_s: dict[str, float]

    def costs(self, variant: str) -> tuple[float, int, int]:
        """Returns the overhead per measured step, the number of these, and that of moves."""
        measured = self.measured[variant]
        return self.overhead_s[variant] / max(measured, 1), measured, self.moves[variant]


class Trace:
    """The costs of layers in a training.

    Args:
        scheme: Name of the scheme, or ``"dense"``.
        begins: First step of each period, and after the last.
        sizes: Of the layers.
        measure_every: Steps after which costs are measured again, where the scheme does not tell when they change.
    """

    def __init__(self, scheme: str, begins: Sequence[int], sizes: Sizes, measure_every: int = 1) -> None:
        self.begins = begins
        self.measure_every = measure_every
        self.sizes = sizes
        self.tells_changes = scheme in TELL_CHANGES
        self.dense = [LayerCost(sizes.dense_s, sizes.dense_s, sizes.dense_s)] * sizes.num_layers
        self._trace = TRACES.get(scheme)

    def __len__(self) -> int:
        return len(self.begins) - 1

    def typical(self, period: int) -> int:
        """Returns the step whose costs stand for the period: the middle one, or the first where that changes layers."""
        begin, end = self.begins[period : period + 2]
        return begin if self.tells_changes else (begin + end) // 2

    def costs(self, step: int) -> list[LayerCost]:
        """Returns what layers cost in a step."""
        if self._trace is None:
            return self.dense
        return self._trace.layer_costs(self.dense[0], self.sizes.num_layers, step)

    def expected(self, step: int) -> list[LayerCost]:
        """Returns what layers are expected to cost in a step."""
        if self._trace is None or isinstance(self._trace, FreezingTrace):
            return self.costs(step)  # no chance, and where layers freeze, other parts of them than those that scale
        factors = self._trace.expected(self.sizes.num_layers, step)
        return [_scaled(cost, factor) for cost, factor in zip(self.dense, factors, strict=True)]

    def changes(self, period: int) -> bool:
        """Returns whether the scheme changes the layers at the begin of the period, and says so."""
        if not self.tells_changes or period == 0:
            return False
        return self.costs(self.typical(period)) != self.costs(self.typical(period - 1))

    def steps_until_change(self, period: int) -> float | None:
        """Returns the steps from the begin of the period to the next change, if the scheme says when that is."""
        if not self.tells_changes:
            return None
        later = (self.begins[other] for other in range(period + 1, len(self)) if self.changes(other))
        return next(later, math.inf) - self.begins[period]

    def perfect(self, num_ranks: int) -> float:
        """Returns how much faster a perfect split of all steps would be than a uniform one, if only work counted."""
        uniform = Assignment.uniform(self.sizes.num_layers, num_ranks)
        loads = [uniform.stage_loads(loads_of(self.costs(self.typical(period)))) for period in range(len(self))]
        return sum(map(max, loads)) / sum(map(statistics.mean, loads))


def _scaled(cost: LayerCost, factor: float) -> LayerCost:
    return LayerCost(cost.forward_s * factor, cost.input_gradient_s * factor, cost.weight_gradient_s * factor)


def loads_of(costs: Sequence[LayerCost]) -> list[float]:
    """Returns what each layer takes for one microbatch, without the gradients that nobody asks for."""
    alone = stage_costs(costs, Assignment((1,) * len(costs)))
    return [cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s for cost in alone]


class Balanced:
    """A pipeline that the library balances, asked at the begin of each period as callbacks ask.

    Args:
        pipeline: The pipeline.
        trace: The costs.
    """

    def __init__(self, pipeline: EmulatedPipeline, trace: Trace) -> None:
        self.pipeline = pipeline
        self.times = Times()
        self.measured = self.moves = 0
        self._trace = trace

    def run(self, period: int) -> None:
        """Runs the measured steps of a period, and one for all that are like it in between."""
        trace, pipeline, rebalancer = self._trace, self.pipeline, self.pipeline.runtime.rebalancer
        step, end = trace.begins[period : period + 2]
        if trace.changes(period):
            rebalancer.model_changed()
        ask_at = step if trace.changes(period) or not trace.tells_changes else end
        seconds: dict[Assignment, float] = {}
        while step < end:
            measure_at = ask_at if rebalancer.measure_at is None else min(ask_at, rebalancer.measure_at)
            if measure_at <= step:
                if ask_at <= step:
                    ask_at = end if trace.tells_changes else step + trace.measure_every
                self._run_measured(period, step)
                step += 1
                continue
            until, assignment = min(measure_at, end), pipeline.runtime.assignment
            if assignment not in seconds:
                prepare(pipeline, trace.costs(trace.typical(period)), until - 1)
                seconds[assignment] = pipeline.step()
            pipeline.runtime.rebalancer.trained(until - 1)
            self.times.add(seconds[assignment], until - step)
            step = until

    def _run_measured(self, period: int, step: int) -> None:
        trace, runtime = self._trace, self.pipeline.runtime
        prepare(self.pipeline, trace.costs(trace.typical(period) if trace.tells_changes else step), step)
        left = trace.begins[-1] - step - 1
        until_change = trace.steps_until_change(period)
        known = None if until_change is None else min(until_change - (step - trace.begins[period]), left)

        def decide() -> None:
            result = runtime.rebalance(horizon_steps=known, at_most_steps=left if known is None else known)
            self.moves += result.migration is not None

        self.measured += 1
        self.times.add(self.pipeline.step(runtime.request_rebalance, decide), 1)


def run_scheme(groups: PipelineGroups, trace: Trace, balanced: dict[str, MoveWhen], others: Sequence[str]) -> Result:
    """Runs all variants of one scheme. Every rank calls it.

    Args:
        groups: Process groups of this rank.
        trace: The costs.
        balanced: Variants that the library balances, and when it moves layers there.
        others: Names of the others.
    """
    variants = {name: Balanced(new_pipeline(groups, trace, rule), trace) for name, rule in balanced.items()}
    pipelines = {name: new_pipeline(groups, trace) for name in others}
    times = {name: variant.times for name, variant in variants.items()} | {name: Times() for name in others}
    names = list(times)
    for period in range(len(trace)):
        typical = trace.typical(period)
        for turn in range(len(names)):
            name = names[(period + turn) % len(names)]
            if name in variants:
                variants[name].run(period)
                continue
            if name == "dense" and period % DENSE_EVERY:
                continue  # it is the same in all
            prepare(pipelines[name], trace.dense if name == "dense" else trace.costs(typical), typical)
            if name == "oracle":
                place(pipelines[name], trace.expected(typical))
            times[name].add(pipelines[name].step(), trace.begins[period + 1] - trace.begins[period])
    return Result(
        times,
        trace.perfect(groups.pp_size),
        {name: variant.measured for name, variant in variants.items()},
        {name: variant.moves for name, variant in variants.items()},
        # Ranks that have ended their step wait there for the others, so what the last to come spends counts.
        {name: min(groups.gather(variant.pipeline.runtime.overhead_s)) for name, variant in variants.items()},
    )


def new_pipeline(groups: PipelineGroups, trace: Trace, move_when: MoveWhen = "worthwhile") -> EmulatedPipeline:
    """Returns a pipeline of dense layers that has run."""
    pipeline = EmulatedPipeline(
        groups, trace.dense, trace.sizes.num_microbatches, num_parameters=NUM_PARAMETERS, move_when=move_when
    )
    pipeline.warm_up(trace.dense)
    pipeline.runtime.restart_clock()
    return pipeline


def prepare(pipeline: EmulatedPipeline, costs: Sequence[LayerCost], step: int) -> None:
    """Gives the layers their costs of a step; where others train than before, shapes at borders are found anew."""
    if pipeline.trains != [cost.trains for cost in costs]:
        pipeline.next_step = max(step - 1, 0)
        pipeline.warm_up(costs)
    else:
        pipeline.set_costs(costs)
    pipeline.next_step = step


def place(pipeline: EmulatedPipeline, expected: Sequence[LayerCost]) -> None:
    """Moves layers as one would who knows what the steps are expected to cost."""
    current = pipeline.runtime.assignment
    best = PartitionBalancer(tolerance=0.0).balance(BalancingProblem(loads_of(expected), current))
    if best != current:
        pipeline.runtime.move_to(best)
