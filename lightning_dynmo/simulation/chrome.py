"""Timelines as files that chrome://tracing and ui.perfetto.dev show."""

import json
from pathlib import Path
from typing import Any

from lightning_dynmo.simulation.timeline import Timeline


def write_chrome_trace(path: Path, timeline: Timeline) -> None:
    """Writes a timeline: a row per rank, and beneath it one for its sums of gradients, which go on beside the rest.

    Args:
        path: The file.
        timeline: What it is to show.
    """
    events: list[dict[str, Any]] = []
    for rank in range(len(timeline.busy_s)):
        for row, name in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank}, sums")):
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}})
            events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": row, "args": {"sort_index": row}})
    for span in timeline.spans:
        events.append(
            {
                "name": span.kind if span.microbatch is None else f"{span.kind} {span.microbatch}",
                "cat": span.kind,
                "ph": "X",
                "pid": 0,
                "tid": 2 * span.rank + (span.kind == "gradient_sum"),
                "ts": span.begin_s * 1e6,
                "dur": (span.end_s - span.begin_s) * 1e6,
                "args": {"stage": span.stage, "microbatch": span.microbatch},
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
