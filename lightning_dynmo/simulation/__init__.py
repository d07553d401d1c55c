"""What a pipeline would do, worked out without running it. Pure Python and numpy; pictures need matplotlib."""

from lightning_dynmo.simulation.actions import Action, ActionKind, Order
from lightning_dynmo.simulation.costs import LayerCost, Network, StageCost, stage_costs
from lightning_dynmo.simulation.execution import Span, SpanKind
from lightning_dynmo.simulation.memory import in_flight
from lightning_dynmo.simulation.recording import (
    RecordedStep,
    Recording,
    check_appendable,
    header_line,
    read_recording,
    step_line,
)
from lightning_dynmo.simulation.timeline import Timeline, simulate, simulate_replicas
from lightning_dynmo.simulation.timeline_drawing import draw_timelines
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
    "RecordedStep",
    "Recording",
    "Span",
    "SpanKind",
    "SparseAttentionTrace",
    "StageCost",
    "Timeline",
    "check_appendable",
    "draw_timelines",
    "header_line",
    "in_flight",
    "read_recording",
    "simulate",
    "simulate_replicas",
    "stage_costs",
    "step_line",
    "trace_events",
    "write_trace",
]
