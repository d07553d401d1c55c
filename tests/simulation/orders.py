"""Orders for the simulation: those of the library, and some written by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_dynmo.pipeline.schedules import find_schedule, simulated_order
from lightning_dynmo.simulation import Action, ActionKind, Network, Order, StageCost, Timeline, simulate

KINDS: dict[str, ActionKind] = {
    "F": "forward",
    "B": "backward",
    "I": "input_backward",
    "W": "weight_backward",
    "SEND_F": "send_activations",
    "RECV_F": "receive_activations",
    "SEND_B": "send_gradients",
    "RECV_B": "receive_gradients",
}


def written(*ranks: str) -> Order:
    """Reads what each rank does, in torch's way of writing: ``"1RECV_F0 1F0"`` is stage 1 and microbatch 0."""
    order = {}
    for rank, text in enumerate(ranks):
        found = [re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", word) for word in text.split()]
        order[rank] = [Action(KINDS[match[2]], int(match[1]), int(match[3])) for match in found if match]
        assert len(order[rank]) == len(found)
    return order


def stage(forward_s: float, backward_s: float = 0.0, update_s: float = 0.0, sends_gradient: bool = True) -> StageCost:
    """Returns a stage whose backward runs whole, as in GPipe and 1F1B."""
    return StageCost(forward_s, backward_s / 2, backward_s / 2, sends_gradient, update_s=update_s)


def run(schedule: str, stages: Sequence[StageCost], num_microbatches: int, network: Network | None = None) -> Timeline:
    """Simulates one of the library's schedules, with its own number of stages per rank."""
    found = find_schedule(schedule)
    num_ranks = len(stages) // found.stages_per_rank
    order = simulated_order(found, num_ranks, found.stages_per_rank, num_microbatches)
    placement = found.place(num_ranks, found.stages_per_rank)
    return simulate(order, placement, stages) if network is None else simulate(order, placement, stages, network)
