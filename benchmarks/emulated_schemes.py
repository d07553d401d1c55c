"""What does balancing bring, end to end, under each scheme?

Eight real processes, 48 layers that sleep, 1F1B. A training of 20,000 steps is compressed: of each scheme's trace, as
many steps as the table says are run, evenly spaced, with the costs that the layers have at that step. All variants run
the same steps, one after the other at each, from a uniform split:

* `static`: the uniform split stays. This is the baseline.
* `ours`: the library measures, decides and moves layers, with all their state. All the time that takes counts, although
  there is one step here where there are hundreds in the training. Schemes whose callbacks change the model themselves
  (pruning, freezing) tell when they do and when they will again; the others are measured at intervals.
* `oracle`: before each step, layers take the exact best split for the step's expected costs; the move is free.
* `dense`: the layers without the scheme, uniformly split, at some of the steps; a second baseline, for comparison only.

`oracle_over_static_<scheme>` and `ours_over_static_<scheme>` are speed-ups: the static variant's time over the other's.
`oracle_step_over_ours_<scheme>` is the oracle's time over ours, at most about 1, and `worst_of_oracle` its minimum. No
split into layers can gain more than `bound`: the layers per rank, or, tighter, what a pipeline without bubbles and
messages would gain from a perfect split of the same costs.

In mixture of experts, loads are drawn anew in every step, and all layers are expected to cost the same: there is nothing
to gain. There `ours` measures and decides in every step. `memoryless_worthwhile` is its speed-up over static, and
`memoryless_always` that of one that moves whenever a measured step says that another split would have been better.

What is not counted, in any variant: the first step after layers freeze, in which shapes at borders are found anew, is
run once without their cost before.

`--null` runs dense layers in place of the schemes: all ratios must be 1.00 +- 0.05. `--quick` runs two schemes, and
fewer and shorter steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from emulation import NUM_RANKS, EmulatedPipeline, on_all_ranks
from harness import arguments_of, ratio, table

from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.planning import Assignment, BalancingProblem, PartitionBalancer
from lightning_dynmo.simulation import TRACES, FreezingTrace, LayerCost, stage_costs

NUM_LAYERS, NUM_MICROBATCHES, RUN_STEPS = 48, 16, 20_000
DENSE_S, QUICK_DENSE_S = 0.9e-3, 0.5e-3
"""Seconds of a dense layer's forward, of its input's gradient and of its weights', each, per microbatch."""
STEPS = {"moe": 16, "pruning": 60, "freezing": 60, "sparse_attention": 60, "early_exit": 60, "mod": 16}
QUICK_STEPS = {"moe": 6, "sparse_attention": 16}
MEMORYLESS = "moe"
TELLS_CHANGES = ("pruning", "freezing")
MEASURE_EVERY = 3
NUM_PARAMETERS = 16_384
DENSE_EVERY = 12


@dataclass(slots=True)
class Times:
    """Seconds of the steps of one scheme, and what the library did in them.

    Attributes:
        seconds: By variant.
        moves: Moves of layers, by variant.
        measured: Measured steps, by variant.
        overhead_s: Seconds of profiles, decisions and moves, by variant.
        perfect: For each step, the quotient of the slowest rank's work and the mean, under the uniform split.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)
    measured: dict[str, int] = field(default_factory=dict)
    overhead_s: dict[str, float] = field(default_factory=dict)
    perfect: list[float] = field(default_factory=list)


class Trace:
    """The costs of layers at the steps that are run.

    Args:
        scheme: Name of the scheme, or ``"dense"``.
        num_steps: Steps to run.
        dense_s: See `DENSE_S`.
    """

    def __init__(self, scheme: str, num_steps: int, dense_s: float) -> None:
        self.dense = [LayerCost(dense_s, dense_s, dense_s)] * NUM_LAYERS
        self.steps = [index * RUN_STEPS // num_steps for index in range(num_steps)]
        self.costs, self.expected = [self.dense] * num_steps, [self.dense] * num_steps
        if scheme != "dense":
            trace = TRACES[scheme]
            self.costs = [trace.layer_costs(self.dense[0], NUM_LAYERS, step) for step in self.steps]
            # Of a frozen layer, the forward is left, which is more than that everything has become a third.
            if not isinstance(trace, FreezingTrace):
                self.expected = [self._scaled(trace.expected(NUM_LAYERS, step)) for step in self.steps]
            else:
                self.expected = self.costs

    def _scaled(self, factors: Sequence[float]) -> list[LayerCost]:
        return [
            LayerCost(cost.forward_s * factor, cost.input_gradient_s * factor, cost.weight_gradient_s * factor)
            for cost, factor in zip(self.dense, factors, strict=True)
        ]

    def changes(self, index: int) -> bool:
        """Returns whether layers are expected to cost something else than in the step before."""
        return index > 0 and self.expected[index] != self.expected[index - 1]

    def next_change(self, index: int) -> int:
        """Returns the steps after this one in which layers cost the same."""
        later = range(index + 1, len(self.steps))
        return next((other for other in later if self.changes(other)), len(self.steps)) - index - 1


def loads_of(costs: Sequence[LayerCost]) -> list[float]:
    """Returns what each layer takes for one microbatch, without the gradients that nobody asks for."""
    alone = stage_costs(costs, Assignment((1,) * len(costs)))
    return [cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s for cost in alone]


class Library:
    """Steps of a pipeline that the library balances, as its callbacks have it done.

    Args:
        pipeline: The pipeline.
        trace: The costs to come.
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
        return self.pipeline.step(lambda: self._before(index), lambda: self._after(index))

    def _before(self, index: int) -> None:
        runtime, changed = self.pipeline.runtime, self._tells_changes and self._trace.changes(index)
        if changed:
            runtime.rebalancer.model_changed()
        if changed or index % self._every == 0 or runtime.rebalancer.wants_measurement:
            self.measured += 1
            runtime.rebalancer.request()
            runtime.request_profile()

    def _after(self, index: int) -> None:
        if not self.pipeline.runtime.rebalancer.requested:
            return
        left = len(self._trace.steps) - index - 1
        horizon = self._trace.next_change(index) if self._tells_changes else None
        result = self.pipeline.runtime.rebalance(
            horizon_steps=horizon, at_most_steps=left if horizon is None else horizon
        )
        self.moves += result.migration is not None


