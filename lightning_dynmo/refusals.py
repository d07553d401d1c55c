"""What the strategy cannot do: refused by name before the first step, alike on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS, Optimizer

from lightning_dynmo.ownership import has_shells
from lightning_dynmo.planning import Balancer


def check_types(num_microbatches: Any, schedule: Any, balance: Any, balancer: Any, timeout: Any) -> None:
    """Checks the types of the strategy's arguments, which would otherwise be found out in the middle of a run.

    Raises:
        TypeError: If one is of another type; says what to write.
        ValueError: If there are less than 1 microbatches.
    """
    whole = isinstance(num_microbatches, int) and not isinstance(num_microbatches, bool)
    if not whole and num_microbatches != "auto":
        raise TypeError(f"num_microbatches must be a whole number or 'auto', such as 8, got {num_microbatches!r}.")
    if whole and num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1 or 'auto', got {num_microbatches}.")
    if not isinstance(schedule, str):
        raise TypeError(f"schedule must be a name, such as '1f1b', got {schedule!r}.")
    if not isinstance(balance, str | list | tuple):
        raise TypeError(f"balance must be a name, such as 'uniform', or a list, such as [3, 4, 3], got {balance!r}.")
    if balancer is not None and not isinstance(balancer, Balancer):
        raise TypeError(f"balancer must be a Balancer, such as PartitionBalancer(), got {balancer!r}.")
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a timedelta, such as timedelta(minutes=30), got {timeout!r}.")


def check_sizes(pipeline_parallel_size: Any, data_parallel_size: Any) -> None:
    """Checks the numbers of ranks in a pipeline and of pipelines.

    Raises:
        TypeError: If one is neither a whole number nor ``"auto"``.
        ValueError: If one is less than 1.
    """
    named = {"pipeline_parallel_size": pipeline_parallel_size, "data_parallel_size": data_parallel_size}
    for name, size in named.items():
        if size == "auto":
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be a whole number or 'auto', such as 2, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name} must be at least 1 or 'auto', got {size}.")


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Checks that the optimizers can work on the parameters of one rank at a time.

    Raises:
        ValueError: If one cannot; names it and what to use instead.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS searches along a line through all parameters and runs the model several times per step, which a "
                "pipeline cannot do. Use an optimizer that updates each parameter by its own gradient, such as AdamW."
            )


def refuse_unsupported(trainer: Trainer, module: LightningModule, precision: Precision, divided: bool = False) -> None:
    """Checks that the module, callbacks and precision can work with a pipeline.

    Args:
        trainer: The Trainer.
        module: The module.
        precision: The Trainer's precision plugin.
        divided: Whether the module's layers are still with the ranks of an earlier run.

    Raises:
        ValueError: If not; names the cause and what to use instead.
    """
    name = type(module).__name__
    if has_shells(module) and not divided:
        raise ValueError(
            f"{name} has lost the layers that other ranks held when an earlier run failed. Create the module anew, and "
            "go on from the last checkpoint: trainer.fit(module, ckpt_path='last')."
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} sets automatic_optimization=False, but a pipeline runs backward while later microbatches are "
            "still in their forward. Remove it, and let the Trainer clip (gradient_clip_val) and accumulate "
            "(accumulate_grad_batches)."
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{name} overrides backward(), which a pipeline never calls: backward runs stage by stage. Use the hooks "
            "on_before_backward and on_after_backward instead."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(f"{name}.training_step takes dataloader_iter; take batch instead, which a pipeline cuts up.")
    if getattr(precision, "scaler", None) is not None:
        raise ValueError("precision='16-mixed' scales losses, which is not supported; use precision='bf16-mixed'.")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the whole model on every rank and replaces the schedule of learning "
                "rates. Use lightning.pytorch.callbacks.WeightAveraging instead, which averages layer by layer."
            )
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise ValueError(
                f"{type(callback).__name__} puts the whole model back in the middle of a run, which no rank of a "
                "pipeline holds. Search on one device without DynMoStrategy, and set the value found."
            )
