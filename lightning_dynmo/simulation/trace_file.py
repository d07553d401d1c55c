"""Timelines as files for chrome://tracing and ui.perfetto.dev."""

import json
from pathlib import Path
from typing import Any

from lightning_dynmo.simulation.execution import Span
from lightning_dynmo.simulation.timeline import Timeline

_COMPUTING, _SUMMING = 0, 1
_PROCESSES = {_COMPUTING: "computing", _SUMMING: "sums of gradients over replicas"}


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline in the Trace Event Format: one thread per rank, times in microseconds.

    Sums over replicas go on beside the computations, so they are threads of their own.
    """
    events: list[dict[str, Any]] = []
    for process, name in _PROCESSES.items():
        spans = [span for span in timeline.spans if (span.kind == "gradient_sum") == (process == _SUMMING)]
        if spans:
            events.append(_named(process, 0, "process_name", {"name": name}))
            for rank in range(len(timeline.busy_s)):
                events.append(_named(process, rank, "thread_name", {"name": f"rank {rank}"}))
                events.append(_named(process, rank, "thread_sort_index", {"sort_index": rank}))
            events += [_event(process, span) for span in spans]
    other = {"makespan_s": timeline.makespan_s, "bubble_ratio": timeline.bubble_ratio}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Writes a timeline for chrome://tracing or ui.perfetto.dev.

    Args:
        timeline: The step.
        path: The file, such as ``"step.json"``.
    """
    Path(path).write_text(json.dumps(trace_events(timeline)))


def _named(process: int, rank: int, what: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": rank, "args": args}


def _event(process: int, span: Span) -> dict[str, Any]:
    # The viewers count in nanoseconds: rounded to these, what follows at once does not seem to overlap.
    begin_ns, end_ns = round(span.begin_s * 1e9), round(span.end_s * 1e9)
    words = span.kind.replace("_", " ")
    return {
        "ph": "X",
        "name": words if span.microbatch is None else f"{words} {span.microbatch}",
        "cat": span.kind,
        "pid": process,
        "tid": span.rank,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
        "args": {"stage": span.stage} | ({} if span.microbatch is None else {"microbatch": span.microbatch}),
    }
