import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dynmo.planning import Assignment, Balancer, BalancingProblem, MemoryLimits, PartitionBalancer, predict


@dataclass(frozen=True)
class Case:
    loads: list[float]
    current: Assignment
    state_bytes: list[int] | None = None
    memory_bytes: list[int] | None = None
    memory_cap_bytes: int | None = None
    rank_speeds: list[float] | None = None

    def solve(self) -> Assignment:
        return PartitionBalancer().balance(self.problem())

    def problem(self) -> BalancingProblem:
        memory = None
        if self.memory_bytes is not None and self.memory_cap_bytes is not None:
            num_stages = self.current.num_stages
            nothing = [0] * len(self.memory_bytes)
            memory = MemoryLimits(self.memory_bytes, nothing, [1] * num_stages, [self.memory_cap_bytes] * num_stages)
        return BalancingProblem(
            self.loads, self.current, state_bytes=self.state_bytes, rank_speeds=self.rank_speeds, memory=memory
        )

    def bottleneck(self, split: Assignment) -> Fraction:
        speeds = self.rank_speeds or [1.0] * split.num_stages
        return max(
            sum((Fraction(self.loads[layer]) for layer in split.layers_of(stage)), Fraction(0)) / Fraction(speed)
            for stage, speed in enumerate(speeds)
        )

    def moved_bytes(self, split: Assignment) -> int:
        sizes = self.state_bytes or [1] * split.num_layers
        return sum(size for layer, size in enumerate(sizes) if split.stage_of(layer) != self.current.stage_of(layer))

    def fits(self, split: Assignment) -> bool:
        if self.memory_bytes is None or self.memory_cap_bytes is None:
            return True
        return max(split.stage_loads(self.memory_bytes)) <= self.memory_cap_bytes

    def key(self, split: Assignment) -> tuple[Fraction, int]:
        return self.bottleneck(split), self.moved_bytes(split)


def all_splits(num_layers: int, num_stages: int) -> Iterator[Assignment]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        borders = (0, *inner, num_layers)
        yield Assignment(tuple(end - start for start, end in pairwise(borders)))


@st.composite
def cases(draw: st.DrawFn, *, memory: bool = False, speeds: bool = False, loads: st.SearchStrategy[float]) -> Case:
    num_stages = draw(st.integers(1, 4))
    num_layers = draw(st.integers(num_stages, 9))
    borders = [0, *sorted(draw(_subsets(num_layers - 1, num_stages - 1))), num_layers]

    def per_layer(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=num_layers, max_size=num_layers))

    ints = st.integers(0, 9)
    return Case(
        loads=per_layer(loads),
        current=Assignment(tuple(end - start for start, end in pairwise(borders))),
        state_bytes=draw(st.none() | st.lists(ints, min_size=num_layers, max_size=num_layers)),
        memory_bytes=draw(st.lists(ints, min_size=num_layers, max_size=num_layers)) if memory else None,
        memory_cap_bytes=draw(st.integers(0, 40)) if memory else None,
        rank_speeds=draw(
            st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0]), min_size=num_stages, max_size=num_stages)
        )
        if speeds
        else None,
    )


def _subsets(size: int, count: int) -> st.SearchStrategy[set[int]]:
    return st.permutations(range(1, size + 1)).map(lambda order: set(order[:count]))


whole_loads = st.integers(0, 12).map(float)
real_loads = st.floats(0, 1e3, allow_subnormal=False)


def assert_optimal(case: Case, split: Assignment) -> None:
    allowed = [other for other in all_splits(split.num_layers, split.num_stages) if case.fits(other)]
    assert split in allowed
    assert case.key(split) == min(case.key(other) for other in allowed)


@settings(max_examples=150, deadline=None)
@given(st.booleans().flatmap(lambda speeds: cases(loads=whole_loads, speeds=speeds)))
def test_equals_brute_force(case: Case) -> None:
    assert_optimal(case, case.solve())


@settings(max_examples=200, deadline=None)
@given(st.booleans().flatmap(lambda speeds: cases(loads=whole_loads, speeds=speeds, memory=True)))
def test_equals_brute_force_within_memory(case: Case) -> None:
    if any(case.fits(split) for split in all_splits(case.current.num_layers, case.current.num_stages)):
        assert_optimal(case, case.solve())
    else:
        with pytest.raises(ValueError, match="No split of"):
            case.solve()


