"""What holds for timelines of all costs and schedules."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dynmo.pipeline.schedules import SCHEDULES, simulated_order
from lightning_dynmo.planning import expected_bubble_ratio
from lightning_dynmo.simulation import Network, Order, StageCost, Timeline, in_flight, simulate, simulate_replicas
from lightning_dynmo.simulation.execution import MAX_SENDING
from tests.simulation.orders import stage

# Multiples of 1/16: sums are exact, so that equalities are.
seconds = st.integers(0, 64).map(lambda sixteenths: sixteenths / 16)
sizes = st.integers(0, 8)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    return Network(draw(seconds), draw(st.sampled_from([0.5, 2.0, math.inf])), draw(st.sampled_from([1.0, math.inf])))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Order, tuple[int, ...], list[StageCost]]:
    """Returns an order, its placement and costs, with or without a frozen front."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    num_ranks = draw(st.integers(1 if schedule.placement == "loop" else 2, 4))
    num_microbatches = draw(st.integers(1, 12))
    order = simulated_order(schedule, num_ranks, schedule.stages_per_rank, num_microbatches)
    placement = schedule.place(num_ranks, schedule.stages_per_rank)
    num_frozen = draw(st.integers(0, len(placement) - 1))
    borders = draw(st.lists(sizes, min_size=len(placement) + 1, max_size=len(placement) + 1))
    stages = []
    for index in range(len(placement)):
        forward, inputs, weights, update = (draw(seconds) for _ in range(4))
        cost = StageCost(forward, inputs, weights, index > num_frozen, draw(sizes), borders[index + 1], borders[index])
        trained = replace(cost, gradient_bytes=draw(sizes), update_s=update)
        frozen = replace(cost, input_gradient_s=0.0, weight_gradient_s=0.0, activation_bytes=0)
        stages.append(frozen if index < num_frozen else trained)
    return order, placement, stages


def fixpoint(order: Order, placement: tuple[int, ...], stages: list[StageCost], network: Network) -> float:
    """Returns when the last rank ends: the least times that obey every rule of waiting, found by raising all from 0.

    Another way to the same times: no queues and no turns, only inequalities between the ends of actions.
    """
    ends: dict[tuple[int, int], float] = defaultdict(float)
    while True:
        before = dict(ends)
        times = _Times(order, placement, stages, network, ends)
        for rank, actions in order.items():
            for index in range(len(actions)):
                ends[rank, index] = times.end_of(rank, index)
        if before == dict(ends):
            return max(times.end_of(rank, len(order[rank])) for rank in order)


