"""A checkpoint may be a folder to which every rank writes its own layers; it holds what the file holds."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.fitting import QUIET, differences, load
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

KEYS = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "loops", "global_step", "epoch", "test")


class Marked(TinyGPT):
    """Has state that is no tensor, looks at what is saved and loaded, and notes the losses of every batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[1].mlp = Counting(self.blocks[1].mlp)
        self.register_buffer("outside", torch.zeros(3))
        self.loaded: list[str] = []
        self.seen: list[str] = []

    def on_train_start(self) -> None:
        self.outside += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["test"] = {"numbers": [1, 2]}
        self.seen = list(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = list(checkpoint["state_dict"])


class Counting(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.count = inner, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, 7: "seven", "tensor": torch.tensor(float(self.count))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["tensor"] == state["count"]
        assert state[7] == "seven"
        self.count = state["count"]


class ResumableLoader:
    """Shuffles anew in every epoch, and goes on where it was, as torchdata's StatefulDataLoader does."""

    def __init__(self, batch_size: int) -> None:
        self.samples = token_loader(80, 80).dataset.tensors
        self.batch_size, self.epoch, self.next = batch_size, 0, 0

    def __len__(self) -> int:
        return 80 // self.batch_size

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        order = torch.randperm(80, generator=torch.Generator().manual_seed(self.epoch)).split(self.batch_size)
        while self.next < len(self):
            self.next += 1
            yield [tensor[order[self.next - 1]] for tensor in self.samples]
        self.epoch, self.next = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.next = state["epoch"], state["next"]


class SaveBoth(Callback):
    """Saves the same moment as a file and as a folder."""

    def __init__(self, directory: str, steps: tuple[int, ...]) -> None:
        self.directory, self.steps = directory, steps

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps and trainer.fit_loop.epoch_loop.batch_idx % 2:
            for kind in ("file", "folder"):
                trainer.strategy.save_distributed_checkpoint = kind == "folder"
                trainer.save_checkpoint(f"{self.directory}/{kind}-{trainer.global_step}.ckpt")


def trainer(strategy: Any = None, callbacks: Any = (), **options: Any) -> Trainer:
    from lightning_dynmo import DynMoStrategy

    return Trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DynMoStrategy(**{"num_microbatches": 4, **(strategy or {})}),
        callbacks=list(callbacks),
        accumulate_grad_batches=2,
        **{**QUIET, **options},
    )


def fit(rank: int, directory: str, max_steps: int, resume: str | None, strategy: Any = None) -> Marked:
    """Trains on shuffled data; an epoch has 10 batches, which are 5 steps."""
    seed_everything(3 if resume is None else 4, verbose=False)
    model = Marked(dropout=0.1)  # whose random numbers go on from the checkpoint, whatever the seed is now
    runner = trainer(strategy, [SaveBoth(directory, (3, 8))], max_steps=max_steps)
    runner.fit(model, ResumableLoader(8), ckpt_path=resume)
    model.trainer = None
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Marked]]:
    directory = tmp_path_factory.mktemp("saved")
    return directory, run_distributed(fit, 3, str(directory), 8, None)


