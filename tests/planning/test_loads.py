import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dynmo.planning import (
    Assignment,
    BalancingProblem,
    LayerLoad,
    PartitionBalancer,
    bubble_ratio,
    expected_bubble_ratio,
    idle_share,
    imbalance,
    load_values,
    speedup,
    speedup_bound,
)

stage_loads = st.lists(st.floats(0, 1e6), min_size=1, max_size=8)
bad_numbers = pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])


def test_load_values_by_metric() -> None:
    loads = [LayerLoad(0.25, 0.5, 7, 28), LayerLoad(1.0, 2.0, 0, 0)]
    assert load_values(loads, "time") == (0.75, 3.0)
    assert load_values(loads, "parameters") == (7.0, 0.0)


def test_load_values_lists_the_metrics() -> None:
    with pytest.raises(ValueError, match=r"'flops'.*'time', 'parameters'"):
        load_values([LayerLoad(1.0, 1.0, 1, 1)], "flops")  # type: ignore[arg-type]


@bad_numbers
def test_load_values_names_the_layer(bad: float) -> None:
    with pytest.raises(ValueError, match=f"layer 1 .*got {bad}"):
        load_values([LayerLoad(1.0, 1.0, 1, 1), LayerLoad(0.0, bad, 1, 1)], "time")


@pytest.mark.parametrize(
    ("loads", "expected"),
    [([2, 2, 2], 0.0), ([1, 2, 3], 1.0), ([1, 3], 1.0), ([0, 4], 2.0), ([0, 0, 0], 0.0), ([5], 0.0), ([0, 0, 3], 3.0)],
)
def test_imbalance_of_known_loads(loads: list[float], expected: float) -> None:
    assert imbalance(loads) == expected


@given(stage_loads)
def test_imbalance_lies_between_zero_and_the_number_of_stages(loads: list[float]) -> None:
    assert 0.0 <= imbalance(loads) <= len(loads) * (1 + 1e-12)


@bad_numbers
def test_imbalance_names_the_stage(bad: float) -> None:
    with pytest.raises(ValueError, match=f"stage 2 .*got {bad}"):
        imbalance([1.0, 2.0, bad])


def test_imbalance_needs_a_stage() -> None:
    with pytest.raises(ValueError, match="no values"):
        imbalance([])


def test_bubble_ratio_of_known_times() -> None:
    assert bubble_ratio([4.0, 4.0], 4.0) == 0.0
    assert bubble_ratio([4.0, 2.0, 2.0, 0.0], 4.0) == 0.5
    assert bubble_ratio([0.0, 0.0], 4.0) == 1.0


def test_bubble_ratio_stays_in_range_when_clocks_disagree() -> None:
    assert bubble_ratio([4.0001, 4.0], 4.0) == 0.0


@bad_numbers
def test_bubble_ratio_names_the_rank(bad: float) -> None:
    with pytest.raises(ValueError, match=f"rank 1 .*got {bad}"):
        bubble_ratio([1.0, bad], 4.0)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
def test_bubble_ratio_needs_a_step_time(step_s: float) -> None:
    with pytest.raises(ValueError, match=f"step_s={step_s}"):
        bubble_ratio([1.0], step_s)


def test_expected_bubble_ratio_of_balanced_stages_is_that_of_the_schedule() -> None:
    assert expected_bubble_ratio([2.0] * 4, 12) == pytest.approx(3 / 15, abs=1e-15)
    assert expected_bubble_ratio([0.0] * 4, 12) == pytest.approx(3 / 15, abs=1e-15)
    assert expected_bubble_ratio([2.0], 12) == 0.0
    assert expected_bubble_ratio([2.0] * 4, 13) != pytest.approx(3 / 15, abs=1e-3)
    assert expected_bubble_ratio([2.0] * 3 + [1.99], 12) != pytest.approx(3 / 15, abs=1e-15)


def test_expected_bubble_ratio_equals_the_schedule_of_one_slow_stage() -> None:
    # Stages of 1, 3 and 1 seconds per microbatch, M = 4: the slow stage works 12 s of a step. By the formula the step
    # takes 12 / (1 - b0) = 12 * 6 / 4 = 18 s, of which the three stages work 4 + 12 + 4 = 20 s.
    assert expected_bubble_ratio([4.0, 12.0, 4.0], 4) == pytest.approx(bubble_ratio([4.0, 12.0, 4.0], 18.0), abs=1e-15)
    assert expected_bubble_ratio([4.0, 12.0, 4.0], 4) != pytest.approx(bubble_ratio([4.0, 12.0, 4.0], 17.9), abs=1e-3)


