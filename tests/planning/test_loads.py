import math

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
    imbalance,
    load_values,
    predict,
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


# The paper's headline numbers obey this model: a bubble that falls from one ratio to another gives
# (1 - after) / (1 - before) times the throughput, for the same total work. b0 = 0.04 is 2 stages and 24 microbatches.
@pytest.mark.parametrize(("before", "after", "speedup"), [(0.25, 0.08, 1.23), (0.18, 0.04, 1.17)], ids=["moe", "mod"])
def test_bubble_and_bottleneck_tell_the_same_speedup(before: float, after: float, speedup: float) -> None:
    loads = [_two_stages(before, 0.04), _two_stages(after, 0.04)]
    ratios = [expected_bubble_ratio(pair, 24) for pair in loads]
    assert ratios == pytest.approx([before, after], abs=1e-12)
    from_bubbles = (1 - ratios[1]) / (1 - ratios[0])
    assert max(loads[0]) / max(loads[1]) == pytest.approx(from_bubbles, abs=1e-12)
    assert from_bubbles == pytest.approx(speedup, abs=0.005)
    assert expected_bubble_ratio(loads[0], 23) != pytest.approx(before, abs=1e-3)
    assert (1 - ratios[0]) / (1 - ratios[1]) != pytest.approx(speedup, abs=0.005)


def _two_stages(idle: float, balanced: float) -> list[float]:
    """Returns the loads of two stages, with sum 1, whose pipeline idles that much."""
    largest = 0.5 * (1 - balanced) / (1 - idle)
    return [largest, 1 - largest]


def _frozen_half() -> list[float]:
    """The first half of 40 layers only runs forward, a third of the work."""
    return [1 / 3] * 20 + [1.0] * 20


def _sparse_attention() -> list[float]:
    """Attention is 0.8 of a dense layer and keeps from 6 % (first layer) to all (last layer) of its tiles."""
    return [0.2 + 0.8 * 0.06 * (1 / 0.06) ** ((layer / 47) ** 3) for layer in range(48)]


def _early_exit() -> list[float]:
    """After 10,000 steps: from about 8 % of the depth on, tokens leave at a rate of about 6 per depth."""
    trained = 1 - math.exp(-10_000 / 1500)
    first = 1 - 0.92 * trained
    return [min(1.0, math.exp(-6 * trained * ((layer + 0.5) / 48 - first))) for layer in range(48)]


def _pruned() -> list[float]:
    """Global magnitude pruning to 90 % of 48 Gaussian layers; sparse kernels win below a density of 0.25."""
    scales = [1 + 0.4 * (2 * layer / 47 - 1) for layer in range(48)]
    low, high = 0.0, 10.0
    for _ in range(60):
        threshold = (low + high) / 2
        densities = [math.erfc(threshold / (scale * math.sqrt(2))) for scale in scales]
        low, high = (threshold, high) if math.fsum(densities) / 48 > 0.1 else (low, threshold)
    return [min(1.0, density / 0.25) for density in densities]


# num_microbatches makes the bubble of balanced stages that of the traces: 0.08, 0.16, 0.16 and 0.123.
@pytest.mark.parametrize(
    ("loads", "num_stages", "num_microbatches", "idle_uniform", "idle_best"),
    [
        pytest.param(_frozen_half(), 8, 80, 0.387, 0.233, id="freezing"),
        pytest.param(_sparse_attention(), 12, 58, 0.646, 0.283, id="sparse-attention"),
        pytest.param(_early_exit(), 12, 58, 0.792, 0.308, id="early-exit"),
        pytest.param(_pruned(), 24, 164, 0.611, 0.334, id="pruning"),
    ],
)
def test_idle_share_of_the_schemes_cost_traces(
    loads: list[float], num_stages: int, num_microbatches: int, idle_uniform: float, idle_best: float
) -> None:
    uniform = Assignment.uniform(len(loads), num_stages)
    best = PartitionBalancer(tolerance=0.0).balance(BalancingProblem(loads, uniform))
    before = expected_bubble_ratio(uniform.stage_loads(loads), num_microbatches)
    after = expected_bubble_ratio(best.stage_loads(loads), num_microbatches)
    assert before == pytest.approx(idle_uniform, abs=1e-3)
    assert after == pytest.approx(idle_best, abs=1e-3)
    assert 1 / (1 - predict(BalancingProblem(loads, uniform), best).gain) == pytest.approx(
        (1 - after) / (1 - before), rel=1e-12
    )
    one_layer_off = Assignment((uniform.balance[0] + 1, *uniform.balance[1:-1], uniform.balance[-1] - 1))
    assert expected_bubble_ratio(one_layer_off.stage_loads(loads), num_microbatches) != pytest.approx(after, abs=1e-3)
