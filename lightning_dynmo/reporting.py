"""What users read: a line for each rebalance and a table at the end."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_dynmo.pipeline import PipelineRuntime, Rebalance, simulated_order
from lightning_dynmo.planning import Assignment, LoadMetric, Move, imbalance
from lightning_dynmo.simulation import LayerCost, Timeline, simulate, stage_costs


def rebalance_line(step: int, result: Rebalance, runtime: PipelineRuntime) -> str:
    """Returns one line: what moved, what it cost and what it gains, or why nothing moved."""
    decision, migration, load = result.decision, result.migration, runtime.load
    prediction, unit = decision.prediction, unit_of(runtime)
    before = format_load(prediction.bottleneck_before, load)
    if migration is None:
        return f"[dynmo] step {step}: nothing moved, {decision.reason}; largest {unit} load {before}"
    moved = (
        f"{list(result.before.balance)} -> {list(decision.proposed.balance)}, moved {_layers(migration.moves, unit)} "
        f"({format_bytes(migration.moved_bytes)}) in {result.duration_s * 1e3:.0f} ms"
    )
    if decision.undone:
        return f"[dynmo] step {step}: undone, {moved}; {decision.reason}"
    after = format_load(prediction.bottleneck_after, load)
    change = f"largest {unit} load {before} -> {after} ({-prediction.gain:+.0%})"
    return f"[dynmo] step {step}: {moved}; {change}; {decision.reason}"


def final_table(runtime: PipelineRuntime, num_microbatches: int) -> str:
    """Returns a table of loads under the first and the last assignment, for the costs measured last.

    Args:
        runtime: After training.
        num_microbatches: Microbatches per batch.
    """
    profile, problem = runtime.profile, runtime.rebalancer.problem
    assert profile is not None
    assert problem is not None
    unit, splits = unit_of(runtime), (runtime.initial_assignment, runtime.assignment)
    title = f"{unit.capitalize()} loads per batch, by {runtime.load}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in (unit, "static: layers", "load", "rebalanced: layers", "load"):
        table.add_column(column, justify="right")
    loads = [problem.rank_times(split) for split in splits]
    for rank in range(problem.num_ranks):
        cells = [
            cell
            for split, part in zip(splits, loads, strict=True)
            for cell in (_layers_of(split, rank, runtime.placement), format_load(part[rank], runtime.load))
        ]
        table.add_row(str(rank), *cells)
    table.add_section()
    bubbles = [expected_timeline(runtime, split, num_microbatches).bubble_ratio for split in splits]
    for name, (left, right) in (
        ("largest", [format_load(max(part), runtime.load) for part in loads]),
        ("imbalance", [f"{imbalance(part):.2f}" for part in loads]),
        ("bubble", [f"{bubble:.1%}" for bubble in bubbles]),
    ):
        table.add_row(name, "", left, "", right)
    buffer = io.StringIO()
    console = Console(file=buffer, width=100)
    console.print(table)
    console.print(
        f"Bubble measured last: {profile.bubble_ratio:.1%}.\nProfiling, planning and moving took "
        f"{runtime.overhead_s:.2f} s, {runtime.overhead_share:.2%} of the training time.",
        highlight=False,
    )
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def expected_timeline(runtime: PipelineRuntime, assignment: Assignment, num_microbatches: int) -> Timeline:
    """Returns how a step would go under an assignment, with the times measured last and messages that take none."""
    assert runtime.profile is not None
    problem = runtime.rebalancer.problem
    assert problem is not None
    first = next((index for index, load in enumerate(runtime.profile.loads) if load.backward_s > 0), 0)
    owners = [runtime.placement[problem.current.stage_of(layer)] for layer in range(problem.num_layers)]
    speeds = runtime.rebalancer.rank_speeds or [1.0] * problem.num_ranks
    costs = []
    for index, (load, owner) in enumerate(zip(runtime.profile.loads, owners, strict=True)):
        scale = speeds[owner] / speeds[runtime.placement[assignment.stage_of(index)]] / num_microbatches
        backward_s = load.backward_s * scale
        # Measured as a whole. Where a schedule splits it, about half is for the gradients of the input.
        of_input = backward_s / 2 if index > first else 0.0
        costs.append(LayerCost(load.forward_s * scale, of_input, backward_s - of_input, trains=load.backward_s > 0))
    order = simulated_order(runtime.schedule, problem.num_ranks, runtime.stages_per_rank, num_microbatches)
    return simulate(order, runtime.placement, stage_costs(costs, assignment))


def unit_of(runtime: PipelineRuntime) -> str:
    """Returns what shares the load: stages, or where there are several on each rank, ranks."""
    return "stage" if runtime.stages_per_rank == 1 else "rank"


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


def _layers(moves: Sequence[Move], unit: str) -> str:
    targets: dict[tuple[int, int], list[int]] = {}
    for move in moves:
        targets.setdefault((move.source, move.target), []).append(move.layer)
    return ", ".join(
        f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))} from {unit} {source} to {target}"
        for (source, target), layers in targets.items()
    )


def _layers_of(assignment: Assignment, rank: int, placement: Sequence[int]) -> str:
    return ", ".join(_range(assignment.layers_of(stage)) for stage, owner in enumerate(placement) if owner == rank)


def _range(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
