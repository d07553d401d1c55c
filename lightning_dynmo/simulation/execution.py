"""Carries out a schedule on clocks instead of devices: `pipeline/execution.py`, with seconds in place of tensors.

What waits for what is the same there and here. Each rank goes through its actions in order. A message begins to travel
once both of its ends have asked for it, as with gloo and NCCL, and behind those that its sender has sent to the same
rank before. A computation waits for the message that it needs; a send for the oldest one, where too many are on their
way. No time depends on which rank is looked at first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_dynmo.simulation.actions import Action, Computation, Order
from lightning_dynmo.simulation.costs import Network, StageCost

MAX_SENDING = 8
"""Messages of a rank that are on their way at a time, as in the library."""

SpanKind: TypeAlias = Literal[Computation, "gradient_sum", "update"]

Message: TypeAlias = tuple[str, int, int]
"""What it is for: ``"activations"`` or ``"gradients"``, the stage that takes it, and the microbatch."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time on a rank.

    Attributes:
        rank: The rank.
        stage: The stage.
        kind: A computation, the sum of a stage's gradients over replicas, or the optimizer's update.
        microbatch: The microbatch; None for what is done once per step.
        begin_s: When it begins, in seconds from the begin of the step.
        end_s: When it ends.
    """

    rank: int
    stage: int
    kind: SpanKind
    microbatch: int | None
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Execution:
    """One iteration of a schedule.

    Attributes:
        spans: The computations, those of each rank in order. What takes no time has no span.
        gradients_s: When each stage has all its gradients, ``[S]``.
        ended_s: When each rank has done all its actions and all that it has sent has left, ``[R]``.
    """

    spans: list[Span]
    gradients_s: list[float]
    ended_s: list[float]


def execute(order: Order, placement: Sequence[int], stages: Sequence[StageCost], network: Network) -> Execution:
    """Carries out all ranks' actions.

    Args:
        order: What each rank does.
        placement: The rank of each stage.
        stages: Cost of each stage.
        network: How long messages take.

    Raises:
        RuntimeError: If a rank waits for what never comes, or sends what it does not have.
    """
    links = _Links(network)
    ranks = [_Rank(rank, placement, stages, links) for rank in range(len(order))]
    runs = [rank.run(order[rank.index]) for rank in ranks]
    waiting: dict[Message, list[int]] = {}
    ready = deque(range(len(ranks)))
    while ready:
        index = ready.popleft()
        missing = next(runs[index], None)
        if missing is not None:
            waiting.setdefault(missing, []).append(index)
        while links.news:
            ready.extend(waiting.pop(links.news.pop(), ()))
    if waiting:
        lines = [f"rank {rank} for {_words(message)}" for message, blocked in waiting.items() for rank in blocked]
        raise RuntimeError(f"The schedule waits for ever: {'; '.join(sorted(lines))}. {_CURE}")
    gradients_s = [ranks[rank].gradients_s.get(stage, 0.0) for stage, rank in enumerate(placement)]
    return Execution([span for rank in ranks for span in rank.spans], gradients_s, [rank.clock for rank in ranks])


class _Links:
    """The messages between ranks."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._sent: defaultdict[tuple[int, int], deque[tuple[Message, float, int]]] = defaultdict(deque)
        self._asked_s: dict[Message, float] = {}
        self._free_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.left_s: dict[Message, float] = {}
        self.arrived_s: dict[Message, float] = {}
        self.news: list[Message] = []
        """Messages whose times have become known."""

    def send(self, message: Message, link: tuple[int, int], at_s: float, num_bytes: int) -> None:
        self._sent[link].append((message, at_s, num_bytes))
        self._advance(link)

    def receive(self, message: Message, link: tuple[int, int], at_s: float) -> None:
        self._asked_s[message] = at_s
        self._advance(link)

    def _advance(self, link: tuple[int, int]) -> None:
        sent = self._sent[link]
        while sent and sent[0][0] in self._asked_s:
            message, at_s, num_bytes = sent.popleft()
            begin_s = max(at_s, self._asked_s.pop(message), self._free_s[link])
            left_s = begin_s + num_bytes / self._network.bytes_per_s
            self._free_s[link] = self.left_s[message] = left_s
            self.arrived_s[message] = left_s + self._network.latency_s
            self.news.append(message)


