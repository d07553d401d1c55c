"""Pictures of simulated trainings: of the promised size, with every run, the optimum and the bound in them."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from lightning_dynmo.simulation import TRACES
from lightning_dynmo.simulation import comparison_drawing as drawing
from lightning_dynmo.simulation.training import OPTIMUM, Comparison, compare
from tests.simulation.test_training import PLANS, costs_of, machine


@pytest.fixture(scope="module")
def comparisons() -> dict[str, Comparison]:
    return {
        scheme: compare(costs_of(scheme, num_steps=8000, every_n_steps=2000), machine(), PLANS) for scheme in TRACES
    }


def colors(path: Path) -> set[tuple[int, ...]]:
    pixels = (imread(path)[::2, ::2, :3] * 255).round().astype(int)
    return {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}


def rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[start : start + 2], 16) for start in (1, 3, 5))


@pytest.mark.parametrize("draw", [drawing.draw_idleness, drawing.draw_throughput, drawing.draw_overhead])
def test_pictures_are_1200_pixels_wide_and_show_something(
    draw: object, comparisons: dict[str, Comparison], tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    draw(path, comparisons, "Six schemes")  # type: ignore[operator]
    height, width = imread(path).shape[:2]
    assert width == 1200
    assert 500 < height < 1200
    assert len(colors(path)) > 5


def test_every_run_has_its_colour(comparisons: dict[str, Comparison], tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    drawing.draw_idleness(path, comparisons, "Six schemes")
    found = colors(path)
    expected = [*drawing._STATIC_COLORS.values(), *drawing._COLORS[: len(PLANS)], drawing._OPTIMUM_COLOR]
    assert [color for color in expected if rgb(color) not in found] == []
    assert rgb(drawing._COLORS[len(PLANS)]) not in found  # there are no more runs


def test_heights_are_the_numbers(comparisons: dict[str, Comparison], tmp_path: Path) -> None:
    axes = drawn_axes(comparisons, drawing.draw_throughput, tmp_path)
    baselines = ("static uniform", "dense model")
    for panel, baseline in zip(axes, baselines, strict=True):
        bars = {container.get_label(): [bar.get_height() for bar in container] for container in panel.containers}
        assert set(bars) == {"static uniform", *(plan.name for plan in PLANS)}
        for name, heights in bars.items():
            assert heights == [found.speedup(name, baseline) for found in comparisons.values()]
        lines = [line.get_ydata()[0] for line in panel.lines if line.get_color() == drawing._OPTIMUM_COLOR]
        assert lines == [found.speedup(OPTIMUM, baseline) for found in comparisons.values()]
        bounds = [found.bound * found.speedup("static uniform", baseline) for found in comparisons.values()]
        assert [text.get_text() for text in panel.texts] == [f"{bound:.1f}×" for bound in bounds]
        assert panel.get_ylabel() == "speed-up (×)"


def test_a_bound_far_above_everything_does_not_flatten_the_bars(
    comparisons: dict[str, Comparison], tmp_path: Path
) -> None:
    far = {scheme: replace(found, bound=400) for scheme, found in comparisons.items()}
    panel, _ = drawn_axes(far, drawing.draw_throughput, tmp_path)
    assert panel.get_ylim()[1] < 10
    assert panel.texts[0].get_text() == "400.0×"
    assert {line.get_marker() for line in panel.lines if line.get_marker() != "None"} == {"^"}


def drawn_axes(comparisons: dict[str, Comparison], draw: object, folder: Path) -> list:
    """Draws, and returns the panels."""
    made = []
    original = drawing.new_figure

    def remembering(width_inches: float, height_inches: float) -> object:
        made.append(original(width_inches, height_inches))
        return made[-1]

    drawing.new_figure = remembering  # type: ignore[assignment]
    try:
        draw(folder / "figure.png", comparisons, "Six schemes")  # type: ignore[operator]
    finally:
        drawing.new_figure = original
    return made[0].axes
