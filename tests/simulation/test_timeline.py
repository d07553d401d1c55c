"""Timelines, against ones drawn by hand and bubbles that are known."""

from __future__ import annotations

import math

import pytest

from lightning_dynmo.pipeline import execution
from lightning_dynmo.pipeline.schedules import find_schedule, simulated_order
from lightning_dynmo.planning import speedup
from lightning_dynmo.simulation import Network, Span, StageCost, Timeline, simulate, simulate_replicas
from lightning_dynmo.simulation.execution import MAX_SENDING
from tests.simulation.orders import run, stage, written


def times_of(timeline: Timeline, rank: int) -> list[tuple[str, int | None, float, float]]:
    return [(span.kind, span.microbatch, span.begin_s, span.end_s) for span in timeline.spans if span.rank == rank]


# 1F1B, by hand.


def test_one_stage_does_everything_in_a_row() -> None:
    timeline = run("1f1b", [stage(1.0, 2.0, 5.0)], 4)
    assert timeline.makespan_s == 4 * 3.0 + 5.0
    assert timeline.idle_s == (0.0,)
    assert timeline.bubble_ratio == 0.0


def test_two_equal_stages_idle_for_one_microbatch() -> None:
    # time     0  1  2  3  4  5  6  7  8  9  10 11
    # stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    # stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2
    timeline = run("1f1b", [stage(1.0, 2.0)] * 2, 3)
    F, B = "forward", "backward"
    assert times_of(timeline, 0) == [
        (F, 0, 0, 1),
        (F, 1, 1, 2),
        (B, 0, 4, 6),
        (F, 2, 6, 7),
        (B, 1, 7, 9),
        (B, 2, 10, 12),
    ]
    assert times_of(timeline, 1) == [
        (F, 0, 1, 2),
        (B, 0, 2, 4),
        (F, 1, 4, 5),
        (B, 1, 5, 7),
        (F, 2, 7, 8),
        (B, 2, 8, 10),
    ]
    assert timeline.makespan_s == 12.0
    assert timeline.busy_s == (9.0, 9.0)
    assert timeline.idle_s == (3.0, 3.0)
    assert timeline.bubble_ratio == 0.25
    assert timeline.peak_in_flight == (2, 1)


def test_two_stages_of_unequal_cost() -> None:
    # Stage 1 is the slower: it waits for F0 (1), then works without a break (3 * 6); at the end stage 0 runs B2 (2).
    assert run("1f1b", [stage(1.0, 2.0), stage(2.0, 4.0)], 3).makespan_s == 1.0 + 3 * 6.0 + 2.0
    # Stage 0 is the slower. F0 F1 until 4; B0 waits for stage 1, which has done F0 at 3 and B0 at 5: B0 5-9, F2 9-11.
    # Stage 1: F1 5-6, B1 6-8, F2 11-12, B2 12-14. Stage 0: B1 11-15, B2 15-19.
    assert run("1f1b", [stage(2.0, 4.0), stage(1.0, 2.0)], 3).makespan_s == 19.0


def test_frozen_first_stage_only_fills_the_pipeline() -> None:
    # Stage 1 waits for F0 alone, and nothing comes back.
    last = stage(1.0, 2.0, 0.5, sends_gradient=False)
    timeline = run("1f1b", [stage(1.0), last], 4)
    assert timeline.makespan_s == 1.0 + 4 * 3.0 + 0.5
    assert {span.kind for span in timeline.spans if span.rank == 0} == {"forward"}
    # Where the frozen stage is the slower one, it works without a break, and the last microbatch is left.
    assert run("1f1b", [stage(5.0), stage(1.0, 2.0, sends_gradient=False)], 4).makespan_s == 4 * 5.0 + 3.0
    # With a gradient that goes back, the first stage waits for it before its third forward, although its own backward
    # takes no time.
    assert times_of(run("1f1b", [stage(1.0), stage(1.0, 2.0)], 4), 0)[2] == ("forward", 2, 4.0, 5.0)
    assert times_of(run("1f1b", [stage(1.0), last], 4), 0)[2] == ("forward", 2, 2.0, 3.0)


def test_updates_overlap() -> None:
    # Stage 1 has sent B1 at 7 (F0 1-2, B0 2-4, F1 4-5, B1 5-7) and updates until 17; stage 0 ends at 9.
    timeline = run("1f1b", [stage(1.0, 2.0), stage(1.0, 2.0, 10.0)], 2)
    assert timeline.makespan_s == 17.0
    assert timeline.spans[-1] == Span(1, 1, "update", None, 7.0, 17.0)
    assert timeline.busy_s == (6.0, 16.0)


