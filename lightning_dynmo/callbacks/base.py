"""The base of all schemes: when the model changes, measure it and rebalance."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_dynmo.module import pipeline_layers
from lightning_dynmo.pipeline import PipelineRuntime
from lightning_dynmo.reporting import rebalance_line


class DynamismCallback(Callback):
    """Applies a scheme that changes what layers cost, and has the pipeline rebalanced after each change.

    A subclass implements `apply`, and `steps_until_change` where it knows. The batch after a change is measured, and
    layers move at its end where that is worth its cost (see ``DynMoStrategy(move_when=...)``); in between optimizer
    steps nothing moves. Where the answer is not certain yet, and after a move, further batches are measured. Several
    such callbacks share one measurement and one decision. A resumed run is taken as one whose model has just changed:
    its split may be another one, and the last change may not have been answered yet. Without `DynMoStrategy`, on one
    device for instance, the scheme is applied all the same and nothing is rebalanced.

    Args:
        rebalance_every_n_steps: Rebalance also at every so many optimizer steps, whether the model has changed or not.
            By default only after changes.

    Raises:
        ValueError: If the interval is less than 1.
    """

    def __init__(self, rebalance_every_n_steps: int | None = None) -> None:
        if rebalance_every_n_steps is not None and rebalance_every_n_steps < 1:
            raise ValueError(f"rebalance_every_n_steps must be at least 1 or None, got {rebalance_every_n_steps}.")
        self.rebalance_every_n_steps = rebalance_every_n_steps
        self._changed = False
        self._resumed = False
        self._step = 0

    @abstractmethod
    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        """Changes the model where the scheme says so; called after each optimizer step.

        Args:
            trainer: The Trainer.
            pl_module: The module; every rank has its whole tree, with shells for layers that live elsewhere.
            step: Optimizer steps done, the same on every rank.

        Returns:
            Whether the cost of a layer has changed.
        """

    def steps_until_change(self, step: int) -> float | None:
        """Returns how many optimizer steps the layers will cost what they cost now, as far as the scheme knows.

        Layers move if that gains more in these steps than the move costs. By default unknown: then they move once
        staying has cost as much as the move.

        Args:
            step: Optimizer steps done; where `apply` will change the model after this very step, the answer is 0.

        Returns:
            Steps; infinity where there will be no change; None where it is not known.
        """
        return None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._resumed = self._step > 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        runtime = runtime_of(trainer)
        if runtime is None:
            return
        if self._changed or self._is_due(trainer.global_step + 1) or runtime.rebalancer.wants_measurement:
            runtime.request_rebalance()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        self._step = trainer.global_step
        runtime = runtime_of(trainer)
        if runtime is not None and runtime.rebalancer.requested:
            _rebalance(runtime, trainer, pl_module)
        # The first batch of a run is not measured, since it takes longer than any other.
        self._changed = self.apply(trainer, pl_module, self._step) or self._resumed
        self._resumed = False
        if self._changed and runtime is not None:
            runtime.rebalancer.model_changed()

    def _is_due(self, step: int) -> bool:
        return self.rebalance_every_n_steps is not None and step % self.rebalance_every_n_steps == 0


def runtime_of(trainer: Trainer) -> PipelineRuntime | None:
    """Returns the pipeline that the Trainer's strategy runs, or None where it runs none."""
    runtime = getattr(trainer.strategy, "runtime", None)
    return runtime if isinstance(runtime, PipelineRuntime) else None


def layers_of(trainer: Trainer, pl_module: LightningModule) -> Sequence[nn.Module]:
    """Returns the chain of layers, with or without a pipeline."""
    runtime = runtime_of(trainer)
    return pipeline_layers(pl_module) if runtime is None else runtime.chain.layers


def remaining_steps(trainer: Trainer) -> float:
    """Returns the optimizer steps until training ends; infinity where nothing says when."""
    total = trainer.estimated_stepping_batches
    return max(total - trainer.global_step, 0) if total > 0 else math.inf


def _rebalance(runtime: PipelineRuntime, trainer: Trainer, pl_module: LightningModule) -> None:
    """Rebalances once for all callbacks: the first of them is called before any of them changes the model again."""
    all_callbacks = trainer.callbacks  # type: ignore[attr-defined]
    callbacks = [callback for callback in all_callbacks if isinstance(callback, DynamismCallback)]
    changes = [callback.steps_until_change(trainer.global_step) for callback in callbacks]
    known = [steps for steps in changes if steps is not None]
    batches = min([*known, remaining_steps(trainer)]) * trainer.accumulate_grad_batches
    with runtime.groups.guard(f"rebalance after step {trainer.global_step}"):
        result = runtime.rebalance(horizon_steps=None if None in changes else batches, at_most_steps=batches)
    moved = 0 if result.migration is None else len(result.migration.moves)
    pl_module.log("dynmo/moved_layers", float(moved))
    pl_module.log("dynmo/overhead_share", runtime.overhead_share)
    pl_module.print(rebalance_line(trainer.global_step, result, runtime))