class _Times:
    def __init__(
        self,
        order: Order,
        placement: tuple[int, ...],
        stages: list[StageCost],
        network: Network,
        ends: dict[tuple[int, int], float],
    ) -> None:
        self.order, self.placement, self.stages, self.network, self.ends = order, placement, stages, network, ends
        self.sent: dict[int, list[tuple[str, int, int]]] = {rank: [] for rank in order}
        self.position = {}
        for rank, actions in order.items():
            for index, action in enumerate(actions):
                self.position[action.kind, action.stage, action.microbatch] = (rank, index)
                if action.kind.startswith("send") and self.exists(action.kind, action.stage):
                    self.sent[rank].append((action.kind, action.stage, action.microbatch))

    def exists(self, kind: str, stage: int) -> bool:
        return kind == "send_activations" or self.stages[stage].sends_gradient

    def begin_of(self, rank: int, index: int) -> float:
        return self.ends[rank, index - 1] if index else 0.0

    def left(self, send: tuple[str, int, int]) -> float:
        """Returns when a message has left its sender."""
        kind, stage, microbatch = send
        step, receive = (1, "receive_activations") if kind == "send_activations" else (-1, "receive_gradients")
        source, target = self.position[send], self.position[receive, stage + step, microbatch]
        same_way = [other for other in self.sent[source[0]] if self.target(other) == self.target(send)]
        place = same_way.index(send)
        free = self.left(same_way[place - 1]) if place else 0.0
        cost = self.stages[stage]
        num_bytes = cost.output_bytes if kind == "send_activations" else cost.input_bytes
        return max(self.begin_of(*source), self.begin_of(*target), free) + num_bytes / self.network.bytes_per_s

    def target(self, send: tuple[str, int, int]) -> int:
        return self.placement[send[1] + (1 if send[0] == "send_activations" else -1)]

    def end_of(self, rank: int, index: int) -> float:
        begin = self.begin_of(rank, index)
        if index == len(self.order[rank]):
            return max([begin, *(self.left(send) for send in self.sent[rank])])
        action = self.order[rank][index]
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind.startswith("receive"):
            return begin
        if kind.startswith("send"):
            if not self.exists(kind, stage):
                return begin
            place = self.sent[rank].index((kind, stage, microbatch))
            return max(begin, self.left(self.sent[rank][place - MAX_SENDING])) if place >= MAX_SENDING else begin
        if kind == "forward":
            needs = ("send_activations", stage - 1, microbatch) if stage else None
        else:
            needs = ("send_gradients", stage + 1, microbatch) if stage + 1 < len(self.stages) else None
        if kind != "weight_backward" and needs in self.position and self.exists(*needs[:2]):
            begin = max(begin, self.left(needs) + self.network.latency_s)
        cost, first = self.stages[stage], stage == 0 or not self.stages[stage].sends_gradient
        return (
            begin
            + {
                "forward": cost.forward_s,
                "backward": cost.input_gradient_s + cost.weight_gradient_s,
                "input_backward": 0.0 if first else cost.input_gradient_s,
                "weight_backward": cost.weight_gradient_s + (cost.input_gradient_s if first else 0.0),
            }[kind]
        )


@settings(deadline=None, max_examples=60)
@given(pipelines(), networks())
def test_timeline_is_the_least_that_obeys_every_rule(
    pipeline: tuple[Order, tuple[int, ...], list[StageCost]], network: Network
) -> None:
    order, placement, stages = pipeline
    stages = [replace(cost, update_s=0.0) for cost in stages]
    assert simulate(order, placement, stages, network).makespan_s == fixpoint(order, placement, stages, network)


@settings(deadline=None)
@given(pipelines(), networks())
def test_no_step_is_shorter_than_its_work(
    pipeline: tuple[Order, tuple[int, ...], list[StageCost]], network: Network
) -> None:
    order, placement, stages = pipeline
    timeline = simulate(order, placement, stages, network)
    num_microbatches = 1 + max(action.microbatch for action in order[0])
    work = [0.0] * len(order)
    for cost, rank in zip(stages, placement, strict=True):
        per_microbatch = cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s
        work[rank] += num_microbatches * per_microbatch + cost.update_s
    assert timeline.busy_s == tuple(work)
    assert timeline.makespan_s >= max(work)
    assert timeline.idle_s == tuple(timeline.makespan_s - busy for busy in work)
    # One microbatch goes down all stages, over every border between ranks, and its gradient comes back as far as it
    # has to; the last stage that trains has its weights to do.
    chain = sum(cost.forward_s for cost in stages) + network.latency_s * hops(placement)
    chain += sum(cost.input_gradient_s for cost in stages if cost.sends_gradient)
    assert timeline.makespan_s >= chain
    assert_nothing_overlaps(timeline)


def hops(placement: tuple[int, ...]) -> int:
    return sum(rank != after for rank, after in pairwise(placement))


def assert_nothing_overlaps(timeline: Timeline) -> None:
    for rank in range(len(timeline.busy_s)):
        spans = [span for span in timeline.spans if span.rank == rank and span.kind != "gradient_sum"]
        assert all(span.begin_s < span.end_s for span in spans)
        assert all(span.end_s <= after.begin_s for span, after in pairwise(spans))