def test_more_stages_than_microbatches() -> None:
    # The last batch of an epoch may be short: F0 F1 down three stages, B0 B1 up again.
    timeline = run("1f1b", [stage(1.0, 2.0)] * 3, 2)
    assert timeline.makespan_s == (2 + 3 - 1) * 3.0
    assert timeline.peak_in_flight == (2, 2, 1)


# Backward in two parts.


def test_split_backward_leaves_the_first_stage_to_the_weights() -> None:
    # Nobody waits for a gradient of the first stage's input: its backward runs as a whole with the weights.
    order = written("0F0 0SEND_F0 0RECV_B0 0I0 0W0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
    timeline = simulate(order, (0, 1), [StageCost(1.0, 2.0, 3.0), StageCost(1.0, 2.0, 3.0)])
    assert times_of(timeline, 0) == [("forward", 0, 0, 1), ("weight_backward", 0, 4, 9)]
    assert times_of(timeline, 1) == [
        ("forward", 0, 1, 2),
        ("input_backward", 0, 2, 4),
        ("weight_backward", 0, 4, 7),
    ]


def test_split_backward_behind_frozen_layers_is_left_to_the_weights() -> None:
    # Stage 1 has layers before its first trained one no gradient goes to, but inner gradients between its own layers.
    order = written("0F0 0SEND_F0 0RECV_B0 0I0 0W0", "1RECV_F0 1F0 1I0 1SEND_B0 1W0")
    timeline = simulate(order, (0, 1), [StageCost(1.0), StageCost(1.0, 2.0, 3.0, sends_gradient=False)])
    assert times_of(timeline, 0) == [("forward", 0, 0, 1)]
    assert times_of(timeline, 1) == [("forward", 0, 1, 2), ("weight_backward", 0, 2, 7)]


def test_stages_on_one_rank_hand_over_without_a_message() -> None:
    order = written(
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0", "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0"
    )
    slow = Network(latency_s=10.0)
    timeline = simulate(order, (0, 1, 1, 0), [stage(1.0, 2.0)] * 4, slow)
    # One message down, one up, and twice back: the stages of rank 1 follow each other at once.
    assert [span[2] for span in times_of(timeline, 1)] == [11.0, 12.0, 36.0, 38.0]
    assert timeline.makespan_s == 4 * 3.0 + 4 * 10.0


# Messages.


def test_message_takes_latency_and_its_bytes() -> None:
    stages = [StageCost(1.0, 1.0, 1.0, output_bytes=10), StageCost(1.0, 1.0, 1.0, input_bytes=10)]
    timeline = run("gpipe", stages, 1, Network(latency_s=0.5, bytes_per_s=10.0))
    # F0 0-1, 1.5 on the way, F0 2.5-3.5, B0 3.5-5.5, 1.5 on the way, B0 7-9.
    assert [span.begin_s for span in timeline.spans] == [0.0, 7.0, 2.5, 3.5]
    assert timeline.makespan_s == 9.0


def test_messages_in_one_direction_share_the_bandwidth() -> None:
    stages = [StageCost(0.25, output_bytes=10), StageCost(0.25, sends_gradient=False, input_bytes=10)]
    order = written("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2", "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2")
    timeline = simulate(order, (0, 1), stages, Network(latency_s=0.5, bytes_per_s=10.0))
    # Sent at 0.25, 0.5 and 0.75, they leave one after the other until 1.25, 2.25 and 3.25, and arrive half a second on.
    assert [begin for _, _, begin, _ in times_of(timeline, 1)] == [1.75, 2.75, 3.75]


def test_rank_is_done_when_all_it_has_sent_has_left() -> None:
    order = written("0F0 0SEND_F0", "1RECV_F0 1F0")
    stages = [StageCost(1.0, output_bytes=10, update_s=1.0), StageCost(0.25)]
    timeline = simulate(order, (0, 1), stages, Network(latency_s=0.5, bytes_per_s=5.0))
    assert times_of(timeline, 0)[-1] == ("update", None, 3.0, 4.0)
    assert timeline.makespan_s == 4.0


def test_messages_in_both_directions_do_not_share() -> None:
    # F0 0-1, 2 s on the way, F0 3-4, B0 4-5. From 5 to 7 its gradient goes back and the second activation comes.
    order = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    costs = [StageCost(1.0, 0.5, 0.5, input_bytes=4, output_bytes=4)] * 2
    timeline = simulate(order, (0, 1), costs, Network(bytes_per_s=2.0))
    assert [begin for _, _, begin, _ in times_of(timeline, 0)] == [0.0, 1.0, 7.0, 11.0]
    assert [begin for _, _, begin, _ in times_of(timeline, 1)] == [3.0, 4.0, 7.0, 8.0]


def test_message_leaves_once_both_ends_have_asked_for_it() -> None:
    # Rank 1 is busy with another microbatch until 5 before it asks: with a latency, that is when the message leaves.
    late = written("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    early = written("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    costs = [StageCost(1.0), StageCost(3.0, sends_gradient=False)]
    assert simulate(late, (0, 1), costs, Network(latency_s=1.0)).makespan_s == 1 + 1 + 3 + 1 + 3
    assert simulate(early, (0, 1), costs, Network(latency_s=1.0)).makespan_s == 1 + 1 + 3 + 3


def test_a_ninth_message_waits_for_the_first_to_leave() -> None:
    # Rank 1 takes 100 s for the first microbatch and asks for the second only then. The tenth send of rank 0, at 10,
    # finds the second to ninth still waiting, and waits for the second before the eleventh microbatch begins.
    makes = " ".join(f"0F{index} 0SEND_F{index}" for index in range(11))
    takes = " ".join(f"1RECV_F{index} 1F{index}" for index in range(11))
    timeline = simulate(written(makes, takes), (0, 1), [StageCost(1.0), StageCost(100.0)])
    assert [begin for _, _, begin, _ in times_of(timeline, 0)] == [*range(10), 101.0]
    # One microbatch fewer, and it waits for nothing.
    begins = times_of(run("gpipe", [StageCost(1.0), StageCost(100.0, sends_gradient=False)], 10), 0)
    assert [begin for _, _, begin, _ in begins] == list(range(10))


def test_as_many_messages_are_on_their_way_as_in_the_library() -> None:
    assert MAX_SENDING == execution._MAX_SENDING


# Known bubbles.


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 3, 4, 5])
@pytest.mark.parametrize("num_microbatches", [5, 6, 11])
def test_equal_stages_have_the_known_bubble(schedule: str, num_stages: int, num_microbatches: int) -> None:
    timeline = run(schedule, [stage(1.0, 2.0)] * num_stages, num_microbatches)
    assert timeline.makespan_s == (num_microbatches + num_stages - 1) * 3.0
    assert timeline.bubble_ratio == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1), abs=1e-15)
    in_flight = [num_microbatches] * num_stages if schedule == "gpipe" else range(num_stages, 0, -1)
    assert timeline.peak_in_flight == tuple(in_flight)


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "loopedbfs"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_interleaved_stages_have_the_known_bubble(schedule: str, num_ranks: int) -> None:
    # v stages per rank: what waits at both ends of the step is one v-th as long.
    num_microbatches = 2 * num_ranks
    timeline = run(schedule, [stage(1.0, 2.0)] * (2 * num_ranks), num_microbatches)
    work_s = 2 * num_microbatches * 3.0
    assert timeline.busy_s == (work_s,) * num_ranks
    assert timeline.makespan_s == work_s * (1 + (num_ranks - 1) / (2 * num_microbatches))


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbvzerobubble", "dualpipev"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_weights_fill_two_thirds_of_the_bubble(schedule: str, num_ranks: int) -> None:
    stages = [StageCost(1.0, 1.0, 1.0)] * (2 * num_ranks)
    num_microbatches = 2 * num_ranks
    bubble_s = run(schedule, stages, num_microbatches).makespan_s - 2 * num_microbatches * 3.0
    assert bubble_s == num_ranks - 1
    interleaved_s = run("interleaved1f1b", stages, num_microbatches).makespan_s
    assert interleaved_s - 2 * num_microbatches * 3.0 == 3 * bubble_s


