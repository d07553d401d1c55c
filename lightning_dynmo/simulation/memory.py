"""How many microbatches a schedule holds, which follows from the order alone: time changes when, not how many."""

from collections.abc import Sequence

from lightning_dynmo.simulation.actions import Order
from lightning_dynmo.simulation.costs import StageCost

_LAST = ("backward", "weight_backward")
"""With these the backward of a microbatch is complete, and its activations are let go."""


def in_flight(order: Order, num_stages: int) -> tuple[int, ...]:
    """Returns the most microbatches whose activations each stage holds at a time, ``[S]``.

    Args:
        order: What each rank does.
        num_stages: Number of stages S.
    """
    held, most = [0] * num_stages, [0] * num_stages
    for actions in order.values():
        for action in actions:
            if action.kind == "forward":
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.kind in _LAST:
                held[action.stage] -= 1
    return tuple(most)


def peak_activation_bytes(order: Order, stages: Sequence[StageCost]) -> tuple[int, ...]:
    """Returns the most bytes of activations that each rank holds at a time, ``[R]``.

    Args:
        order: What each rank does.
        stages: Cost of each stage.
    """
    peaks = [0] * len(order)
    for rank, actions in order.items():
        held = 0
        for action in actions:
            if action.kind == "forward":
                held += stages[action.stage].activation_bytes
                peaks[rank] = max(peaks[rank], held)
            elif action.kind in _LAST:
                held -= stages[action.stage].activation_bytes
    return tuple(peaks)
