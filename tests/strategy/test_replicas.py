"""Pipelines side by side train as one process does with the global batch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader, DistributedSampler, Subset

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, ForcedMoves, SaveAtEnd, differences, load
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

SEED = 3
STEPS, REPLICAS, MICROBATCHES, SAMPLES = 9, 2, 2, 2
GLOBAL = REPLICAS * MICROBATCHES * SAMPLES
OPTIONS = {"max_epochs": 1, "gradient_clip_val": 0.5, "accumulate_grad_batches": 1}
BALANCES = [(4, 3), (1, 6), (6, 1)]


class Replicated(TinyGPT):
    """Logs in all ways, weights by tokens, and keeps what it sees in validation."""

    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.weighted = weighted
        self.accuracy = torchmetrics.MeanMetric()
        self.logged: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        weights = (tokens % 5 > 0).float() if self.weighted else torch.ones_like(loss)
        mean = (loss * weights).sum() / weights.sum()
        self.log("train_loss", mean, batch_size=len(tokens))
        self.log("largest", mean, reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": mean, "weight": weights.sum()} if self.weighted else mean

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.accuracy.update(loss, weight=len(batch[0]))
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_metric", self.accuracy)

    def on_train_batch_end(self, *args: Any) -> None:
        self._note("train_loss")

    def on_train_epoch_end(self) -> None:
        for name in ("val_loss", "val_metric"):
            self._note(name)

    def _note(self, name: str) -> None:
        self.logged.setdefault(name, []).append(float(self.trainer.callback_metrics[name]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def in_order_of_replicas(dataset: Any, *, shuffle: bool) -> DataLoader:
    """Returns microbatches in the order of replicas for each step, as Lightning's sampler divides the samples."""
    shuffled = list(DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=SEED))
    order = []
    for start in range(0, len(dataset), GLOBAL):
        for replica in range(REPLICAS):
            order += shuffled[start + replica : start + GLOBAL : REPLICAS]
    return DataLoader(Subset(dataset, order), batch_size=SAMPLES)


def fit_alone(rank: int, module: Any, path: str, pipeline: bool, samples: int) -> dict[str, Any]:
    """Trains in one process, under plain Lightning or as a pipeline of one rank, on what the replicas read."""
    seed_everything(SEED, verbose=False)
    model, options = module(), {**QUIET, **OPTIONS}
    loaders = [
        in_order_of_replicas(token_loader(samples, 1).dataset, shuffle=True),  # as Lightning does to training data
        in_order_of_replicas(token_loader(24, 1, seed=2).dataset, shuffle=False),
    ]
    if pipeline:
        from lightning_dynmo import DynMoStrategy

        loaders = [DataLoader(loader.dataset, batch_size=GLOBAL) for loader in loaders]
        options["strategy"] = DynMoStrategy(num_microbatches=REPLICAS * MICROBATCHES)
    else:
        options["accumulate_grad_batches"] = REPLICAS * MICROBATCHES
    trainer = Trainer(devices=1, callbacks=[SaveAtEnd(path)], **options)
    trainer.fit(model, *loaders)
    return model.logged


def fit_replicas(rank: int, module: Any, path: str, samples: int, balances: Any, options: Any) -> dict[str, Any]:
    from lightning_dynmo import DynMoStrategy

    seed_everything(SEED, verbose=False)
    model, moves = module(), [ForcedMoves(balances)] if balances else []
    strategy = DynMoStrategy(data_parallel_size=REPLICAS, num_microbatches=MICROBATCHES, **options)
    trainer = Trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=[SaveAtEnd(path), *moves],
        **QUIET,
        **OPTIONS,
    )
    size = MICROBATCHES * SAMPLES
    trainer.fit(model, token_loader(samples, size), token_loader(24, size, seed=2))
    assert (strategy.pipeline_parallel_size, strategy.data_parallel_size) == (trainer.world_size // 2, 2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"logged": model.logged, "state": state}


def compare(tmp_path: Path, module: Any, *, world_size: int = 4, balances: Any = (), **options: Any) -> None:
    samples = STEPS * GLOBAL
    alone, many = tmp_path / "alone.ckpt", tmp_path / "many.ckpt"
    plain = options.pop("plain", True)
    (expected,) = run_distributed(
        fit_alone, 1, module, str(alone), not plain, samples, init_process_group=False, timeout_s=240
    )
    ranks = run_distributed(fit_replicas, world_size, module, str(many), samples, balances, options, timeout_s=240)
    one, several = load(alone)["state_dict"], load(many)["state_dict"]
    assert one.keys() == several.keys()
    for name in (name for name in one if "calls" not in name):  # each replica counts its own
        torch.testing.assert_close(several[name], one[name], rtol=1e-5, atol=1e-6, msg=name)
    for result in ranks:
        assert result["logged"] == ranks[0]["logged"]
        assert differences(result["state"], ranks[0]["state"]) == []
    logged = ranks[0]["logged"]
    for name in ("val_loss", "val_metric"):
        assert logged[name] == pytest.approx(expected[name], rel=1e-5)
    if not plain:
        assert logged["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)


def test_two_by_two_equals_one_process_with_the_global_batch(tmp_path: Path) -> None:
    compare(tmp_path, Replicated)


def test_two_by_two_with_moves_weights_and_accumulation(tmp_path: Path) -> None:
    compare(tmp_path, partial(Replicated, weighted=True), balances=BALANCES, plain=False)


def test_dropout_and_losses_equal_a_pipeline_of_one_rank(tmp_path: Path) -> None:
    compare(tmp_path, partial(Replicated, dropout=0.1), plain=False, schedule="interleaved1f1b")
