"""CASES rows 41-43, 45 and 46: samples, logs, ends of data, schedules of learning rates, names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.cases.modules import WIDTH, Chain, eight_layers, regression
from tests.cases.running import Case, Comparison, assert_equal_to_one_device, assert_refused_alike, run_cases
from tests.helpers.fitting import QUIET

pytestmark = pytest.mark.distributed

eights = partial(regression, (8,) * 6)


def rank_of_this_process() -> int:
    return int(os.environ["RANK"])


# Row 41: all stages read the same samples


class Numbered(Dataset):
    """Sample i is full of i, with noise that the worker draws."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = self.noise * (torch.rand(WIDTH) + float(np.random.rand()))
        return torch.full((WIDTH,), index / 48) + noise, torch.zeros(WIDTH)


class InOrderOfRank(Sampler[int]):
    """From epoch `since` on, each rank reads in an order of its own."""

    def __init__(self, since: int) -> None:
        self.since, self.epoch = since, 0

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[int]:
        seed = rank_of_this_process() if self.epoch >= self.since else 0
        self.epoch += 1
        yield from torch.randperm(48, generator=torch.Generator().manual_seed(seed)).tolist()


def in_order_of_rank(since: int) -> DataLoader:
    return DataLoader(Numbered(), batch_size=8, sampler=InOrderOfRank(since))


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def own_samples(kind: str) -> list[Any]:
    """Returns batches of the same form on all ranks, with other samples on rank 1."""
    x, y = regression((8,), seed=1 + (rank_of_this_process() == 1))[0]
    if kind == "HF":
        from transformers import BatchEncoding

        return [BatchEncoding({"x": x, "y": y})]
    kinds = {"dataclass": Pair(x, y), "arrays": {"x": x * 0, "y": y * 0, "z": x.numpy()}, "dict": {"x": x, "y": y}}
    return [kinds[kind]]


class AnyBatch(Chain):
    def pipeline_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((batch.x if isinstance(batch, Pair) else batch["x"]),), {}

    def loss(self, batch: Any) -> Tensor:
        x, y = (batch.x, batch.y) if isinstance(batch, Pair) else (batch["x"], batch["y"])
        return F.mse_loss(self(x), y)