class _Rank:
    """What one rank does; its generators yield each message that has to be through before they can go on."""

    def __init__(self, index: int, placement: Sequence[int], stages: Sequence[StageCost], links: _Links) -> None:
        self.index = index
        self.clock = 0.0
        self.spans: list[Span] = []
        self.gradients_s: dict[int, float] = {}
        self._placement = placement
        self._stages = stages
        self._seconds = [_seconds_of(stage, cost) for stage, cost in enumerate(stages)]
        self._links = links
        self._made: set[Message] = set()
        self._sending: deque[Message] = deque()

    def run(self, actions: Sequence[Action]) -> Iterator[Message]:
        for action in actions:
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if kind == "send_activations":
                yield from self._send(("activations", stage + 1, microbatch), self._stages[stage].output_bytes)
            elif kind == "send_gradients":
                yield from self._send(("gradients", stage - 1, microbatch), self._stages[stage].input_bytes)
            elif kind == "receive_activations":
                self._receive(("activations", stage, microbatch), stage - 1)
            elif kind == "receive_gradients":
                self._receive(("gradients", stage, microbatch), stage + 1)
            else:
                yield from self._compute(kind, stage, microbatch)
        yield from self._wait_for_sends(0)

    def _compute(self, kind: Computation, stage: int, microbatch: int) -> Iterator[Message]:
        if kind == "forward":
            if stage:
                yield from self._take(("activations", stage, microbatch))
            self._made.add(("activations", stage + 1, microbatch))
        elif kind != "weight_backward":
            if stage + 1 < len(self._stages):
                yield from self._take(("gradients", stage, microbatch))
            self._made.add(("gradients", stage - 1, microbatch))
        begin_s = self.clock
        self.clock += self._seconds[stage][kind]
        if self.clock > begin_s:
            self.spans.append(Span(self.index, stage, kind, microbatch, begin_s, self.clock))
        if kind in ("backward", "weight_backward"):
            self.gradients_s[stage] = self.clock

    def _take(self, message: Message) -> Iterator[Message]:
        """Waits for a message, unless a neighbour on this rank has handed it over."""
        if message in self._made:
            self._made.remove(message)
        elif self._exists(message):
            arrived_s = self._links.arrived_s
            if message not in arrived_s:
                yield message
            self.clock = max(self.clock, arrived_s[message])

    def _send(self, message: Message, num_bytes: int) -> Iterator[Message]:
        if message not in self._made:
            raise RuntimeError(f"Rank {self.index} sends {_words(message)} before there are any. {_CURE}")
        self._made.remove(message)
        if self._exists(message):
            self._links.send(message, (self.index, self._placement[message[1]]), self.clock, num_bytes)
            self._sending.append(message)
            yield from self._wait_for_sends(MAX_SENDING)

    def _wait_for_sends(self, most: int) -> Iterator[Message]:
        left_s = self._links.left_s
        while len(self._sending) > most:
            oldest = self._sending.popleft()
            if oldest not in left_s:
                yield oldest
            self.clock = max(self.clock, left_s[oldest])

    def _receive(self, message: Message, source: int) -> None:
        if self._exists(message):
            self._links.receive(message, (self._placement[source], self.index), self.clock)

    def _exists(self, message: Message) -> bool:
        """Returns whether there is anything to send: no gradient leaves a stage with nothing before it that trains."""
        return message[0] == "activations" or self._stages[message[1] + 1].sends_gradient


_CURE = "Take the order of pipeline.schedules.simulated_order, which gives every message a send and a receive in time."


def _words(message: Message) -> str:
    kind, stage, microbatch = message
    return f"the {kind} of microbatch {microbatch} for stage {stage}"


def _seconds_of(stage: int, cost: StageCost) -> dict[Computation, float]:
    """Returns how long each computation takes.

    A stage whose input needs no gradient leaves the whole backward to the pass over the weights, as `Stage` does.
    """
    whole = cost.input_gradient_s + cost.weight_gradient_s
    split = stage > 0 and cost.sends_gradient
    return {
        "forward": cost.forward_s,
        "backward": whole,
        "input_backward": cost.input_gradient_s if split else 0.0,
        "weight_backward": cost.weight_gradient_s if split else whole,
    }
