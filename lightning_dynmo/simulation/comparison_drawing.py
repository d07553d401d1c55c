"""Pictures of simulated trainings, 1200 pixels wide, in the form of the paper's figures 1, 3 and 4.

Colours are those of Okabe and Ito, which stay apart for the colour-blind; where two are alike, hatches tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dynmo.simulation.timeline_drawing import new_figure
from lightning_dynmo.simulation.training import DENSE, OPTIMUM, STATIC, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 100
_WIDTH_INCHES = 12.0
_STATIC_COLORS = {DENSE: "#D9D9D9", STATIC: "#4D4D4D"}
_COLORS = ("#8C8C8C", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#CC79A7", "#F0E442")
_OPTIMUM_COLOR, _BOUND_COLOR = "#009E73", "#000000"
_PARTS = (("profiling", "#56B4E9", ""), ("deciding", "#E69F00", "//"), ("migrating", "#009E73", ".."))


def draw_idleness(path: Path, comparisons: Mapping[str, Comparison], title: str) -> None:
    """Draws the share of time in which ranks idle, per scheme and plan, as the paper's figure 1.

    Args:
        path: The file.
        comparisons: By scheme.
        title: What was simulated.
    """
    figure, (axes,) = _figure(6.5, 1)
    names = [name for name in next(iter(comparisons.values())).runs if name != OPTIMUM]
    _bars(
        axes,
        list(comparisons),
        {name: [100 * found.runs[name].idleness for found in comparisons.values()] for name in names},
        [100 * found.runs[OPTIMUM].idleness for found in comparisons.values()],
    )
    axes.set_ylabel("idle share of training steps (%)")
    axes.set_ylim(0, 100)
    axes.set_title(title, loc="left")
    _legend(figure, axes)
    figure.savefig(path, dpi=_DPI)


def draw_throughput(path: Path, comparisons: Mapping[str, Comparison], title: str) -> None:
    """Draws the throughput of each plan over both baselines, as the paper's figure 3.

    Args:
        path: The file.
        comparisons: By scheme.
        title: What was simulated.
    """
    figure, panels = _figure(9.5, 2)
    baselines = ((STATIC, "dynamic model, static partition"), (DENSE, "dense model"))
    for axes, (baseline, words) in zip(panels, baselines, strict=True):
        found = list(comparisons.values())
        names = [name for name in found[0].runs if name not in (DENSE, OPTIMUM)]
        values = {name: [entry.speedup(name, baseline) for entry in found] for name in names}
        optima = [entry.speedup(OPTIMUM, baseline) for entry in found]
        _bars(axes, list(comparisons), values, optima)
        _bounds(axes, [entry.bound * entry.speedup(STATIC, baseline) for entry in found], [*values.values(), optima])
        axes.axhline(1.0, color="black", linewidth=0.8, zorder=1)
        axes.set_ylabel("speed-up (×)")
        axes.set_title(f"over: {words}", loc="left")
    figure.suptitle(title, x=0.01, ha="left")
    _legend(figure, panels[0])
    figure.savefig(path, dpi=_DPI)


def draw_overhead(path: Path, comparisons: Mapping[str, Comparison], title: str) -> None:
    """Draws what measuring, deciding and moving take of the whole time, as the paper's figure 4.

    Args:
        path: The file.
        comparisons: By scheme.
        title: What was simulated.
    """
    rows = [
        (scheme, run) for scheme, found in comparisons.items() for run in found.runs.values() if run.num_measurements
    ]
    figure, (axes,) = _figure(1.8 + 0.28 * max(len(rows), 4), 1)
    lefts = [0.0] * len(rows)
    for part, color, hatch in _PARTS:
        shares = [100 * getattr(run, f"{part}_s") / run.total_s for _, run in rows]
        axes.barh(range(len(rows)), shares, left=lefts, color=color, hatch=hatch, edgecolor="white", label=part)
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_yticks(range(len(rows)), [f"{scheme.replace('_', ' ')}: {run.name}" for scheme, run in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.invert_yaxis()
    axes.set_xlabel("share of the whole time (%)")
    axes.grid(axis="x", linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left")
    _legend(figure, axes)
    figure.savefig(path, dpi=_DPI)


def _figure(height_inches: float, num_panels: int) -> tuple[Figure, list[Axes]]:
    """Returns a figure and its panels from top to bottom."""
    figure = new_figure(_WIDTH_INCHES, height_inches)
    panels = list(figure.subplots(num_panels, 1, squeeze=False)[:, 0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _bars(axes: Axes, groups: Sequence[str], values: Mapping[str, Sequence[float]], optima: Sequence[float]) -> None:
    """Draws a bar per group and name, and a line across each group for what is optimal."""
    width = 0.84 / len(values)
    others = [name for name in values if name not in _STATIC_COLORS]
    for position, (name, heights) in enumerate(values.items()):
        color = _STATIC_COLORS.get(name) or _COLORS[others.index(name) % len(_COLORS)]
        hatch = "//" if name.endswith("parameters") else ""
        lefts = [group - 0.42 + width * (position + 0.5) for group in range(len(groups))]
        axes.bar(lefts, heights, width, color=color, hatch=hatch, edgecolor="white", linewidth=0.5, label=name)
    ranges = [(group - 0.45, group + 0.45) for group in range(len(groups))]
    for number, (height, (left, right)) in enumerate(zip(optima, ranges, strict=True)):
        label = OPTIMUM if number == 0 else None
        axes.plot([left, right], [height, height], color=_OPTIMUM_COLOR, linewidth=2.5, label=label, zorder=4)
    axes.set_xticks(range(len(groups)), [group.replace("_", " ") for group in groups])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(axis="y", linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)


def _bounds(axes: Axes, bounds: Sequence[float], values: Sequence[Sequence[float]]) -> None:
    """Draws what balancing can gain at most; far above everything else, a number at the upper edge says it."""
    highest = max(max(row) for row in values)
    top = max(1.3 * highest, min(1.1 * max(bounds), 3 * highest))
    axes.set_ylim(0, top)
    for group, bound in enumerate(bounds):
        inside = bound <= 0.97 * top
        height = bound if inside else 0.95 * top
        label = "granularity bound" if group == 0 else None
        marker = "v" if inside else "^"
        axes.plot([group], [height], marker, color=_BOUND_COLOR, markersize=9, label=label, zorder=5)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(f"{bound:.1f}×", (group, height), (9, 0), textcoords="offset points", va="center", bbox=box)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
