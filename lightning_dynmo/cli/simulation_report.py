"""What `lightning-dynmo simulate` prints and writes: the paper's figures 1, 3 and 4 as tables, pictures and numbers."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lightning_dynmo.cli.terminal import new_table
from lightning_dynmo.simulation import draw_timelines, simulate, stage_costs, write_trace
from lightning_dynmo.simulation.comparison_drawing import draw_idleness, draw_overhead, draw_throughput
from lightning_dynmo.simulation.sources import RunCosts
from lightning_dynmo.simulation.training import DENSE, OPTIMUM, STATIC, Comparison, Machine

_PAPER_IDLENESS = {
    "moe": "25% to 8%",
    "pruning": "5 × dense",
    "freezing": "40%",
    "sparse_attention": "4 × dense",
    "early_exit": "5 × dense",
    "mod": "18% to 4%",
}
_PAPER_SPEEDUPS = {
    "moe": (1.23, STATIC),
    "pruning": (3.18, DENSE),
    "freezing": (2.23, STATIC),
    "sparse_attention": (4.02, DENSE),
    "early_exit": (4.52, DENSE),
    "mod": (1.17, STATIC),
}
"""What the paper reports, and over which of the two baselines that can be."""


_LEAST_WIDTH = 110
"""Below which tables would break numbers apart."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a simulation.

    Attributes:
        title: What was simulated.
        assumptions: What the numbers rest on.
        comparisons: By scheme, or by the recording's name.
        is_recorded: Whether costs are those of a recorded run, whose first measurement stands for the dense model.
        may_split: Whether it would help to cut the blocks in two.
    """

    title: str
    assumptions: str
    comparisons: Mapping[str, Comparison]
    is_recorded: bool
    may_split: bool

    def label(self, run: str) -> str:
        """Returns what a run is called for people."""
        return "first measurement" if run == DENSE and self.is_recorded else run


def print_report(report: Report) -> None:
    """Prints the tables, and what is to be known about them."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(f"{report.title}\n")
    _print_idleness(console, report)
    _print_throughput(console, report)
    _print_overhead(console, report)
    console.print(report.assumptions)
    bounds = {comparison.bound for comparison in report.comparisons.values()}
    console.print(
        f"Bound: with {max(bounds)} layers on a rank, moving whole layers gains at most a factor of {max(bounds)} over "
        "the static split, whatever they cost. Optimum: at each step the fastest of the exact split for its expected "
        "costs and the splits of all runs, with moves for free; what is drawn anew in every step nobody can foresee."
    )
    if not report.is_recorded:
        _print_paper(console, report)
    if report.may_split:
        console.print(
            "With fewer than 3 layers per stage there is little to balance. --split_blocks=true cuts blocks into "
            "attention and MLP layers, as GPT(split_blocks=True) does."
        )


def write_files(folder: Path, report: Report, sources: Mapping[str, RunCosts], machine: Machine) -> None:
    """Writes the numbers, the figures, and a step of the end of training before and after balancing.

    Args:
        folder: Where to.
        report: What came of the simulation.
        sources: Costs of the layers, by the same names.
        machine: What was simulated.
    """
    _write_numbers(folder / "simulation.csv", report)
    draw_idleness(folder / "idleness.png", report.comparisons, report.title)
    draw_throughput(folder / "throughput.png", report.comparisons, report.title)
    draw_overhead(folder / "overhead.png", report.comparisons, report.title)
    for name, comparison in report.comparisons.items():
        costs = sources[name]
        step = costs.periods[-1].typical_step
        best = max(_balanced(comparison), key=comparison.speedup, default=OPTIMUM)
        timelines = {}
        for when, run in (("before", STATIC), ("after", best)):
            assignment = comparison.runs[run].segments[-1].assignment
            stages = stage_costs(costs.layer_costs(step, 0), assignment)
            timeline = simulate(machine.order, machine.placement, stages, machine.network)
            write_trace(folder / f"step_{name}_{when}.json", timeline)
            timelines[f"{when} ({run})"] = timeline
        draw_timelines(folder / f"step_{name}.png", timelines, f"{name}, step {step}: {report.title}")
    Console(highlight=False, soft_wrap=True).print(f"Figures, numbers and steps are in {folder}")


def _balanced(comparison: Comparison) -> list[str]:
    """Returns the names of the runs that measure and may move layers."""
    return [name for name, run in comparison.runs.items() if run.num_measurements]


