"""How many weights are pruned when."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dynmo.planning import CubicSparsity, num_kept
from lightning_dynmo.simulation import PruningTrace


def test_the_default_prunes_four_times_to_exact_decimals() -> None:
    schedule = CubicSparsity()
    expected = {3000: 0.0, 4000: 0.5203125, 5000: 0.7875, 6000: 0.8859375, 7000: 0.9}
    assert {step: schedule.sparsity(step) for step in expected} == expected
    assert [step for step in range(10_000) if schedule.prunes_at(step)] == [4000, 5000, 6000, 7000]


def test_sparsity_stays_between_prunings_and_after_them() -> None:
    schedule = CubicSparsity()
    assert [schedule.sparsity(step) for step in (0, 2999, 3999, 4999, 6999, 7001, 10**9)] == [
        *(0.0, 0.0, 0.0, 0.5203125, 0.8859375, 0.9, 0.9)
    ]


def test_steps_until_the_next_pruning() -> None:
    schedule = CubicSparsity()
    found = [schedule.steps_until_pruning(step) for step in (0, 3000, 3999, 4000, 4001, 7000, 7001)]
    assert found == [4000, 1000, 1, 0, 999, 0, math.inf]


def test_the_first_step_prunes_where_there_is_an_initial_sparsity() -> None:
    schedule = CubicSparsity(0, 20, 10, initial_sparsity=0.5, final_sparsity=0.9)
    assert [schedule.sparsity(step) for step in (0, 10, 20)] == [0.5, 0.85, 0.9]
    assert [step for step in range(30) if schedule.prunes_at(step)] == [0, 10, 20]
    once = CubicSparsity(5, 20, 5, initial_sparsity=0.5, final_sparsity=0.5)
    assert [step for step in range(30) if once.prunes_at(step)] == [5]
    assert once.steps_until_pruning(6) == math.inf
    never = CubicSparsity(final_sparsity=0.0)
    assert never.steps_until_pruning(0) == math.inf


@pytest.mark.parametrize("num_prunings", [1, 3, 4, 7])
def test_the_simulation_follows_the_same_schedule(num_prunings: int) -> None:
    schedule = CubicSparsity(100, 100 + 10 * num_prunings, 10, final_sparsity=0.8)
    trace = PruningTrace(100, 10, num_prunings, 0.8)
    for step in range(90, 120 + 10 * num_prunings):
        assert schedule.sparsity(step) == pytest.approx(trace.sparsity(step), abs=1e-12)
    assert schedule.sparsity(100 + 10 * num_prunings) == 0.8


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.floats(0, 0.99), st.floats(0, 0.99))
def test_sparsity_only_grows_and_ends_at_the_final_one(num_prunings: int, every: int, one: float, other: float) -> None:
    initial, final = sorted((one, other))
    schedule = CubicSparsity(7, 7 + num_prunings * every, every, initial, final)
    steps = range(8 + num_prunings * every)
    found = [schedule.sparsity(step) for step in steps]
    assert found == sorted(found)
    assert found[-1] == final
    for step in steps:
        ahead = next((later - step for later in steps[step:] if schedule.prunes_at(later)), math.inf)
        assert schedule.steps_until_pruning(step) == ahead


def test_kept_counts_are_exact_in_decimal() -> None:
    assert num_kept(1_300_000_000, 0.5203125) == 623_593_750
    assert num_kept(10, 0.9) == 1
    assert (1 - 0.9) * 10**17 != 10**16, "what floating point makes of it"
    assert num_kept(10**17, 0.9) == 10**16
    assert [num_kept(10, sparsity) for sparsity in (0.0, 0.04, 0.05, 0.06, 0.94, 0.95, 0.96, 1.0)] == [
        *(10, 10, 10, 9, 1, 1, 0, 0)
    ]
    assert [num_kept(count, 0.5) for count in (0, 1, 2, 3, 5)] == [0, 1, 1, 2, 3]
    assert num_kept(6, 0.5) == 3


@settings(deadline=None)
@given(st.integers(0, 10**15), st.decimals(0, 1, places=6))
def test_kept_counts_are_the_nearest(num_weights: int, sparsity: object) -> None:
    exact = num_weights * (1 - Fraction(str(sparsity)))
    distance = num_kept(num_weights, float(str(sparsity))) - exact
    assert -Fraction(1, 2) < distance <= Fraction(1, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"start_step": -1}, "start_step of at least 0, got -1"),
        ({"every_n_steps": 0}, "every_n_steps of at least 1, got 0"),
        ({"end_step": 7400}, "got end_step=7400. Use end_step=7000"),
        ({"end_step": 3000}, "got end_step=3000. Use end_step=4000"),
        ({"end_step": 100}, "got end_step=100. Use end_step=4000"),
        ({"final_sparsity": 1.0}, r"final_sparsity in \[0, 1\), got 1.0"),
        ({"final_sparsity": math.nan}, "got nan"),
        ({"initial_sparsity": 0.95}, "between 0 and final_sparsity=0.9, got 0.95"),
        ({"initial_sparsity": -0.1}, "got -0.1"),
    ],
)
def test_checks_its_settings(arguments: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CubicSparsity(**arguments)


def test_checks_what_is_to_be_kept() -> None:
    with pytest.raises(ValueError, match=r"got 1\.5"):
        num_kept(10, 1.5)
    with pytest.raises(ValueError, match=r"got -1"):
        num_kept(-1, 0.5)
