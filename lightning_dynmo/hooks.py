"""Hooks that look at gradients see those of the whole model, on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dynmo.pipeline import PipelineRuntime, remote_gradients


class GradientHooks:
    """Knows which hooks of the module and of callbacks may look at gradients, and has norms exchanged for these only.

    Args:
        trainer: The Trainer with all its callbacks.
        module: The user's module.
        runtime: The pipeline.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, runtime: PipelineRuntime) -> None:
        self._callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._module = module
        self._runtime = runtime

    def around(self, *names: str) -> AbstractContextManager[None]:
        """Returns a context for the call of these hooks; one that does nothing where nobody has defined any."""
        if not any(map(self._defined, names)):
            return nullcontext()
        return remote_gradients(self._runtime.chain, self._runtime.owners, self._runtime.groups)

    def _defined(self, name: str) -> bool:
        return is_overridden(name, self._module) or (
            hasattr(Callback, name) and any(is_overridden(name, callback) for callback in self._callbacks)
        )
