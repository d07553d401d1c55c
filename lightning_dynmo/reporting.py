"""What users read: a line for each rebalance and a table at the end."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_dynmo.pipeline import PipelineRuntime, Rebalance
from lightning_dynmo.planning import Assignment, LoadMetric, Move, expected_bubble_ratio, imbalance, load_values


def rebalance_line(step: int, result: Rebalance, load: LoadMetric) -> str:
    """Returns one line: what moved, what it cost and what it gains, or why nothing moved."""
    prediction, migration = result.prediction, result.migration
    before = format_load(prediction.bottleneck_before, load)
    if migration is None:
        if result.proposed == result.before:
            why = f"{list(result.before.balance)} is the best split already"
        else:
            why = f"{list(result.proposed.balance)} would gain only {prediction.gain:.1%}"
        return f"[dynmo] step {step}: nothing moved, {why}; largest stage load {before}"
    after = format_load(prediction.bottleneck_after, load)
    return (
        f"[dynmo] step {step}: {list(result.before.balance)} -> {list(result.proposed.balance)}, moved "
        f"{_layers(migration.moves)} ({format_bytes(migration.moved_bytes)}) in {result.duration_s * 1e3:.0f} ms; "
        f"largest stage load {before} -> {after} ({-prediction.gain:+.0%})"
    )


def final_table(runtime: PipelineRuntime, num_microbatches: int) -> str:
    """Returns a table of stage loads under the first and the last assignment, for the costs measured last.

    Args:
        runtime: After training.
        num_microbatches: Microbatches per batch.
    """
    profile = runtime.profile
    assert profile is not None
    loads = load_values(profile.loads, runtime.load)
    static, now = runtime.initial_assignment, runtime.assignment
    table = Table(title=f"Stage loads per batch, by {runtime.load}", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("stage", "static: layers", "load", "rebalanced: layers", "load"):
        table.add_column(column, justify="right")
    before, after = static.stage_loads(loads), now.stage_loads(loads)
    for stage in range(now.num_stages):
        table.add_row(
            str(stage),
            _range(static, stage),
            format_load(before[stage], runtime.load),
            _range(now, stage),
            format_load(after[stage], runtime.load),
        )
    table.add_section()
    rows = [
        ("largest", [format_load(max(part), runtime.load) for part in (before, after)]),
        ("imbalance", [f"{imbalance(part):.2f}" for part in (before, after)]),
    ]
    if runtime.stages_per_rank == 1:  # the formula is that of one stage per rank
        rows.append(("bubble", [f"{expected_bubble_ratio(part, num_microbatches):.1%}" for part in (before, after)]))
    for name, (left, right) in rows:
        table.add_row(name, "", left, "", right)
    buffer = io.StringIO()
    console = Console(file=buffer, width=100)
    console.print(table)
    console.print(
        f"Bubble measured last: {profile.bubble_ratio:.1%}. Profiling, planning and moving took "
        f"{runtime.overhead_s:.2f} s, {runtime.overhead_share:.2%} of the training time.",
        highlight=False,
    )
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def format_load(value: float, load: LoadMetric) -> str:
    """Returns a load with its unit."""
    return f"{value * 1e3:.1f} ms" if load == "time" else f"{value:,.0f} {load}"


def format_bytes(count: float) -> str:
    """Returns a number of bytes as people read it, such as ``"1.5 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _layers(moves: Sequence[Move]) -> str:
    targets: dict[tuple[int, int], list[int]] = {}
    for move in moves:
        targets.setdefault((move.source, move.target), []).append(move.layer)
    return ", ".join(
        f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))} from stage {source} to {target}"
        for (source, target), layers in targets.items()
    )


def _range(assignment: Assignment, stage: int) -> str:
    layers = assignment.layers_of(stage)
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