@settings(max_examples=100, deadline=None)
@given(st.booleans().flatmap(lambda speeds: cases(loads=real_loads, speeds=speeds)))
def test_real_loads_reach_the_optimum_up_to_rounding(case: Case) -> None:
    best = min(case.bottleneck(split) for split in all_splits(case.current.num_layers, case.current.num_stages))
    assert best <= case.bottleneck(case.solve()) <= best * (1 + Fraction(1, 2**39))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((2, 3, 1), id="larger-bottleneck"),
        pytest.param((3, 1, 2), id="more-bytes"),
        pytest.param((4, 1, 1), id="too-much-memory"),
    ],
)
def test_the_brute_force_check_rejects_wrong_splits(wrong: tuple[int, ...]) -> None:
    case = Case([1, 1, 1, 0, 3, 0], Assignment((3, 2, 1)), memory_bytes=[1] * 6, memory_cap_bytes=3)
    assert_optimal(case, Assignment((3, 2, 1)))
    with pytest.raises(AssertionError):
        assert_optimal(case, Assignment(wrong))


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1e9, 1e300])
@settings(max_examples=40, deadline=None)
@given(case=cases(loads=whole_loads.map(lambda load: load / 10)))
def test_scale_free(scale: float, case: Case) -> None:
    scaled = Case([load * scale for load in case.loads], case.current, case.state_bytes)
    assert scaled.solve() == case.solve()


def test_a_load_that_really_differs_is_not_taken_for_rounding() -> None:
    current = Assignment((2, 2))
    assert Case([0.1, 0.2, 0.3, 0.0], current).solve() == current
    assert Case([0.1, 0.2, 0.0, 0.1 + 0.2], current).solve() == current
    # One part in 10**9 is a difference, one in 10**15 is not.
    assert Case([1.0, 1e-9, 1.0 - 1e-9, 0.0], Assignment((1, 3))).solve() == Assignment((1, 3))
    assert Case([1.0, 1e-9, 1.0 - 2e-9, 0.0], Assignment((2, 2))).solve() == Assignment((1, 3))
    assert Case([1.0, 1e-15, 1.0 - 2e-15, 0.0], Assignment((2, 2))).solve() == Assignment((2, 2))


@settings(max_examples=40, deadline=None)
@given(cases(loads=real_loads, speeds=True))
def test_deterministic(case: Case) -> None:
    assert case.solve() == case.solve()


@settings(max_examples=40, deadline=None)
@given(cases(loads=whole_loads, speeds=True))
def test_a_second_call_moves_nothing(case: Case) -> None:
    split = case.solve()
    assert Case(case.loads, split, case.state_bytes, rank_speeds=case.rank_speeds).solve() == split


def test_all_zero_loads_stay_where_they_are() -> None:
    assert Case([0.0] * 5, Assignment((1, 3, 1))).solve() == Assignment((1, 3, 1))


def test_all_zero_loads_still_respect_memory() -> None:
    case = Case([0.0] * 5, Assignment((1, 3, 1)), memory_bytes=[1] * 5, memory_cap_bytes=2)
    assert case.solve() == Assignment((1, 2, 2))


def test_remaining_ties_go_to_the_earlier_border() -> None:
    # Layer 1 or layer 2 must leave the middle stage; both cost the same.
    case = Case([2, 1, 0, 1, 2], Assignment((1, 3, 1)), memory_bytes=[1] * 5, memory_cap_bytes=2)
    assert case.solve() == Assignment((1, 2, 2))
    assert case.key(Assignment((2, 2, 1))) == case.key(Assignment((1, 2, 2)))


def test_moves_the_cheap_layer() -> None:
    loads, current = [1.0, 1.0, 1.0, 1.0, 1.0], Assignment((1, 3, 1))
    assert Case(loads, current, state_bytes=[1, 9, 1, 1, 1]).solve() == Assignment((1, 2, 2))
    assert Case(loads, current, state_bytes=[1, 1, 1, 9, 1]).solve() == Assignment((2, 2, 1))


def test_a_slow_rank_gets_less() -> None:
    assert Case([1.0] * 9, Assignment.uniform(9, 3), rank_speeds=[1.0, 0.25, 1.0]).solve() == Assignment((4, 1, 4))


