"""Averages of costs that vary."""

import math
import random

import pytest

from lightning_dynmo.planning.smoothing import SmoothedLoads


def test_the_first_measurements_count_the_same_and_then_older_ones_fade() -> None:
    smoothed = SmoothedLoads(0.25)
    for value, expected in ((4.0, 4.0), (0.0, 2.0), (1.0, 5 / 3), (3.0, 2.0), (0.0, 1.5), (0.5, 1.25)):
        smoothed.add([value])
        assert smoothed.values == (pytest.approx(expected),)


def test_a_restart_forgets() -> None:
    smoothed = SmoothedLoads(0.25)
    smoothed.add([4.0, 1.0])
    smoothed.restart()
    assert smoothed.values == ()
    smoothed.add([1.0, 2.0])
    assert smoothed.values == (1.0, 2.0)


def test_costs_that_have_drifted_away_start_anew() -> None:
    smoothed = SmoothedLoads(0.25)
    for _ in range(10):
        smoothed.add([1.0, 1.0])
    smoothed.add([2.0, 1.0])
    assert smoothed.values == (1.25, 1.0)  # may be chance
    smoothed.add([2.25, 1.0])
    assert smoothed.values == (2.125, 1.0)
    smoothed.add([2.5, 1.0])  # nearer to the last than to the average, but not by far
    assert smoothed.values == (2.25, 1.0)


def test_costs_drawn_anew_each_time_are_averaged_on() -> None:
    generator = random.Random(0)
    smoothed = SmoothedLoads(0.01)
    for _ in range(1000):
        smoothed.add([generator.lognormvariate(0.0, 0.65) for _ in range(32)])
    mean = math.exp(0.65**2 / 2)
    assert all(abs(value / mean - 1) < 0.3 for value in smoothed.values)  # of two measurements, some are off by twice
