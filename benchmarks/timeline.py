"""How long a step of a pipeline takes, given how long each stage takes: a replay of torch's 1F1B schedule.

Every stage is a list of actions: work for some time, post messages, wait for messages. A message is through once both
of its ends are posted, as with gloo; it takes no time itself. So what comes out is the time that the work alone and the
order of the schedule impose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

Message = tuple[str, int, int]
"""``"forward"`` or ``"backward"``, microbatch, and the stage behind the border that it crosses."""
Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds that one stage works.

    Attributes:
        forward_s: Forward of one microbatch.
        backward_s: Backward of one microbatch; 0 where the whole stage is frozen.
        update_s: Optimizer step, once per step of the pipeline.
        trains_below: Whether a gradient goes back to the stage before.
    """

    forward_s: float
    backward_s: float = 0.0
    update_s: float = 0.0
    trains_below: bool = True


@dataclass(frozen=True, slots=True)
class _Action:
    seconds: float = 0.0
    posts: Messages = ()
    waits: Messages = ()


def step_time(stages: Sequence[StageCost], num_microbatches: int) -> float:
    """Returns the seconds of a 1F1B step, from when all stages begin to when the last has updated its layers.

    Args:
        stages: Cost of each stage, first stage first.
        num_microbatches: Microbatches per step, at least as many as stages.
    """
    programs = [_program(stages, stage, num_microbatches) for stage in range(len(stages))]
    clocks = [0.0] * len(stages)
    positions = [0] * len(stages)
    posted: dict[Message, list[float]] = {}
    while True:
        progressed = False
        for stage, program in enumerate(programs):
            while positions[stage] < len(program):
                action = program[positions[stage]]
                if action.waits:
                    if any(len(posted.get(message, ())) < 2 for message in action.waits):
                        break  # the other end is not yet there
                    clocks[stage] = max(clocks[stage], *(max(posted[message]) for message in action.waits))
                for message in action.posts:
                    posted.setdefault(message, []).append(clocks[stage])
                clocks[stage] += action.seconds
                positions[stage] += 1
                progressed = True
        if all(position == len(program) for position, program in zip(positions, programs, strict=True)):
            return max(clocks)
        if not progressed:
            raise RuntimeError("The schedule waits for ever: a message has only one end.")


def best_split(costs: Sequence[StageCost], num_stages: int, num_microbatches: int) -> tuple[tuple[int, ...], float]:
    """Returns the contiguous split of layers with the shortest step, and its seconds.

    Args:
        costs: Cost of each layer; `trains_below` says whether a gradient goes back to the layer before.
        num_stages: Number of stages.
        num_microbatches: Microbatches per step.
    """
    splits = [
        tuple(end - start for start, end in pairwise((0, *borders, len(costs))))
        for borders in combinations(range(1, len(costs)), num_stages - 1)
    ]
    times = {split: step_time(merge(costs, split), num_microbatches) for split in splits}
    best = min(times, key=times.__getitem__)
    return best, times[best]


def merge(costs: Sequence[StageCost], balance: Sequence[int]) -> list[StageCost]:
    """Adds up the costs of layers to those of stages.

    Args:
        costs: Cost of each layer.
        balance: Layers per stage.
    """
    stages, start = [], 0
    for size in balance:
        layers = costs[start : start + size]
        stages.append(
            StageCost(
                sum(layer.forward_s for layer in layers),
                sum(layer.backward_s for layer in layers),
                sum(layer.update_s for layer in layers),
                layers[0].trains_below,
            )
        )
        start += size
    return stages


def _program(stages: Sequence[StageCost], stage: int, num_microbatches: int) -> list[_Action]:
    """Returns what a stage does in one step, in the order of torch's ``Schedule1F1B``."""
    cost, border = stages[stage], _Border(stages, stage, num_microbatches)
    warmup = min(num_microbatches, len(stages) - stage)
    program: list[_Action] = []
    in_flight: Messages = ()

    for microbatch in range(warmup):
        program += _exchange(border.from_previous(microbatch))
        program += [_Action(cost.forward_s), _Action(waits=in_flight)]
        # The last of these messages is sent together with the first backward's receive.
        in_flight = border.to_next(microbatch) if microbatch < warmup - 1 else ()
        program.append(_Action(posts=in_flight))
    in_flight = ()
    for microbatch in range(num_microbatches):
        newest = microbatch + warmup - 1
        program += _exchange(border.to_next(newest) + border.gradient_from_next(microbatch))
        program.append(_Action(cost.backward_s))
        if newest + 1 < num_microbatches:
            program += _exchange(border.gradient_to_previous(microbatch) + border.from_previous(newest + 1))
            program.append(_Action(cost.forward_s))
        else:
            program.append(_Action(waits=in_flight))
            in_flight = border.gradient_to_previous(microbatch)
            program.append(_Action(posts=in_flight))
    return [*program, _Action(waits=in_flight), _Action(cost.update_s)]


def _exchange(messages: Messages) -> list[_Action]:
    return [_Action(posts=messages), _Action(waits=messages)]


@dataclass(frozen=True, slots=True)
class _Border:
    """The messages of one stage; empty where there is no neighbour, no microbatch or no gradient."""

    stages: Sequence[StageCost]
    stage: int
    num_microbatches: int

    def to_next(self, microbatch: int) -> Messages:
        exists = self.stage + 1 < len(self.stages) and microbatch < self.num_microbatches
        return (("forward", microbatch, self.stage + 1),) if exists else ()

    def from_previous(self, microbatch: int) -> Messages:
        return (("forward", microbatch, self.stage),) if self.stage else ()

    def gradient_from_next(self, microbatch: int) -> Messages:
        exists = self.stage + 1 < len(self.stages) and self.stages[self.stage + 1].trains_below
        return (("backward", microbatch, self.stage + 1),) if exists else ()

    def gradient_to_previous(self, microbatch: int) -> Messages:
        return (("backward", microbatch, self.stage),) if self.stage and self.stages[self.stage].trains_below else ()
