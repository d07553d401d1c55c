"""How near the optimum do balancers come, how much do they move, and how long do they think?

Of the six schemes' cost traces at step 10,000 (32 layers of 10 ms on 8 stages, uniform before; the median seed where
chance has a part): the bottleneck of each balancer, with the optimum, found here by plain dynamic programming, and the
granularity bound beside it: no move of whole layers gains more than the layers per stage of the split before.

Two rows are a re-implementation of the rules of the original DynMo code. `original_bisection` bisects the bottleneck
until its limits are 0.001 apart, whatever the unit: see the table Units. `original_lightest` gives the lightest layer
of the heaviest rank to the lightest rank, wherever that is. So it loses the order of the layers, and may be below the
optimum of stages in order; `crossings` counts how often a microbatch then goes from rank to rank, 7 times in order.
`parameters` counts those that are neither pruned nor frozen.

Then the balancers on random instances: Diffusion over the optimum, and the two other placements over the best of all
splits. Last, 1,000 layers on 64 stages; of the rounds the fastest counts.

--null makes every balancer return the split that it is given: all gains are 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import numpy as np
from harness import arguments_of, ratio, table

from lightning_dynmo.planning import (
    Assignment,
    BalancingProblem,
    DiffusionBalancer,
    MemoryLimits,
    PartitionBalancer,
    diffuse,
    initial_assignment,
    speedup_bound,
)
from lightning_dynmo.planning.balancers import most_rounds
from lightning_dynmo.simulation import TRACES, CostTrace, FreezingTrace, PruningTrace

LAYERS, STAGES, STEP, DENSE_S = 32, 8, 10_000, 0.01
LAYER_BYTES = 16 * 12 * 1024**2  # mixed precision and Adam, at width 1024
ORIGINAL_EPSILON = 1e-3


@dataclass(frozen=True)
class Answer:
    """Which rank runs each layer; the rules of the original may leave a rank empty, or lose the order."""

    ranks: tuple[int, ...]
    plan_s: float

    def bottleneck(self, loads: Sequence[float], num_ranks: int) -> float:
        own = ([load for load, at in zip(loads, self.ranks, strict=True) if at == rank] for rank in range(num_ranks))
        return max(map(math.fsum, own))

    def moved_layers(self, before: Assignment) -> int:
        return sum(rank != before.stage_of(layer) for layer, rank in enumerate(self.ranks))

    @property
    def crossings(self) -> int:
        return sum(one != other for one, other in pairwise(self.ranks))


def answer(plan: Callable[[], Sequence[int]], repeats: int) -> Answer:
    """Returns the plan with the shortest time it took."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        ranks = plan()
        times.append(time.perf_counter() - begin)
    return Answer(tuple(ranks), min(times))


def ranks_of(assignment: Assignment) -> list[int]:
    return [stage for stage, size in enumerate(assignment.balance) for _ in range(size)]


def original_bisection(loads: Sequence[float], num_ranks: int) -> list[int]:
    """Returns the rank of each layer: the bottleneck is bisected until its limits are 0.001 apart."""

    def fill(limit: float) -> list[int]:
        ranks, rank, filled = [], 0, 0.0
        for load in loads:
            if filled + load > limit and filled > 0:
                rank, filled = rank + 1, 0.0
            ranks.append(rank)
            filled += load
        return ranks

    low, high = max(loads), math.fsum(loads)
    while high - low > ORIGINAL_EPSILON:
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle)[-1] < num_ranks else (middle, high)
    return fill(high)


def original_lightest(loads: Sequence[float], current: Assignment) -> list[int]:
    """Returns the rank of each layer: the heaviest rank's lightest layer goes to the lightest, while that helps."""
    ranks = ranks_of(current)
    while True:
        own = (
            [load for load, at in zip(loads, ranks, strict=True) if at == rank] for rank in range(current.num_stages)
        )
        totals = list(map(math.fsum, own))
        heaviest, lightest = totals.index(max(totals)), totals.index(min(totals))
        layers = [layer for layer, rank in enumerate(ranks) if rank == heaviest]
        layer = min(layers, key=lambda index: loads[index])
        if len(layers) == 1 or totals[lightest] + loads[layer] >= totals[heaviest]:
            return ranks
        ranks[layer] = lightest


def optimum(loads: Sequence[float], num_stages: int) -> float:
    """Returns the smallest largest stage, by dynamic programming over all borders."""
    prefix = np.concatenate([[0.0], np.cumsum(loads)])
    best = np.where(np.arange(len(prefix)) == 0, 0.0, np.inf)
    for _ in range(num_stages):
        following = np.full(len(prefix), np.inf)
        for end in range(1, len(prefix)):
            following[end] = np.maximum(best[:end], prefix[end] - prefix[:end]).min()
        best = following
    return float(best[-1])


def parameters_that_cost(trace: CostTrace) -> list[int]:
    """Returns the parameters of each layer that still cost work: those that are neither pruned nor frozen."""
    whole = LAYER_BYTES // 16
    if isinstance(trace, PruningTrace):
        return [round(density * whole) for density in trace.densities(LAYERS, STEP)]
    if isinstance(trace, FreezingTrace):
        return [whole * (layer >= trace.num_frozen(LAYERS, STEP)) for layer in range(LAYERS)]
    return [whole] * LAYERS


