"""The traces give the published numbers: idle shares of the reference table, and each scheme's own values."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightning_dynmo.planning import (
    Assignment,
    BalancingProblem,
    PartitionBalancer,
    expected_bubble_ratio,
    idle_share,
    predict,
    speedup,
    speedup_bound,
)
from lightning_dynmo.simulation import (
    TRACES,
    CostTrace,
    EarlyExitTrace,
    FreezingTrace,
    LayerCost,
    MoDTrace,
    MoETrace,
    PruningTrace,
    SparseAttentionTrace,
    stage_costs,
)

SETTLED = 10_000  # a step by which every scheme has done what it does
NUM_SEEDS = 400


def idle_shares(loads: Sequence[float], num_stages: int, balanced: float) -> tuple[float, float]:
    """Returns the idle share under the uniform split and under the best."""
    uniform = Assignment.uniform(len(loads), num_stages)
    best = PartitionBalancer().balance(BalancingProblem(loads, uniform))
    before, after = (idle_share(split.stage_loads(loads), balanced) for split in (uniform, best))
    assert 1 - 1e-12 <= speedup(before, after) <= speedup_bound(uniform.balance) + 1e-12
    return before, after


# The reference table of idle shares: those of schemes without chance, to every digit.
TABLE = [
    pytest.param(PruningTrace(), 48, 24, 0.123, "61.1", "33.4", id="pruning"),
    pytest.param(FreezingTrace(), 40, 8, 0.08, "38.7", "23.3", id="freezing"),
    pytest.param(SparseAttentionTrace(sigma=0.0), 48, 12, 0.16, "64.6", "28.3", id="sparse_attention"),
    pytest.param(EarlyExitTrace(propagation=0.0), 48, 12, 0.16, "79.2", "30.8", id="early_exit"),
]


@pytest.mark.parametrize(("trace", "num_layers", "num_stages", "balanced", "idle_static", "idle_oracle"), TABLE)
def test_idle_shares_of_the_schemes(
    trace: CostTrace, num_layers: int, num_stages: int, balanced: float, idle_static: str, idle_oracle: str
) -> None:
    before, after = idle_shares(trace.costs(num_layers, SETTLED), num_stages, balanced)
    assert (f"{100 * before:.1f}", f"{100 * after:.1f}") == (idle_static, idle_oracle)
    earlier, _ = idle_shares(trace.costs(num_layers, 700), num_stages, balanced)
    assert f"{100 * earlier:.1f}" != idle_static


@pytest.mark.parametrize(("trace", "num_layers", "num_stages", "balanced", "idle_static", "idle_oracle"), TABLE)
def test_best_split_is_best_and_its_gain_is_predicted(
    trace: CostTrace, num_layers: int, num_stages: int, balanced: float, idle_static: str, idle_oracle: str
) -> None:
    loads, uniform = trace.costs(num_layers, SETTLED), Assignment.uniform(num_layers, num_stages)
    best = PartitionBalancer().balance(BalancingProblem(loads, uniform))
    before, after = (idle_share(split.stage_loads(loads), balanced) for split in (uniform, best))
    gain = predict(BalancingProblem(loads, uniform), best).gain
    assert 1 / (1 - gain) == pytest.approx(speedup(before, after), rel=1e-12)
    one_layer_off = Assignment((uniform.balance[0] + 1, *uniform.balance[1:-1], uniform.balance[-1] - 1))
    assert idle_share(one_layer_off.stage_loads(loads), balanced) > after + 1e-3


def mean_idle_shares(trace: CostTrace) -> tuple[float, float]:
    runs = [idle_shares(trace.costs(32, SETTLED, seed), 16, 0.04) for seed in range(NUM_SEEDS)]
    return statistics.fmean(before for before, _ in runs), statistics.fmean(after for _, after in runs)


# The reference numbers of the random schemes are means of samples themselves. A single step's share has a standard
# deviation of 7 points under the static split and 4 under the best one.
@pytest.mark.parametrize(
    ("trace", "idle_static", "idle_oracle", "wrong"),
    [
        pytest.param(MoETrace(), 0.253, 0.223, MoETrace(sigma=0.5), id="moe"),
        pytest.param(MoDTrace(), 0.176, 0.176, MoDTrace(sigma=0.5, last_sigma=0.5), id="mod"),
    ],
)
def test_idle_shares_of_the_schemes_with_chance(
    trace: CostTrace, idle_static: float, idle_oracle: float, wrong: CostTrace
) -> None:
    before, after = mean_idle_shares(trace)
    assert before == pytest.approx(idle_static, abs=0.015)
    assert after == pytest.approx(idle_oracle, abs=0.01)
    assert mean_idle_shares(wrong)[0] != pytest.approx(idle_static, abs=0.015)


# What holds for every trace.

CASES = [
    *TRACES.values(),
    MoETrace("grouped"),
    MoETrace("ep", "sinkhorn", layer_share=0.7),
    MoETrace(balancing="bias", layer_share=1.0),
    FreezingTrace(caches_forward=True),
    MoDTrace("topk"),
    MoDTrace(capacity=0.9, sigma=1.2, last_sigma=1.2),
    MoDTrace(capacity=0.015, sigma=1.2, last_sigma=1.2),
]
# These change in steps; the others from one step to the next.
IN_STEPS = [PruningTrace(), FreezingTrace(), FreezingTrace(caches_forward=True), MoETrace("grouped"), MoDTrace("topk")]
WITHOUT_CHANCE = [*IN_STEPS, EarlyExitTrace(), MoETrace(balancing="bias", layer_share=1.0)]
BY_CHANCE = [trace for trace in CASES if trace not in WITHOUT_CHANCE]


@pytest.mark.parametrize("trace", CASES, ids=str)
@pytest.mark.parametrize("step", [0, 600, 4500, SETTLED])
def test_expected_costs_are_the_mean_of_many_draws(trace: CostTrace, step: int) -> None:
    draws = np.array([trace.costs(12, step, seed) for seed in range(3000)])
    errors = draws.std(axis=0) / len(draws) ** 0.5
    expected = np.array(trace.expected(12, step))
    assert np.all(np.abs(draws.mean(axis=0) - expected) <= 4.5 * errors + 1e-12)
    if errors.max() > 0:  # and more than a little off would be seen
        assert np.any(np.abs(draws.mean(axis=0) - 1.1 * expected) > 4.5 * errors)


@pytest.mark.parametrize("trace", CASES, ids=str)
def test_costs_are_finite_and_chosen_by_seed_and_step(trace: CostTrace) -> None:
    costs = trace.costs(24, 3000, 5)
    assert len(costs) == 24
    assert all(isinstance(cost, float) and 0 <= cost < 10 for cost in costs)
    assert trace.costs(24, 3000, 5) == costs
    assert (trace.costs(24, 3000, 6) != costs) == (trace in BY_CHANCE)
    assert (trace.costs(24, 3001, 5) != costs) == (trace not in IN_STEPS)


def test_costs_are_the_same_in_another_process() -> None:
    script = (
        "from lightning_dynmo.simulation import TRACES\nprint([trace.costs(9, 1234, 42) for trace in TRACES.values()])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str([trace.costs(9, 1234, 42) for trace in TRACES.values()])


@pytest.mark.parametrize("trace", [*TRACES.values()], ids=TRACES)
def test_layer_costs_scale_the_dense_layer(trace: CostTrace) -> None:
    dense = LayerCost(1.0, 1.0, 1.0, True, 10, 20, 30, 0.5)
    layers = trace.layer_costs(dense, 10, SETTLED, 3)
    costs = trace.costs(10, SETTLED, 3)
    stages = stage_costs(layers, Assignment((1,) * 10))
    totals = [cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s for cost in stages]
    if isinstance(trace, FreezingTrace):
        # The first trained layer computes no gradient of its input: that is where the backward ends.
        assert totals == pytest.approx([3 * cost - (index == 5) for index, cost in enumerate(costs)])
        assert layers == [replace(dense, trains=False)] * 5 + [dense] * 5
    else:
        assert totals == pytest.approx([3 * cost - cost * (index == 0) for index, cost in enumerate(costs)])
        assert all(layer.trains and layer.activation_bytes == 10 for layer in layers)


# Each scheme's own values.


def test_pruning_follows_the_cubic_schedule() -> None:
    trace = PruningTrace()
    steps = {0: 0.0, 3000: 0.0, 3999: 0.0, 4000: 0.5203125, 5000: 0.7875, 6000: 0.8859375, 7000: 0.9, 90000: 0.9}
    assert {step: trace.sparsity(step) for step in steps} == pytest.approx(steps, abs=1e-15)


def test_pruning_leaves_the_known_densities() -> None:
    densities = PruningTrace().densities(48, 7000)
    assert statistics.fmean(densities) == pytest.approx(0.1, abs=1e-12)
    assert (f"{densities[0]:.3f}", f"{densities[-1]:.3f}") == ("0.005", "0.228")
    assert densities == sorted(densities)
    assert PruningTrace().densities(48, 0) == [1.0] * 48
    # Uniform pruning layer by layer would leave the same everywhere.
    assert PruningTrace(spread=0.0).densities(48, 7000) == pytest.approx([0.1] * 48, abs=1e-12)


def test_pruning_idles_only_where_sparse_kernels_win() -> None:
    shares = [
        idle_shares(PruningTrace().costs(48, step), 24, balanced)[0]
        for balanced in (0.0, 0.123)
        for step in (3000, 4000, 5000, 6000, 7000)
    ]
    extra, with_bubble = shares[:5], shares[5:]
    assert [f"{share:.2f}" for share in extra] == ["0.00", "0.00", "0.26", "0.54", "0.56"]
    assert [f"{share:.2f}" for share in with_bubble] == ["0.12", "0.12", "0.35", "0.59", "0.61"]
    assert f"{with_bubble[-1] / 0.123:.2f}" == "4.97"


def test_freezing_idles_as_published() -> None:
    trace = FreezingTrace()
    shares = {step: idle_shares(trace.costs(40, step), 8, 0.08)[0] for step in (0, 1000, 2000, 4000, 6000, 9000)}
    assert {step: f"{share:.3f}" for step, share in shares.items()} == {
        0: "0.080",
        1000: "0.080",
        2000: "0.141",
        4000: "0.264",
        6000: "0.387",
        9000: "0.387",
    }
    cached = FreezingTrace(frozen_share=0.35, caches_forward=True)
    assert f"{idle_shares(cached.costs(40, 6000), 8, 0.08)[0]:.2f}" == "0.40"
    assert [trace.num_frozen(40, step) for step in (0, 1500, 2000, 3000, 6000)] == [0, 2, 4, 8, 20]
    assert [trace.num_frozen(7, step) for step in (1001, 6000)] == [1, 4]


def test_frozen_and_cached_layers_cost_nothing() -> None:
    dense = LayerCost(1.0, 1.0, 1.0)
    first, *_, last = FreezingTrace(caches_forward=True).layer_costs(dense, 4, 6000)
    assert (first.forward_s, first.trains) == (0.0, False)
    assert last == dense


def test_sparse_attention_idles_as_published() -> None:
    trace = SparseAttentionTrace(sigma=0.0)
    shares = [idle_shares(trace.costs(48, step), 12, 0.16)[0] for step in (0, 250, 500, 1000, 5000)]
    assert [f"{share:.2f}" for share in shares] == ["0.16", "0.27", "0.38", "0.65", "0.65"]
    assert f"{shares[-1] / 0.16:.2f}" == "4.04"
    assert SparseAttentionTrace().costs(48, 0) == [1.0] * 48
    # The last layer's attention visits all tiles, the first one's 6 %.
    costs = trace.costs(48, 1000)
    assert (costs[0], costs[-1]) == (pytest.approx(0.2 + 0.8 * 0.06), 1.0)


def test_early_exit_idles_as_published() -> None:
    trace = EarlyExitTrace(propagation=0.0)
    shares = [idle_shares(trace.costs(48, step), 12, 0.16)[0] for step in (0, 500, 1000, 2000, 4000, SETTLED)]
    assert [f"{share:.2f}" for share in shares] == ["0.16", "0.20", "0.33", "0.55", "0.73", "0.79"]
    assert f"{shares[-1] / 0.16:.2f}" == "4.95"
    assert f"{statistics.fmean(trace.survival(48, 1_000_000)):.3f}" == "0.246"
    survival = EarlyExitTrace().survival(48, SETTLED)
    assert survival == sorted(survival, reverse=True)
    # A token that has left still costs a sixth: its keys and values.
    assert EarlyExitTrace().costs(48, SETTLED) == pytest.approx([s + (1 - s) / 6 for s in survival])


def test_mixture_of_experts_settles() -> None:
    def excess(trace: MoETrace, step: int) -> float:
        return (trace.expected(1, step)[0] - 1) / 0.65

    trace = MoETrace()
    assert excess(trace, 0) == pytest.approx(1.5)
    assert excess(trace, 500) == pytest.approx(0.5 + 1.0 / np.e)
    assert excess(trace, 100_000) == pytest.approx(0.5)
    assert excess(MoETrace(balancing="bias"), 100_000) == pytest.approx(0.08)
    assert excess(MoETrace(balancing="sinkhorn"), 100_000) == pytest.approx(0.05)
    assert MoETrace("grouped").costs(5, 0) == [1.0] * 5
    assert MoETrace("ep").costs(5, 0) == trace.costs(5, 0)


def test_layers_of_experts_can_keep_a_part() -> None:
    def same(trace: MoETrace) -> float:
        """Returns the correlation of the logarithms of V from one step to the next."""
        logs = [np.log(np.array(trace.costs(4000, step)) - 1) for step in (SETTLED, SETTLED + 1)]
        return float(np.corrcoef(*logs)[0, 1])

    assert same(MoETrace()) == pytest.approx(0.0, abs=0.06)
    assert same(MoETrace(layer_share=0.6)) == pytest.approx(0.6, abs=0.06)
    assert same(MoETrace(layer_share=1.0)) == pytest.approx(1.0, abs=1e-6)
    assert len(set(MoETrace(layer_share=0.6).expected(12, 0))) == 12
    assert MoETrace(layer_share=0.6, layer_seed=1).expected(12, 0) != MoETrace(layer_share=0.6).expected(12, 0)


def test_mixture_of_depths_alternates() -> None:
    trace = MoDTrace("topk")
    assert trace.costs(4, 7) == [1.0, pytest.approx(0.109, abs=5e-4), 1.0, trace.costs(4, 7)[1]]
    assert f"{statistics.fmean(trace.costs(4, 7)):.3f}" == "0.555"
    # An even number of layers per stage is balanced, an odd or broken one is not.
    shares = [idle_shares(trace.costs(num_layers, 0), 16, 0.04)[0] for num_layers in (32, 24, 40, 48)]
    assert [f"{share:.2f}" for share in shares] == ["0.04", "0.28", "0.37", "0.24"]


def test_mixture_of_depths_can_settle() -> None:
    trace = MoDTrace(last_sigma=0.25)
    spread = {
        step: np.log([(cost / 0.857) for cost in trace.costs(4000, step)[1::2]]).std() for step in (0, 2000, 90_000)
    }
    assert spread == pytest.approx({0: 0.65, 2000: 0.25 + 0.4 / np.e, 90_000: 0.25}, rel=0.1)
    assert spread[2000] != pytest.approx(0.65, rel=0.1)


def test_traces_name_their_choices() -> None:
    with pytest.raises(ValueError, match=r"experts_exec 'dense'.*'padded', 'grouped', 'ep'"):
        MoETrace("dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"balancing 'loss'.*'aux', 'bias', 'sinkhorn'"):
        MoETrace(balancing="loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"routing 'top'.*'predictor', 'topk'"):
        MoDTrace("top")  # type: ignore[arg-type]


def test_bubble_of_equal_stages_is_that_of_the_reference() -> None:
    # The shares b0 above are those of so many microbatches.
    assert [round(expected_bubble_ratio([1.0] * s, m), 3) for s, m in ((8, 80), (12, 58), (24, 164))] == [
        0.080,
        0.159,
        0.123,
    ]
