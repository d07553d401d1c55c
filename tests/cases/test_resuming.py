"""CASES row 44: checkpoints do not know the number of stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from tests.cases.modules import Chain, eight_layers, regression
from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences

pytestmark = pytest.mark.distributed


class Resumed(Chain):
    def __init__(self) -> None:
        super().__init__(eight_layers, 0.05)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def resume(rank: int, strategy: dict[str, Any] | None, epochs: int, source: str | None, target: str) -> Any:
    """Trains up to an epoch, from a checkpoint if there is one, and saves."""
    seed_everything(3, verbose=False)
    options: dict[str, Any] = {"devices": 1}
    if strategy is not None:
        from lightning_dynmo import DynMoStrategy

        options = {"devices": int(os.environ["WORLD_SIZE"]), "strategy": DynMoStrategy(num_microbatches=4, **strategy)}
    trainer = Trainer(max_epochs=epochs, num_sanity_val_steps=0, callbacks=[Saves(target)], **options, **QUIET)
    model = Resumed()
    trainer.fit(model, DataLoader(regression((8,) * 3), batch_size=None), ckpt_path=source)
    return {key: value for key, value in model.state_dict().items() if "calls" not in key}


class Saves(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_row_44_train_on_3_resume_on_2_and_1_and_in_one_process(tmp_path: Path) -> None:
    def run(ranks: int, strategy: Any, epochs: int, source: str | None, target: str) -> list[dict[str, Tensor]]:
        paths = (None if source is None else str(tmp_path / source), str(tmp_path / target))
        return run_distributed(resume, ranks, strategy, epochs, *paths, init_process_group=False)

    (expected,) = run(1, None, 4, None, "whole")
    run(3, {}, 1, None, "first")
    run(2, {"schedule": "zbvzerobubble"}, 2, "first", "second")
    run(1, {}, 3, "second", "third")
    ends = run(1, None, 4, "third", "plain") + run(2, {"schedule": "interleaved1f1b"}, 4, "third", "last")
    for found in ends:
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5, msg=key)
    (other,) = run(1, None, 4, "first", "other epoch")
    assert differences(other, dict(ends[0])) != []  # bits differ: the comparison above does compare
    model = Resumed.load_from_checkpoint(tmp_path / "last", weights_only=True)
    assert differences({key: value for key, value in model.state_dict().items() if "calls" not in key}, ends[-1]) == []