def plans_of(problem: BalancingProblem, counts: Sequence[int], null: bool) -> dict[str, Callable[[], Sequence[int]]]:
    """Returns each balancer as a function of nothing."""
    loads, current = problem.loads, problem.current
    names = ["Block"] * problem.num_layers
    plans: dict[str, Callable[[], Sequence[int]]] = {
        "uniform": lambda: ranks_of(current),
        "parameters": lambda: ranks_of(initial_assignment("parameters", counts, names, problem.num_stages)),
        "original_bisection": lambda: original_bisection(loads, problem.num_stages),
        "original_lightest": lambda: original_lightest(loads, current),
        "diffusion": lambda: ranks_of(DiffusionBalancer().balance(problem)),
        "partition": lambda: ranks_of(PartitionBalancer().balance(problem)),
    }
    return dict.fromkeys(plans, lambda: ranks_of(current)) if null else plans


def compare_on_schemes(arguments: argparse.Namespace) -> None:
    uniform = Assignment.uniform(LAYERS, STAGES)
    bound = speedup_bound(uniform.balance)
    rows: list[list[object]] = []
    for name, trace in TRACES.items():
        seeds = sorted(range(9), key=lambda seed: optimum(trace.costs(LAYERS, STEP, seed), STAGES))
        loads = [DENSE_S * cost for cost in trace.costs(LAYERS, STEP, seeds[4])]
        problem = BalancingProblem(loads, uniform, state_bytes=[LAYER_BYTES] * LAYERS)
        best = optimum(loads, STAGES)
        for balancer, plan in plans_of(problem, parameters_that_cost(trace), arguments.null).items():
            found = answer(plan, 3 if arguments.quick else 20)
            slowest, moved = found.bottleneck(loads, STAGES), found.moved_layers(uniform)
            gain = problem.bottleneck(uniform) / slowest
            moved_mb = moved * LAYER_BYTES / 2**20
            rows.append([name, balancer, slowest, best, f"{gain:.4f}", bound, f"{moved_mb:.0f}", found.crossings])
            rows[-1].append(found.plan_s)
    columns = ("scheme", "balancer", "bottleneck_ms", "optimum_ms", "gain", "bound", "moved_mb", "crossings", "plan_ms")
    print(table(f"Schemes, {LAYERS} layers on {STAGES} stages", columns, rows))
    for balancer in ("partition", "diffusion", "original_bisection"):
        worst = max(row[2] / row[3] for row in rows if row[1] == balancer)  # type: ignore[operator]
        print(ratio(f"{balancer}_over_optimum_worst_scheme", worst))
    for row in rows:
        if row[1] == "partition":
            print(ratio(f"uniform_over_partition_{row[0]}", float(str(row[4]))))
    print()


def compare_units(arguments: argparse.Namespace) -> None:
    """Prints what the unit of the loads does to a bisection with an absolute tolerance."""
    costs = TRACES["early_exit"].costs(LAYERS, STEP)
    uniform, rows = Assignment.uniform(LAYERS, STAGES), []
    for unit in (1.0, 1e-1, 1e-2, 1e-3, 1e-4):
        problem = BalancingProblem([unit * cost for cost in costs], uniform)
        plans, best = plans_of(problem, [1] * LAYERS, arguments.null), optimum(problem.loads, STAGES)
        over = (
            answer(plans[name], 1).bottleneck(problem.loads, STAGES) / best
            for name in ("original_bisection", "partition")
        )
        rows.append([f"{unit:g}", *(f"{share:.4f}" for share in over)])
    print(
        table(
            "Units: bottleneck over the optimum, early_exit", ("dense_layer_s", "original_bisection", "partition"), rows
        )
    )
    print(ratio("original_over_optimum_at_1e-4_s", float(rows[-1][1])))
    print(ratio("partition_over_optimum_at_1e-4_s", float(rows[-1][2])), "\n")


# Random instances.


def random_problem(
    draws: np.random.Generator, num_layers: int, placement: Sequence[int], spread: str
) -> BalancingProblem:
    inner = np.sort(draws.choice(np.arange(1, num_layers), len(placement) - 1, replace=False)).tolist()
    current = Assignment(tuple(end - start for start, end in pairwise([0, *inner, num_layers])))
    loads = draws.uniform(0.5, 2.0, num_layers) if spread == "uniform" else draws.lognormal(0.0, 1.0, num_layers)
    return BalancingProblem(loads.tolist(), current, placement)