@settings(deadline=None)
@given(pipelines(), networks(), st.data())
def test_no_step_becomes_shorter_when_something_takes_longer(
    pipeline: tuple[Order, tuple[int, ...], list[StageCost]], network: Network, data: st.DataObject
) -> None:
    order, placement, stages = pipeline
    before_s = simulate(order, placement, stages, network).makespan_s
    index = data.draw(st.integers(0, len(stages) - 1))
    name = data.draw(st.sampled_from(["forward_s", "input_gradient_s", "weight_gradient_s", "update_s"]))
    slower = list(stages)
    slower[index] = replace(stages[index], **{name: getattr(stages[index], name) + 1.0})
    assert simulate(order, placement, slower, network).makespan_s >= before_s
    later = replace(network, latency_s=network.latency_s + 1.0)
    assert simulate(order, placement, stages, later).makespan_s >= before_s


@settings(deadline=None)
@given(pipelines(), networks(), st.sampled_from([2.0**-30, 2.0**30]))
def test_unit_of_time_makes_no_difference(
    pipeline: tuple[Order, tuple[int, ...], list[StageCost]], network: Network, scale: float
) -> None:
    order, placement, stages = pipeline
    names = ("forward_s", "input_gradient_s", "weight_gradient_s", "update_s")
    scaled = [replace(cost, **{name: scale * getattr(cost, name) for name in names}) for cost in stages]
    slow = Network(network.latency_s * scale, network.bytes_per_s / scale, network.replica_bytes_per_s / scale)
    one, two = (
        simulate_replicas(order, placement, [costs] * 2, net)[0] for costs, net in ((stages, network), (scaled, slow))
    )
    assert two.makespan_s == one.makespan_s * scale
    assert two.bubble_ratio == one.bubble_ratio
    assert [span.begin_s for span in two.spans] == [span.begin_s * scale for span in one.spans]


@settings(deadline=None)
@given(pipelines(), networks())
def test_what_is_held_is_what_the_spans_say(
    pipeline: tuple[Order, tuple[int, ...], list[StageCost]], network: Network
) -> None:
    order, placement, stages = pipeline
    # Every computation takes some time here, so that all of them have spans.
    stages = [
        replace(cost, forward_s=cost.forward_s + 1, input_gradient_s=cost.input_gradient_s + 1, weight_gradient_s=1.0)
        for cost in stages
    ]
    timeline = simulate(order, placement, stages, network)
    assert timeline.peak_in_flight == in_flight(order, len(stages))
    held, most, peaks = [0] * len(stages), [0] * len(stages), [0] * len(order)
    for span in timeline.spans:
        if span.kind in ("forward", "backward", "weight_backward"):
            held[span.stage] += 1 if span.kind == "forward" else -1
            most[span.stage] = max(most[span.stage], held[span.stage])
            here = [index for index, rank in enumerate(placement) if rank == span.rank]
            peaks[span.rank] = max(
                peaks[span.rank], sum(held[index] * stages[index].activation_bytes for index in here)
            )
    assert timeline.peak_in_flight == tuple(most)
    assert timeline.peak_activation_bytes == tuple(peaks)
    assert held == [0] * len(stages)


@settings(deadline=None)
@given(st.lists(seconds, min_size=1, max_size=5), st.integers(1, 12))
def test_idle_share_of_uneven_stages_is_an_upper_bound(loads: list[float], num_microbatches: int) -> None:
    """The formula lets every stage fill and drain as slowly as the largest; GPipe does so only when all are equal."""
    order = simulated_order(SCHEDULES["gpipe"], len(loads), 1, num_microbatches)
    timeline = simulate(order, range(len(loads)), [stage(load, 2 * load) for load in loads])
    expected = expected_bubble_ratio(loads, num_microbatches)
    if max(loads) > 0:
        assert timeline.bubble_ratio <= expected + 1e-12
    if len(set(loads)) == 1 and loads[0]:
        assert timeline.bubble_ratio == pytest.approx(expected, abs=1e-12)
    # Forwards and backwards each take the sum over stages, and the largest once more for every further microbatch.
    assert timeline.makespan_s == 3 * (sum(loads) + (num_microbatches - 1) * max(loads))
