"""What moves cost, as learnt from those that were made."""

import pytest

from lightning_dynmo.planning import MigrationCost


def learnt(*moves: tuple[int, float]) -> MigrationCost:
    cost = MigrationCost(fixed_s=0.01, s_per_byte=1e-9)
    for moved_bytes, seconds in moves:
        cost.learn(moved_bytes, seconds)
    return cost


def test_before_the_first_move_values_are_assumed() -> None:
    assert learnt().predict(1_000_000_000) == pytest.approx(1.01)


def test_moves_of_one_size_say_how_much_slower_it_is_here() -> None:
    assert learnt((10_000_000, 0.1)).predict(10_000_000) == pytest.approx(0.1)
    assert learnt((10_000_000, 0.1)).predict(90_000_000) == pytest.approx(0.5)


def test_moves_of_two_sizes_tell_the_fixed_part_from_the_rest() -> None:
    cost = learnt((1_000_000, 0.052), (10_000_000, 0.070), (5_000_000, 0.060))
    assert cost.predict(0) == pytest.approx(0.05)
    assert cost.predict(100_000_000) == pytest.approx(0.25)


def test_one_move_that_had_to_wait_changes_little() -> None:
    usual = [(size * 1_000_000, 0.05 + size * 0.002) for size in (1, 3, 9, 27, 5)]
    assert learnt(*usual, (2_000_000, 30.0)).predict(4_000_000) == pytest.approx(0.058, rel=0.1)
    many = [(2_000_000, 30.0)] * 6
    assert learnt(*usual, *many).predict(4_000_000) > 1, "but many that did are what it costs now"


def test_nothing_is_predicted_to_take_negative_time() -> None:
    assert learnt((1_000_000, 0.5), (10_000_000, 0.1)).predict(0) >= 0
    assert learnt((1_000_000, 0.01), (3_000_000, 0.1)).predict(0) == 0


def test_checks_its_settings() -> None:
    with pytest.raises(ValueError, match=r"got fixed_s=0.0 and s_per_byte=1e-09"):
        MigrationCost(fixed_s=0.0)
