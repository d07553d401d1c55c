"""Pictures of timelines are looked at pixel by pixel: what is drawn is where the timeline says, in its colour."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from lightning_dynmo import drawing
from lightning_dynmo.drawing import draw_timeline
from lightning_dynmo.simulation import Network, StageCost, Timeline, simulate, simulate_replicas
from tests.simulation.orders import run, stage, written


def where(picture: NDArray[np.float32], colour: str) -> NDArray[np.bool_]:
    """Returns which pixels of a picture have a colour."""
    wanted = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)])
    found: NDArray[np.bool_] = np.abs(np.round(picture[..., :3] * 255) - wanted).max(axis=-1) <= 1
    return found


def share_of(picture: NDArray[np.float32], colour: str) -> float:
    """Returns the share of a colour in a picture's pixels."""
    return float(where(picture, colour).mean())


def drawn(timeline: Timeline, path: Path) -> NDArray[np.float32]:
    draw_timeline(timeline, path, "A step")
    picture: NDArray[np.float32] = imread(path)
    return picture


def test_areas_are_times(tmp_path: Path) -> None:
    timeline = run("1f1b", [stage(1.0, 2.0)] * 4, 8)
    picture = drawn(timeline, tmp_path / "step.png")
    assert picture.shape[1] == 2100
    forward, backward, idle = (share_of(picture, colour) for colour in ("#56B4E9", "#E69F00", drawing._IDLE))
    # Borders, numbers and the legend take some pixels.
    assert backward / forward == pytest.approx(2.0, rel=0.1)
    assert backward / forward != pytest.approx(1.0, rel=0.1)
    assert idle / (idle + forward + backward) == pytest.approx(timeline.bubble_ratio, rel=0.1)
    assert share_of(picture, "#CC79A7") == 0.0


def test_every_kind_has_its_colour(tmp_path: Path) -> None:
    order = written("0F0 0I0 0W0 0F1 0B1")
    stages = [StageCost(1.0, 1.0, 1.0, gradient_bytes=4, update_s=1.0)]
    timeline, _ = simulate_replicas(order, (0,), [stages] * 2, Network(replica_bytes_per_s=2.0))
    shares = {kind: share_of(drawn(timeline, tmp_path / "one.png"), c) for kind, c in drawing._COLOURS.items()}
    # The first stage's backward of inputs takes no time.
    assert {kind for kind, share in shares.items() if share > 0.002} == set(shares) - {"input_backward"}
    assert len(set(drawing._COLOURS.values())) == len(drawing._COLOURS) == len(drawing._LABELS)
    # A second stage on the same rank is lighter.
    two = simulate(written("0F0 1F0"), (0, 0), [StageCost(1.0)] * 2)
    picture = drawn(two, tmp_path / "two.png")
    assert share_of(picture, "#56B4E9") > 0.1
    assert share_of(picture, "#ABDAF4") > 0.1


def test_numbers_are_drawn_where_they_fit(tmp_path: Path) -> None:
    def dark(num_microbatches: int) -> float:
        """Returns the share of dark pixels in the bars."""
        picture = drawn(run("gpipe", [stage(1.0, 1.0)], num_microbatches), tmp_path / "step.png")
        rows, columns = np.nonzero(where(picture, "#56B4E9"))
        inside = picture[rows.min() : np.median(rows).astype(int), columns.min() : columns.max(), :3]
        return float((inside.max(axis=-1) < 0.3).mean())

    assert dark(20) > 0.005
    assert dark(300) == 0.0


def test_empty_timeline_can_be_drawn(tmp_path: Path) -> None:
    assert drawn(simulate(written("0F0"), (0,), [StageCost(0.0)]), tmp_path / "none.png").size > 0


@pytest.mark.parametrize(("seconds", "unit"), [(3.0, "s"), (0.25, "ms"), (2e-5, "µs"), (0.0, "s")])
def test_axis_has_a_unit_that_is_easy_to_read(seconds: float, unit: str) -> None:
    factor, found = drawing._unit(seconds)
    assert found == unit
    assert seconds == 0.0 or 1 <= seconds * factor < 1000


def test_pyplot_is_left_alone(tmp_path: Path) -> None:
    from matplotlib import get_backend, pyplot

    before = get_backend(), pyplot.get_fignums()
    drawn(run("gpipe", [stage(1.0, 1.0)], 2), tmp_path / "step.png")
    assert (get_backend(), pyplot.get_fignums()) == before


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(drawing)  # importing it needs no matplotlib
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-dynmo\[plots\]"'):
        drawing.draw_timeline(run("gpipe", [stage(1.0, 1.0)], 2), tmp_path / "step.png")