def _print_idleness(console: Console, report: Report) -> None:
    table = new_table("Idle share of training steps (figure 1)", ["balancer", *report.comparisons], words=["balancer"])
    names = next(iter(report.comparisons.values())).runs
    for name in [*(name for name in names if name != OPTIMUM), OPTIMUM]:
        shares = [comparison.runs[name].idleness for comparison in report.comparisons.values()]
        table.add_row(report.label(name), *(f"{share:.1%}" for share in shares))
    if not report.is_recorded:
        table.add_section()
        table.add_row("the paper", *(_PAPER_IDLENESS[scheme] for scheme in report.comparisons))
    console.print(table)


def _print_throughput(console: Console, report: Report) -> None:
    dense = report.label(DENSE)
    table = new_table(
        f"Throughput: speed-up over the dynamic model with a static split, and over the {dense} (figure 3)",
        ["balancer", "steps/s", "over static", "optimum", "bound", f"over {dense.split()[0]}", "optimum", "bound"],
        words=["balancer"],
    )
    for scheme, comparison in report.comparisons.items():
        table.add_row(scheme)
        for name, run in comparison.runs.items():
            if name in (DENSE, OPTIMUM):
                continue
            cells = []
            for baseline in (STATIC, DENSE):
                bound = comparison.bound * comparison.speedup(STATIC, baseline)
                numbers = (comparison.speedup(name, baseline), comparison.speedup(OPTIMUM, baseline), bound)
                cells += [f"{number:.2f}×" for number in numbers]
            table.add_row(f"  {name}", f"{run.steps_per_s:.4g}", *cells)
        table.add_section()
    console.print(table)


def _print_overhead(console: Console, report: Report) -> None:
    columns = ["balancer", "profiling", "deciding", "migrating", "together", "measured", "moves", "layers moved"]
    table = new_table("Overhead, as share of the whole time (figure 4)", columns, words=["balancer"])
    for scheme, comparison in report.comparisons.items():
        table.add_row(scheme)
        for name in _balanced(comparison):
            run = comparison.runs[name]
            parts = [run.profiling_s, run.deciding_s, run.migrating_s]
            cells = [f"{part / run.total_s:.4%}" for part in (*parts, sum(parts))]
            table.add_row(f"  {name}", *cells, *map(str, (run.num_measurements, run.num_moves, run.moved_layers)))
        table.add_section()
    console.print(table)


def _print_paper(console: Console, report: Report) -> None:
    far = []
    for scheme, comparison in report.comparisons.items():
        factor, baseline = _PAPER_SPEEDUPS[scheme]
        reached = comparison.speedup(OPTIMUM, baseline)
        last = comparison.runs[baseline].times[-1].makespan_s / comparison.runs[OPTIMUM].times[-1].makespan_s
        if max(reached, last) < factor:
            far.append(f"{scheme} {factor}× over {baseline} (here at best {reached:.2f}×, in the end {last:.2f}×)")
    if far:
        console.print(
            f"The paper reports more than moving layers can give under these costs: {'; '.join(far)}. Its pipelines of "
            "24 stages have 24 to 48 layers, 1 or 2 per stage, where balancing gains at most that factor."
        )


def _write_numbers(path: Path, report: Report) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                *("scheme", "run", "num_steps", "training_s", "profiling_s", "deciding_s", "migrating_s", "total_s"),
                "idleness",
                *("over_static", "over_dense", "optimum_over_static", "optimum_over_dense", "bound_over_static"),
                *("num_measurements", "num_moves", "moved_layers", "last_balance"),
            ]
        )
        for scheme, comparison in report.comparisons.items():
            for name, run in comparison.runs.items():
                writer.writerow(
                    [
                        *(
                            scheme,
                            name,
                            run.num_steps,
                            run.training_s,
                            run.profiling_s,
                            run.deciding_s,
                            run.migrating_s,
                            run.total_s,
                        ),
                        *(run.idleness, comparison.speedup(name), comparison.speedup(name, DENSE)),
                        *(comparison.speedup(OPTIMUM), comparison.speedup(OPTIMUM, DENSE), comparison.bound),
                        *(run.num_measurements, run.num_moves, run.moved_layers),
                        " ".join(map(str, run.segments[-1].assignment.balance)),
                    ]
                )
