"""What does balancing bring, end to end, under each scheme?

Eight real processes, 48 layers that sleep, 1F1B. A training of 30,000 steps is cut into as many periods as the table
says. In each, one step runs whose costs stand for all of the period, and counts for as many. Each variant begins with a
uniform split:

* `static`: the uniform split stays. This is the baseline.
* `ours`: the library is asked as a callback asks it: it measures, decides, measures again where it wants to, and moves
  layers with all their state. Each step in which it does so runs as well, with all the time that it takes, and counts
  for one step, as it would in the training. Pruning and freezing tell when they change the layers, at the begin of a
  period, and when they will again; of the others nothing is known, and they are measured at every 1,000th step.
* `oracle`: layers take the exact best split for the period's expected costs; the move is free.
* `dense`: the layers without the scheme, uniformly split: a second baseline, for comparison only.

The variants take turns within each period. Tables have means per step of the training. `measuring_ms` is what
measuring, deciding and moving take beside the step, per step in which that is done: eight processes share two cores.

`oracle_over_static_<scheme>` and `ours_over_static_<scheme>` are speed-ups: the static variant's time over theirs.
`oracle_of_ours_<scheme>` is the oracle's time over ours, at most about 1; `worst_of_oracle` is the smallest of them,
and `worst_over_static` the smallest speed-up of ours over static. `bound` is the speed-up over static of a perfect
split in a pipeline without bubbles and messages: the slowest rank's work over the mean, added up over the steps. No
split can gain more than there are layers per rank.

The second table is a mixture of experts whose loads are drawn anew in every step, with the same expectation for all
layers, so that there is nothing to gain. There the library is asked in every step. `memoryless_worthwhile` is the
speed-up over static with `move_when="worthwhile"`, `memoryless_always` that with `"always"`, which follows every
measurement. It has four ranks, and fewer and longer layers: what measuring costs does not grow with their length, but
with the number of processes that share two cores.

The numbers of layers, microbatches and periods were chosen so that the layers of eight ranks become uneven enough,
within five minutes. The traces have their default parameters. The first step after layers freeze, in which shapes at
borders are found anew, is run without their cost before, in all variants, and not counted.

`--null` runs dense layers in place of the schemes: all ratios must be 1.00 +- 0.05. `--quick` runs two schemes, in
fewer periods and shorter steps.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from emulation import NUM_RANKS, EmulatedPipeline, on_all_ranks
from harness import arguments_of, ratio, table

from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.planning import Assignment, BalancingProblem, MoveWhen, PartitionBalancer
from lightning_dynmo.simulation import TRACES, FreezingTrace, LayerCost, stage_costs

RUN_STEPS, NUM_PARAMETERS = 30_000, 16_384
MEASURE_EVERY, TELL_CHANGES = 1000, ("pruning", "freezing")
PERIODS = {"moe": 3, "pruning": 16, "freezing": 20, "sparse_attention": 14, "early_exit": 14, "mod": 3}
QUICK_PERIODS = {"sparse_attention": 5, "mod": 2}


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


SIZES, QUICK_SIZES = Sizes(48, 16, 1.8e-3), Sizes(48, 12, 1.2e-3)
MEMORYLESS_SIZES, QUICK_MEMORYLESS_SIZES = Sizes(16, 8, 10e-3), Sizes(16, 8, 4e-3)
MEMORYLESS_RANKS, MEMORYLESS_STEPS, QUICK_MEMORYLESS_STEPS = 4, 8, 5
DENSE_EVERY = 4


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
    """

    def __init__(self, scheme: str, begins: Sequence[int], sizes: Sizes) -> None:
        self.begins = begins
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

    def perfect(self) -> float:
        """Returns how much faster a perfect split of all steps would be than a uniform one, if only work counted."""
        uniform = Assignment.uniform(self.sizes.num_layers, NUM_RANKS)
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
                    ask_at = end if trace.tells_changes else step + MEASURE_EVERY
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
        trace.perfect(),
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


def run_schemes(groups: PipelineGroups, periods: dict[str, int], sizes: Sizes) -> dict[str, Result]:
    """Runs all schemes. Every rank calls it."""
    found = {}
    for scheme, count in periods.items():
        trace = Trace(scheme, [index * RUN_STEPS // count for index in range(count + 1)], sizes)
        found[scheme] = run_scheme(groups, trace, {"ours": "worthwhile"}, ("static", "oracle", "dense"))
    return found


def run_memoryless(groups: PipelineGroups, scheme: str, sizes: Sizes, num_steps: int) -> Result:
    """Runs the memoryless scheme, with a decision after each step. Every rank calls it."""
    trace = Trace(scheme, range(RUN_STEPS, RUN_STEPS + num_steps + 1), sizes)
    return run_scheme(groups, trace, {rule: rule for rule in get_args(MoveWhen)}, ("static",))


def main(arguments: argparse.Namespace) -> None:
    periods, sizes = (QUICK_PERIODS, QUICK_SIZES) if arguments.quick else (PERIODS, SIZES)
    memoryless = MEMORYLESS_SIZES, MEMORYLESS_STEPS
    if arguments.quick:
        memoryless = QUICK_MEMORYLESS_SIZES, QUICK_MEMORYLESS_STEPS
    if arguments.null:
        periods = {"dense": max(periods.values())}
    found = on_all_ranks(run_schemes, periods, sizes)
    scheme = "dense" if arguments.null else "moe"
    asked = on_all_ranks(run_memoryless, scheme, *memoryless, num_ranks=MEMORYLESS_RANKS)
    report(sizes, memoryless[0], found, asked)


def report(sizes: Sizes, memoryless_sizes: Sizes, found: dict[str, Result], memoryless: Result) -> None:
    print(f"{NUM_RANKS} ranks, 1F1B; a training of {RUN_STEPS} steps\nschemes: {sizes}")
    print(f"memoryless: {MEMORYLESS_RANKS} ranks, {memoryless_sizes}")
    for scheme in found.keys() & TRACES.keys():
        print(f"{scheme}: {TRACES[scheme]}")
    rows = [
        (
            scheme,
            *(result.times[name].mean for name in ("static", "ours", "oracle", "dense")),
            *result.costs("ours"),
            len(result.times["static"].seconds),
            result.perfect,
        )
        for scheme, result in found.items()
    ]
    costs = ("measuring_ms", "measured", "moves")
    columns = ("scheme", "static_ms", "ours_ms", "oracle_ms", "dense_ms", *costs, "periods", "bound")
    print("\n" + table("Schemes, mean per step", columns, [(*row[:-1], f"{row[-1]:.3f}") for row in rows]))
    for scheme, static_s, ours_s, oracle_s, *_ in rows:
        print(ratio(f"oracle_over_static_{scheme}", static_s / oracle_s))
        print(ratio(f"ours_over_static_{scheme}", static_s / ours_s))
        print(ratio(f"oracle_of_ours_{scheme}", oracle_s / ours_s))
    print(ratio("worst_of_oracle", min(row[3] / row[2] for row in rows)))
    print(ratio("worst_over_static", min(row[1] / row[2] for row in rows)))
    static_s = memoryless.times["static"].mean
    asked = [
        (rule, static_s, memoryless.times[rule].mean, *memoryless.costs(rule), len(memoryless.times[rule].seconds))
        for rule in memoryless.measured
    ]
    print("\n" + table("Memoryless, mean per step", ("move_when", "static_ms", "ours_ms", *costs, "steps"), asked))
    for rule, static_s, ours_s, *_ in asked:
        print(ratio(f"memoryless_{rule}", static_s / ours_s))


if __name__ == "__main__":
    main(arguments_of(__doc__))
