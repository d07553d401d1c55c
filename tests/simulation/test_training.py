"""Whole trainings: times that follow from single steps, moves at the network's bandwidth, and no harm by balancing."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_dynmo.pipeline.schedules import SCHEDULES, simulated_order
from lightning_dynmo.planning import Assignment, BalancingProblem, DiffusionBalancer, PartitionBalancer, moves_between
from lightning_dynmo.simulation import (
    TRACES,
    LayerCost,
    MoDTrace,
    MoETrace,
    Network,
    Recording,
    simulate_replicas,
    stage_costs,
)
from lightning_dynmo.simulation.sources import RecordedCosts, TraceCosts
from lightning_dynmo.simulation.training import DENSE, OPTIMUM, STATIC, Comparison, Machine, Plan, compare
from tests.simulation.test_recording import STEP

PLANS = (
    Plan("static parameters", balance="parameters"),
    Plan("Partition by time", balancer=PartitionBalancer()),
    Plan("Partition by parameters", balancer=PartitionBalancer(), load="parameters"),
    Plan("Diffusion by time", balancer=DiffusionBalancer()),
)
BLOCK = LayerCost(1e-3, 1e-3, 1e-3, output_bytes=10**6, gradient_bytes=10**7)
NETWORK = Network(1e-5, 1e10, 1e10)


def machine(num_ranks: int = 4, schedule: str = "1f1b", num_replicas: int = 3, num_microbatches: int = 16) -> Machine:
    found = SCHEDULES[schedule]
    order = simulated_order(found, num_ranks, found.stages_per_rank, num_microbatches)
    placement = found.place(num_ranks, found.stages_per_rank)
    return Machine(order, placement, num_microbatches, num_replicas, NETWORK, profiling_s=0.25)


def costs_of(scheme: str, **options: object) -> TraceCosts:
    settings = {"num_blocks": 16, "block_parameters": 10**6, "block_bytes": 16 * 10**6, **options}
    return TraceCosts(TRACES[scheme], BLOCK, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sparse() -> Comparison:
    return compare(costs_of("sparse_attention"), machine(), PLANS)


@pytest.mark.parametrize("scheme", TRACES)
def test_times_are_those_of_single_steps(scheme: str) -> None:
    costs, pipelines = costs_of(scheme, num_steps=8000, every_n_steps=2000), machine()

    runs = compare(costs, pipelines, PLANS).runs

    for name, run in runs.items():
        expected_s = idle_s = 0.0
        for segment, time in zip(run.segments, run.times, strict=True):
            replicas = [
                stage_costs(
                    costs.dense() if name == DENSE else costs.layer_costs(segment.typical_step, replica),
                    segment.assignment,
                )
                for replica in range(3)
            ]
            timelines = simulate_replicas(pipelines.order, pipelines.placement, replicas, NETWORK)
            step_s = max(timeline.makespan_s for timeline in timelines)
            assert time.makespan_s == pytest.approx(step_s, rel=1e-12)
            expected_s += segment.num_steps * step_s
            idle_s += segment.num_steps * (step_s - sum(sum(timeline.busy_s) for timeline in timelines) / 12)
        assert run.num_steps == 8000
        assert run.training_s >= runs[OPTIMUM].training_s or name == DENSE
        assert run.training_s == pytest.approx(expected_s, rel=1e-12)
        assert run.idleness == pytest.approx(idle_s / expected_s, rel=1e-6)
        assert run.profiling_s == 0.25 * run.num_measurements
        assert run.total_s == run.training_s + run.profiling_s + run.deciding_s + run.migrating_s
        assert run.steps_per_s == pytest.approx(8000 / run.total_s)


def test_baselines_measure_nothing_and_balancers_do(sparse: Comparison) -> None:
    for name in (DENSE, STATIC, OPTIMUM, "static parameters"):
        run = sparse.runs[name]
        assert (run.num_measurements, run.num_moves, run.deciding_s, run.migrating_s) == (0, 0, 0.0, 0.0)
        assert run.total_s == run.training_s
    for name in ("Partition by time", "Partition by parameters", "Diffusion by time"):
        assert sparse.runs[name].num_measurements >= 19
        assert sparse.runs[name].deciding_s > 0
    assert {segment.assignment.balance for segment in sparse.runs[STATIC].segments} == {(4, 4, 4, 4)}


def test_balancing_by_time_gains_nearly_what_there_is_to_gain(sparse: Comparison) -> None:
    optimum = sparse.speedup(OPTIMUM)
    assert 1.25 < optimum <= sparse.bound == 4
    assert sparse.speedup("Partition by time") > 0.95 * optimum
    assert 1.1 < sparse.speedup("Diffusion by time") <= optimum
    # All blocks have as many parameters, so there is nothing to even out; measuring is all that it does.
    assert 0.99 < sparse.speedup("Partition by parameters") < 1
    assert sparse.speedup(STATIC) == sparse.speedup(DENSE, DENSE) == 1
    assert sparse.speedup("Partition by time", DENSE) == pytest.approx(
        sparse.speedup("Partition by time") * sparse.speedup(STATIC, DENSE)
    )


def test_the_optimum_is_at_least_the_exact_split_for_what_is_expected(sparse: Comparison) -> None:
    costs, pipelines = costs_of("sparse_attention"), machine()
    for period, segment, time in zip(
        costs.periods, sparse.runs[OPTIMUM].segments, sparse.runs[OPTIMUM].times, strict=True
    ):
        alone = stage_costs(costs.expected(period.typical_step), Assignment((1,) * 16))
        loads = [cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s for cost in alone]
        exact = PartitionBalancer(tolerance=0.0).balance(BalancingProblem(loads, Assignment.uniform(16, 4)))
        replicas = [stage_costs(costs.layer_costs(period.typical_step, replica), exact) for replica in range(3)]
        timelines = simulate_replicas(pipelines.order, pipelines.placement, replicas, NETWORK)
        assert time.makespan_s <= max(timeline.makespan_s for timeline in timelines) * (1 + 1e-12)
        assert segment.typical_step == period.typical_step


def test_moves_cost_what_the_busiest_rank_sends_or_receives(sparse: Comparison) -> None:
    run = sparse.runs["Partition by time"]
    assignments = [segment.assignment for segment in run.segments]
    expected_s, moved, rebalances = 0.0, 0, 0
    for before, after in pairwise(assignments):
        moves = moves_between(before, after)
        sent, received = [0] * 4, [0] * 4
        for move in moves:
            sent[move.source] += 1
            received[move.target] += 1
        expected_s += max(*sent, *received) * (1e-5 + 16e6 / 1e10)
        moved += len(moves)
        rebalances += bool(moves)
    assert moved > 0
    assert run.migrating_s == pytest.approx(expected_s, rel=1e-12)
    assert (run.num_moves, run.moved_layers) == (rebalances, moved)


def test_a_slow_network_keeps_layers_where_they_are() -> None:
    costs = costs_of("sparse_attention", block_bytes=10**15)
    run = compare(costs, machine(), PLANS).runs["Partition by time"]
    assert run.num_moves == 0


@pytest.mark.parametrize("trace", [MoETrace(), MoDTrace(), MoETrace(first_excess=0.5)])
def test_costs_without_memory_are_left_alone(trace: MoETrace | MoDTrace) -> None:
    costs = replace(costs_of("moe", num_steps=4000, every_n_steps=200), trace=trace)
    found = compare(costs, machine(), PLANS)
    assert found.speedup("Partition by time") > 0.99
    assert found.speedup("Diffusion by time") > 0.99


def test_a_lasting_difference_between_experts_is_balanced() -> None:
    costs = replace(costs_of("moe", num_blocks=48), trace=MoETrace(layer_share=1.0, sigma=1.2))
    found = compare(costs, machine(), PLANS)
    assert found.speedup("Partition by time") > 0.95 * found.speedup(OPTIMUM) > 1.05


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_and_its_bound_counts_the_layers_of_a_rank(schedule: str) -> None:
    costs = costs_of("early_exit", num_steps=4000, every_n_steps=1000)
    found = compare(costs, machine(schedule=schedule), PLANS)
    assert found.bound == 4
    assert found.speedup("Partition by time") > (0.95 if SCHEDULES[schedule].placement == "v" else 1.02)
    assert found.speedup(OPTIMUM) <= found.bound


def test_finer_layers_can_be_balanced_better() -> None:
    options = {"num_blocks": 8, "num_steps": 8000}
    whole = compare(costs_of("sparse_attention", **options), machine(), PLANS)
    halves = compare(costs_of("sparse_attention", split_blocks=True, **options), machine(), PLANS)
    assert (whole.bound, halves.bound) == (2, 4)
    assert halves.runs[STATIC].training_s == pytest.approx(whole.runs[STATIC].training_s, rel=0.005)
    assert halves.speedup(OPTIMUM) > whole.speedup(OPTIMUM)


def test_a_recorded_run_is_planned_from_one_measurement_and_timed_by_the_next() -> None:
    loads = [replace(STEP.loads[1], forward_s=forward_s) for forward_s in (5.0, 1.0, 1.0, 1.0)]
    heavy_front, heavy_end = tuple(loads), tuple(reversed(loads))
    numbers = [*range(100, 2100, 100)]
    steps = [
        replace(STEP, step=step, balance=(2, 2), loads=heavy_front if step <= 500 else heavy_end) for step in numbers
    ]
    costs = RecordedCosts(Recording({}, tuple(steps)))
    pipelines = replace(machine(num_ranks=2, num_replicas=1), network=Network())

    found = compare(costs, pipelines, PLANS)

    run = found.runs["Partition by time"]
    assert [segment.num_steps for segment in run.segments] == [100] * 20
    assert [segment.typical_step for segment in run.segments] == numbers
    assert run.num_measurements == 19
    optimum = [segment.assignment.balance for segment in found.runs[OPTIMUM].segments]
    assert optimum == [(1, 3)] * 5 + [(3, 1)] * 15
    balances = [segment.assignment.balance for segment in run.segments]
    assert balances[0] == (2, 2)  # what the first measurement asks for is known only after it
    assert (1, 3) in balances[:6]
    assert balances[5] != (3, 1)  # and so is the change
    assert balances[-1] == (3, 1)
