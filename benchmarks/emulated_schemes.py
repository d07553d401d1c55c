"""What does balancing bring, end to end, under each scheme?

Eight real processes, 48 layers that sleep, 1F1B. A training of 30,000 steps is compressed: of each scheme's trace, as
many steps as the table says are run, evenly spaced, with the costs that the layers have at that step. Each variant
begins with a uniform split:

* `static`: the uniform split stays. This is the baseline.
* `ours`: the library measures, decides and moves layers, with all their state. All the time that takes counts, although
  there is one step here where there are hundreds in the training. Schemes whose callbacks change the model themselves
  (pruning, freezing) tell when they do and when they will again; the others are measured at intervals.
* `oracle`: before each step, layers take the exact best split for the step's expected costs; the move is free.
* `dense`: the layers without the scheme, uniformly split: a second baseline, for comparison only.

`ours` runs all steps. The others depend on no step before, so where loads change slowly (by less than 1 %), one step
stands for up to 8 neighbours, or 16 where they do not change at all; it is run next to the same step of `ours`, in
turns. Tables have means over all steps.

The numbers of steps, layers and microbatches were chosen so that the layers of eight ranks become uneven enough, and
that a change is answered within a small part of the run, as in a training of thousands of steps. The traces have their
default parameters.

`oracle_over_static_<scheme>` and `ours_over_static_<scheme>` are speed-ups: the static variant's time over theirs.
`oracle_of_ours_<scheme>` is the oracle's time over ours, at most about 1; `worst_of_oracle` is the smallest of them,
and `worst_over_static` the smallest speed-up of ours over static. `bound` is the speed-up over static of a perfect
split in a pipeline without bubbles and messages: the slowest rank's work over the mean, added up over the steps. No
split can gain more than there are layers per rank.

The second table is a mixture of experts whose loads are drawn anew in every step, with the same expectation for all
layers, so that there is nothing to gain. There the library is asked in every step. `memoryless_worthwhile` is the
speed-up over static with `move_when="worthwhile"`, `memoryless_always` that with `"always"`, which follows every
measurement. Its steps are long, as those of real models are, since what measuring costs does not grow with them.

The first step after layers freeze, in which shapes at borders are found anew, is run without their cost before, in all
variants, and not counted.

`--null` runs dense layers in place of the schemes: all ratios must be 1.00 +- 0.05. `--quick` runs two schemes, and
fewer and shorter steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import get_args

from emulation import NUM_RANKS, EmulatedPipeline, on_all_ranks
from harness import arguments_of, ratio, table

from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.planning import Assignment, BalancingProblem, MoveWhen, PartitionBalancer
from lightning_dynmo.simulation import TRACES, CostTrace, FreezingTrace, LayerCost, stage_costs

NUM_LAYERS, RUN_STEPS = 48, 30_000
STEPS = {"moe": 6, "pruning": 64, "freezing": 40, "sparse_attention": 112, "early_exit": 96, "mod": 6}
QUICK_STEPS = {"sparse_attention": 16, "mod": 3}
CHUNKS = {"pruning": 16, "freezing": 8, "sparse_attention": 8, "early_exit": 8}
"""Steps for which one may stand, where loads are not drawn anew in each."""
CHANGE = 0.01
DENSE_EVERY = 16
TELL_CHANGES = ("pruning", "freezing")
MEASURE_EVERY = 6
NUM_PARAMETERS = 16_384
COSTS = ("overhead_ms", "steps", "measured", "moves")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long steps are.

    Attributes:
        num_microbatches: Microbatches per step.
        dense_s: Seconds of a dense layer's forward, of its input's gradient and of its weights', each, per microbatch.
        memoryless_dense_s: The same for the memoryless scheme.
        memoryless_steps: Steps of that.
    """

    num_microbatches: int
    dense_s: float
    memoryless_dense_s: float
    memoryless_steps: int


SIZES, QUICK_SIZES = Sizes(16, 1.8e-3, 4.3e-3, 5), Sizes(12, 1.2e-3, 3.5e-3, 2)


