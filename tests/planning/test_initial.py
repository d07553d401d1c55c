import pytest

from lightning_dynmo.planning import Assignment, initial_assignment


def test_uniform_ignores_the_parameters() -> None:
    assert initial_assignment("uniform", [100, 1, 1, 1, 1], 2) == Assignment((3, 2))


def test_parameters_evens_them_out() -> None:
    assert initial_assignment("parameters", [100, 1, 1, 1, 1], 2) == Assignment((1, 4))


def test_layers_without_parameters_are_layers() -> None:
    assert initial_assignment("parameters", [0, 8, 0, 8, 0, 0], 2) == Assignment((3, 3))
    assert initial_assignment("parameters", [0, 0, 0], 3) == Assignment((1, 1, 1))


def test_equal_parameters_stay_uniform() -> None:
    # Models whose sums do not fit 53 bits included.
    for size in (1, 7, 10**9 + 7, 10**15 + 1):
        assert initial_assignment("parameters", [size] * 10, 3) == Assignment.uniform(10, 3)


def test_a_list_is_taken_as_it_is() -> None:
    assert initial_assignment([1, 4], [1, 1, 1, 1, 100], 2) == Assignment((1, 4))
    assert initial_assignment((1, 4), [1, 1, 1, 1, 100], 2) == Assignment((1, 4))


def test_a_list_that_does_not_fit_gets_an_example() -> None:
    with pytest.raises(ValueError, match=r"balance=\[2, 2\] .*for example balance=\[3, 2\]"):
        initial_assignment([2, 2], [1] * 5, 2)


@pytest.mark.parametrize(
    ("name", "hint"), [("parameter", "'parameters'"), ("Uniform", "'uniform'"), ("unifrom", "'un")]
)
def test_a_near_miss_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(
        ValueError, match=f"'uniform', 'parameters', 'time' or a list .*got '{name}'. Did you mean balance={hint}"
    ):
        initial_assignment(name, [1] * 5, 2)


def test_an_unknown_name_gets_the_choices_only() -> None:
    with pytest.raises(ValueError, match="'uniform', 'parameters', 'time' or a list") as error:
        initial_assignment("xyz", [1] * 5, 2)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("balance", ["uniform", "parameters", [1, 1]])
def test_more_stages_than_layers(balance: str | list[int]) -> None:
    with pytest.raises(ValueError, match=r"3 stages for 2 layers.*at most 2 devices"):
        initial_assignment(balance, [1, 1], 3)
