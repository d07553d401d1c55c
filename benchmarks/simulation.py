"""Does the simulator tell how long a step takes?

The same schedules twice: `lightning_dynmo.simulation` works a step out, and eight real processes run it, with the
library's own messages (gloo) between layers that sleep. Both get the same costs of layers: those of a scheme's trace,
at a step at which the scheme has made the layers as uneven as it does, split uniformly. They are scaled so that the
slowest rank works for the same time per microbatch in every case.

The simulator has one constant, what a message takes: one microbatch goes through a pipeline of these processes and
back, and what it takes longer than the layers sleep is divided by its messages. So it holds the Python around a message
too. It is measured before, and fitted on none of the cases.

`error` is |simulated - emulated| / emulated, where `emulated` is the median over rounds, and `median_error_<schedule>`
its median over schemes. `formula` is (microbatches + ranks - 1) x the slowest rank's time, which knows nothing of the
schedule; `median_error_of_formula`, over all cases, says what there is to know beyond it.

Schedules with two stages per rank have 16 stages of 2 layers.

`--null` runs dense layers, all alike, in place of the schemes: `emulated_over_simulated_<schedule>` must be 1.00 +-
0.05. `--quick` has two rounds, of fewer microbatches that are shorter.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from emulation import NUM_RANKS, EmulatedPipeline, on_all_ranks
from harness import Rounds, arguments_of, ratio, table

from lightning_dynmo.pipeline import PipelineGroups, find_schedule
from lightning_dynmo.pipeline.schedules import simulated_order
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import TRACES, LayerCost, Network, simulate, stage_costs

NUM_LAYERS = 32
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": 2, "interleavedzerobubble": 2, "zbvzerobubble": 2}
"""Stages per rank of each schedule."""
STEPS = {"moe": 2000, "pruning": 7000, "freezing": 6000, "sparse_attention": 1000, "early_exit": 6000, "mod": 2000}
"""Step of each trace: its last change, or where it has settled."""
NUM_MICROBATCHES, SLOWEST_S, ROUNDS, BUDGET_S = 16, 0.045, 5, 220.0
QUICK_NUM_MICROBATCHES, QUICK_SLOWEST_S, QUICK_ROUNDS = 8, 0.03, 2
PINGS, PING_S = 10, 0.002
DENSE = LayerCost(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One scheme under one schedule.

    Attributes:
        scheme: Name of the trace, or ``"dense"``.
        schedule: Schedule.
        num_microbatches: Microbatches per step.
        costs: Costs of the layers.
    """

    scheme: str
    schedule: str
    num_microbatches: int
    costs: tuple[LayerCost, ...]

    @property
    def assignment(self) -> Assignment:
        return Assignment.uniform(NUM_LAYERS, NUM_RANKS * SCHEDULES[self.schedule])

    def rank_times(self) -> list[float]:
        """Returns what each rank computes per microbatch."""
        placement = find_schedule(self.schedule).place(NUM_RANKS, SCHEDULES[self.schedule])
        times = [0.0] * NUM_RANKS
        for rank, stage in zip(placement, stage_costs(self.costs, self.assignment), strict=True):
            times[rank] += stage.forward_s + stage.input_gradient_s + stage.weight_gradient_s
        return times

    def scaled(self, slowest_s: float) -> Case:
        """Returns the same with costs of which the slowest rank has so much per microbatch."""
        factor = slowest_s / max(self.rank_times())
        costs = [
            LayerCost(
                factor * cost.forward_s, factor * cost.input_gradient_s, factor * cost.weight_gradient_s, cost.trains
            )
            for cost in self.costs
        ]
        return Case(self.scheme, self.schedule, self.num_microbatches, tuple(costs))

    def simulated_s(self, latency_s: float) -> float:
        schedule, stages_per_rank = find_schedule(self.schedule), SCHEDULES[self.schedule]
        order = simulated_order(schedule, NUM_RANKS, stages_per_rank, self.num_microbatches)
        placement = schedule.place(NUM_RANKS, stages_per_rank)
        return simulate(order, placement, stage_costs(self.costs, self.assignment), Network(latency_s)).makespan_s

    def formula_s(self) -> float:
        return (self.num_microbatches + NUM_RANKS - 1) * max(self.rank_times())


