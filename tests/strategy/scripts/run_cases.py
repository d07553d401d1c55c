"""Runs cases that must fail, one after the other, and writes what each rank got: python run_cases.py FOLDER CASE...

Started by `torchrun` or, without it, by Lightning's own launcher. Exceptions of all cases but the last are caught.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.models import CONTEXT, VOCABULARY, TinyGPT, token_loader

FOLDER = Path(sys.argv[1])
WORLD_SIZE = 3


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def record(name: str, **values: Any) -> None:
    (FOLDER / f"{name}-{rank()}.json").write_text(json.dumps({"at": time.time(), **values}))


class Case:
    """What is passed to the Trainer; each case below changes something."""

    def __init__(self) -> None:
        self.module: LightningModule = TinyGPT(num_blocks=3)  # 5 layers: 2, 2, 1
        self.strategy: dict[str, Any] = {"num_microbatches": 4}
        self.trainer: dict[str, Any] = {"num_sanity_val_steps": 0}
        self.loader = token_loader(32, 8)
        self.val_loader: DataLoader | None = None

    def run(self) -> None:
        from lightning_dynmo import DynMoStrategy  # here, so that what it does at exit comes before the record of it

        trainer = Trainer(
            accelerator="cpu",
            devices=WORLD_SIZE,
            strategy=DynMoStrategy(**self.strategy),
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": False, **self.trainer},
        )
        trainer.fit(self.module, self.loader, self.val_loader)


def boom(case: str) -> None:
    record(f"{case}-raised")
    raise ValueError(f"{case} went wrong")


def fail_in_layer(case: Case, name: str, layer: int, count: int, *, backward: bool = False, train: bool = True) -> None:
    """Lets a layer raise in the forward or backward of its `count`-th microbatch in training or validation."""
    calls = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal calls
        calls += module.training == train
        if calls == count and module.training == train:
            if backward:
                output.register_hook(lambda gradient: boom(name))
            else:
                boom(name)

    case.module.configure_pipeline()[layer].register_forward_hook(hook)


class FailingCallback(Callback):
    def __init__(self, name: str, on_rank: int, sleeps: int | None = None) -> None:
        self.name, self.on_rank, self.sleeps = name, on_rank, sleeps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            if rank() == self.sleeps:
                time.sleep(3.0)
            if rank() == self.on_rank:
                boom(self.name)


class FailingData(Dataset):
    def __init__(self, name: str, on_rank: int) -> None:
        self.name, self.on_rank = name, on_rank

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if rank() == self.on_rank and index == 16:
            boom(self.name)
        return torch.zeros(CONTEXT, dtype=torch.int64), torch.zeros(CONTEXT, dtype=torch.int64)


# What cannot work


def too_many_stages(case: Case) -> None:
    case.module = TinyGPT(num_blocks=0)


def sizes_of_another_product(case: Case) -> None:
    case.strategy.update(pipeline_parallel_size=2, data_parallel_size=2)


def too_few_microbatches(case: Case) -> None:
    case.strategy["num_microbatches"] = 2


def unknown_schedule(case: Case) -> None:
    case.strategy["schedule"] = "1f2b"


def balance_of_wrong_sum(case: Case) -> None:
    case.strategy["balance"] = [2, 2, 2]


def balance_of_wrong_length(case: Case) -> None:
    case.strategy["balance"] = [3, 2]


def speeds_of_wrong_number(case: Case) -> None:
    case.strategy["rank_speeds"] = [1.0, 0.5]


def no_chain(case: Case) -> None:
    class Plain(TinyGPT):
        configure_pipeline = None

    case.module = Plain(num_blocks=3)


def parameters_outside(case: Case) -> None:
    case.module.scale = nn.Parameter(torch.ones(1))


def shared_counter(case: Case) -> None:
    case.module.blocks[2].calls = case.module.blocks[0].calls


def gradients_not_cleared(case: Case) -> None:
    class Keeps(TinyGPT):
        def optimizer_zero_grad(self, *args: Any) -> None:
            pass

    case.module = Keeps(num_blocks=3)


def layers_of_another_module(case: Case) -> None:
    class Foreign(TinyGPT):
        def configure_pipeline(self) -> Sequence[nn.Module]:
            return [self.embedding, *TinyGPT(num_blocks=3).blocks, self.head]

    case.module = Foreign(num_blocks=3)


def manual_optimization(case: Case) -> None:
    case.module.automatic_optimization = False


def own_backward(case: Case) -> None:
    class Own(TinyGPT):
        def backward(self, loss: Tensor) -> None:
            loss.backward()

    case.module = Own(num_blocks=3)


def lbfgs(case: Case) -> None:
    class Searching(TinyGPT):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters())

    case.module = Searching(num_blocks=3)


class ReturnsDict(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.layer(x)}


def dict_in_the_middle(case: Case) -> None:
    case.module.blocks[1] = ReturnsDict(case.module.blocks[1])


def step_without_forward(case: Case) -> None:
    class Without(TinyGPT):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return torch.zeros((), requires_grad=True)

    case.module = Without(num_blocks=3)


def step_with_other_arguments(case: Case) -> None:
    class Other(TinyGPT):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return super().training_step([(batch[0] + 1) % VOCABULARY, batch[1]], batch_idx)

    case.module = Other(num_blocks=3)


def different_batches(case: Case) -> None:
    case.loader = token_loader(32, 8, seed=1 + (rank() == 1))


def module_of_a_failed_run(case: Case) -> None:
    fail_in_layer(case, "module_of_a_failed_run", 2, 1)
    with contextlib.suppress(Exception):
        case.run()


# What goes wrong on the way


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


# Memory


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


# Nothing wrong


def succeeds(case: Case) -> None:
    """Trains, after all that, as if nothing had happened."""


def main(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_S", "90")), exit=True)
    atexit.register(record, "exit")
    record("started", pid=os.getpid())
    for index, name in enumerate(names):
        make: Callable[[Case], None] = globals()[name]
        case = Case()
        make(case)
        try:
            case.run()
            record(name, kind=None, text="", losses=getattr(case.module, "losses", None))
        except BaseException as error:
            record(name, kind=type(error).__name__, text=str(error))
            if index == len(names) - 1:
                if os.environ.get("STAYS_ALIVE") == str(rank()):
                    time.sleep(8.0)
                raise


if __name__ == "__main__":
    main(sys.argv[2:])
