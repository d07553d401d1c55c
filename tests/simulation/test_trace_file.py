"""Traces for viewers, checked against the Trace Event Format."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_dynmo.pipeline.schedules import find_schedule, simulated_order
from lightning_dynmo.simulation import Network, StageCost, Timeline, simulate_replicas, trace_events, write_trace
from tests.simulation.orders import run, stage


def replicated_timeline() -> Timeline:
    """A timeline with every kind of span, in times that nanoseconds cannot say exactly."""
    schedule = find_schedule("dualpipev")
    order, placement = simulated_order(schedule, 2, 2, 6), schedule.place(2, 2)
    stages = [StageCost(1 / 3e3, 1 / 7e3, 1 / 9e3, index > 0, 1, 1, 1, 10, 1 / 11e3) for index in range(4)]
    return simulate_replicas(order, placement, [stages] * 3, Network(1e-5, 1e6, 1e5))[1]


def events_by_thread(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    return threads


def test_trace_is_valid(tmp_path: Path) -> None:
    timeline = replicated_timeline()
    write_trace(timeline, tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace == trace_events(timeline)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            assert set(event["args"]) == {"sort_index" if event["name"] == "thread_sort_index" else "name"}
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] > 0
    assert {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"} == {
        "forward",
        "backward",
        "input_backward",
        "weight_backward",
        "gradient_sum",
        "update",
    }


def test_trace_has_a_thread_per_rank_on_which_nothing_overlaps() -> None:
    timeline = replicated_timeline()
    threads = events_by_thread(trace_events(timeline))
    assert set(threads) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for (process, rank), events in threads.items():
        spans = [s for s in timeline.spans if s.rank == rank and (s.kind == "gradient_sum") == (process == 1)]
        assert len(events) == len(spans)
        for span, event in zip(spans, events, strict=True):
            assert event["ts"] == pytest.approx(span.begin_s * 1e6, abs=1e-3)
            assert event["ts"] + event["dur"] == pytest.approx(span.end_s * 1e6, abs=1e-3)
            assert event["args"].get("microbatch") == span.microbatch
            assert event["args"]["stage"] == span.stage
        for before, after in pairwise(events):
            # In whole nanoseconds, as the viewers count.
            assert round(1000 * (before["ts"] + before["dur"])) <= round(1000 * after["ts"])


def test_trace_names_events_and_threads() -> None:
    trace = trace_events(run("gpipe", [stage(1.0, 2.0, 0.5)] * 2, 1))
    names = [(event["tid"], event["name"], event["ts"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    assert names == [
        (0, "forward 0", 0.0),
        (0, "backward 0", 4e6),
        (0, "update", 6e6),
        (1, "forward 0", 1e6),
        (1, "backward 0", 2e6),
        (1, "update", 4e6),
    ]
    labels = [event["args"].get("name") for event in trace["traceEvents"] if event["name"] != "thread_sort_index"]
    assert labels[:3] == ["computing", "rank 0", "rank 1"]
    assert trace["otherData"] == {"makespan_s": 6.5, "bubble_ratio": pytest.approx(1 - 7 / 13)}