@given(stage_loads, st.integers(1, 64))
def test_expected_bubble_ratio_is_never_below_that_of_balanced_stages(
    loads: list[float], num_microbatches: int
) -> None:
    balanced = expected_bubble_ratio([1.0] * len(loads), num_microbatches)
    assert balanced - 1e-12 <= expected_bubble_ratio(loads, num_microbatches) <= 1.0


def test_expected_bubble_ratio_checks_its_inputs() -> None:
    with pytest.raises(ValueError, match="num_microbatches=0"):
        expected_bubble_ratio([1.0], 0)
    with pytest.raises(ValueError, match=r"stage 1 .*got nan"):
        expected_bubble_ratio([1.0, math.nan], 4)


def test_idle_share_of_known_loads() -> None:
    assert idle_share([1.0, 1.0], 0.25) == 0.25
    assert idle_share([1.0, 1.0, 4.0], 0.0) == 0.5
    assert idle_share([1.0, 1.0, 4.0], 0.25) == 0.625
    assert idle_share([0.0, 0.0], 0.25) == 0.25
    with pytest.raises(ValueError, match=r"stage 1 .*got nan"):
        idle_share([1.0, math.nan], 0.25)


# The paper's headline numbers obey this model: a bubble that falls from one ratio to another gives
# (1 - after) / (1 - before) times the throughput, for the same total work.
@pytest.mark.parametrize(
    ("before", "after", "quotient", "printed"),
    [("0.25", "0.08", "0.92/0.75", 1.23), ("0.18", "0.04", "0.96/0.82", 1.17)],
    ids=["moe", "mod"],
)
def test_the_papers_speedups_are_those_of_its_bubbles(before: str, after: str, quotient: str, printed: float) -> None:
    above, below = quotient.split("/")
    assert speedup(Fraction(before), Fraction(after)) == Fraction(above) / Fraction(below)
    assert speedup(float(before), float(after)) == float(above) / float(below)
    assert round(speedup(float(before), float(after)), 2) == printed
    assert round(speedup(float(after), float(before)), 2) != printed
    # Largest loads tell the same, for stages that idle that much: b0 = 0.04 is 2 stages and 24 microbatches.
    pairs = [_two_stages(float(idle), 0.04) for idle in (before, after)]
    assert [expected_bubble_ratio(pair, 24) for pair in pairs] == pytest.approx(
        [float(before), float(after)], abs=1e-12
    )
    assert max(pairs[0]) / max(pairs[1]) == pytest.approx(speedup(float(before), float(after)), abs=1e-12)
    assert expected_bubble_ratio(pairs[0], 23) != pytest.approx(float(before), abs=1e-3)


def _two_stages(idle: float, balanced: float) -> list[float]:
    """Returns the loads of two stages, with sum 1, whose pipeline idles that much."""
    largest = 0.5 * (1 - balanced) / (1 - idle)
    return [largest, 1 - largest]


# "n times the bubble" and the speed-up that goes with it fit together only against the dense run, which works more:
# with b0 = 0.163 early exit idles for 5 b0 = 0.815, and is 4.52 times faster when nothing idles but b0.
@pytest.mark.parametrize(("balanced", "times", "printed"), [(0.163, 5, 4.52), (0.2, 4, 4.02), (0.146, 5, 3.18)])
def test_the_papers_multiples_of_the_bubble(balanced: float, times: int, printed: float) -> None:
    assert speedup(times * balanced, balanced) == pytest.approx(printed, rel=0.01)
    assert speedup((times + 0.2) * balanced, balanced) != pytest.approx(printed, rel=0.01)


def test_freezing_gains_more_than_balance_can_give() -> None:
    assert speedup(0.40, 0.0) == pytest.approx(1.667, abs=5e-4)
    assert speedup(0.40, 0.0) < 2.23


@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=12), st.integers(1, 3))
def test_no_split_gains_more_than_layers_per_stage(loads: list[float], num_stages: int) -> None:
    static = Assignment.uniform(len(loads), num_stages)
    best = PartitionBalancer().balance(BalancingProblem(loads, static))
    gain = max(static.stage_loads(loads)) / max(best.stage_loads(loads))
    assert gain <= speedup_bound(static.balance) * (1 + 1e-12)


def test_one_costly_layer_per_stage_reaches_the_bound() -> None:
    # Both costly layers are on the first stage. As one layer per stage cannot be cut, no more than 2 can be gained.
    loads, static = [1.0, 1.0, 0.0, 0.0], Assignment((2, 2))
    best = PartitionBalancer().balance(BalancingProblem(loads, static))
    assert max(static.stage_loads(loads)) / max(best.stage_loads(loads)) == speedup_bound(static.balance) == 2
    assert speedup_bound((1, 1, 1)) == 1
