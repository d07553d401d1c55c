"""What a pipeline would do, worked out without running it. Pure Python and numpy."""

from lightning_dynmo.simulation.actions import Action, ActionKind, Order
from lightning_dynmo.simulation.costs import LayerCost, Network, StageCost, stage_costs

__all__ = ["Action", "ActionKind", "LayerCost", "Network", "Order", "StageCost", "stage_costs"]
