"""Many steps at once: the times that `simulate_replicas` gives, for thousands of pipelines in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dynmo.simulation.actions import Order
from lightning_dynmo.simulation.costs import Network, StageCost
from lightning_dynmo.simulation.execution import execute

_MOST = 4096
"""Pipelines in one pass; more would not fit into the cache of a core."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One training step of all replicas.

    Attributes:
        makespan_s: Seconds from the begin of the step to the end of the last rank of all.
        bubble_ratio: Share of that time in which ranks do not compute, over all replicas, in ``[0, 1]``.
    """

    makespan_s: float
    bubble_ratio: float


def simulate_steps(
    order: Order, placement: Sequence[int], steps: Sequence[Sequence[Sequence[StageCost]]], network: Network
) -> list[StepTime]:
    """Returns the times of many steps; each as `simulate_replicas` would find it.

    Args:
        order: What each rank does.
        placement: The rank of each stage, ``[S]``.
        steps: Costs of the stages, ``[S]``, in each replica, at each step; with the same number of replicas.
        network: How long messages take.
    """
    num_microbatches = 1 + max(action.microbatch for actions in order.values() for action in actions)
    groups: dict[tuple[bool, ...], list[int]] = {}
    for index, replicas in enumerate(steps):
        groups.setdefault(tuple(stage.sends_gradient for stage in replicas[0]), []).append(index)
    found: list[StepTime | None] = [None] * len(steps)
    for indices in groups.values():
        size = max(_MOST // len(steps[indices[0]]), 1)
        for begin in range(0, len(indices), size):
            part = indices[begin : begin + size]
            times = _simulate(order, placement, [steps[index] for index in part], network, num_microbatches)
            for index, time in zip(part, times, strict=True):
                found[index] = time
    return [time for time in found if time is not None]


def _simulate(
    order: Order,
    placement: Sequence[int],
    steps: Sequence[Sequence[Sequence[StageCost]]],
    network: Network,
    num_microbatches: int,
) -> list[StepTime]:
    shape = (len(steps), len(steps[0]))
    stages = _as_arrays(steps)
    execution: Any = execute(order, placement, stages, network, many=True)
    ended_s = [np.broadcast_to(time, shape[0] * shape[1]).reshape(shape) for time in execution.ended_s]
    ready_s = [np.broadcast_to(time, shape[0] * shape[1]).reshape(shape).max(axis=1) for time in execution.gradients_s]
    share = 2 * (shape[1] - 1) / shape[1]
    free_s: list[Any] = [0.0] * len(ended_s)
    # Each rank begins its sums in the order of its schedule, which is that of the times in any of the pipelines.
    for stage in sorted(range(len(placement)), key=lambda stage: float(np.ravel(execution.gradients_s[stage])[0])):
        rank, num_bytes = placement[stage], _cases(stages[stage].gradient_bytes, shape).max(axis=1)
        begin_s = np.maximum(ready_s[stage], free_s[rank])
        free_s[rank] = begin_s + share * num_bytes / network.replica_bytes_per_s
    makespan_s, busy_s = np.zeros(shape[0]), np.zeros(shape[0])
    for rank, ended in enumerate(ended_s):
        updates = sum(
            _cases(cost.update_s, shape) for cost, owner in zip(stages, placement, strict=True) if owner == rank
        )
        last = np.maximum(ended, np.reshape(free_s[rank], (-1, 1))) + updates
        makespan_s = np.maximum(makespan_s, last.max(axis=1))
    for cost in stages:
        computed = _cases(cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s, shape) * num_microbatches
        busy_s += (computed + _cases(cost.update_s, shape)).sum(axis=1)
    total_s = makespan_s * len(ended_s) * shape[1]
    idle = np.where(total_s > 0, np.clip(1 - busy_s / np.where(total_s > 0, total_s, 1), 0, 1), 0.0)
    return [StepTime(float(time), float(ratio)) for time, ratio in zip(makespan_s, idle, strict=True)]


def _as_arrays(steps: Sequence[Sequence[Sequence[StageCost]]]) -> list[StageCost]:
    """Returns one cost per stage, whose numbers are arrays over steps and replicas; the flag is that of all."""
    pipelines = [stages for replicas in steps for stages in replicas]
    numbers = [field.name for field in fields(StageCost) if field.name != "sends_gradient"]
    joined = []
    for costs in zip(*pipelines, strict=True):
        values: dict[str, Any] = {name: np.array([getattr(cost, name) for cost in costs], float) for name in numbers}
        joined.append(StageCost(**values, sends_gradient=costs[0].sends_gradient))
    return joined


def _cases(values: Any, shape: tuple[int, int]) -> NDArray[np.float64]:
    return np.asarray(values, float).reshape(shape)
