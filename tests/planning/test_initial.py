from collections.abc import Sequence

import pytest

from lightning_dynmo.planning import Assignment, initial_assignment


def first_split(balance: Sequence[int] | str, num_parameters: Sequence[int], num_stages: int) -> Assignment:
    return initial_assignment(balance, num_parameters, ["Linear"] * len(num_parameters), num_stages)


def test_uniform_ignores_the_parameters() -> None:
    assert first_split("uniform", [100, 1, 1, 1, 1], 2) == Assignment((3, 2))


def test_parameters_evens_them_out() -> None:
    assert first_split("parameters", [100, 1, 1, 1, 1], 2) == Assignment((1, 4))


def test_layers_without_parameters_are_layers() -> None:
    assert first_split("parameters", [0, 8, 0, 8, 0, 0], 2) == Assignment((3, 3))
    assert first_split("parameters", [0, 0, 0], 3) == Assignment((1, 1, 1))


def test_equal_parameters_stay_uniform() -> None:
    # Models whose sums do not fit 53 bits included.
    for size in (1, 7, 10**9 + 7, 10**15 + 1):
        assert first_split("parameters", [size] * 10, 3) == Assignment.uniform(10, 3)


def test_a_list_is_taken_as_it_is() -> None:
    assert first_split([1, 4], [1, 1, 1, 1, 100], 2) == Assignment((1, 4))
    assert first_split((1, 4), [1, 1, 1, 1, 100], 2) == Assignment((1, 4))


def test_a_list_that_does_not_fit_gets_an_example() -> None:
    with pytest.raises(ValueError, match=r"balance=\[2, 2\] .*for example balance=\[3, 2\]"):
        first_split([2, 2], [1] * 5, 2)


@pytest.mark.parametrize(
    ("name", "hint"), [("parameter", "'parameters'"), ("Uniform", "'uniform'"), ("unifrom", "'un")]
)
def test_a_near_miss_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"'uniform', 'parameters', 'time', 'type:regex' or a list .*got '{name}'. Did you mean balance={hint}",
    ):
        first_split(name, [1] * 5, 2)


def test_an_unknown_name_gets_the_choices_only() -> None:
    with pytest.raises(ValueError, match="'uniform', 'parameters', 'time', 'type:regex' or a list") as error:
        first_split("xyz", [1] * 5, 2)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("balance", ["uniform", "parameters", [1, 1]])
def test_more_stages_than_layers(balance: str | list[int]) -> None:
    with pytest.raises(ValueError, match=r"3 stages for 2 layers.*at most 2 devices"):
        first_split(balance, [1, 1], 3)


NAMES = ["Embedding", "Block", "Block", "Norm", "MoEBlock", "Norm", "Block", "Head"]


@pytest.mark.parametrize("balance", ["type:block", "type:Block", "type:BLOCK$", "type:^(moe)?block"])
def test_a_type_evens_out_its_layers(balance: str) -> None:
    # Two of the four blocks on each stage, and no more moved away from the uniform split than that takes.
    assert initial_assignment(balance, [1] * 8, NAMES, 2) == Assignment((4, 4))
    assert initial_assignment(balance, [1] * 8, ["Block", "Block", *["Norm"] * 6], 2) == Assignment((1, 7))
    assert initial_assignment(balance, [1] * 8, [*["Norm"] * 5, "Block", "Norm", "Block"], 2) == Assignment((6, 2))


def test_a_type_counts_layers_not_parameters() -> None:
    assert initial_assignment("type:moe|head", [9, 1, 1, 1, 1, 1, 1, 1], NAMES, 2) == Assignment((5, 3))
    assert initial_assignment("parameters", [9, 1, 1, 1, 1, 1, 1, 1], NAMES, 2) == Assignment((1, 7))


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        (
            "type:transformer",
            "balance='type:transformer' to match .* Block, Embedding, Head, MoEBlock, Norm. .*'type:Emb",
        ),
        (
            "type:blo(ck",
            r"regular expression .*got 'blo\(ck'.*unterminated.*'type:Emb.*Block, Embedding, Head, MoEBlock",
        ),
        ("type", "'type:regex' or a list .*got 'type'"),
    ],
)
def test_a_type_that_is_none(balance: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initial_assignment(balance, [1] * 8, NAMES, 2)
