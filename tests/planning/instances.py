"""Small balancing problems, and what is best for them by trying all splits; shares nothing with the balancers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise

from hypothesis import strategies as st

from lightning_dynmo.planning import Assignment, BalancingProblem, MemoryLimits

whole_loads = st.integers(0, 12).map(float)
real_loads = st.floats(0, 1e3, allow_subnormal=False)


def from_borders(borders: Sequence[int]) -> Assignment:
    return Assignment(tuple(end - start for start, end in pairwise(borders)))


def all_splits(num_layers: int, num_stages: int) -> Iterator[Assignment]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield from_borders((0, *inner, num_layers))


def bottleneck(problem: BalancingProblem, split: Assignment) -> Fraction:
    totals = [Fraction(0)] * problem.num_ranks
    for stage, rank in enumerate(problem.ranks):
        totals[rank] += sum((Fraction(problem.loads[layer]) for layer in split.layers_of(stage)), Fraction(0))
        totals[rank] += Fraction((problem.stage_costs or [0.0] * problem.num_stages)[stage])
    speeds = problem.rank_speeds or [1.0] * problem.num_ranks
    return max(total / Fraction(speed) for total, speed in zip(totals, speeds, strict=True))


def lacking_bytes(problem: BalancingProblem, split: Assignment) -> int:
    memory = problem.memory
    if memory is None:
        return 0
    totals = [-cap for cap in memory.cap_bytes]
    for stage, rank in enumerate(problem.ranks):
        for layer in split.layers_of(stage):
            totals[rank] += memory.layer_bytes[layer] + memory.in_flight[stage] * memory.activation_bytes[layer]
    return max(0, *totals)


def moved_bytes(problem: BalancingProblem, split: Assignment) -> int:
    sizes, ranks = problem.state_bytes or [1] * problem.num_layers, problem.ranks
    holders = [[ranks[of.stage_of(layer)] for layer in range(problem.num_layers)] for of in (problem.current, split)]
    return sum(size for size, before, after in zip(sizes, *holders, strict=True) if before != after)


def possible_splits(problem: BalancingProblem) -> list[Assignment]:
    """Returns all splits that fit in memory."""
    splits = all_splits(problem.num_layers, problem.num_stages)
    return [split for split in splits if lacking_bytes(problem, split) == 0]


def best_bottleneck(problem: BalancingProblem) -> Fraction:
    return min(bottleneck(problem, split) for split in possible_splits(problem))


def assert_best(problem: BalancingProblem, split: Assignment, tolerance: float = 0.0) -> None:
    """Checks that a split moves the fewest bytes of all within the tolerance."""
    limit = best_bottleneck(problem) * (1 + Fraction(tolerance))
    within = [other for other in possible_splits(problem) if bottleneck(problem, other) <= limit]
    assert split in within
    assert moved_bytes(problem, split) == min(moved_bytes(problem, other) for other in within)


def with_more_memory(problem: BalancingProblem, num_bytes: int) -> BalancingProblem:
    assert problem.memory is not None
    caps = [cap + num_bytes for cap in problem.memory.cap_bytes]
    return replace(problem, memory=replace(problem.memory, cap_bytes=caps))


def scaled(problem: BalancingProblem, scale: float) -> BalancingProblem:
    costs = problem.stage_costs
    return replace(
        problem,
        loads=[load * scale for load in problem.loads],
        stage_costs=None if costs is None else [cost * scale for cost in costs],
    )


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    loads: st.SearchStrategy[float] = whole_loads,
    placements: Sequence[Sequence[int]] = tuple(tuple(range(stages)) for stages in (1, 2, 3, 4)),
    memory: bool = False,
    speeds: bool = True,
    most_layers: int = 10,
) -> BalancingProblem:
    """Draws a problem with one of the placements; all else that is allowed is there or not."""
    placement = draw(st.sampled_from([entry for entry in placements if len(entry) <= most_layers]))
    num_stages, num_ranks = len(placement), max(placement) + 1
    num_layers = draw(st.integers(num_stages, most_layers))
    inner = draw(st.permutations(range(1, num_layers)))[: num_stages - 1]

    def several(count: int, values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
        return st.lists(values, min_size=count, max_size=count)

    small = st.integers(0, 9)
    limits = st.builds(
        MemoryLimits,
        layer_bytes=several(num_layers, small),
        activation_bytes=several(num_layers, st.integers(0, 3)),
        in_flight=several(num_stages, st.integers(0, 4)),
        cap_bytes=several(num_ranks, st.integers(0, 60)),
    )
    fast_and_slow = several(num_ranks, st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]))
    return BalancingProblem(
        draw(several(num_layers, loads)),
        from_borders((0, *sorted(inner), num_layers)),
        placement=placement,
        state_bytes=draw(st.none() | several(num_layers, small)),  # type: ignore[arg-type]
        rank_speeds=draw(st.none() | fast_and_slow) if speeds else None,
        stage_costs=draw(st.none() | several(num_stages, loads)),
        memory=draw(limits) if memory else None,
    )