@dataclass(slots=True)
class Result:
    """What became of one scheme.

    Attributes:
        seconds: Of the steps run, by variant.
        weights: Steps for which each of these stands, by variant.
        perfect: Quotient of the slowest rank's work and the mean under the uniform split, over all steps.
        measured: Measured steps of the library's variants.
        moves: How often they moved layers.
        overhead_s: Seconds that measuring, deciding and moving took in all.
    """

    seconds: dict[str, list[float]]
    weights: dict[str, list[int]]
    perfect: float
    measured: dict[str, int]
    moves: dict[str, int]
    overhead_s: dict[str, float]

    def mean(self, variant: str) -> float:
        """Returns the mean seconds of a step."""
        return statistics.fmean(self.seconds[variant], self.weights[variant])

    def costs(self, variant: str) -> tuple[float, int, int, int]:
        """Returns the overhead per step, the number of steps, those that were measured, and the number of moves."""
        steps = len(self.seconds[variant])
        return self.overhead_s[variant] / steps, steps, self.measured[variant], self.moves[variant]


class Trace:
    """The costs of layers at the steps that are run.

    Args:
        scheme: Name of the scheme, or ``"dense"``.
        steps: Steps of the training.
        dense_s: See `Sizes`.
    """

    def __init__(self, scheme: str, steps: Sequence[int], dense_s: float) -> None:
        self.dense = [LayerCost(dense_s, dense_s, dense_s)] * NUM_LAYERS
        self.costs = self.expected = [self.dense for _ in steps]
        if scheme != "dense":
            trace = TRACES[scheme]
            self.costs = [trace.layer_costs(self.dense[0], NUM_LAYERS, step) for step in steps]
            self.expected = [self._expected(trace, step) for step in steps]

    def __len__(self) -> int:
        return len(self.costs)

    def _expected(self, trace: CostTrace, step: int) -> list[LayerCost]:
        if isinstance(trace, FreezingTrace):  # no chance, and other parts of a layer than those that scale
            return trace.layer_costs(self.dense[0], NUM_LAYERS, step)
        return [
            LayerCost(cost.forward_s * factor, cost.input_gradient_s * factor, cost.weight_gradient_s * factor)
            for cost, factor in zip(self.dense, trace.expected(NUM_LAYERS, step), strict=True)
        ]

    def changes(self, index: int) -> bool:
        """Returns whether layers are expected to cost something else than in the step before."""
        return index > 0 and self.expected[index] != self.expected[index - 1]

    def steps_until_change(self, index: int) -> int:
        """Returns the steps after this one in which layers are expected to cost what they cost now."""
        later = range(index + 1, len(self))
        return next((other for other in later if self.changes(other)), len(self)) - index - 1

    def chunks(self, most: int) -> dict[int, int]:
        """Returns steps that stand for all: the middle ones of runs of steps whose expected costs are nearly the same.

        Args:
            most: Longest run.

        Returns:
            For each such step, the length of its run.
        """
        uniform = Assignment.uniform(NUM_LAYERS, NUM_RANKS)
        largest = [max(uniform.stage_loads(loads_of(costs))) for costs in self.expected]
        starts = [0]
        for index in range(1, len(self)):
            if index - starts[-1] == most or abs(largest[index] / largest[starts[-1]] - 1) > CHANGE:
                starts.append(index)
        return {(begin + end) // 2: end - begin for begin, end in pairwise([*starts, len(self)])}

    def perfect(self) -> float:
        """Returns how much faster a perfect split of all steps would be than a uniform one, if only work counted."""
        uniform = Assignment.uniform(NUM_LAYERS, NUM_RANKS)
        loads = [uniform.stage_loads(loads_of(costs)) for costs in self.costs]
        return sum(map(max, loads)) / sum(map(statistics.mean, loads))


def loads_of(costs: Sequence[LayerCost]) -> list[float]:
    """Returns what each layer takes for one microbatch, without the gradients that nobody asks for."""
    alone = stage_costs(costs, Assignment((1,) * len(costs)))
    return [cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s for cost in alone]


class Balanced:
    """Runs the steps of a pipeline that the library balances, and does what its callbacks do.

    Args:
        pipeline: The pipeline.
        trace: The costs.
        every: Steps from one measurement to the next, where the library asks for none in between.
        tells_changes: Whether the scheme says when it changes the layers.
    """

    def __init__(self, pipeline: EmulatedPipeline, trace: Trace, every: int, tells_changes: bool) -> None:
        self.pipeline = pipeline
        self.measured = self.moves = 0
        self._trace = trace
        self._every = every
        self._tells_changes = tells_changes

    def step(self, index: int) -> float:
        """Runs a step and returns its seconds, with all that was measured, decided and moved."""
        return self.pipeline.step(partial(self._before, index), partial(self._after, index))

    def _before(self, index: int) -> None:
        runtime, changed = self.pipeline.runtime, self._tells_changes and self._trace.changes(index)
        if changed:
            runtime.rebalancer.model_changed()
        if changed or index % self._every == 0 or runtime.rebalancer.wants_measurement:
            self.measured += 1
            runtime.request_rebalance()

    def _after(self, index: int) -> None:
        runtime = self.pipeline.runtime
        if runtime.rebalancer.requested:
            known = self._trace.steps_until_change(index) if self._tells_changes else None
            left = len(self._trace) - index - 1
            result = runtime.rebalance(horizon_steps=known, at_most_steps=left if known is None else known)
            self.moves += result.migration is not None


def run_scheme(
    groups: PipelineGroups,
    trace: Trace,
    num_microbatches: int,
    variants: dict[str, Balanced],
    others: dict[str, dict[int, int]],
) -> Result:
    """Runs all variants of one scheme. Every rank calls it.

    Args:
        groups: Process groups of this rank.
        trace: The costs.
        num_microbatches: Microbatches per step.
        variants: Those that the library balances.
        others: The others, with the steps that they run, and for how many each of these stands.
    """
    pipelines = {name: variant.pipeline for name, variant in variants.items()}
    pipelines |= {name: new_pipeline(groups, trace, num_microbatches) for name in others}
    names = list(pipelines)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(len(trace)):
        for turn in range(len(names)):
            name = names[(index + turn) % len(names)]
            if name in others and index not in others[name]:
                continue
            if name != "dense":
                prepare(pipelines[name], trace.costs[index])
            if name == "oracle":
                place(pipelines[name], trace.expected[index])
            seconds[name].append(variants[name].step(index) if name in variants else pipelines[name].step())
    return Result(
        seconds,
        {name: list(others[name].values()) if name in others else [1] * len(trace) for name in names},
        trace.perfect(),
        {name: variant.measured for name, variant in variants.items()},
        {name: variant.moves for name, variant in variants.items()},
        # Ranks that have ended their step wait there for the others, so what the last to come spends counts.
        {name: min(groups.gather(variant.pipeline.runtime.overhead_s)) for name, variant in variants.items()},
    )


def new_pipeline(
    groups: PipelineGroups, trace: Trace, num_microbatches: int, move_when: MoveWhen = "worthwhile"
) -> EmulatedPipeline:
    """Returns a pipeline of dense layers that has run."""
    pipeline = EmulatedPipeline(
        groups, trace.dense, num_microbatches, num_parameters=NUM_PARAMETERS, move_when=move_when
    )
    pipeline.warm_up(trace.dense)
    pipeline.runtime.restart_clock()
    return pipeline


def prepare(pipeline: EmulatedPipeline, costs: Sequence[LayerCost]) -> None:
    """Gives the layers their costs of a step; where others train than before, shapes at borders are found anew."""
    if pipeline.trains != [cost.trains for cost in costs]:
        pipeline.warm_up(costs)
    else:
        pipeline.set_costs(costs)


def place(pipeline: EmulatedPipeline, expected: Sequence[LayerCost]) -> None:
    """Moves layers as one would who knows what the step is expected to cost."""
    current = pipeline.runtime.assignment
    best = PartitionBalancer(tolerance=0.0).balance(BalancingProblem(loads_of(expected), current))
    if best != current:
        pipeline.runtime.move_to(best)


def run_all(groups: PipelineGroups, steps: dict[str, int], sizes: Sizes) -> tuple[dict[str, Result], Result]:
    """Runs all schemes, and the memoryless one. Every rank calls it."""
    found, microbatches = {}, sizes.num_microbatches
    for scheme, count in steps.items():
        trace = Trace(scheme, [index * RUN_STEPS // count for index in range(count)], sizes.dense_s)
        chunks = trace.chunks(CHUNKS.get(scheme, 1))
        others = {"static": chunks, "oracle": chunks, "dense": dict.fromkeys(range(0, count, DENSE_EVERY), 1)}
        pipeline = new_pipeline(groups, trace, microbatches)
        ours = {"ours": Balanced(pipeline, trace, MEASURE_EVERY, scheme in TELL_CHANGES)}
        found[scheme] = run_scheme(groups, trace, microbatches, ours, others)
    settled = range(RUN_STEPS, RUN_STEPS + sizes.memoryless_steps)
    trace = Trace("dense" if "dense" in steps else "moe", settled, sizes.memoryless_dense_s)
    variants = {
        move_when: Balanced(new_pipeline(groups, trace, microbatches, move_when), trace, 1, tells_changes=False)
        for move_when in get_args(MoveWhen)
    }
    return found, run_scheme(groups, trace, microbatches, variants, {"static": trace.chunks(1)})


def main(arguments: argparse.Namespace) -> None:
    steps, sizes = (QUICK_STEPS, QUICK_SIZES) if arguments.quick else (STEPS, SIZES)
    if arguments.null:
        steps = {"dense": max(steps.values())}
    report(sizes, *on_all_ranks(run_all, steps, sizes))


def report(sizes: Sizes, found: dict[str, Result], memoryless: Result) -> None:
    print(
        f"{NUM_RANKS} ranks, {NUM_LAYERS} layers, {NUM_LAYERS // NUM_RANKS} per rank, 1F1B, {sizes.num_microbatches} "
        f"microbatches; a training of {RUN_STEPS} steps; a dense layer takes {3e3 * sizes.dense_s:.1f} ms of each; "
        f"measured at every {MEASURE_EVERY}th step and where the library asks"
    )
    for scheme in found.keys() & TRACES.keys():
        print(f"{scheme}: {TRACES[scheme]}")
    rows = [
        (scheme, *map(result.mean, ("static", "ours", "oracle", "dense")), *result.costs("ours"), result.perfect)
        for scheme, result in found.items()
    ]
    columns = ("scheme", "static_ms", "ours_ms", "oracle_ms", "dense_ms", *COSTS, "bound")
    print("\n" + table("Schemes, mean per step", columns, [(*row[:-1], f"{row[-1]:.3f}") for row in rows]))
    for scheme, static_s, ours_s, oracle_s, *_ in rows:
        print(ratio(f"oracle_over_static_{scheme}", static_s / oracle_s))
        print(ratio(f"ours_over_static_{scheme}", static_s / ours_s))
        print(ratio(f"oracle_of_ours_{scheme}", oracle_s / ours_s))
    print(ratio("worst_of_oracle", min(row[3] / row[2] for row in rows)))
    print(ratio("worst_over_static", min(row[1] / row[2] for row in rows)))
    asked = [
        (variant, memoryless.mean("static"), memoryless.mean(variant), *memoryless.costs(variant))
        for variant in memoryless.measured
    ]
    print("\n" + table("Memoryless, mean per step", ("move_when", "static_ms", "ours_ms", *COSTS), asked))
    for variant, static_s, ours_s, *_ in asked:
        print(ratio(f"memoryless_{variant}", static_s / ours_s))


if __name__ == "__main__":
    main(arguments_of(__doc__))
