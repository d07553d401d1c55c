"""Averages of costs that vary."""

import pytest

from lightning_dynmo.planning.smoothing import SmoothedLoads


def test_the_first_measurements_count_the_same_and_then_older_ones_fade() -> None:
    smoothed = SmoothedLoads(0.25)
    for value, expected in ((4.0, 4.0), (0.0, 2.0), (1.0, 5 / 3), (3.0, 2.0), (0.0, 1.5), (0.0, 1.125)):
        smoothed.add([value])
        assert smoothed.values == (pytest.approx(expected),)


def test_a_restart_forgets() -> None:
    smoothed = SmoothedLoads(0.25)
    smoothed.add([4.0, 1.0])
    smoothed.restart()
    assert smoothed.values == ()
    smoothed.add([1.0, 2.0])
    assert smoothed.values == (1.0, 2.0)