@pytest.mark.parametrize(("before", "after"), [(0.25, 0.08), (0.18, 0.04)], ids=["moe", "mod"])
def test_the_papers_speedups_are_those_of_simulated_steps(before: float, after: float) -> None:
    def simulated(idle: float) -> Timeline:
        """Two stages of work 1 in all: 24 microbatches take 1 + 23 times the larger, and both ranks work for 24."""
        larger = (24 / (2 * (1 - idle)) - 1) / 23
        return run("gpipe", [stage(larger / 4, larger * 3 / 4), stage((1 - larger) / 4, (1 - larger) * 3 / 4)], 24)

    static, balanced = simulated(before), simulated(after)
    assert (static.bubble_ratio, balanced.bubble_ratio) == pytest.approx((before, after), abs=1e-12)
    assert static.makespan_s / balanced.makespan_s == pytest.approx((1 - after) / (1 - before), rel=1e-12)
    assert static.makespan_s / balanced.makespan_s == pytest.approx(speedup(before, after), rel=1e-12)


# Replicas.


def test_sums_begin_when_all_replicas_have_the_gradients() -> None:
    order = simulated_order(find_schedule("1f1b"), 2, 1, 2)
    fast = [StageCost(1.0, 1.0, 1.0, gradient_bytes=8)] * 2
    slow = [StageCost(2.0, 2.0, 2.0, gradient_bytes=8)] * 2
    network = Network(replica_bytes_per_s=2.0)
    first, second = simulate_replicas(order, (0, 1), [fast, slow], network)
    # Alone, the replicas take 9 and 18; their last stages end at 7 and 14. The sum of 8 bytes takes 2 * 1/2 * 8 / 2.
    sums = [Span(0, 0, "gradient_sum", None, 18.0, 22.0), Span(1, 1, "gradient_sum", None, 14.0, 18.0)]
    for timeline in (first, second):
        assert [span for span in timeline.spans if span.kind == "gradient_sum"] == sums
        assert timeline.makespan_s == 22.0
    assert first.busy_s == (6.0, 6.0)
    assert second.busy_s == (12.0, 12.0)
    # One pipeline alone adds nothing up.
    (alone,) = simulate_replicas(order, (0, 1), [slow], network)
    assert alone == simulate(order, (0, 1), slow)
    assert alone.makespan_s == 18.0


