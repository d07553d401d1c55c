"""The pipeline schedules a user can name: which rank runs which stages, and what each rank does in which order.

The orders are torch's own; `Stage` and `run_schedule` carry them out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from lightning_dynmo import simulation
from lightning_dynmo._torch import Action, ActionType, Order, add_messages, compute_order

_SIMULATED: dict[ActionType, simulation.ActionKind] = {
    ActionType.FORWARD: "forward",
    ActionType.FULL_BACKWARD: "backward",
    ActionType.BACKWARD_INPUT: "input_backward",
    ActionType.BACKWARD_WEIGHT: "weight_backward",
    ActionType.SEND_F: "send_activations",
    ActionType.RECV_F: "receive_activations",
    ActionType.SEND_B: "send_gradients",
    ActionType.RECV_B: "receive_gradients",
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is known of a schedule.

    Attributes:
        name: As users write it.
        torch_class: torch's class of that schedule.
        stages_per_rank: Stages that each rank runs by default.
        fixed: Whether that is the only number possible.
        placement: ``"loop"`` puts stage s on rank s modulo the number of ranks; ``"v"`` goes down the ranks and up
            again, so that the first and the last stage share a rank.
        allows: Whether so many microbatches can run, given the number of ranks and of stages.
        splits_backward: Whether gradients of inputs and of weights are computed apart.
    """

    name: str
    torch_class: type
    stages_per_rank: int
    fixed: bool
    placement: Literal["loop", "v"]
    allows: Callable[[int, int, int], bool]
    splits_backward: bool = False

    def place(self, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Returns the rank that runs each stage."""
        down = tuple(range(num_ranks))
        if self.placement == "v":
            return down + down[::-1]
        return down * stages_per_rank


def _any_number(num_microbatches: int, num_ranks: int, num_stages: int) -> bool:
    return True


def _one_per_stage(num_microbatches: int, num_ranks: int, num_stages: int) -> bool:
    return num_microbatches >= num_stages


def _whole_rounds(num_microbatches: int, num_ranks: int, num_stages: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


_ALL = (
    Schedule("gpipe", ScheduleGPipe, 1, True, "loop", _any_number),
    Schedule("1f1b", Schedule1F1B, 1, True, "loop", _one_per_stage),
    Schedule("interleaved1f1b", ScheduleInterleaved1F1B, 2, False, "loop", _whole_rounds),
    Schedule("loopedbfs", ScheduleLoopedBFS, 2, False, "loop", _any_number),
    Schedule("interleavedzerobubble", ScheduleInterleavedZeroBubble, 2, False, "loop", _whole_rounds, True),
    Schedule("zbvzerobubble", ScheduleZBVZeroBubble, 2, True, "v", _any_number, True),
    Schedule("dualpipev", ScheduleDualPipeV, 2, True, "v", _one_per_stage, True),
)
SCHEDULES = {schedule.name: schedule for schedule in _ALL}


def find_schedule(name: str) -> Schedule:
    """Returns the schedule of that name; upper and lower case do not matter.

    Raises:
        ValueError: If there is none; suggests one that is spelt alike.
    """
    if name.lower() in SCHEDULES:
        return SCHEDULES[name.lower()]
    close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Unknown schedule {name!r}; choose one of {', '.join(map(repr, SCHEDULES))}.{hint}")


def check_stages_per_rank(schedule: Schedule, stages_per_rank: int | None) -> int:
    """Returns how many stages each rank runs: what the user asked for, or the schedule's own number.

    Raises:
        ValueError: If the schedule cannot run so many stages on a rank.
    """
    if stages_per_rank is None:
        return schedule.stages_per_rank
    if stages_per_rank < 1 or (schedule.fixed and stages_per_rank != schedule.stages_per_rank):
        only = f"runs exactly {schedule.stages_per_rank}" if schedule.fixed else "runs 1 or more"
        raise ValueError(
            f"Schedule {schedule.name!r} {only} stages on each rank, got stages_per_rank={stages_per_rank}. Leave "
            f"stages_per_rank at None{', or choose schedule=' + repr('interleaved1f1b') if schedule.fixed else ''}."
        )
    return stages_per_rank


def check_num_microbatches(schedule: Schedule, num_microbatches: int, num_ranks: int, num_stages: int) -> None:
    """Checks that a schedule can run so many microbatches.

    Raises:
        ValueError: If it cannot; names the nearest numbers that work.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}. Use 'auto' to have it chosen.")
    if schedule.allows(num_microbatches, num_ranks, num_stages):
        return
    near = [nearest_num_microbatches(schedule, num_microbatches, num_ranks, num_stages, step) for step in (-1, 1)]
    choices = " or ".join(f"num_microbatches={count}" for count in near if count is not None)
    needs = (
        f"at least as many microbatches as stages ({num_stages})"
        if schedule.allows is _one_per_stage
        else f"microbatches in equal rounds of {num_ranks} or more"
    )
    raise ValueError(
        f"Schedule {schedule.name!r} needs {needs}, got num_microbatches={num_microbatches} on {num_ranks} ranks. Use "
        f"{choices}, or a schedule that takes any number, such as "
        f"{'gpipe' if num_stages == num_ranks else 'loopedbfs'!r}."
    )


