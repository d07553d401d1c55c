"""What a pipeline would do, worked out without running it. Pure Python and numpy."""

from lightning_dynmo.simulation.actions import Action, ActionKind, Order
from lightning_dynmo.simulation.costs import LayerCost, Network, StageCost, stage_costs
from lightning_dynmo.simulation.recording import (
    RecordedStep,
    Recording,
    check_appendable,
    header_line,
    read_recording,
    step_line,
)

__all__ = [
    "Action",
    "ActionKind",
    "LayerCost",
    "Network",
    "Order",
    "RecordedStep",
    "Recording",
    "StageCost",
    "check_appendable",
    "header_line",
    "read_recording",
    "stage_costs",
    "step_line",
]
