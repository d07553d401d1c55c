"""Random numbers belong to a step, a layer and a microbatch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo.pipeline.randomness import keyed_randomness
from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import (
    Block,
    Plan,
    Run,
    difference,
    evaluate,
    run_loop,
    run_pipelines,
    start,
    together,
    train,
)

CPU = torch.device("cpu")


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x)) + 0.1 * torch.rand_like(x)


def noisy_layers() -> list[nn.Module]:
    return [Noisy() for _ in range(5)]


def noisy_loss(output: Tensor, index: int) -> Tensor:
    """Draws numbers too, as label noise does."""
    return (output * torch.rand_like(output) - index).square().mean()


MOVING = {1: (2, 1, 1, 1), 2: (1, 1, 1, 2)}


@pytest.mark.distributed
def test_dropout_is_the_same_on_any_number_of_ranks_and_with_moves() -> None:
    runs: list[Run] = []
    for plan, balance in [
        (Plan(layers=noisy_layers, loss=noisy_loss), (5,)),
        (Plan(layers=noisy_layers, loss=noisy_loss), (2, 3)),
        (Plan(layers=noisy_layers, loss=noisy_loss, schedule="gpipe"), (1, 1, 2, 1)),
        (Plan(layers=noisy_layers, loss=noisy_loss, moves=MOVING), (1, 1, 2, 1)),
    ]:
        ranks = run_distributed(run_pipelines, len(balance), [(plan, balance)])
        runs.append(together([results[0] for results in ranks]))
    assert [difference(run, runs[0]) for run in runs[1:]] == ["", "", ""]
    assert difference(run_loop(Plan(layers=noisy_layers, loss=noisy_loss)), runs[0]), "the ambient stream is another"
    assert len({loss for losses in runs[0].losses for loss in losses}) == 12


def _ambient_state(rank: int) -> tuple[bool, int]:
    plan = Plan(layers=noisy_layers, loss=noisy_loss)
    runtime = start(plan, (2, 3))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(runtime, plan, 0)
    with torch.no_grad():
        evaluate(runtime, plan, 0)
    return torch.equal(before, torch.get_rng_state()), torch.initial_seed()


@pytest.mark.distributed
def test_steps_leave_the_ambient_generator_as_it_was() -> None:
    assert run_distributed(_ambient_state, 2) == [(True, 5), (True, 5)]


def draw(*key: int) -> tuple[float, ...]:
    with keyed_randomness(CPU, *key):
        return tuple(torch.rand(4).tolist())


def test_numbers_follow_from_the_key_alone() -> None:
    first = draw(0, 1, 2, 3)
    torch.rand(7)
    assert draw(0, 1, 2, 3) == first
    keys = [(seed, step, layer, mb) for seed in range(3) for step in range(5) for layer in range(5) for mb in range(5)]
    assert len({draw(*key) for key in keys}) == len(keys)


def test_state_is_put_back_after_an_error_and_when_nested() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="negative"), keyed_randomness(CPU, 1):
        torch.rand(4) + torch.rand(-1)
    assert torch.equal(before, torch.get_rng_state())
    with keyed_randomness(CPU, 1):
        first = torch.rand(1)
        with keyed_randomness(CPU, 2):
            torch.rand(5)
        second = torch.rand(1)
    with keyed_randomness(CPU, 1):
        assert torch.equal(torch.cat([first, second]), torch.rand(2))