def test_three_replicas_send_each_byte_four_thirds_times() -> None:
    order = simulated_order(find_schedule("gpipe"), 1, 1, 1)
    stages = [StageCost(1.0, 1.0, 1.0, gradient_bytes=6, update_s=0.5)]
    timelines = simulate_replicas(order, (0,), [stages] * 3, Network(replica_bytes_per_s=2.0))
    assert {timeline.makespan_s for timeline in timelines} == {3.0 + 4 / 3 * 6 / 2 + 0.5}


def test_a_ranks_sums_follow_each_other_beside_the_schedule() -> None:
    # Stage 1 is done on rank 0 before stage 0: its sum goes on while stage 0 runs backward, which takes less time.
    order = written("0F0 1F0 1B0 0B0")
    stages = [StageCost(1.0, 1.0, 1.0, gradient_bytes=5)] * 2
    timeline, _ = simulate_replicas(order, (0, 0), [stages] * 2, Network(replica_bytes_per_s=1.0))
    assert [(span.stage, span.begin_s, span.end_s) for span in timeline.spans if span.kind == "gradient_sum"] == [
        (1, 4.0, 9.0),
        (0, 9.0, 14.0),
    ]
    assert timeline.makespan_s == 14.0
    assert timeline.busy_s == (6.0,)


# What cannot be.


def test_schedule_that_waits_for_ever() -> None:
    order = written("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(RuntimeError, match=r"for ever: rank 0 for the gradients of microbatch 0 for stage 0; rank 1"):
        simulate(order, (0, 1), [stage(1.0, 2.0)] * 2)
    # A frozen first stage waits for no gradient.
    assert simulate(order, (0, 1), [stage(1.0), stage(1.0, 2.0, sends_gradient=False)]).makespan_s == 4.0


def test_two_ranks_that_wait_for_each_other() -> None:
    order = written("2RECV_F0 2F0 0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_F0")
    with pytest.raises(RuntimeError, match=r"rank 0 for the activations of microbatch 0 for stage 2; rank 1 for the"):
        simulate(order, (0, 1, 0), [stage(1.0)] * 3)


def test_send_of_what_was_not_made() -> None:
    with pytest.raises(RuntimeError, match=r"Rank 0 sends the activations of microbatch 1 for stage 1 before"):
        simulate(written("0F0 0SEND_F1", "1RECV_F1 1F1"), (0, 1), [stage(1.0)] * 2)


def test_simulation_checks_its_inputs() -> None:
    order = written("0F0 0B0")
    with pytest.raises(ValueError, match="one cost per stage, 1 in all, got 2"):
        simulate(order, (0,), [stage(1.0)] * 2)
    with pytest.raises(ValueError, match=r"ranks 0 to 1, .* got those of \[0\]"):
        simulate(order, (0, 1), [stage(1.0)] * 2)
    with pytest.raises(ValueError, match=r"input_gradient_s of stage 0 .*got nan"):
        simulate(order, (0,), [StageCost(1.0, math.nan)])
    with pytest.raises(ValueError, match=r"bytes_per_s to be positive, got 0\.0"):
        Network(bytes_per_s=0.0)
    with pytest.raises(ValueError, match=r"latency_s.*got -1\.0"):
        Network(latency_s=-1.0)


def test_step_without_any_work() -> None:
    timeline = run("gpipe", [stage(0.0)] * 2, 3)
    assert timeline.spans == ()
    assert (timeline.makespan_s, timeline.bubble_ratio) == (0.0, 0.0)