def test_filling_each_stage_would_miss_this_split() -> None:
    # With a limit of 18, filling stage 0 to the brim leaves one large layer to a rank ten times too slow.
    case = Case([1, 1, 9, 9], Assignment((2, 1, 1)), rank_speeds=[1.0, 0.0625, 1.0])
    assert case.solve() == Assignment((1, 1, 2))
    assert_optimal(case, Assignment((1, 1, 2)))


def test_infeasible_memory_says_by_how_much() -> None:
    case = Case([1.0] * 4, Assignment((2, 2)), memory_bytes=[30, 50, 40, 20], memory_cap_bytes=70)
    with pytest.raises(ValueError, match=r"memory_cap_bytes=70: .* needs 80 bytes on a stage, 10 more.*=80 or higher"):
        case.solve()
    enough = Case([1.0] * 4, Assignment((2, 2)), memory_bytes=[30, 50, 40, 20], memory_cap_bytes=80)
    assert enough.solve() == Assignment((2, 2))


def test_memory_without_a_cap_is_no_limit() -> None:
    assert Case([1.0] * 4, Assignment((2, 2)), memory_bytes=[30, 50, 40, 20]).solve() == Assignment((2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loads": [1.0] * 3}, "loads to have one value per layer, 4 in all, got 3"),
        ({"loads": [1.0, 1.0, math.nan, 1.0]}, "layer 2 .*got nan"),
        ({"loads": [1.0, -1.0, 1.0, 1.0]}, "layer 1 .*got -1.0"),
        ({"loads": [1.0, 1.0, 1.0, math.inf]}, "layer 3 .*got inf"),
        ({"state_bytes": [1] * 5}, "state_bytes to have one value per layer, 4 in all, got 5"),
        ({"state_bytes": [1, 1, -1, 1]}, "state_bytes .*got -1 at index 2"),
        ({"state_bytes": [2**60, 1, 0, 0]}, r"state_bytes to sum to at most 2\*\*60"),
        ({"memory_bytes": [1, 1, 0.5, 1], "memory_cap_bytes": 9}, "layer_bytes .*got 0.5 at index 2"),
        ({"memory_bytes": [1] * 4, "memory_cap_bytes": -9}, "cap_bytes .*got -9"),
        ({"rank_speeds": [1.0] * 3}, "rank_speeds to have one value per rank, 2 in all, got 3"),
        ({"rank_speeds": [1.0, 0.0]}, "rank 1 .*got 0.0"),
        ({"rank_speeds": [math.inf, 1.0]}, "rank 0 .*got inf"),
    ],
)
def test_checks_its_inputs(changes: dict[str, Sequence[float]], message: str) -> None:
    arguments = {"loads": [1.0] * 4, "current": Assignment((2, 2))} | changes
    with pytest.raises(ValueError, match=message):
        Case(**arguments).solve()  # type: ignore[arg-type]


@pytest.mark.parametrize("loads", [[1e308] * 6, [5e-324] * 6, [1e308, 5e-324, 1e-300, 1.0, 1e308, 0.0]])
def test_extreme_loads(loads: list[float]) -> None:
    case = Case(loads, Assignment.uniform(6, 3), rank_speeds=[1e-3, 1.0, 1e3])
    best = min(case.bottleneck(split) for split in all_splits(6, 3))
    assert case.bottleneck(case.solve()) <= best * (1 + Fraction(1, 2**39))


def test_a_huge_cap_is_no_limit() -> None:
    case = Case([3.0, 1.0, 1.0, 1.0], Assignment((2, 2)), memory_bytes=[1] * 4, memory_cap_bytes=2**80)
    assert case.solve() == Assignment((1, 3))


def test_large_pipelines() -> None:
    loads = [1.0 + (layer * 7919 % 1000) / 500 for layer in range(1000)]
    uniform = Assignment.uniform(1000, 64)
    best = PartitionBalancer().balance(BalancingProblem(loads, uniform))
    assert best.num_stages == 64
    bound = max(max(loads), math.fsum(loads) / 64)
    assert bound <= max(best.stage_loads(loads)) <= bound + max(loads)
    assert predict(BalancingProblem(loads, uniform), best).gain > 0


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Balancer()  # type: ignore[abstract]
