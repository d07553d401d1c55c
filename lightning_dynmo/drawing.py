"""Pictures of simulated steps, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dynmo.simulation import Span, SpanKind, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people see apart whatever colours they see.
_COLOURS: dict[SpanKind, str] = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "input_backward": "#F0E442",
    "weight_backward": "#009E73",
    "gradient_sum": "#CC79A7",
    "update": "#4D4D4D",
}
_LABELS: dict[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input_backward": "backward of inputs",
    "weight_backward": "backward of weights",
    "gradient_sum": "sum of gradients over replicas",
    "update": "optimizer",
}
_IDLE = "#EBEBEB"
_WIDTH_INCHES, _ROW_INCHES, _DPI = 14.0, 0.42, 150
_DIGIT_WIDTH = 0.65  # of the size of the font
_FONT_POINTS, _SMALLEST_FONT_POINTS = 7.5, 4.5
_MANY = 150
"""Spans of a rank from which on they have no borders, which would hide them."""


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "One training step") -> None:
    """Draws a timeline into a picture: one row per rank, with microbatch numbers where there is room for them.

    Where a rank runs several stages, the later ones are lighter.

    Args:
        timeline: The step.
        path: The file; its ending chooses the format, such as ``"step.png"``.
        title: What stands above the picture, before the length of the step and its bubble.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure = new_figure(_WIDTH_INCHES, 1.3 + _ROW_INCHES * len(timeline.busy_s))
    axes = figure.subplots()
    _draw_bars(axes, timeline)
    _draw_numbers(axes, timeline)
    _draw_legend(figure, timeline)
    factor, unit = _unit(timeline.makespan_s)
    axes.set_title(
        f"{title}: {timeline.makespan_s * factor:.4g} {unit}, bubble ratio {100 * timeline.bubble_ratio:.1f} %",
        loc="left",
        fontsize=11,
    )
    axes.set_xlim(0.0, timeline.makespan_s or 1.0)
    axes.set_ylim(len(timeline.busy_s) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.busy_s)), [f"rank {rank}" for rank in range(len(timeline.busy_s))], fontsize=8)
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * factor:.4g}")
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=_DPI)


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Returns an empty figure, which needs no screen and leaves ``matplotlib.pyplot`` alone.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Pictures need matplotlib, which is not there ({error}). Install it with "
            f'pip install "lightning-dynmo[plots]".'
        ) from error
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_bars(axes: Axes, timeline: Timeline) -> None:
    for rank in range(len(timeline.busy_s)):
        axes.broken_barh([(0.0, timeline.makespan_s)], (rank - 0.42, 0.84), facecolor=_IDLE, linewidth=0)
    bars: dict[tuple[int, SpanKind, float], list[tuple[float, float]]] = {}
    for span, lightness in zip(timeline.spans, _lightness(timeline.spans), strict=True):
        bars.setdefault((span.rank, span.kind, lightness), []).append((span.begin_s, span.end_s - span.begin_s))
    border = 0.5 if len(timeline.spans) < _MANY * len(timeline.busy_s) else 0.0
    for (rank, kind, lightness), entries in bars.items():
        # A sum goes on beside the computations: a stripe at the foot of the row.
        rows = (rank + 0.22, 0.2) if kind == "gradient_sum" else (rank - 0.42, 0.84)
        colour = _lighter(_COLOURS[kind], lightness)
        axes.broken_barh(
            entries,
            rows,
            facecolor=colour,
            edgecolor="white",
            linewidth=border,
            zorder=2 if kind == "gradient_sum" else 1,
        )


def _draw_numbers(axes: Axes, timeline: Timeline) -> None:
    """Writes the microbatches' numbers into the bars of each stage and kind, where there is room in all of them."""
    points_per_second = 72 * 0.93 * _WIDTH_INCHES / timeline.makespan_s if timeline.makespan_s else 0.0
    groups: dict[tuple[int, SpanKind], list[Span]] = {}
    for span in timeline.spans:
        if span.microbatch is not None:
            groups.setdefault((span.stage, span.kind), []).append(span)
    for spans in groups.values():
        room = 0.9 * points_per_second * min(span.end_s - span.begin_s for span in spans)
        digits = max(len(str(span.microbatch)) for span in spans)
        size = min(_FONT_POINTS, room / (_DIGIT_WIDTH * digits))
        if size >= _SMALLEST_FONT_POINTS:
            for span in spans:
                middle = (span.begin_s + span.end_s) / 2
                axes.text(middle, span.rank, str(span.microbatch), size=size, ha="center", va="center_baseline")


def _draw_legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    drawn = {span.kind for span in timeline.spans}
    patches = [Patch(facecolor=colour, label=_LABELS[kind]) for kind, colour in _COLOURS.items() if kind in drawn]
    patches.append(Patch(facecolor=_IDLE, label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)


def _lightness(spans: Sequence[Span]) -> list[float]:
    """Returns how much lighter each span is drawn: the more, the later its stage among those of its rank."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.rank, set()).add(span.stage)
    steps = {
        (rank, stage): place / (2 * (len(found) - 1)) if len(found) > 1 else 0.0
        for rank, found in stages.items()
        for place, stage in enumerate(sorted(found))
    }
    return [steps[span.rank, span.stage] for span in spans]


def _lighter(colour: str, lightness: float) -> tuple[float, ...]:
    parts = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return tuple(part + lightness * (1 - part) for part in parts)


def _unit(seconds: float) -> tuple[float, str]:
    """Returns in which unit a time is easy to read, and how many of it make a second."""
    if seconds >= 1.0 or seconds == 0.0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
