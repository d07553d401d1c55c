"""The exact balancer, with a rank per stage."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dynmo.planning import Assignment, Balancer, BalancingProblem, MemoryLimits, PartitionBalancer, predict
from tests.planning.instances import (
    all_splits,
    assert_best,
    best_bottleneck,
    bottleneck,
    lacking_bytes,
    moved_bytes,
    possible_splits,
    problems,
    real_loads,
    scaled,
    whole_loads,
    with_more_memory,
)


def solve(problem: BalancingProblem, tolerance: float = 0.0) -> Assignment:
    return PartitionBalancer(tolerance).balance(problem)


def limits(layer_bytes: Sequence[int], cap_bytes: int, num_stages: int) -> MemoryLimits:
    return MemoryLimits(layer_bytes, [0] * len(layer_bytes), [1] * num_stages, [cap_bytes] * num_stages)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equals_brute_force(problem: BalancingProblem) -> None:
    assert_best(problem, solve(problem))


@settings(max_examples=400, deadline=None)
@given(problems(memory=True))
def test_equals_brute_force_within_memory(problem: BalancingProblem) -> None:
    if possible_splits(problem):
        assert_best(problem, solve(problem))
    else:
        with pytest.raises(ValueError, match="No split of"):
            solve(problem)


@settings(max_examples=300, deadline=None)
@given(st.booleans().flatmap(lambda memory: problems(memory=memory)), st.sampled_from([1 / 64, 1 / 8, 1 / 2, 4.0]))
def test_fewest_bytes_within_the_tolerance(problem: BalancingProblem, tolerance: float) -> None:
    if possible_splits(problem):
        assert_best(problem, solve(problem, tolerance), tolerance)


@settings(max_examples=100, deadline=None)
@given(problems(loads=real_loads))
def test_real_loads_reach_the_optimum_up_to_rounding(problem: BalancingProblem) -> None:
    best = best_bottleneck(problem)
    assert best <= bottleneck(problem, solve(problem)) <= best * (1 + Fraction(1, 2**39))


@settings(max_examples=200, deadline=None)
@given(problems(memory=True))
def test_infeasible_memory_names_the_smallest_cure(problem: BalancingProblem) -> None:
    if possible_splits(problem):
        return
    with pytest.raises(ValueError, match="No split of") as error:
        solve(problem)
    found = re.search(r"Give each rank (\d+) bytes more", str(error.value))
    assert found
    needed = int(found[1])
    assert needed == min(lacking_bytes(problem, split) for split in all_splits(problem.num_layers, problem.num_stages))
    assert_best(with_more_memory(problem, needed), solve(with_more_memory(problem, needed)))
    with pytest.raises(ValueError, match="No split of"):
        solve(with_more_memory(problem, needed - 1))


SMALL = BalancingProblem([1, 1, 1, 0, 3, 0], Assignment((3, 2, 1)), memory=limits([1] * 6, 3, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param((2, 3, 1), id="larger-bottleneck"),
        pytest.param((3, 1, 2), id="more-bytes"),
        pytest.param((4, 1, 1), id="too-much-memory"),
    ],
)
def test_the_brute_force_check_rejects_wrong_splits(wrong: tuple[int, ...]) -> None:
    assert_best(SMALL, Assignment((3, 2, 1)))
    with pytest.raises(AssertionError):
        assert_best(SMALL, Assignment(wrong))


def test_the_brute_force_check_rejects_a_split_beyond_the_tolerance() -> None:
    problem = BalancingProblem([4, 1, 4], Assignment((2, 1)))
    assert_best(replace(problem, current=Assignment((1, 2))), Assignment((1, 2)))
    uneven = BalancingProblem([4, 4, 1], Assignment((2, 1)))
    assert_best(uneven, Assignment((2, 1)), tolerance=0.75)
    with pytest.raises(AssertionError):
        assert_best(uneven, Assignment((2, 1)), tolerance=0.5)  # 8 instead of 5
    with pytest.raises(AssertionError):
        assert_best(uneven, Assignment((1, 2)), tolerance=0.75)  # moves a layer for nothing


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1e9, 1e300])
@settings(max_examples=40, deadline=None)
@given(problem=problems(loads=whole_loads.map(lambda load: load / 10), speeds=False))
def test_scale_free(scale: float, problem: BalancingProblem) -> None:
    assert solve(scaled(problem, scale)) == solve(problem)


def test_a_load_that_really_differs_is_not_taken_for_rounding() -> None:
    def solved(loads: list[float], *balance: int) -> tuple[int, ...]:
        return solve(BalancingProblem(loads, Assignment(balance))).balance

    assert solved([0.1, 0.2, 0.3, 0.0], 2, 2) == (2, 2)
    assert solved([0.1, 0.2, 0.0, 0.1 + 0.2], 2, 2) == (2, 2)
    # One part in 10**9 is a difference, one in 10**15 is not.
    assert solved([1.0, 1e-9, 1.0 - 1e-9, 0.0], 1, 3) == (1, 3)
    assert solved([1.0, 1e-9, 1.0 - 2e-9, 0.0], 2, 2) == (1, 3)
    assert solved([1.0, 1e-15, 1.0 - 2e-15, 0.0], 2, 2) == (2, 2)


def test_noise_moves_nothing_by_default() -> None:
    current = Assignment((3, 3, 3, 3))
    noisy = [1.0 + 0.01 * math.sin(7.0 * layer) for layer in range(12)]
    moved = BalancingProblem([*noisy[:5], 3.0, *noisy[6:]], current)
    assert PartitionBalancer().balance(BalancingProblem(noisy, current)) == current
    assert PartitionBalancer().balance(moved) != current
    # A hair is enough where the optimum is asked for.
    tilted = BalancingProblem([1.0, 0.001, 0.995, 0.0], Assignment((2, 2)))
    assert PartitionBalancer().balance(tilted) == Assignment((2, 2))
    assert PartitionBalancer(tolerance=0.0).balance(tilted) == Assignment((1, 3))


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf])
def test_checks_the_tolerance(tolerance: float) -> None:
    with pytest.raises(ValueError, match=f"tolerance .*got {tolerance}.*tolerance=0.01"):
        PartitionBalancer(tolerance)


@settings(max_examples=40, deadline=None)
@given(problems(loads=real_loads), st.sampled_from([0.0, 0.01]))
def test_deterministic(problem: BalancingProblem, tolerance: float) -> None:
    assert solve(problem, tolerance) == solve(problem, tolerance)


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.125]))
def test_a_second_call_moves_nothing(problem: BalancingProblem, tolerance: float) -> None:
    split = solve(problem, tolerance)
    assert solve(replace(problem, current=split), tolerance) == split


def test_all_zero_loads_stay_where_they_are() -> None:
    problem = BalancingProblem([0.0] * 5, Assignment((1, 3, 1)))
    assert solve(problem) == Assignment((1, 3, 1))
    assert solve(replace(problem, memory=limits([1] * 5, 2, 3))) == Assignment((1, 2, 2))


def test_remaining_ties_go_to_the_earlier_border() -> None:
    # Layer 1 or layer 2 must leave the middle stage; both cost the same.
    problem = BalancingProblem([2, 1, 0, 1, 2], Assignment((1, 3, 1)), memory=limits([1] * 5, 2, 3))
    assert solve(problem) == Assignment((1, 2, 2))
    keys = [
        (bottleneck(problem, split), moved_bytes(problem, split))
        for split in (Assignment((2, 2, 1)), Assignment((1, 2, 2)))
    ]
    assert keys[0] == keys[1]


def test_moves_the_cheap_layer() -> None:
    problem = BalancingProblem([1.0] * 5, Assignment((1, 3, 1)), state_bytes=[1, 9, 1, 1, 1])
    assert solve(problem) == Assignment((1, 2, 2))
    assert solve(replace(problem, state_bytes=[1, 1, 1, 9, 1])) == Assignment((2, 2, 1))


def test_a_slow_rank_gets_less() -> None:
    problem = BalancingProblem([1.0] * 9, Assignment.uniform(9, 3), rank_speeds=[1.0, 0.25, 1.0])
    assert solve(problem) == Assignment((4, 1, 4))


def test_a_stage_with_a_cost_of_its_own_gets_less() -> None:
    # Such as the last one, which computes the loss.
    problem = BalancingProblem([1.0] * 9, Assignment.uniform(9, 3), stage_costs=[0.0, 0.0, 3.0])
    assert solve(problem) == Assignment((4, 4, 1))


def test_early_stages_hold_more_activations() -> None:
    # 1F1B with many microbatches: stage s holds those of 3 - s. So two layers fit on stage 0, three on stage 1.
    loads = [1.0, 1.0, 1.0, 1.0, 2.0, 3.0]
    memory = MemoryLimits([10] * 6, [10] * 6, [3, 2, 1], [100] * 3)
    problem = BalancingProblem(loads, Assignment((2, 2, 2)))
    assert solve(problem) == Assignment((3, 2, 1))
    assert solve(replace(problem, memory=memory)) == Assignment((2, 3, 1))
    roomy = replace(memory, cap_bytes=[120, 100, 100])
    assert solve(replace(problem, memory=roomy)) == Assignment((3, 2, 1))


def test_a_rank_with_less_memory_gets_fewer_layers() -> None:
    memory = replace(limits([10] * 6, 100, 3), cap_bytes=[100, 15, 100])
    problem = BalancingProblem([1.0] * 6, Assignment((2, 2, 2)), memory=memory)
    assert solve(problem).balance[1] == 1
    # Stages may be on the ranks in any order.
    assert solve(replace(problem, placement=[1, 2, 0])).balance[0] == 1


def test_filling_each_stage_would_miss_this_split() -> None:
    # With a limit of 18, filling stage 0 to the brim leaves one large layer to a rank ten times too slow.
    problem = BalancingProblem([1, 1, 9, 9], Assignment((2, 1, 1)), rank_speeds=[1.0, 0.0625, 1.0])
    assert solve(problem) == Assignment((1, 1, 2))
    assert_best(problem, Assignment((1, 1, 2)))


def test_infeasible_memory_says_by_how_much() -> None:
    problem = BalancingProblem([1.0] * 4, Assignment((2, 2)), memory=limits([30, 50, 40, 20], 70, 2))
    message = r"4 layers over 2 stages .*memory, 70 bytes: .*lacks 10 bytes.*cap_bytes=80.*largest takes 50 bytes"
    with pytest.raises(ValueError, match=message):
        solve(problem)
    assert solve(with_more_memory(problem, 10)) == Assignment((2, 2))
    uneven = replace(limits([30, 50, 40, 20], 70, 2), cap_bytes=[70, 5])
    with pytest.raises(ValueError, match="5 to 70 bytes: a rank lacks 50 bytes"):
        solve(replace(problem, memory=uneven))


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
        ({"memory": limits([1, 1, 0.5, 1], 9, 2)}, "layer_bytes .*got 0.5 at index 2"),  # type: ignore[list-item]
        ({"memory": limits([1] * 4, -9, 2)}, "cap_bytes .*got -9"),
        ({"memory": limits([1] * 4, 9, 3)}, "in_flight to have one value per stage, 2 in all, got 3"),
        ({"memory": MemoryLimits([1] * 4, [2**40] * 4, [2**40] * 2, [9] * 2)}, r"in flight .*at most 2\*\*60"),
        ({"rank_speeds": [1.0] * 3}, "rank_speeds to have one value per rank, 2 in all, got 3"),
        ({"rank_speeds": [1.0, 0.0]}, "rank 1 .*got 0.0"),
        ({"rank_speeds": [math.inf, 1.0]}, "rank 0 .*got inf"),
        ({"stage_costs": [1.0]}, "stage_costs to have one value per stage, 2 in all, got 1"),
        ({"stage_costs": [1.0, -1.0]}, "stage 1 .*got -1.0"),
        ({"placement": [0, 2]}, r"every rank from 0 to 2 in placement, got \[0, 2\]"),
    ],
)
def test_problems_check_what_they_are_given(changes: dict[str, object], message: str) -> None:
    arguments = {"loads": [1.0] * 4, "current": Assignment((2, 2))} | changes
    with pytest.raises(ValueError, match=message):
        BalancingProblem(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 0, 1), (1, 0, 0)])
@pytest.mark.parametrize("loads", [[1e308] * 6, [5e-324] * 6, [1e308, 5e-324, 1e-300, 1.0, 1e308, 0.0]])
def test_extreme_loads_and_speeds(loads: list[float], placement: tuple[int, ...]) -> None:
    speeds = [1e-3, 1.0, 1e3][: max(placement) + 1]
    problem = BalancingProblem(loads, Assignment.uniform(6, 3), placement, rank_speeds=speeds)
    assert bottleneck(problem, solve(problem)) <= best_bottleneck(problem) * (1 + Fraction(1, 2**39))
    far_apart = replace(problem, rank_speeds=[1e-300, 1e300, 1.0][: max(placement) + 1])
    assert bottleneck(far_apart, solve(far_apart)) <= best_bottleneck(far_apart) * (1 + Fraction(1, 2**39))


def test_huge_caps_and_counts_are_no_limits() -> None:
    memory = MemoryLimits([1] * 4, [0] * 4, [2**70] * 2, [2**80] * 2)
    assert solve(BalancingProblem([3.0, 1.0, 1.0, 1.0], Assignment((2, 2)), memory=memory)) == Assignment((1, 3))


@pytest.mark.parametrize("speeds", [None, [0.5 + (stage * 31 % 64) / 128 for stage in range(64)]])
def test_large_pipelines(speeds: list[float] | None) -> None:
    loads = [1.0 + (layer * 7919 % 1000) / 500 for layer in range(1000)]
    memory = MemoryLimits([10] * 1000, [1] * 1000, range(64, 0, -1), [2000] * 64)
    problem = BalancingProblem(loads, Assignment.uniform(1000, 64), rank_speeds=speeds, memory=memory)
    best = solve(problem)
    assert best.num_stages == 64
    assert problem.fits(best)
    fair = math.fsum(loads) / sum(speeds or [1.0] * 64)
    assert fair <= problem.bottleneck(best) <= fair + max(loads) / min(speeds or [1.0])
    assert predict(problem, best).gain > 0


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Balancer()  # type: ignore[abstract]