def run_scheme(groups: PipelineGroups, scheme: str, num_steps: int, dense_s: float) -> Times:
    """Runs all variants of one scheme. Every rank calls it."""
    trace, memoryless = Trace(scheme, num_steps, dense_s), scheme == MEMORYLESS
    every = 1 if memoryless else MEASURE_EVERY
    names = ["static", "ours", "oracle", *(["always"] if memoryless else []), "dense"]
    pipelines = {
        name: EmulatedPipeline(
            groups,
            trace.dense,
            NUM_MICROBATCHES,
            num_parameters=NUM_PARAMETERS,
            move_when="always" if name == "always" else "worthwhile",
        )
        for name in names
    }
    libraries = {
        name: Library(pipelines[name], trace, every, scheme in TELLS_CHANGES)
        for name in ("ours", "always")
        if name in names
    }
    for pipeline in pipelines.values():
        pipeline.warm_up(trace.dense)
        pipeline.runtime.restart_clock()
    times = Times({name: [] for name in names})
    for index, costs in enumerate(trace.costs):
        loads = Assignment.uniform(NUM_LAYERS, NUM_RANKS).stage_loads(loads_of(costs))
        times.perfect.append(max(loads) / statistics.mean(loads))
        for turn in range(len(names)):
            name = names[(turn + index) % len(names)]
            if name != "dense":
                prepare(pipelines[name], trace, index)
            if name in libraries:
                times.seconds[name].append(libraries[name].step(index))
            elif name != "dense" or index % DENSE_EVERY == 0:
                if name == "oracle":
                    place(pipelines[name], trace, index)
                times.seconds[name].append(pipelines[name].step())
    for name, library in libraries.items():
        times.moves[name], times.measured[name] = library.moves, library.measured
        times.overhead_s[name] = library.pipeline.runtime.overhead_s
    return times


def prepare(pipeline: EmulatedPipeline, trace: Trace, index: int) -> None:
    """Gives the layers their costs of a step; where others train than before, finds the shapes at borders anew."""
    costs, before = trace.costs[index], trace.costs[max(index - 1, 0)]
    if [cost.trains for cost in costs] != [cost.trains for cost in before]:
        pipeline.warm_up(costs)
    else:
        pipeline.set_costs(costs)


def place(pipeline: EmulatedPipeline, trace: Trace, index: int) -> None:
    """Moves layers as one who knows what a step is expected to cost."""
    current = pipeline.runtime.assignment
    best = PartitionBalancer().balance(BalancingProblem(loads_of(trace.expected[index]), current))
    if best != current:
        pipeline.runtime.move_to(best)


def run_all(groups: PipelineGroups, steps: dict[str, int], dense_s: float) -> dict[str, Times]:
    """Runs all schemes. Every rank calls it."""
    return {scheme: run_scheme(groups, scheme, num_steps, dense_s) for scheme, num_steps in steps.items()}


def main(arguments: argparse.Namespace) -> None:
    steps = QUICK_STEPS if arguments.quick else STEPS
    if arguments.null:
        steps = {"dense": max(steps.values())}
    dense_s = QUICK_DENSE_S if arguments.quick else DENSE_S
    report(on_all_ranks(run_all, steps, dense_s), dense_s)


def report(found: dict[str, Times], dense_s: float) -> None:
    print(
        f"{NUM_RANKS} ranks, {NUM_LAYERS} layers, {NUM_MICROBATCHES} microbatches, 1F1B, a training of {RUN_STEPS} "
        f"steps; dense layer {3 * dense_s * 1e3:.1f} ms per microbatch\n"
    )
    for scheme, trace in TRACES.items():
        if scheme in found:
            print(f"{scheme}: {trace}")
    print()
    rows = []
    for scheme, times in found.items():
        means = {name: statistics.mean(seconds) for name, seconds in times.seconds.items()}
        perfect = statistics.mean(seconds * bound for seconds, bound in zip(times.seconds["static"], times.perfect, strict=True))
        rows.append(
            (scheme, len(times.perfect), means["static"], means["ours"], means["oracle"], means["dense"],
             times.moves["ours"], times.measured["ours"], times.overhead_s["ours"] / len(times.perfect), statistics.mean(times.perfect))
        )
    columns = ("scheme", "steps", "static_ms", "ours_ms", "oracle_ms", "dense_ms", "moves", "measured", "overhead_ms", "bound")
    print(table("Steps, means", columns, rows))
    for row in rows:
        print(ratio("oracle_over_static_" + row[0], row[2]/row[4]), ratio("ours_over_static_"+row[0], row[2]/row[3]), ratio("oracle_step_over_ours", row[4]/row[3]))
    for t in found.values():
        if "always" in t.seconds:
            print({k: statistics.mean(v) for k,v in t.seconds.items()}, t.moves, t.overhead_s, t.measured)


if __name__ == "__main__":
    main(arguments_of(__doc__))
