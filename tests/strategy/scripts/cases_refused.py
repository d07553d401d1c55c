"""Cases that cannot work, which are refused before the first step or where they show."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import VOCABULARY, TinyGPT, token_loader
from tests.strategy.scripts.run_case import (
    Case,
    fail_in_layer,
    rank,
)


def too_many_stages(case: Case) -> None:
    case.module = TinyGPT(num_blocks=0)


def sizes_of_another_product(case: Case) -> None:
    case.strategy.update(pipeline_parallel_size=2, data_parallel_size=2)


def too_few_microbatches(case: Case) -> None:
    case.strategy["num_microbatches"] = 2


def unknown_schedule(case: Case) -> None:
    case.strategy["schedule"] = "1f2b"


def balance_of_wrong_sum(case: Case) -> None:
    case.strategy["balance"] = [2, 2, 2]


def balance_of_wrong_length(case: Case) -> None:
    case.strategy["balance"] = [3, 2]


def speeds_of_wrong_number(case: Case) -> None:
    case.strategy["rank_speeds"] = [1.0, 0.5]


def no_chain(case: Case) -> None:
    class Plain(TinyGPT):
        configure_pipeline = None

    case.module = Plain(num_blocks=3)


def parameters_outside(case: Case) -> None:
    case.module.scale = nn.Parameter(torch.ones(1))


def shared_counter(case: Case) -> None:
    case.module.blocks[2].calls = case.module.blocks[0].calls


def gradients_not_cleared(case: Case) -> None:
    class Keeps(TinyGPT):
        def optimizer_zero_grad(self, *args: Any) -> None:
            pass

    case.module = Keeps(num_blocks=3)


def layers_of_another_module(case: Case) -> None:
    class Foreign(TinyGPT):
        def configure_pipeline(self) -> Sequence[nn.Module]:
            return [self.embedding, *TinyGPT(num_blocks=3).blocks, self.head]

    case.module = Foreign(num_blocks=3)


def manual_optimization(case: Case) -> None:
    case.module.automatic_optimization = False


def own_backward(case: Case) -> None:
    class Own(TinyGPT):
        def backward(self, loss: Tensor) -> None:
            loss.backward()

    case.module = Own(num_blocks=3)


def lbfgs(case: Case) -> None:
    class Searching(TinyGPT):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters())

    case.module = Searching(num_blocks=3)


class ReturnsDict(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.layer(x)}


def dict_in_the_middle(case: Case) -> None:
    case.module.blocks[1] = ReturnsDict(case.module.blocks[1])


def step_without_forward(case: Case) -> None:
    class Without(TinyGPT):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return torch.zeros((), requires_grad=True)

    case.module = Without(num_blocks=3)


def step_with_other_arguments(case: Case) -> None:
    class Other(TinyGPT):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return super().training_step([(batch[0] + 1) % VOCABULARY, batch[1]], batch_idx)

    case.module = Other(num_blocks=3)


def different_batches(case: Case) -> None:
    case.loader = token_loader(32, 8, seed=1 + (rank() == 1))


def module_of_a_failed_run(case: Case) -> None:
    fail_in_layer(case, "module_of_a_failed_run", 2, 1)
    with contextlib.suppress(Exception):
        case.run()
