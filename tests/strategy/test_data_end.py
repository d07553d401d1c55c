"""Ranks that run out of data at different batches end together, and batches of different form are refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.fitting import QUIET, differences, load
from tests.helpers.models import CONTEXT, VOCABULARY, TinyGPT, token_loader

pytestmark = pytest.mark.distributed

RANKS = 3


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (64, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return [(row[:-1], row[1:]) for row in tokens[:count]]


class Stream(IterableDataset):
    """Samples without a length, divided between workers."""

    def __init__(self, count: int) -> None:
        self.samples = samples(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        yield from self.samples if info is None else self.samples[info.id :: info.num_workers]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class Finite(Dataset):
    def __init__(self, count: int) -> None:
        self.samples = samples(count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index]


class Counted(TinyGPT):
    """Counts batches of each loop by its hooks, which run on every rank."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.counts: dict[str, list[int]] = {}

    def count(self, name: str, batch_idx: int) -> None:
        counts = self.counts.setdefault(name, [])
        if batch_idx == 0 or not counts:
            counts.append(0)
        counts[-1] += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count("train", batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.count(f"validation {dataloader_idx}", batch_idx)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count("test", batch_idx)

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count("predict", batch_idx)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def trainer(**options: Any) -> Trainer:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    strategy = DynMoStrategy(num_microbatches=4)
    return Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **{**QUIET, **options})


def loader(kind: type[Dataset], count: int, **options: Any) -> DataLoader:
    return DataLoader(kind(count), batch_size=4, drop_last=True, **options)