def nearest_num_microbatches(
    schedule: Schedule, wanted: int, num_ranks: int, num_stages: int, step: Literal[-1, 1] = -1
) -> int | None:
    """Returns the first number from `wanted` on, downwards or upwards, that the schedule allows; None if none does."""
    last = 0 if step == -1 else wanted + 2 * max(num_ranks, num_stages) + 1
    allowed = (count for count in range(wanted, last, step) if schedule.allows(count, num_ranks, num_stages))
    return next(allowed, None)


@lru_cache(maxsize=64)
def order_of(schedule: Schedule, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Order:
    """Returns what each rank does in one training iteration: computations and messages, in order.

    Where the schedule cannot run so few microbatches, as for the short last batch of an epoch, all forwards come before
    all backwards.
    """
    placement = schedule.place(num_ranks, stages_per_rank)
    if schedule.torch_class is Schedule1F1B:
        computations = _one_forward_one_backward(num_ranks, num_microbatches)
    elif schedule.allows(num_microbatches, num_ranks, len(placement)):
        computations = compute_order(schedule.torch_class, num_ranks, stages_per_rank, num_microbatches)
    else:
        computations = _forwards_then(ActionType.FULL_BACKWARD, placement, num_microbatches)
    return add_messages(computations, placement)


@lru_cache(maxsize=64)
def evaluation_order_of(placement: tuple[int, ...], num_microbatches: int) -> Order:
    """Returns what each rank does in an iteration without backward."""
    return add_messages(_forwards_then(None, placement, num_microbatches), placement)


@lru_cache(maxsize=64)
def simulated_order(
    schedule: Schedule, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> simulation.Order:
    """Returns what `order_of` returns, as the simulation takes it."""
    return {
        rank: tuple(
            simulation.Action(_SIMULATED[action.computation_type], action.stage_index, action.microbatch_index or 0)
            for action in actions
            if action.computation_type in _SIMULATED  # the others are marks, which `ScheduleRun` leaves out too
        )
        for rank, actions in order_of(schedule, num_ranks, stages_per_rank, num_microbatches).items()
    }


def _one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Order:
    """Returns the order of 1F1B; the one that torch's class offers forgets the last stage's first forward."""
    order: Order = {}
    for rank in range(num_ranks):
        ahead = min(num_ranks - 1 - rank, num_microbatches)
        forwards = [Action(rank, ActionType.FORWARD, microbatch) for microbatch in range(num_microbatches)]
        backwards = [Action(rank, ActionType.FULL_BACKWARD, microbatch) for microbatch in range(num_microbatches)]
        steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        order[rank] = forwards[:ahead] + steady + backwards[num_microbatches - ahead :]
    return order


def _forwards_then(backward: ActionType | None, placement: tuple[int, ...], num_microbatches: int) -> Order:
    stages = range(len(placement))
    order: Order = {rank: [] for rank in placement}
    for stage in stages:
        for microbatch in range(num_microbatches):
            order[placement[stage]].append(Action(stage, ActionType.FORWARD, microbatch))
    if backward is not None:
        for stage in reversed(stages):
            for microbatch in range(num_microbatches):
                order[placement[stage]].append(Action(stage, backward, microbatch))
    return order
