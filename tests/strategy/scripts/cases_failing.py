"""Cases in which something goes wrong on the way: errors, killed and terminated ranks, no memory."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.models import TinyGPT, token_loader
from tests.strategy.scripts.run_case import (
    FOLDER,
    Case,
    FailingCallback,
    FailingData,
    boom,
    fail_in_layer,
    rank,
    record,
)


def forward_first(case: Case) -> None:
    fail_in_layer(case, "forward_first", 0, 1)


def forward_middle(case: Case) -> None:
    fail_in_layer(case, "forward_middle", 2, 10)


def forward_last(case: Case) -> None:
    fail_in_layer(case, "forward_last", 4, 3)


def backward_first(case: Case) -> None:
    fail_in_layer(case, "backward_first", 1, 9, backward=True)


def backward_middle(case: Case) -> None:
    fail_in_layer(case, "backward_middle", 3, 1, backward=True)


def backward_last(case: Case) -> None:
    fail_in_layer(case, "backward_last", 4, 6, backward=True)


def validation(case: Case) -> None:
    case.val_loader = token_loader(16, 8)
    case.trainer["num_sanity_val_steps"] = 2
    fail_in_layer(case, "validation", 3, 2, train=False)


def border(case: Case) -> None:
    """A layer returns another shape than its shapes of inputs said."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        record("border-raised")
        return output[:, 1:]

    case.module.blocks[2].register_forward_hook(hook)


def step_method(case: Case) -> None:
    class Raises(TinyGPT):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                boom("step_method")
            return loss

    case.module = Raises(num_blocks=3)


def callback(case: Case) -> None:
    case.trainer["callbacks"] = [FailingCallback("callback", on_rank=1)]


def callback_and_busy_peer(case: Case) -> None:
    """Rank 0 waits for rank 1, which knows nothing yet of the failure of rank 2."""
    case.trainer["callbacks"] = [FailingCallback("callback_and_busy_peer", on_rank=2, sleeps=1)]


def checkpoint_on_exception(case: Case) -> None:
    case.trainer["enable_checkpointing"] = True
    case.trainer["callbacks"] = [
        OnExceptionCheckpoint(FOLDER, "emergency"),
        FailingCallback("checkpoint_on_exception", on_rank=1),
    ]


def data(case: Case) -> None:
    case.loader = DataLoader(FailingData("data", on_rank=2), batch_size=8)


def data_worker(case: Case) -> None:
    case.loader = DataLoader(FailingData("data_worker", on_rank=0), batch_size=8, num_workers=1)


def exit_in_callback(case: Case) -> None:
    class Exits(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            if rank() == 0:
                record("exit_in_callback-raised")
                sys.exit(7)

    case.trainer["callbacks"] = [Exits()]


class Killed(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 2 and rank() == int(os.environ.get("KILLED_RANK", "1")):
            record("killed-raised")
            os.kill(os.getpid(), signal.SIGKILL)


def killed(case: Case) -> None:
    case.trainer["callbacks"] = [Killed()]


class Terminated(Callback):
    """One rank sends SIGTERM to itself, or to its launcher, which passes it to all ranks."""

    def __init__(self, name: str, launcher: bool = False) -> None:
        self.name, self.launcher = name, launcher

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 2 and rank() == 1:
            record(f"{self.name}-raised")
            os.kill(os.getppid() if self.launcher else os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        record("noticed", received=trainer.received_sigterm, step=trainer.global_step)


def terminated(case: Case) -> None:
    case.trainer["callbacks"] = [Terminated("terminated")]


def terminated_while_waiting(case: Case) -> None:
    """The signal comes to a rank that waits for a slow one in the middle of a step; sent by that slow rank."""
    calls = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            record("terminated_while_waiting-raised")
            pid = json.loads((FOLDER / "started-1.json").read_text())["pid"]
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.5)

    case.module.configure_pipeline()[0].register_forward_hook(hook)


def terminated_with_checkpoints(case: Case) -> None:
    case.trainer["enable_checkpointing"] = True
    case.trainer["callbacks"] = [
        Terminated("terminated_with_checkpoints", launcher=True),
        OnExceptionCheckpoint(FOLDER, "emergency"),
        ModelCheckpoint(FOLDER, save_last=True, save_on_exception=True),
    ]
    case.loader = token_loader(800, 8)  # the signal takes its time


def terminated_in_validation(case: Case) -> None:
    class InValidation(Callback):
        def on_validation_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
        ) -> None:
            if rank() == 2 and batch_idx == 1:
                record("terminated_in_validation-raised")
                os.kill(os.getpid(), signal.SIGTERM)

    case.val_loader = token_loader(64, 8)
    case.trainer["callbacks"] = [InValidation()]


def terminated_and_stuck(case: Case) -> None:
    """A rank that never comes to the next step."""
    from lightning_dynmo import signals

    signals._PATIENCE_S = 1.0

    class Stuck(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if trainer.global_step == 2 and rank() == 0:
                record("terminated_and_stuck-raised")
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(4.0)

    case.trainer["callbacks"] = [Stuck()]


def no_memory(case: Case, name: str) -> None:
    """Asks for more memory than the system lets this rank have from now on."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 256 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    record(f"{name}-raised")
    try:
        torch.empty(2**30, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def memory_in_forward(case: Case) -> None:
    def hook(*args: Any) -> None:
        no_memory(case, "memory_in_forward")

    case.module.configure_pipeline()[2].register_forward_hook(hook)


def memory_in_backward(case: Case) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: no_memory(case, "memory_in_backward"))

    case.module.configure_pipeline()[3].register_forward_hook(hook)


def memory_in_optimizer(case: Case) -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            if rank() == 1:
                no_memory(case, "memory_in_optimizer")
            return loss

    class Module(TinyGPT):
        def configure_optimizers(self) -> Any:
            return Greedy(self.parameters(), lr=0.1)

    case.module = Module(num_blocks=3)


def memory_in_checkpoint(case: Case) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            trainer.save_checkpoint(FOLDER / "never.ckpt")

    class Greedy(TinyGPT):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            if rank() == 0:
                no_memory(case, "memory_in_checkpoint")

    case.module = Greedy(num_blocks=3)
    case.trainer["callbacks"] = [Saves()]
