"""Runs of `Trainer.fit` for tests: plain Lightning on one device as the reference, and pipelines beside it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

NUM_MICROBATCHES = 4
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class SaveAtEnd(Callback):
    """Saves a checkpoint when training ends, before the strategy lets go of the model."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


class ForcedMoves(Callback):
    """Moves layers every three optimizer steps, from one given balance to the next."""

    def __init__(self, balances: Sequence[tuple[int, ...]]) -> None:
        self.balances = balances
        self.owners: list[tuple[int, ...]] = []
        self.moved_bytes = 0
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.owners.append(trainer.strategy.runtime.owners)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        from lightning_dynmo import Assignment

        if trainer.global_step > self._step and trainer.global_step % 3 == 0:
            balance = self.balances[trainer.global_step // 3 % len(self.balances)]
            self.moved_bytes += trainer.strategy.runtime.move_to(Assignment(balance)).moved_bytes
            self.owners.append(trainer.strategy.runtime.owners)
        self._step = trainer.global_step


def fit_on_one_device(
    rank: int, module: Callable[[], LightningModule], data: Callable[[int], Any], path: str, options: dict[str, Any]
) -> LightningModule:
    """Trains under plain Lightning with batches of one microbatch, in a process without the package."""
    options = {**QUIET, **options}
    accumulate = options.pop("accumulate_grad_batches", 1) * NUM_MICROBATCHES
    seed_everything(3, verbose=False)
    model = module()
    trainer = Trainer(devices=1, accumulate_grad_batches=accumulate, callbacks=[SaveAtEnd(path)], **options)
    trainer.fit(model, data(1))
    assert not any(name.split(".")[0] == "lightning_dynmo" for name in sys.modules)
    return _bare(model)


def fit_as_pipeline(
    rank: int,
    module: Callable[[], LightningModule],
    data: Callable[[int], Any],
    path: str,
    options: dict[str, Any],
    balances: Sequence[tuple[int, ...]] = (),
    strategy: dict[str, Any] | None = None,
) -> tuple[LightningModule, ForcedMoves | None]:
    """Trains as a pipeline over all ranks, with moves where balances are given."""
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    model = module()
    moves = ForcedMoves(balances) if balances else None
    trainer = Trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DynMoStrategy(**{"num_microbatches": NUM_MICROBATCHES, **(strategy or {})}),
        callbacks=[SaveAtEnd(path), *([moves] if moves else [])],
        **{**QUIET, **options},
    )
    trainer.fit(model, data(NUM_MICROBATCHES))
    return _bare(model), moves


def load(path: Path | str) -> dict[str, Any]:
    """Loads a checkpoint as a stranger would: tensors and plain types only."""
    return torch.load(path, weights_only=True)


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Returns where two nested structures differ, bit by bit; an empty list if nowhere."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and torch.equal(left, right)
        return [] if same else [f"{path}: tensors differ"]
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return [f"{path}: keys {sorted(map(str, left.keys() ^ right.keys())) or 'in another order'}"]
        return [entry for key in left for entry in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [entry for index, (a, b) in pairs for entry in differences(a, b, f"{path}/{index}")]
    return [] if left == right else [f"{path}: {left!r} != {right!r}"]


def _bare(model: LightningModule) -> LightningModule:
    """Cuts the module from its Trainer, so that it can travel to the parent process."""
    model.trainer = None
    return model
