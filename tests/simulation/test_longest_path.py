"""Where messages take no time, a step is as long as the longest path through its computations: found in another way."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lightning_dynmo.pipeline import find_schedule
from lightning_dynmo.pipeline.schedules import simulated_order
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import LayerCost, StageCost, simulate, stage_costs
from lightning_dynmo.simulation.actions import Action, Order

MESSAGES = ("send_activations", "receive_activations", "send_gradients", "receive_gradients")
NUM_MICROBATCHES = 8  # no rank waits for messages of its own


def longest_path(order: Order, stages: Sequence[StageCost]) -> float:
    """Relaxes all computations until no end is later than before."""
    ends: dict[Action, float] = {}
    computed = {rank: [action for action in actions if action.kind not in MESSAGES] for rank, actions in order.items()}
    while True:
        before = dict(ends)
        for actions in computed.values():
            clock = 0.0
            for action in actions:
                needed = [ends.get(other, 0.0) for other in needs(action, stages)]
                clock = ends[action] = max([clock, *needed]) + seconds(action, stages)
        if ends == before:
            return max(ends.values())


def needs(action: Action, stages: Sequence[StageCost]) -> list[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "forward":
        return [Action("forward", stage - 1, microbatch)] if stage else []
    if action.kind == "weight_backward" or stage + 1 == len(stages) or not stages[stage + 1].sends_gradient:
        return []
    return [Action("backward", stage + 1, microbatch), Action("input_backward", stage + 1, microbatch)]


def seconds(action: Action, stages: Sequence[StageCost]) -> float:
    cost, splits = stages[action.stage], action.stage > 0 and stages[action.stage].sends_gradient
    if action.kind == "forward":
        return cost.forward_s
    if action.kind == "input_backward":
        return cost.input_gradient_s if splits else 0.0
    return cost.weight_gradient_s + (0.0 if action.kind == "weight_backward" and splits else cost.input_gradient_s)


@pytest.mark.parametrize(
    "name",
    ["gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev"],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_steps_are_as_long_as_their_longest_path(name: str, num_ranks: int) -> None:
    schedule = find_schedule(name)
    per_rank = schedule.stages_per_rank
    order = simulated_order(schedule, num_ranks, per_rank, NUM_MICROBATCHES)
    assignment = Assignment.uniform(num_ranks * per_rank + 3, num_ranks * per_rank)
    rng = random.Random(num_ranks)
    for frozen in (0, 2, assignment.num_layers - 1, assignment.num_layers):
        layers = [
            LayerCost(rng.random(), rng.random(), rng.random(), trains=layer >= frozen)
            for layer in range(assignment.num_layers)
        ]
        stages = stage_costs(layers, assignment)
        timeline = simulate(order, schedule.place(num_ranks, per_rank), stages)
        assert timeline.makespan_s == pytest.approx(longest_path(order, stages), rel=1e-12)


def test_the_comparison_notices_a_slightly_slower_stage() -> None:
    schedule = find_schedule("1f1b")
    order = simulated_order(schedule, 2, 1, NUM_MICROBATCHES)
    stages, slower = ([StageCost(second, 1.0, 1.0)] * 2 for second in (1.0, 1.0 + 1e-9))
    assert simulate(order, schedule.place(2, 1), slower).makespan_s != pytest.approx(longest_path(order, stages), 1e-12)
