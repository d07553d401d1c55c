"""Trains the small GPT as a user's script does and saves its weights: python train.py FOLDER '{"devices": 2}'

Started by torchrun, by several torchruns, or by Slurm; the rest is Lightning's business.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.models import TinyGPT, token_loader

NUM_SAMPLES, BATCH_SIZE = 96, 16


class Resumable:
    """Batches in order, from where a checkpoint left off: Lightning's interface of loaders that can be resumed."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.position = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for position in range(self.position, len(self.batches)):
            self.position = (position + 1) % len(self.batches)
            yield self.batches[position]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Interrupted(Callback):
    """Notes where training begins; sends signals to its own process after step 5 of 12, if it began at step 0."""

    def __init__(self, folder: Path, signals: dict[str, list[str]]) -> None:
        self.folder, self.signals = folder, signals

    def record(self, name: str, rank: int, **values: Any) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        (self.folder / f"{name}-{attempt}-{rank}.json").write_text(json.dumps({"at": time.time(), **values}))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        environment = type(trainer._accelerator_connector.cluster_environment).__name__
        self.began = trainer.global_step
        self.record("start", trainer.global_rank, step=self.began, environment=environment)
        atexit.register(self.record, "exit", trainer.global_rank)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 5 and not self.began:
            for name in self.signals.get(str(trainer.global_rank), ()):
                self.record(name, trainer.global_rank)
                os.kill(os.getpid(), getattr(signal, name))


def fit(
    folder: Path,
    *,
    devices: int,
    num_nodes: int = 1,
    dropout: float = 0.1,
    signals: dict[str, list[str]] | None = None,
    ckpt_path: str | None = "last",
) -> None:
    """Trains two epochs of 6 steps, saves every second step, and resumes where a checkpoint is found."""
    from lightning_dynmo import DynMoStrategy

    folder.mkdir(exist_ok=True)
    seed_everything(3, verbose=False)
    model = TinyGPT(dropout=dropout)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy=DynMoStrategy(num_microbatches=4),
        max_epochs=2,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True),
            Interrupted(folder, signals or {}),
        ],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, Resumable(list(token_loader(NUM_SAMPLES, BATCH_SIZE))), ckpt_path=ckpt_path)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100.0, exit=True)
    fit(Path(sys.argv[1]), **json.loads(sys.argv[2]))
