import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dynmo.planning import Assignment, Move, moves_between

balances = st.lists(st.integers(1, 6), min_size=1, max_size=6).map(tuple)


def test_stages_and_layers_of_a_known_balance() -> None:
    assignment = Assignment((3, 4, 3))
    assert (assignment.num_layers, assignment.num_stages) == (10, 3)
    assert [assignment.stage_of(layer) for layer in range(10)] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert [assignment.layers_of(stage) for stage in range(3)] == [range(0, 3), range(3, 7), range(7, 10)]


@given(balances)
def test_stage_of_and_layers_of_are_inverse(balance: tuple[int, ...]) -> None:
    assignment = Assignment(balance)
    layers = [layer for stage in range(assignment.num_stages) for layer in assignment.layers_of(stage)]
    assert layers == list(range(assignment.num_layers))
    assert all(layer in assignment.layers_of(assignment.stage_of(layer)) for layer in layers)


def test_equal_whatever_sequence_it_was_built_from() -> None:
    assert Assignment([3, 4]) == Assignment((3, 4)) == Assignment(tuple(np.array([3, 4])))  # type: ignore[arg-type]
    assert len({Assignment([3, 4]), Assignment((3, 4)), Assignment((4, 3))}) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("balance", "message"),
    [((), "empty balance"), ((2, 0, 1), "got 0 for stage 1"), ((2, -1), "got -1 for stage 1"), ((2.5, 1), "2.5")],
)
def test_rejects_what_is_no_balance(balance: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Assignment(balance)


@pytest.mark.parametrize("layer", [-1, 7])
def test_rejects_layers_out_of_range(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"\[0, 7\), got {layer}"):
        Assignment((3, 4)).stage_of(layer)


@pytest.mark.parametrize("stage", [-1, 2])
def test_rejects_stages_out_of_range(stage: int) -> None:
    with pytest.raises(ValueError, match=rf"\[0, 2\), got {stage}"):
        Assignment((3, 4)).layers_of(stage)


def test_stage_loads_are_sums_rounded_once() -> None:
    assert Assignment((3, 1)).stage_loads([0.1, 0.2, 0.3, 4.0]) == (math.fsum([0.1, 0.2, 0.3]), 4.0)
    assert Assignment((3, 1)).stage_loads([1e16, 1.0, -1e16, 0.0]) == (1.0, 0.0)


def test_stage_loads_rejects_another_number_of_layers() -> None:
    with pytest.raises(ValueError, match="4 in all, got 3"):
        Assignment((3, 1)).stage_loads([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "balance"),
    [(10, 3, (4, 3, 3)), (11, 3, (4, 4, 3)), (12, 3, (4, 4, 4)), (3, 3, (1, 1, 1)), (5, 1, (5,))],
)
def test_uniform_gives_the_rest_to_the_first_stages(num_layers: int, num_stages: int, balance: tuple[int, ...]) -> None:
    assert Assignment.uniform(num_layers, num_stages).balance == balance


def test_uniform_rejects_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match=r"5 stages for 4 layers.*at most 4 devices"):
        Assignment.uniform(4, 5)


def test_uniform_rejects_no_stages() -> None:
    with pytest.raises(ValueError, match="num_stages=0"):
        Assignment.uniform(4, 0)


def test_from_balance_accepts_what_fits() -> None:
    assert Assignment.from_balance([3, 4, 3], num_layers=10, num_stages=3) == Assignment((3, 4, 3))


@pytest.mark.parametrize(
    ("balance", "numbers"),
    [([3, 4, 4], "11 layers on 3 stages"), ([5, 5], "10 layers on 2 stages"), ([3, 3], "6 layers on 2 stages")],
)
def test_from_balance_names_the_numbers_and_an_example(balance: list[int], numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers) as error:
        Assignment.from_balance(balance, num_layers=10, num_stages=3)
    assert "10 layers and the pipeline 3 stages" in str(error.value)
    assert "balance=[4, 3, 3]" in str(error.value)


def test_from_balance_says_so_where_no_balance_can_fit() -> None:
    with pytest.raises(ValueError, match="3 stages for 2 layers"):
        Assignment.from_balance([1, 1], num_layers=2, num_stages=3)


def test_moves_of_a_known_change() -> None:
    assert moves_between(Assignment((3, 4, 3)), Assignment((4, 2, 4))) == (Move(3, 1, 0), Move(6, 1, 2))
    assert moves_between(Assignment((2, 1, 1)), Assignment((2, 2))) == (Move(3, 2, 1),)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(splits(n), splits(n))))
def test_moves_turn_one_assignment_into_the_other(pair: tuple[Assignment, Assignment]) -> None:
    before, after = pair
    stages = [before.stage_of(layer) for layer in range(before.num_layers)]
    for move in moves_between(before, after):
        assert stages[move.layer] == move.source != move.target
        stages[move.layer] = move.target
    assert stages == [after.stage_of(layer) for layer in range(after.num_layers)]


def test_moves_between_rejects_different_models() -> None:
    with pytest.raises(ValueError, match=r"got 4 layers in .* and 5"):
        moves_between(Assignment((2, 2)), Assignment((2, 3)))


def splits(num_layers: int) -> st.SearchStrategy[Assignment]:
    """Returns a strategy for all assignments of that many layers."""
    borders = st.sets(st.integers(1, num_layers - 1)) if num_layers > 1 else st.just(set())
    return borders.map(
        lambda inner: Assignment(tuple(np.diff([0, *sorted(inner), num_layers]).tolist())),
    )