def cases(num_microbatches: int, slowest_s: float, dense: bool) -> list[Case]:
    """Returns all cases, those of a scheme one after the other."""
    if dense:
        schemes = {"dense": [DENSE] * NUM_LAYERS}
    else:
        schemes = {name: trace.layer_costs(DENSE, NUM_LAYERS, STEPS[name]) for name, trace in TRACES.items()}
    return [
        Case(scheme, schedule, num_microbatches, tuple(costs)).scaled(slowest_s)
        for scheme, costs in schemes.items()
        for schedule in SCHEDULES
    ]


def measure_all(groups: PipelineGroups, all_cases: Sequence[Case], quick: bool) -> tuple[float, list[list[float]]]:
    """Returns the seconds of a message, and those of each case in every round. Runs on every rank."""
    latency_s = measure_latency(groups)
    pipelines = {
        case.schedule: EmulatedPipeline(
            groups, case.costs, case.num_microbatches, case.schedule, SCHEDULES[case.schedule]
        )
        for case in all_cases
    }
    seconds: list[list[float]] = [[] for _ in all_cases]
    for _ in range(QUICK_ROUNDS) if quick else Rounds(ROUNDS, BUDGET_S):
        for case, found in zip(all_cases, seconds, strict=True):
            pipelines[case.schedule].warm_up(case.costs)
            found.append(pipelines[case.schedule].forward_and_backward())
    return latency_s, seconds


def measure_latency(groups: PipelineGroups) -> float:
    """Sends one microbatch through a pipeline and back; returns the median seconds of a message."""
    costs = [LayerCost(PING_S, PING_S, PING_S)] * NUM_RANKS
    pipeline = EmulatedPipeline(groups, costs, 1, "gpipe")
    pipeline.warm_up(costs)
    order = simulated_order(find_schedule("gpipe"), NUM_RANKS, 1, 1)
    asleep_s = simulate(order, range(NUM_RANKS), stage_costs(costs, pipeline.uniform)).makespan_s
    seconds = [pipeline.forward_and_backward() - asleep_s for _ in range(PINGS)]
    return statistics.median(seconds) / (2 * (NUM_RANKS - 1))


def main(arguments: argparse.Namespace) -> None:
    sizes = (QUICK_NUM_MICROBATCHES, QUICK_SLOWEST_S) if arguments.quick else (NUM_MICROBATCHES, SLOWEST_S)
    all_cases = cases(*sizes, dense=arguments.null)
    latency_s, seconds = on_all_ranks(measure_all, all_cases, arguments.quick)
    report(latency_s, all_cases, seconds)


def report(latency_s: float, all_cases: Sequence[Case], seconds: Sequence[Sequence[float]]) -> None:
    print(
        f"{NUM_RANKS} ranks, {NUM_LAYERS} layers, {all_cases[0].num_microbatches} microbatches, slowest rank "
        f"{max(all_cases[0].rank_times()) * 1e3:.0f} ms per microbatch, {len(seconds[0])} rounds\n"
    )
    print(table("Message", ("latency_ms",), [(latency_s,)]))
    rows = []
    for case, measured in zip(all_cases, seconds, strict=True):
        simulated_s, emulated_s, formula_s = case.simulated_s(latency_s), statistics.median(measured), case.formula_s()
        error = abs(simulated_s / emulated_s - 1)
        rows.append((case.scheme, case.schedule, simulated_s, emulated_s, f"{error:.4f}", formula_s))
    columns = ("scheme", "schedule", "simulated_ms", "emulated_ms", "error", "formula_ms")
    print(table("Steps", columns, rows))
    for schedule in SCHEDULES:
        mine = [row for row in rows if row[1] == schedule]
        print(ratio(f"median_error_{schedule}", statistics.median(float(row[4]) for row in mine)))
        print(ratio(f"emulated_over_simulated_{schedule}", statistics.median(row[3] / row[2] for row in mine)))
    print(ratio("median_error_of_formula", statistics.median(abs(row[5] / row[3] - 1) for row in rows)))


if __name__ == "__main__":
    main(arguments_of(__doc__))
