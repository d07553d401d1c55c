"""What the strategy cannot do: refused by name before the first step, alike on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS, Optimizer

from lightning_dynmo.ownership import has_shells


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


def refuse_unsupported(trainer: Trainer, module: LightningModule, precision: Precision) -> None:
    """Checks that the module, callbacks and precision can work with a pipeline.

    Raises:
        ValueError: If not; names the cause and what to use instead.
    """
    name = type(module).__name__
    if has_shells(module):
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
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the whole model on every rank, which a pipeline does not hold. "
                "Remove it, and average checkpoints after training instead."
            )