def compare_diffusion(arguments: argparse.Namespace) -> None:
    draws, rows = np.random.default_rng(0), []
    count = 40 if arguments.quick else 400
    for spread in ("uniform", "lognormal"):
        for stages, layers in ((4, 16), (8, 32), (8, 128), (24, 48), (24, 96)):
            gaps, in_layers, rounds, bound = [], [], [], most_rounds(stages, DiffusionBalancer().gamma)
            for _ in range(count):
                problem = random_problem(draws, layers, range(stages), spread)
                best = problem.bottleneck(PartitionBalancer(tolerance=0.0).balance(problem))
                found = diffuse(problem)
                slowest = problem.bottleneck(problem.current if arguments.null else found.assignment)
                gaps.append(slowest / best)
                in_layers.append((slowest - best) / max(problem.loads))
                rounds.append(found.diffusing_rounds + found.handing_rounds)
            shares = (statistics.mean(gaps), np.quantile(gaps, 0.95), max(gaps), max(in_layers))
            rows.append([spread, stages, layers, *(f"{share:.4f}" for share in shares), max(rounds), bound])
    columns = ("loads", "stages", "layers", "mean", "p95", "most", "most_in_layers", "most_rounds", "lemma_2")
    print(table(f"Diffusion over the optimum, {count} random instances each", columns, rows))
    print(ratio("diffusion_over_optimum_mean", statistics.mean(float(row[3]) for row in rows)))
    print(ratio("diffusion_above_optimum_in_largest_layers", max(float(row[6]) for row in rows)))
    print(ratio("diffusion_rounds_of_lemma_2", max(row[7] / row[8] for row in rows)), "\n")


def all_splits(num_layers: int, num_stages: int) -> Iterator[Assignment]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield Assignment(tuple(end - start for start, end in pairwise((0, *inner, num_layers))))


def compare_placements(arguments: argparse.Namespace) -> None:
    """Prints the gap to the best of all splits where ranks run two or more stages."""
    draws, rows = np.random.default_rng(0), []
    count = 10 if arguments.quick else 100
    shapes = {
        "v": lambda ranks, _: (*range(ranks), *reversed(range(ranks))),
        "loop": lambda ranks, loops: [*range(ranks)] * loops,
    }
    for shape, ranks, loops, layers in (
        *(("v", 2, 2, 12), ("v", 3, 2, 14)),
        *(("loop", 2, 2, 12), ("loop", 3, 2, 14), ("loop", 2, 3, 14), ("loop", 2, 2, 4), ("loop", 3, 2, 8)),
    ):
        gaps = []
        for _ in range(count):
            problem = random_problem(draws, layers, shapes[shape](ranks, loops), "uniform")
            best = min(map(problem.bottleneck, all_splits(layers, len(problem.ranks))))
            plan = planner(arguments.null)
            gaps.append(problem.bottleneck(plan(problem)) / best)
        exact = sum(gap < 1 + 1e-9 for gap in gaps) / count
        rows.append([shape, ranks, loops, layers, f"{exact:.2f}", f"{statistics.mean(gaps):.4f}", f"{max(gaps):.4f}"])
    columns = ("placement", "ranks", "stages_per_rank", "layers", "exact", "mean", "most")
    print(table(f"Placements: partition over the best of all splits, {count} random instances each", columns, rows))
    for shape in shapes:
        print(ratio(f"{shape}_over_optimum_mean", statistics.mean(float(row[5]) for row in rows if row[0] == shape)))
    print()


def time_large(arguments: argparse.Namespace) -> None:
    """Prints how long planning takes, second objective included."""
    loads = [1.0 + (layer * 7919 % 1000) / 500 for layer in range(1000)]
    sizes = [1 + layer * 31 % 97 for layer in range(1000)]
    speeds = [0.5 + (stage * 31 % 64) / 128 for stage in range(64)]
    memory = MemoryLimits([10] * 1000, [1] * 1000, range(64, 0, -1), [2000] * 64)
    plain = BalancingProblem(loads, Assignment.uniform(1000, 64), state_bytes=sizes)
    small = [1.0 + (layer * 7919 % 64) / 32 for layer in range(64)]
    problems = {
        "plain": plain,
        "with_speeds": replace(plain, rank_speeds=speeds),
        "with_memory": replace(plain, memory=memory),
        "v_64x8": BalancingProblem(small, Assignment.uniform(64, 16), (*range(8), *reversed(range(8)))),
        "loop_64x8": BalancingProblem(small, Assignment.uniform(64, 16), [*range(8)] * 2),
    }
    plan, rows = planner(arguments.null), []
    for turn in range(5 if arguments.quick else 20):
        row: list[object] = [turn]
        for problem in problems.values():
            begin = time.perf_counter()
            plan(problem)
            row.append(time.perf_counter() - begin)
        rows.append(row)
    print(
        table(
            "Large: 1,000 layers on 64 stages, or 64 layers on 8 ranks",
            ("round", *(f"{name}_ms" for name in problems)),
            rows,
        )
    )
    print(ratio("plan_1000x64_ms", 1e3 * min(float(str(row[1])) for row in rows), ".3f"))


def planner(null: bool) -> Callable[[BalancingProblem], Assignment]:
    return (lambda problem: problem.current) if null else PartitionBalancer(tolerance=0.0).balance


def main() -> None:
    arguments = arguments_of(__doc__)
    compare_on_schemes(arguments)
    compare_units(arguments)
    compare_diffusion(arguments)
    compare_placements(arguments)
    time_large(arguments)


if __name__ == "__main__":
    main()
