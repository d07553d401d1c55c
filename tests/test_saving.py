"""A crash while a checkpoint is saved leaves the previous one whole; users' own checkpoint plugins stay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_dynmo import DynMoStrategy
from lightning_dynmo.atomic import _exchange, beside, discard, put_in_place
from lightning_dynmo.saving import AtomicCheckpointIO, local_path
from tests.helpers.fitting import QUIET, load
from tests.helpers.models import TinyGPT, token_loader

SAVE = """
import sys, torch
from lightning_dynmo.saving import AtomicCheckpointIO
path, how = sys.argv[1:]
save = AtomicCheckpointIO().save_checkpoint if how == "atomic" else torch.save
save({"state_dict": {"w": torch.zeros(100_000_000)}}, path)
print("first", flush=True)
save({"state_dict": {"w": torch.ones(100_000_000)}}, path)
print("second", flush=True)
"""


def kill_while_saving(path: Path, how: str) -> None:
    """Saves a checkpoint of 400 MB, saves another one in its place, and kills the process when half is written."""
    command = [sys.executable, "-c", SAVE, str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        deadline = time.time() + 60
        while not any(50_000_000 < entry.stat().st_size < 350_000_000 for entry in path.parent.iterdir()):
            assert time.time() < deadline
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""


def test_a_process_killed_while_saving_leaves_the_previous_checkpoint_whole(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    kill_while_saving(path, "atomic")
    assert load(path)["state_dict"]["w"].count_nonzero() == 0
    (leftover,) = [entry for entry in tmp_path.iterdir() if entry != path]
    assert leftover.stat().st_size > 0
    AtomicCheckpointIO().save_checkpoint({"epoch": 1}, tmp_path / "other.ckpt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "other.ckpt"]


def test_a_plain_save_would_not_survive_that(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    kill_while_saving(path, "plain")
    with pytest.raises(RuntimeError):
        load(path)


class Unsaveable:
    def __reduce__(self) -> Any:
        raise OSError("disk full")


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    plugin, path = AtomicCheckpointIO(), tmp_path / "a" / "last.ckpt"
    plugin.save_checkpoint({"epoch": 1}, path)
    with pytest.raises(OSError, match="disk full"):
        plugin.save_checkpoint({"epoch": 2, "bad": Unsaveable()}, path)
    assert load(path) == {"epoch": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_checkpoint_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    plugin, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    (tmp_path / "target.ckpt").write_text("kept")
    path.symlink_to("target.ckpt")
    plugin.save_checkpoint({"epoch": 1}, path)
    assert not path.is_symlink()
    assert (tmp_path / "target.ckpt").read_text() == "kept"
    path.unlink()
    (path / "inside").mkdir(parents=True)
    plugin.save_checkpoint({"epoch": 2}, path)
    assert load(path) == {"epoch": 2}
    folder = beside(path)
    folder.mkdir()
    (folder / "new").touch()
    put_in_place(folder, path)
    assert [entry.name for entry in path.iterdir()] == ["new"]
    (tmp_path / "link").symlink_to("last.ckpt")
    plugin.remove_checkpoint(tmp_path / "link")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last.ckpt", "target.ckpt"]
    plugin.remove_checkpoint(path)
    plugin.remove_checkpoint(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["target.ckpt"]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_two_folders_swap(in_one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_one_step:
        monkeypatch.setattr("lightning_dynmo.atomic._renameat2", lambda: None)
    for name in ("left", "right"):
        (tmp_path / name / name).mkdir(parents=True)
    _exchange(tmp_path / "left", tmp_path / "right")
    assert [entry.name for entry in (tmp_path / "left").iterdir()] == ["right"]
    assert [entry.name for entry in (tmp_path / "right").iterdir()] == ["left"]
    assert len(list(tmp_path.iterdir())) == 2
    discard(tmp_path / "left")
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_running_process_writes_is_left_alone(tmp_path: Path) -> None:
    busy = tmp_path / beside(tmp_path / "x.ckpt").name.replace(str(os.getpid()), str(os.getppid()))
    busy.touch()
    (tmp_path / ".hidden.ckpt").touch()
    AtomicCheckpointIO().save_checkpoint({}, tmp_path / "y.ckpt")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([busy.name, ".hidden.ckpt", "y.ckpt"])


def test_loaded_tensors_can_be_changed_and_outlive_the_file(tmp_path: Path) -> None:
    plugin, path = AtomicCheckpointIO(), tmp_path / "x.ckpt"
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(4)}, "callbacks": {"c": torch.ones(2)}}, path)
    checkpoint = plugin.load_checkpoint(path)
    plugin.save_checkpoint({"state_dict": {"w": torch.zeros(4)}}, path)
    checkpoint["state_dict"]["w"] += 1
    assert checkpoint["state_dict"]["w"].tolist() == [2.0] * 4
    assert plugin.load_checkpoint(path)["state_dict"]["w"].tolist() == [0.0] * 4
    torch.save({"epoch": 3}, path, _use_new_zipfile_serialization=False)
    assert plugin.load_checkpoint(path) == {"epoch": 3}
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "absent.ckpt")


def test_other_filesystems_are_lightnings_matter(tmp_path: Path) -> None:
    assert local_path(f"file://{tmp_path}/x.ckpt") == tmp_path / "x.ckpt"
    assert local_path("memory://x.ckpt") is None
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint({"epoch": 4}, "memory://x.ckpt")
    assert plugin.load_checkpoint("memory://x.ckpt") == {"epoch": 4}
    plugin.remove_checkpoint("memory://x.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "x.ckpt", {"key": 1})


class OwnIO(TorchCheckpointIO):
    """A user's own plugin."""


@pytest.mark.parametrize("own", [None, OwnIO])
def test_plugins_of_the_user_stay(own: Any, tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(own() if own else None)
    trainer = Trainer(devices=1, strategy=DynMoStrategy(), plugins=[plugin], max_steps=1, **QUIET)
    assert trainer.strategy.checkpoint_io is plugin
    assert type(plugin.checkpoint_io) is (own or AtomicCheckpointIO)
    assert type(DynMoStrategy().checkpoint_io) is AtomicCheckpointIO
    assert type(DynMoStrategy(checkpoint_io=OwnIO()).checkpoint_io) is OwnIO


@pytest.mark.distributed
def test_a_checkpoint_saved_in_the_background_is_whole(tmp_path: Path) -> None:
    from tests.helpers.distributed import run_distributed

    run_distributed(_save_in_the_background, 2, str(tmp_path / "x.ckpt"))
    assert load(tmp_path / "x.ckpt")["state_dict"].keys() == TinyGPT().state_dict().keys()
    assert len(list(tmp_path.iterdir())) == 1


def _save_in_the_background(rank: int, path: str) -> None:
    from tests.helpers.fitting import SaveAtEnd

    callbacks, plugins = [SaveAtEnd(path)], [AsyncCheckpointIO()]
    trainer = Trainer(devices=2, strategy=DynMoStrategy(), callbacks=callbacks, plugins=plugins, max_steps=1, **QUIET)
    trainer.fit(TinyGPT(), token_loader(16, 8))
