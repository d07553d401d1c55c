"""All hooks of the module and of callbacks fire as on one device: once per step, in the same order, on every rank."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

CALLS: list[tuple[str, ...]] = []
MORE_OF_MODULES = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping")
MORE_OF_MODULES += ("configure_callbacks", "configure_model", "configure_optimizers", "transfer_batch_to_device")
OF_BOTH = ("setup", "teardown")


def record(owner: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook that also notes its call: its name, and numbers and sizes of batches among its arguments."""
    names = list(inspect.signature(original).parameters)[1:]

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        details = [f"{key}={arguments[key]}" for key in ("batch_idx", "epoch", "stage") if key in arguments]
        batch = arguments.get("batch")
        if isinstance(batch, list | tuple):
            details.append(f"size={len(batch[0])}")
        CALLS.append((owner, name, *details))
        return original(self, *args, **kwargs)

    return hook


def recording(owner: str, base: type, names: tuple[str, ...]) -> type:
    """Returns a subclass whose hooks note that they were called."""
    hooks = {name: record(owner, name, getattr(base, name)) for name in names}
    return type(f"Recording{base.__name__}", (base,), hooks)


def hooks_of(base: type, more: tuple[str, ...]) -> tuple[str, ...]:
    found = [name for name in dir(base) if name.startswith("on_") or name in (*more, *OF_BOTH)]
    return tuple(name for name in found if callable(getattr(base, name)))


class Data(LightningDataModule):
    """The same loaders for training and evaluation."""

    def train_dataloader(self) -> DataLoader:
        return token_loader(48, 16)

    def val_dataloader(self) -> DataLoader:
        return token_loader(32, 16, seed=2)

    test_dataloader = predict_dataloader = val_dataloader


def all_calls(rank: int, pipeline: bool, folder: str, accumulate: int) -> list[tuple[str, ...]]:
    """Fits with validation, clipping and checkpoints, then validates, tests and predicts, with whole batches."""
    CALLS.clear()
    seed_everything(3, verbose=False)
    module = recording("module", TinyGPT, hooks_of(LightningModule, MORE_OF_MODULES))()
    callback = recording("callback", Callback, hooks_of(Callback, ("state_dict", "load_state_dict")))()
    data = recording("data", Data, (*hooks_of(LightningDataModule, ("prepare_data",)), "train_dataloader"))()
    options: dict[str, Any] = {
        **QUIET,
        "enable_checkpointing": True,
        "accumulate_grad_batches": accumulate,
        "max_epochs": 2,
        "gradient_clip_val": 0.5,
        "callbacks": [callback, ModelCheckpoint(folder, save_last=True)],
    }
    if pipeline:
        from lightning_dynmo import DynMoStrategy

        strategy = DynMoStrategy(num_microbatches=4)
        runner = Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **options)
    else:
        assert "lightning_dynmo" not in sys.modules
        runner = Trainer(devices=1, **options)
    runner.fit(module, data)
    runner.fit_loop.max_epochs = 3
    runner.fit(module, data, ckpt_path="last")
    runner.validate(module, data, verbose=False)
    runner.test(module, data, verbose=False)
    runner.predict(module, data)
    return list(CALLS)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_hooks_fire_in_the_order_of_one_device(accumulate: int, tmp_path: Path) -> None:
    arguments = (str(tmp_path / "one"), accumulate)
    (expected,) = run_distributed(all_calls, 1, False, *arguments, init_process_group=False)
    names = {call[:2] for call in expected}
    for owner, some in {
        "module": ("on_before_optimizer_step", "on_after_backward", "on_before_zero_grad", "on_load_checkpoint"),
        "callback": ("on_before_backward", "on_save_checkpoint", "on_sanity_check_end", "on_predict_batch_end"),
        "data": ("on_before_batch_transfer", "teardown"),
    }.items():
        assert {(owner, name) for name in some} <= names
    assert ("module", "on_train_batch_start", "batch_idx=2", "size=16") in expected
    for rank, found in enumerate(run_distributed(all_calls, 2, True, str(tmp_path / "two"), accumulate)):
        # By Lightning's rule one process of each node prepares the data.
        wanted = [call for call in expected if rank == 0 or call != ("data", "prepare_data")]
        assert found[: len(wanted)] == wanted
        assert len(found) == len(wanted)