class NotesSamples(Chain):
    """Notes on every rank which samples it has read."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.notes.append([round(float(value), 5) for value in batch[0][:, 0]])


def numbered(shuffle: bool, workers: int = 0, noise: float = 0.0) -> DataLoader:
    return DataLoader(Numbered(noise), batch_size=8, shuffle=shuffle, num_workers=workers)


_NUMBERED = Case(NotesSamples, partial(numbered, True), trainer={"max_epochs": 2}, plain="none")
ROW_41 = {
    "41 from the start": replace(_NUMBERED, train=partial(in_order_of_rank, 0), ranks=3),
    "41 from the second epoch": replace(_NUMBERED, train=partial(in_order_of_rank, 1), ranks=3),
    **{
        f"41 {kind}": Case(AnyBatch, partial(own_samples, kind), ranks=3, plain="none")
        for kind in ("dict", "dataclass", "arrays", "HF")
    },
    "41 shuffled": replace(_NUMBERED, ranks=3),
    "41 random in workers": replace(_NUMBERED, train=partial(numbered, True, 2, 1.0), ranks=3),
    "41 replicas": replace(
        _NUMBERED,
        ranks=4,
        strategy={"data_parallel_size": 2},
        trainer={"max_epochs": 2, "use_distributed_sampler": True},
    ),
}

# Row 42: the same logs everywhere


class Logs(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss * 2, on_step=True, on_epoch=True)
        self.log_dict({"at_end": loss + 1, "rows": float(len(batch[0]))}, on_step=False, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_epoch_end(self) -> None:
        shown = self.trainer.progress_bar_metrics
        self.notes.append({key: float(value) for key, value in shown.items() if "dynmo" not in key})


def monitored(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> dict[str, Any]:
    """Trains with callbacks that look at the logs; returns what they have made of them."""
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    stop = EarlyStopping("both_epoch", patience=1, min_delta=0.3)
    trainer.callbacks += [best, stop]
    trainer.fit(module, train, val)
    return {
        "best": float(best.best_model_score),
        "path": Path(best.best_model_path).name,
        "stopped": stop.stopped_epoch,
        "steps": trainer.global_step,
    }


_LOGS = Case(
    Logs,
    partial(regression, (8, 8, 8)),
    val=partial(regression, (8, 8), 2),
    drive=monitored,
    trainer={"max_epochs": 8, "enable_checkpointing": True, "log_every_n_steps": 1},
    plain="microbatches",
)
ROW_42 = {
    "42 on 4": replace(_LOGS, ranks=4),
    "42 zbvzerobubble": replace(_LOGS, strategy={"schedule": "zbvzerobubble"}),
    "42 replicas": replace(
        _LOGS, ranks=4, strategy={"data_parallel_size": 2, "num_microbatches": 2}, val=partial(regression, (8, 8), 2)
    ),
}

# Row 43: ranks that run out of data at different steps


class Stream(IterableDataset):
    """Rank r has r batches more than rank 0."""

    def __iter__(self) -> Iterator[Any]:
        more = rank_of_this_process() if "lightning_dynmo" in sys.modules else 0
        yield from regression((8,) * (3 + more))


def streamed() -> DataLoader:
    return DataLoader(Stream(), batch_size=None)


ROW_43 = {
    "43 stream": Case(partial(Chain, eight_layers), streamed, ranks=3),
    "43 stream, accumulated": Case(
        partial(Chain, eight_layers), streamed, ranks=3, trainer={"accumulate_grad_batches": 2, "max_epochs": 2}
    ),
}

# Row 45: schedules of learning rates


class Scheduled(Chain):
    """Notes each step's learning rate and momentum, and whether the optimizer is the same as ever."""

    def __init__(self, kind: str) -> None:
        super().__init__(eight_layers)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        halves = [list(self.layers[:4].parameters()), list(self.layers[4:].parameters())]
        groups = [{"params": halves[0], "lr": 0.1}, {"params": halves[1], "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        schedules = torch.optim.lr_scheduler
        made = {
            "cosine": partial(schedules.CosineAnnealingLR, T_max=5),
            "one cycle": partial(schedules.OneCycleLR, max_lr=[0.2, 0.1], total_steps=12),
            "plateau": partial(schedules.ReduceLROnPlateau, patience=0, threshold=10.0),
            "warm-up": partial(schedules.LambdaLR, lr_lambda=_warm_up),
        }[self.kind](optimizer)
        config = {"scheduler": made, "interval": "step", "monitor": "loss_step"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_start(self) -> None:
        self.known = id(self.trainer.optimizers[0])

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer, scheduler = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        assert id(optimizer) == self.known
        assert scheduler.optimizer is optimizer
        self.notes.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])


def _warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


ROW_45 = {
    f"45 {kind}": Case(
        partial(Scheduled, kind),
        eights,
        ranks=3,
        trainer={"max_epochs": 2},
        moves=[(1, 1, 6), (5, 2, 1), (1, 6, 1), (3, 3, 2)],
    )
    for kind in ("cosine", "one cycle", "plateau", "warm-up")
}


# Row 46: names


def by_alias(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> str:
    again = Trainer(devices=trainer.world_size, strategy="dynmo", max_epochs=1, num_sanity_val_steps=0, **QUIET)
    again.fit(module, train)
    return type(again.strategy).__name__


def by_wrong_alias(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> None:
    Trainer(devices=trainer.world_size, strategy="dynamo", **QUIET)


ROW_46 = {
    "46 alias": Case(Chain, eights, ranks=3, drive=by_alias, plain="none"),
    "46 near miss": Case(Chain, eights, drive=by_wrong_alias, plain="none"),
}

CASES = {**ROW_41, **ROW_42, **ROW_43, **ROW_45, **ROW_46}


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", [name for name in ROW_41 if name not in ("41 shuffled", "41 replicas")])
def test_row_41_different_samples_on_stages(name: str, found: dict[str, Comparison]) -> None:
    if name == "41 random in workers":
        return _assert_same_samples(found[name])
    strange = "[1, 2]" if " from " in name else "[1]"
    parts = ("The ranks of the pipeline read different batches", f"ranks {strange} differ from rank 0", "Remove rank-")
    assert_refused_alike(found[name], "ValueError", *parts)
    return None


def _assert_same_samples(comparison: Comparison) -> None:
    for outcome in comparison.ranks:
        assert outcome.kind is None, outcome.text
        assert len(outcome.notes) == 12
        assert outcome.notes == comparison.ranks[0].notes


def _samples(batches: list[list[float]]) -> list[float]:
    return sorted(sample for batch in batches for sample in batch)


def test_row_41_a_shuffled_loader_is_read_alike(found: dict[str, Comparison]) -> None:
    comparison = found["41 shuffled"]
    _assert_same_samples(comparison)
    first, second = comparison.ranks[0].notes[:6], comparison.ranks[0].notes[6:]
    assert first != second
    assert _samples(first) == _samples(second) == [round(index / 48, 5) for index in range(48)]


def test_row_41_replicas_read_samples_of_their_own(found: dict[str, Comparison]) -> None:
    ranks = found["41 replicas"].ranks
    assert [outcome.text for outcome in ranks] == [""] * 4
    samples = [[_samples(outcome.notes[start : start + 3]) for start in (0, 3)] for outcome in ranks]
    assert samples[0] == samples[2]  # stages of one pipeline
    assert samples[1] == samples[3]
    for epoch in (0, 1):
        assert sorted(samples[0][epoch] + samples[1][epoch]) == [round(index / 48, 5) for index in range(48)]


@pytest.mark.parametrize("name", ROW_42)
def test_row_42_the_same_keys_and_values_on_every_rank(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    plain = found[name].plain
    for outcome in found[name].ranks:
        assert outcome.result == found[name].ranks[0].result
        assert outcome.notes == found[name].ranks[0].notes
        assert outcome.logged.keys() == plain.logged.keys()
        assert [set(shown) for shown in outcome.notes] == [set(shown) for shown in plain.notes]
        assert outcome.result["best"] == pytest.approx(plain.result["best"], abs=1e-5)
        assert outcome.result["path"].partition("step")[0] == plain.result["path"].partition("step")[0]
        assert (outcome.result["stopped"], outcome.result["steps"]) == (plain.result["stopped"], plain.result["steps"])
        for key in ("both_epoch", "at_end", "val_loss"):
            torch.testing.assert_close(outcome.logged[key], plain.logged[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ROW_43)
def test_row_43_ranks_end_with_the_shortest(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


@pytest.mark.parametrize("name", ROW_45)
def test_row_45_learning_rates_go_on_after_moves(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    expected = found[name].plain.notes
    assert len({rates[0] for rates in expected}) > 2
    for outcome in found[name].ranks:
        assert outcome.notes == expected


def test_row_46_alias_and_near_misses(found: dict[str, Comparison]) -> None:
    for outcome in found["46 alias"].ranks:
        assert (outcome.text, outcome.result) == ("", "DynMoStrategy")
    # Lightning's own check; the command line names what was meant, see tests/cli/test_parsing.py.
    assert_refused_alike(found["46 near miss"], "ValueError", "You selected an invalid strategy name", "'dynamo'")
