"""Tied weights keep their optimizer state over a resume, on the same and on another number of stages."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed


class Tied(TinyGPT):
    """Head and embedding share their weight, and so do two blocks."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__(num_blocks=4)
        self.momentum = momentum
        self.head[1].weight = self.embedding.tokens.weight
        self.blocks[2].out.weight = self.blocks[0].out.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def fit(path: str, epochs: int, *, folder: bool, schedule: str, resume: bool = False, momentum: float = 0.9) -> Any:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    module = Tied(momentum)
    strategy = DynMoStrategy(num_microbatches=4, schedule=schedule, save_distributed_checkpoint=folder)
    trainer = Trainer(max_epochs=epochs, devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **QUIET)
    trainer.fit(module, token_loader(64, 16), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return {name: value.clone() for name, value in module.state_dict().items()}


def resumed(rank: int, directory: str) -> list[list[str]]:
    found = []
    for folder, schedule in ((False, "1f1b"), (True, "1f1b"), (True, "zbvzerobubble")):
        path, options = f"{directory}/{schedule}-{folder}.ckpt", {"folder": folder, "schedule": schedule}
        whole = fit(f"{path}.whole", 2, **options)
        fit(path, 1, **options)
        found.append(differences(fit(path, 2, resume=True, **options), whole))
        assert differences(fit(f"{path}.none", 2, momentum=0.0, **options), whole) != []
    return found


def test_tied_weights_resume_with_their_optimizer_state(tmp_path: Any) -> None:
    for found in run_distributed(resumed, 2, str(tmp_path), timeout_s=180):
        assert found == [[], [], []]