def test_a_folder_holds_what_the_file_holds(saved: tuple[Path, list[Marked]], tmp_path: Path) -> None:
    from lightning_dynmo import consolidate_checkpoint

    directory, ranks = saved
    for step in (3, 8):
        path = consolidate_checkpoint(directory / f"folder-{step}.ckpt", tmp_path / f"{step}.ckpt")
        expected, found = load(directory / f"file-{step}.ckpt"), load(path)
        assert sorted(found) == sorted(expected)
        for key in KEYS:
            assert differences(found[key], expected[key], key) == []
    assert differences(load(tmp_path / "3.ckpt")["state_dict"], load(tmp_path / "8.ckpt")["state_dict"]) != []
    meta = load(directory / "folder-8.ckpt" / "meta.pt")  # tensors and plain types only
    assert meta["test"] == {"numbers": [1, 2]}
    # Callbacks and hooks see the part of their rank, and every rank has written a part.
    keys = [set(rank.seen) for rank in ranks]
    assert set.union(*keys) == set(ranks[0].state_dict())
    assert sum(map(len, keys)) == len(set.union(*keys))
    names = {path.name for path in (directory / "folder-8.ckpt").iterdir()}
    assert names == {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"}
    assert {path.name for path in directory.iterdir()} == {f"{k}-{s}.ckpt" for k in ("file", "folder") for s in (3, 8)}


def test_a_folder_becomes_a_file_by_command_and_loads_in_one_process(
    saved: tuple[Path, list[Marked]], tmp_path: Path
) -> None:
    directory, ranks = saved
    command = [sys.executable, "-m", "lightning_dynmo.consolidate", str(directory / "folder-8.ckpt")]
    run = [*command, "--output_file", str(tmp_path / "whole.ckpt")]
    subprocess.run(run, check=True, timeout=120)
    model = Marked.load_from_checkpoint(tmp_path / "whole.ckpt", num_blocks=5)
    assert differences(dict(model.state_dict()), dict(ranks[0].state_dict())) == []
    again = subprocess.run(run, check=False, timeout=120, capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists. Remove it" in again.stderr


def test_lightnings_own_command_reads_the_weights(saved: tuple[Path, list[Marked]], tmp_path: Path) -> None:
    directory, ranks = saved
    command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint"]
    whole = tmp_path / "whole.ckpt"
    subprocess.run([*command, str(directory / "folder-8.ckpt"), "--output_file", str(whole)], check=True, timeout=120)
    weights = load(whole)["state_dict"]
    for name, parameter in ranks[0].named_parameters():
        assert torch.equal(weights[name], parameter)


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_goes_on_within_an_epoch_as_if_nothing_had_happened(
    kind: str, world_size: int, saved: tuple[Path, list[Marked]], tmp_path: Path
) -> None:
    directory, undisturbed = saved
    resume = str(directory / f"{kind}-3.ckpt")
    # The other kind of saving: the path decides how to load, not the setting.
    options = {"save_distributed_checkpoint": kind == "file"}
    ranks = run_distributed(fit, world_size, str(tmp_path), 8, resume, options)
    assert ranks[-1].losses == undisturbed[-1].losses[3 * 2 * 4 :]
    assert len(ranks[-1].losses) == 5 * 2 * 4
    for rank in ranks:
        assert rank.loaded == list(rank.state_dict())
        weights, expected = dict(rank.state_dict()), dict(undisturbed[0].state_dict())
        assert torch.equal(weights.pop("outside"), expected.pop("outside") + 1)  # a second on_train_start
        assert differences(weights, expected) == []
    before, after = load(directory / "file-8.ckpt"), load(tmp_path / "file-8.ckpt")
    for key in ("optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert differences(after[key], before[key], key) == []


def resume_shuffled(rank: int, directory: str, resume: str | None, world: str) -> Any:
    """Trains on a loader that shuffles and cannot resume, and saves within the first epoch."""
    from tests.helpers.fitting import NUM_MICROBATCHES

    seed_everything(3 if resume is None else 4, verbose=False)
    model, plain = TinyGPT(), world == "plain"
    callback = ModelCheckpoint(directory, every_n_train_steps=3, save_top_k=-1, filename=f"{world}-{{step}}")
    options = {"max_steps": 8, "enable_checkpointing": True}
    if plain:
        every = {"accumulate_grad_batches": 2 * NUM_MICROBATCHES}
        runner = Trainer(devices=1, callbacks=[callback], **{**QUIET, **options, **every})
    else:
        runner = trainer({"save_distributed_checkpoint": world == "folder"}, [callback], **options)
    loader = token_loader(80, 8 // NUM_MICROBATCHES if plain else 8, shuffle=True)
    runner.fit(model, loader, ckpt_path=resume)
    return dict(model.state_dict())


@pytest.mark.parametrize("world", ["file", "folder"])
def test_shuffled_data_go_on_as_on_one_device(world: str, tmp_path: Path) -> None:
    def train(kind: str, ranks: int, resume: str | None) -> Any:
        return run_distributed(resume_shuffled, ranks, str(tmp_path), resume, kind, init_process_group=kind != "plain")

    whole = train("plain", 1, None)[0]
    train(world, 3, None)
    expected = train("plain", 1, str(tmp_path / "plain-step=3.ckpt"))[0]
    for found in train(world, 2, str(tmp_path / f"{world}-step=3.ckpt")):
        assert differences(found, expected) == []
    assert differences(whole, expected) != []  # Lightning begins the epoch's data anew


def evaluate(rank: int, path: str, world: str) -> tuple[Any, Any, Any]:
    seed_everything(5, verbose=False)
    model = Marked()
    strategy = None if world == "plain" else {"num_microbatches": 1}
    runner = trainer(strategy) if strategy else Trainer(devices=1, **QUIET)
    loader = token_loader(8, 4, seed=7)
    (validated,) = runner.validate(model, loader, ckpt_path=path, verbose=False)
    (tested,) = runner.test(model, loader, ckpt_path=path, verbose=False)
    return validated, tested, runner.predict(model, loader, ckpt_path=path)


def test_a_folder_can_be_evaluated(saved: tuple[Path, list[Marked]]) -> None:
    directory, _ = saved
    (expected,) = run_distributed(evaluate, 1, str(directory / "file-8.ckpt"), "plain", init_process_group=False)
    other = run_distributed(evaluate, 1, str(directory / "file-3.ckpt"), "plain", init_process_group=False)[0]
    assert other[0] != expected[0]
    ranks = run_distributed(evaluate, 2, str(directory / "folder-8.ckpt"), "pipeline")
    for found in ranks:
        assert found[:2] == expected[:2]
    assert differences(ranks[0][2], expected[2]) == []


def fit_with_callback(rank: int, directory: str) -> tuple[dict[str, Any], str, str, int]:
    seed_everything(3, verbose=False)
    model = TinyGPT()
    callback = ModelCheckpoint(
        directory, monitor="train_loss", every_n_train_steps=1, save_top_k=2, save_last="link", filename="{step}"
    )
    options = {"save_distributed_checkpoint": True}
    runner = trainer(options, [callback], max_steps=6, enable_checkpointing=True)
    runner.fit(model, token_loader(80, 8))
    runner.save_checkpoint(f"{directory}/after.ckpt")
    second = trainer(options, [ModelCheckpoint(directory)], max_steps=8, enable_checkpointing=True)
    second.fit(TinyGPT(), token_loader(80, 8), ckpt_path="last")
    return dict(model.state_dict()), callback.best_model_path, callback.last_model_path, second.global_step


def test_model_checkpoint_keeps_links_and_removes_folders(tmp_path: Path) -> None:
    from lightning_dynmo.pipeline import load_folder

    ranks = run_distributed(fit_with_callback, 2, str(tmp_path), timeout_s=120)
    weights, best, last, step = ranks[0]
    assert all(rank[1:] == ranks[0][1:] for rank in ranks)
    assert step == 8
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step="))
    assert Path(best).name in names
    assert last == str(tmp_path / "last.ckpt")
    assert Path(last).is_symlink()
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    assert all(path.is_dir() for path in tmp_path.iterdir())
    linked = load_folder(Path(last))
    after = load_folder(tmp_path / "after.ckpt")
    assert differences(dict(after["state_dict"]), weights) == []
    assert differences(dict(linked["state_dict"]), weights) == []
    for found, expected in zip(after["optimizer_states"], linked["optimizer_states"], strict=True):
        assert len(found["state"]) == len(list(TinyGPT().parameters()))
        assert differences(dict(found["state"]), dict(expected["state"])) == []


class Wider(TinyGPT):
    """Large enough that saving it takes a while, on the second stage."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.head.register_buffer("ballast", torch.zeros(100_000_000))


class DieWhileSaving(Callback):
    """Saves the same folder twice; the second time, one rank is killed in the middle."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        if trainer.strategy.global_rank == 1:
            with torch.no_grad():
                pl_module.head.ballast.fill_(1.0)
            threading.Thread(target=self.watch, daemon=True).start()
        trainer.save_checkpoint(self.path)

    def watch(self) -> None:
        while True:
            for file in self.path.parent.glob(f".{self.path.name}.*.saving/*.distcp"):
                if file.stat().st_size > 50_000_000:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)


def save_and_die(rank: int, path: str) -> None:
    runner = trainer({"save_distributed_checkpoint": True}, [DieWhileSaving(path)], max_steps=1)
    runner.fit(Wider(), token_loader(16, 8))


def save_again(rank: int, path: str) -> None:
    runner = trainer({"save_distributed_checkpoint": True}, max_steps=1)
    runner.fit(TinyGPT(), token_loader(16, 8))
    runner.save_checkpoint(path)


def test_a_rank_killed_while_saving_leaves_the_previous_folder_whole(tmp_path: Path) -> None:
    from lightning_dynmo.pipeline import load_folder

    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError, match="SIGKILL"):
        run_distributed(save_and_die, 2, str(path), timeout_s=120)
    assert list(tmp_path.iterdir()) == [path]
    checkpoint = load_folder(path)
    assert checkpoint["global_step"] == 1
    weights = dict(checkpoint["state_dict"])
    assert weights.keys() == Wider().state_dict().keys()
    assert weights["head.ballast"].count_nonzero() == 0
    run_distributed(save_again, 2, str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    assert "head.ballast" not in load_folder(path)["state_dict"]


def load_what_does_not_fit(rank: int, path: str, num_blocks: int, strict: bool) -> str:
    model = Marked(num_blocks=num_blocks)
    model.strict_loading = strict
    try:
        trainer(max_steps=9).fit(model, token_loader(80, 8), ckpt_path=path)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("num_blocks", [4, 6])
def test_weights_that_do_not_fit_are_named_alike_on_every_rank(
    num_blocks: int, saved: tuple[Path, list[Marked]]
) -> None:
    path = str(saved[0] / "folder-3.ckpt")
    texts = run_distributed(load_what_does_not_fit, 3, path, num_blocks, True)
    assert len(set(texts)) == 1
    kind, block = ("Missing", 5) if num_blocks == 6 else ("Unexpected", 4)
    assert f"{kind} keys in what is to be loaded: blocks.{block}.attention.bias, blocks.{block}.att" in texts[0]
    assert texts[0].count("keys in what is to be loaded") == 1
    assert "strict=False" in texts[0]


def load_other_folder(rank: int, path: str) -> str:
    try:
        trainer(max_steps=9).fit(TinyGPT(), token_loader(80, 8), ckpt_path=path)
    except ValueError as error:
        return str(error)
    return "no error"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (text,) = set(run_distributed(load_other_folder, 2, str(tmp_path)))
    assert "is a folder, but not a checkpoint" in text
    (tmp_path / ".metadata").touch()
    torch.save({"state_dict": {}}, tmp_path / "meta.pt")
    (text,) = set(run_distributed(load_other_folder, 2, str(tmp_path)))
    assert "was not written by DynMoStrategy" in text
