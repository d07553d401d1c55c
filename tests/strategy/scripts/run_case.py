"""One case of a run under a launcher: what is passed to the Trainer, and the record of what each rank got."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.models import CONTEXT, TinyGPT, token_loader

FOLDER = Path(sys.argv[1])
WORLD_SIZE = 3


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def record(name: str, **values: Any) -> None:
    (FOLDER / f"{name}-{rank()}.json").write_text(json.dumps({"at": time.time(), **values}))


class Case:
    """What is passed to the Trainer; each case below changes something."""

    def __init__(self) -> None:
        self.module: LightningModule = TinyGPT(num_blocks=3)  # 5 layers: 2, 2, 1
        self.strategy: dict[str, Any] = {"num_microbatches": 4}
        self.trainer: dict[str, Any] = {"num_sanity_val_steps": 0}
        self.loader = token_loader(32, 8)
        self.val_loader: DataLoader | None = None

    def run(self) -> None:
        from lightning_dynmo import DynMoStrategy  # here, so that what it does at exit comes before the record of it

        trainer = Trainer(
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=DynMoStrategy(**self.strategy),
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False, **self.trainer},
        )
        trainer.fit(self.module, self.loader, self.val_loader)


def boom(case: str) -> None:
    record(f"{case}-raised")
    raise ValueError(f"{case} went wrong")


def fail_in_layer(case: Case, name: str, layer: int, count: int, *, backward: bool = False, train: bool = True) -> None:
    """Lets a layer raise in the forward or backward of its `count`-th microbatch in training or validation."""
    calls = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal calls
        calls += module.training == train
        if calls == count and module.training == train:
            if backward:
                output.register_hook(lambda gradient: boom(name))
            else:
                boom(name)

    case.module.configure_pipeline()[layer].register_forward_hook(hook)


class FailingCallback(Callback):
    def __init__(self, name: str, on_rank: int, sleeps: int | None = None) -> None:
        self.name, self.on_rank, self.sleeps = name, on_rank, sleeps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            if rank() == self.sleeps:
                time.sleep(3.0)
            if rank() == self.on_rank:
                boom(self.name)


class FailingData(Dataset):
    def __init__(self, name: str, on_rank: int) -> None:
        self.name, self.on_rank = name, on_rank

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if rank() == self.on_rank and index == 16:
            boom(self.name)
        return torch.zeros(CONTEXT, dtype=torch.int64), torch.zeros(CONTEXT, dtype=torch.int64)
