"""How many tokens a layer works on: those of its input, or as many as it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dynmo import count_tokens
from lightning_dynmo.profiling import LayerTimer
from lightning_dynmo.tokens import noting_tokens, tokens_of


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((torch.zeros(2, 5, 7),), 10),  # activations [B, T, D]
        ((torch.zeros(2, 5, dtype=torch.int64),), 10),  # token ids [B, T]
        ((torch.zeros(2, 5),), 2),  # features [B, D]
        ((torch.zeros(2, 3, 8, 8),), 2),  # images [B, C, H, W]
        ((torch.zeros(6, dtype=torch.int64),), 6),
        ((None, {"hidden": torch.zeros(2, 5, 7), "mask": torch.zeros(9)}), 10),
        ((torch.zeros(()), torch.zeros(4, 3)), 4),
        ((3,), 0),
    ],
)
def test_tokens_of_an_input(values: tuple[Any, ...], expected: int) -> None:
    assert tokens_of(values) == expected


def test_what_a_layer_says_counts_once_however_often_it_runs() -> None:
    timer = LayerTimer(torch.device("cpu"))
    values = (torch.zeros(2, 5, 7),)
    for microbatch in range(3):
        with timer.tokens(4, microbatch, values):
            count_tokens(3 + microbatch)
        count_tokens(100)  # a forward that is repeated in the backward
    with timer.tokens(4, 2, values):
        count_tokens(9)
        count_tokens(5)
    with timer.tokens(5, 0, values):
        pass
    assert timer.num_tokens(4) == 3 + 4 + 5
    assert timer.num_tokens(5) == 10


def test_layers_within_layers_do_not_disturb_each_other() -> None:
    outer: list[int] = []
    inner: list[int] = []
    with noting_tokens(outer.append):
        with noting_tokens(inner.append):
            count_tokens(1)
        count_tokens(2)
    count_tokens(3)
    assert (outer, inner) == ([2], [1])


def test_a_number_that_depends_on_values_is_looked_at_in_measured_steps_only() -> None:
    count_tokens(torch.zeros((), device="meta"))  # as where shapes are found without data
    found: list[int] = []
    with noting_tokens(found.append):
        count_tokens((torch.arange(5) > 1).sum())
        with pytest.raises(ValueError, match="at least 0, got -1"):
            count_tokens(-1)
    assert found == [3]
    assert type(found[0]) is int
