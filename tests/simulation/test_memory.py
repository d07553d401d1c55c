from __future__ import annotations

import pytest

from lightning_dynmo.pipeline.schedules import SCHEDULES, order_of, simulated_order
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import LayerCost, StageCost, in_flight, simulate, stage_costs
from tests.simulation.orders import KINDS, written


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 16])
def test_microbatches_in_flight(num_stages: int, num_microbatches: int) -> None:
    held = {
        name: in_flight(simulated_order(SCHEDULES[name], num_stages, 1, num_microbatches), num_stages)
        for name in ("gpipe", "1f1b")
    }
    assert held["gpipe"] == (num_microbatches,) * num_stages
    if num_microbatches >= num_stages:
        assert held["1f1b"] == tuple(min(num_stages - stage, num_microbatches) for stage in range(num_stages))


def test_activations_stay_until_the_weights_are_done() -> None:
    order = written("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2")
    assert in_flight(order, 1) == (3,)
    timeline = simulate(order, (0,), [StageCost(1.0, 1.0, 1.0, activation_bytes=5)])
    assert timeline.peak_activation_bytes == (15,)


def test_a_rank_holds_the_activations_of_all_its_stages() -> None:
    order = written("0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1")
    stages = [StageCost(1.0, 1.0, 1.0, activation_bytes=size) for size in (3, 10)]
    timeline = simulate(order, (0, 0), stages)
    assert timeline.peak_activation_bytes == (2 * 3 + 10,)
    assert timeline.peak_in_flight == (2, 1)


def test_costs_of_stages_leave_out_what_does_not_run() -> None:
    frozen = LayerCost(1.0, 2.0, 4.0, False, 10, 100, 1000, 0.5)
    trained = LayerCost(1.0, 2.0, 4.0, True, 10, 100, 1000, 0.5)
    first, second, third = stage_costs([frozen, frozen, frozen, trained, frozen, trained], Assignment((2, 2, 2)))
    assert first == StageCost(2.0, 0.0, 0.0, False, 0, 100, 0, 0, 0.0)
    # Nothing before the first trained layer needs a gradient, and none of its input is computed.
    assert second == StageCost(2.0, 0.0, 4.0, False, 10, 100, 100, 1000, 0.5)
    # A frozen layer behind it passes the gradient on.
    assert third == StageCost(2.0, 4.0, 4.0, True, 20, 100, 100, 1000, 0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_simulated_order_is_what_the_library_runs(schedule: str, num_microbatches: int) -> None:
    found = SCHEDULES[schedule]
    library = order_of(found, 4, found.stages_per_rank, num_microbatches)
    simulated = simulated_order(found, 4, found.stages_per_rank, num_microbatches)
    words = {kind: word for word, kind in KINDS.items()}
    for rank, actions in library.items():
        texts = [f"{action.stage}{words[action.kind]}{action.microbatch}" for action in simulated[rank]]
        marks = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        assert texts == [str(action) for action in actions if not any(mark in str(action) for mark in marks)]
        assert len(texts) >= 2 * num_microbatches
