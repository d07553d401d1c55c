"""What the strategy cannot do: refused by name before the first step, alike on every rank."""

from __future__ import annotations

import inspect
import math
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
from lightning_dynmo.planning import Balancer, check_load_metric, check_move_when


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


def check_sizes(pipeline_parallel_size: Any, data_parallel_size: Any, stages_per_rank: Any) -> None:
    """Checks the numbers of ranks in a pipeline, of pipelines, and of stages on a rank.

    Raises:
        TypeError: If one is neither a whole number nor left to the strategy.
        ValueError: If one is less than 1.
    """
    named = (
        ("pipeline_parallel_size", pipeline_parallel_size, "auto"),
        ("data_parallel_size", data_parallel_size, "auto"),
        ("stages_per_rank", stages_per_rank, None),
    )
    for name, size, free in named:
        if size == free:
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} must be a whole number or {free!r}, such as 2, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name} must be at least 1 or {free!r}, got {size}.")


def check_rebalancing(load: Any, move_when: Any, rank_speeds: Any, memory_cap_bytes: Any) -> None:
    """Checks by what and when layers are to move, how fast ranks are, and how much they may hold.

    Raises:
        TypeError: If one is of another type.
        ValueError: If one has a value that cannot work.
    """
    check_load_metric(load)
    check_move_when(move_when)
    if rank_speeds is not None:
        numbers = isinstance(rank_speeds, list | tuple) and all(
            isinstance(speed, int | float) and not isinstance(speed, bool) for speed in rank_speeds
        )
        if not numbers:
            raise TypeError(f"rank_speeds must be a list of numbers, such as [1.0, 0.5], got {rank_speeds!r}.")
        if not all(0 < speed < math.inf for speed in rank_speeds):
            raise ValueError(f"rank_speeds must be finite and above 0, such as [1.0, 0.5], got {rank_speeds}.")
    if memory_cap_bytes is not None:
        if not isinstance(memory_cap_bytes, int) or isinstance(memory_cap_bytes, bool):
            raise TypeError(f"memory_cap_bytes must be a whole number, such as 8000000000, got {memory_cap_bytes!r}.")
        if memory_cap_bytes < 1:
            raise ValueError(f"memory_cap_bytes must be at least 1, such as 8000000000, got {memory_cap_bytes}.")


def check_num_speeds(rank_speeds: Sequence[float] | None, num_ranks: int) -> None:
    """Checks that there is one speed for each rank of a pipeline.

    Raises:
        ValueError: If not.
    """
    if rank_speeds is not None and len(rank_speeds) != num_ranks:
        raise ValueError(
            f"rank_speeds must have one entry for each of the {num_ranks} ranks of a pipeline, got {len(rank_speeds)}. "
            f"Use for example rank_speeds={[1.0] * num_ranks}."
        )


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
