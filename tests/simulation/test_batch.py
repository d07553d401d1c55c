"""Many steps in one pass: the times of `simulate_replicas`, for all schedules, and steps that send other gradients."""

import random
from dataclasses import replace

import pytest

from lightning_dynmo.pipeline.schedules import SCHEDULES, simulated_order
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import LayerCost, Network, StageCost, simulate_replicas, stage_costs
from lightning_dynmo.simulation.batch import StepTime, simulate_steps

NETWORK = Network(latency_s=0.002, bytes_per_s=1e9, replica_bytes_per_s=5e8)
RANKS, MICROBATCHES = 4, 16


def steps(num_stages: int) -> list[list[list[StageCost]]]:
    """Steps with 0 to 9 of 24 layers frozen, two splits, and three replicas of different cost."""
    numbers = random.Random(7)
    uneven = Assignment((24 - 2 * (num_stages - 1), *[2] * (num_stages - 1)))
    found = []
    for frozen in (0, 0, 5, 9):
        for assignment in (Assignment.uniform(24, num_stages), uneven):
            replicas = []
            for _ in range(3):
                layers = [
                    LayerCost(
                        *(numbers.uniform(0.5, 2.0) for _ in range(3)),
                        trains=layer >= frozen,
                        output_bytes=numbers.randrange(10**8),
                        gradient_bytes=numbers.randrange(10**9),
                        update_s=numbers.uniform(0.0, 3.0),
                    )
                    for layer in range(24)
                ]
                replicas.append(stage_costs(layers, assignment))
            found.append(replicas)
    return found


def one_by_one(name: str, cases: list[list[list[StageCost]]]) -> list[StepTime]:
    schedule = SCHEDULES[name]
    order = simulated_order(schedule, RANKS, schedule.stages_per_rank, MICROBATCHES)
    found = []
    for replicas in cases:
        timelines = simulate_replicas(order, schedule.place(RANKS, schedule.stages_per_rank), replicas, NETWORK)
        makespan_s = max(timeline.makespan_s for timeline in timelines)
        busy_s = sum(sum(timeline.busy_s) for timeline in timelines)
        found.append(StepTime(makespan_s, 1 - busy_s / (makespan_s * RANKS * len(replicas))))
    return found


def at_once(name: str, cases: list[list[list[StageCost]]]) -> list[StepTime]:
    schedule = SCHEDULES[name]
    order = simulated_order(schedule, RANKS, schedule.stages_per_rank, MICROBATCHES)
    return simulate_steps(order, schedule.place(RANKS, schedule.stages_per_rank), cases, NETWORK)


def agree(left: list[StepTime], right: list[StepTime]) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(one.makespan_s == pytest.approx(other.makespan_s, rel=1e-12) for one, other in pairs) and all(
        one.bubble_ratio == pytest.approx(other.bubble_ratio, rel=1e-9) for one, other in pairs
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_one_by_one(name: str) -> None:
    cases = steps(RANKS * SCHEDULES[name].stages_per_rank)

    found = at_once(name, cases)

    assert agree(found, one_by_one(name, cases))
    assert len({time.makespan_s for time in found}) == len(cases)


@pytest.mark.parametrize("what", ["forward_s", "output_bytes", "gradient_bytes", "update_s"])
def test_the_comparison_notices_one_stage_of_one_replica(what: str) -> None:
    cases = steps(RANKS)
    changed = [[list(stages) for stages in replicas] for replicas in cases]
    stage = changed[3][1][2]
    changed[3][1][2] = replace(stage, **{what: 100_000 * getattr(stage, what)})  # type: ignore[arg-type]

    assert not agree(at_once("1f1b", changed), one_by_one("1f1b", cases))
    assert agree(at_once("1f1b", changed), one_by_one("1f1b", changed))


def test_more_pipelines_than_fit_into_one_pass() -> None:
    cases = steps(RANKS)[:1] * 1400  # 4,200 pipelines

    assert set(at_once("1f1b", cases)) == set(at_once("1f1b", cases[:1]))


def test_a_step_that_takes_no_time_does_not_idle() -> None:
    (late,) = at_once("1f1b", [[[StageCost(0.0)] * RANKS]])
    assert late.makespan_s > 0  # messages alone
    assert late.bubble_ratio == 1.0
    schedule = SCHEDULES["1f1b"]
    order = simulated_order(schedule, RANKS, 1, MICROBATCHES)
    free = simulate_steps(order, schedule.place(RANKS, 1), [[[StageCost(0.0)] * RANKS]], Network())
    assert free == [StepTime(0.0, 0.0)]
