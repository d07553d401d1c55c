"""What a pipeline would do, worked out without running it. Pure Python and numpy."""

from lightning_dynmo.simulation.actions import Action, ActionKind, Order
from lightning_dynmo.simulation.costs import LayerCost, Network, StageCost, stage_costs
from lightning_dynmo.simulation.execution import Span, SpanKind
from lightning_dynmo.simulation.memory import in_flight
from lightning_dynmo.simulation.timeline import Timeline, simulate, simulate_replicas
from lightning_dynmo.simulation.trace_file import trace_events, write_trace
from lightning_dynmo.simulation.traces import (
    TRACES,
    CostTrace,
    EarlyExitTrace,
    FreezingTrace,
    MoDTrace,
    MoETrace,
    PruningTrace,
    SparseAttentionTrace,
)

__all__ = [
    "TRACES",
    "Action",
    "ActionKind",
    "CostTrace",
    "EarlyExitTrace",
    "FreezingTrace",
    "LayerCost",
    "MoDTrace",
    "MoETrace",
    "Network",
    "Order",
    "PruningTrace",
    "Span",
    "SpanKind",
    "SparseAttentionTrace",
    "StageCost",
    "Timeline",
    "in_flight",
    "simulate",
    "simulate_replicas",
    "stage_costs",
    "trace_events",
    "write_trace",
]