def everywhere(rank: int, kind: type[Dataset], workers: int) -> dict[str, Any]:
    """Trains, validates, tests and predicts with loaders of which one rank's is shorter."""
    model = Counted()
    # By default workers would start as the ranks here do, and import everything anew.
    options = {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}

    def short(on_rank: int, count: int = 32) -> DataLoader:
        return loader(kind, count - 8 * (rank == on_rank), **options)

    runner = trainer(max_epochs=2, num_sanity_val_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(model, short(1), [short(0, 16), token_loader(8, 4)])
    told = [str(entry.message) for entry in caught if "end at different batches" in str(entry.message)]
    runner.test(model, short(2), verbose=False)
    runner.predict(model, short(1))
    return {"counts": model.counts, "told": told, "weights": dict(model.state_dict())}


@pytest.mark.parametrize(("kind", "workers"), [(Stream, 0), (Stream, 2), (SizedStream, 0), (Finite, 0)])
def test_all_ranks_end_with_the_shortest(kind: type[Dataset], workers: int) -> None:
    ranks = run_distributed(everywhere, RANKS, kind, workers, timeout_s=100)
    for found in ranks:
        assert found["counts"] == {
            "validation 0": [1, 2, 2],
            "validation 1": [1, 2, 2],
            "train": [6, 6],
            "test": [6],
            "predict": [6],
        }
        assert differences(found["weights"], ranks[0]["weights"]) == []
    told = " ".join(ranks[0]["told"])
    if kind is Stream:
        assert "ranks [1] had no batch 6" in told
        assert "ranks [0] had no batch 2" in told
    else:
        assert "they have [8, 6, 8] batches, so all ranks stop after 6" in told


class Nested(Counted):
    """Reads one of several loaders."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["a"])

    def pipeline_inputs(self, batch: Any) -> Any:
        return (batch["a"][0],), {}


def combined(rank: int) -> dict[str, Any]:
    """Uses several loaders at once, limits, and validation in the middle of an epoch."""
    counts = {}
    for mode in ("min_size", "max_size_cycle"):
        model = Nested()
        runner = trainer(max_epochs=1, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0)
        parts = {"a": loader(Stream, 32 - 8 * (rank == 1)), "b": loader(Stream, 16 - 4 * (rank == 2))}
        runner.fit(model, CombinedLoader(parts, mode), CombinedLoader({"a": loader(Stream, 16)}, "min_size"))
        counts[mode] = model.counts
        assert runner.train_dataloader["a"].batch_size == 4
    model, runner = Counted(), trainer(max_epochs=-1, max_steps=7, limit_train_batches=3)
    runner.fit(model, loader(Stream, 32 - 4 * (rank == 0)))
    counts["limited"] = model.counts
    return counts


def test_several_loaders_and_limits() -> None:
    for found in run_distributed(combined, RANKS, timeout_s=100):
        assert found["min_size"] == {"train": [3], "validation 0": [1]}
        assert found["max_size_cycle"] == {"train": [6], "validation 0": [1, 1, 1]}
        assert found["limited"] == {"train": [3, 3, 1]}


def same_data(rank: int) -> tuple[Any, Any]:
    """Trains with a stream and with an ordinary loader of the same samples."""
    weights = []
    for kind in (Stream, Finite):
        runner, model = trainer(max_epochs=2), Counted()
        given = loader(kind, 32)
        runner.fit(model, given)
        assert (runner.train_dataloader is given) == (kind is Finite)  # what cannot go wrong costs nothing
        weights.append(dict(model.state_dict()))
    return weights[0], weights[1]


def test_stream_of_equal_length_trains_as_an_ordinary_loader() -> None:
    for stream, finite in run_distributed(same_data, RANKS):
        assert differences(stream, finite) == []


class Resumable(Stream):
    """A loader that can be resumed and has no length."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        batches = list(DataLoader(self.samples, batch_size=4))
        for position in range(self.position, len(batches)):
            self.position = position + 1
            yield batches[position]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def resumed(rank: int, folder: str) -> int:
    path = f"{folder}/epoch=0-step=3.ckpt"
    saved = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)]}
    trainer(max_epochs=1, **saved).fit(Counted(), Resumable(32))
    if rank == 0:  # Lightning reads one batch ahead where there is no length
        assert load(path)["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"position": 4}]
    runner = trainer(max_epochs=1)
    runner.fit(Counted(), Resumable(32 - 4 * (rank == 1)), ckpt_path=path)
    return runner.global_step


def test_resumable_loader_resumes(tmp_path: Any) -> None:
    assert run_distributed(resumed, RANKS, str(tmp_path)) == [6] * RANKS


class Uneven(Finite):
    """One rank's samples become shorter in the third batch."""

    def __init__(self, rank: int) -> None:
        super().__init__(32)
        self.rank = rank

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self.samples[index]
        return (tokens[:-1], targets[:-1]) if self.rank == 1 and index >= 8 else (tokens, targets)


def uneven(rank: int) -> None:
    trainer(max_epochs=1).fit(Counted(), DataLoader(Uneven(rank), batch_size=4))


def other_size(rank: int) -> None:
    batches = [[8, 8, 4], [8, 8, 8]][rank == 0]
    trainer(max_epochs=1).validate(
        Counted(), DataLoader([next(iter(token_loader(size, size))) for size in batches], batch_size=None)
    )


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (
            uneven,
            r"in training_step of batch 2 .*rank 0: int64\[4, 8\], .*rank 1: int64\[4, 7\], .*rank 2: int64\[4, 8\]",
        ),
        (other_size, r"in validation_step of batch 2 .*rank 0: int64\[8, 8\].*rank 1: int64\[4, 8\]"),
    ],
)
def test_batches_of_different_form_are_refused_at_once(function: Any, pattern: str) -> None:
    with pytest.raises(RankError, match=pattern):
        run_distributed(function, RANKS, timeout_s=30)


def augmented(rank: int, rng: bool) -> Any:
    """Draws random numbers in workers, after `seed_everything(workers=True)`."""
    runner = trainer(max_epochs=1)
    seed_everything(5, workers=True, verbose=False)
    model = Counted()
    runner.fit(model, DataLoader(Noisy(32), batch_size=4, num_workers=2, multiprocessing_context="fork"))
    return runner.train_dataloader.worker_init_fn.keywords["rank"]


class Noisy(Finite):
    """Augments with the random numbers of its worker."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self.samples[index]
        return (tokens + torch.randint(VOCABULARY, ())) % VOCABULARY, targets


def test_workers_of_all_ranks_draw_the_same_numbers() -> None:
    assert run_distributed(augmented, 2, True, timeout_s=100) == [0, 0]
