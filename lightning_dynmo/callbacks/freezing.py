"""Layer freezing: the first layers stop training as they converge (paper section 2.3)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dynmo.callbacks.base import DynamismCallback, layers_of, runtime_of


class FreezingRule(ABC):
    """Decides how many of the first layers are frozen."""

    @property
    def needs_gradient_norms(self) -> bool:
        """Whether `advance` wants the norm of each layer's gradient."""
        return False

    @abstractmethod
    def advance(self, frozen: float, num_layers: int, gradient_norms: Sequence[float] | None) -> float:
        """Returns how many layers are to be frozen now; a fraction counts as begun, and is kept until the next time.

        Args:
            frozen: What the last call returned; 0 at first.
            num_layers: Layers of the model.
            gradient_norms: 2-norm of each layer's gradient before clipping, if the rule needs it.
        """


@dataclass(frozen=True, slots=True)
class PipeTransformerRule(FreezingRule):
    """Freezes a share of the layers that still train, each time (PipeTransformer, He et al. 2021, equation 1).

    ``frozen <- min(frozen + alpha * (num_layers - frozen), argmin of the gradient norm over the layers that train)``.
    The authors' code has the first term only, as is the default here: then 12 layers with ``alpha=1/3`` freeze as
    4, 7, 9, 10, 11, 11, 12.

    Args:
        alpha: Share of the training layers, in ``(0, 1]``.
        use_gradient_norms: Whether the second term holds back layers whose gradients are still large.

    Raises:
        ValueError: If `alpha` is out of range.
    """

    alpha: float = 1 / 3
    use_gradient_norms: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be greater than 0 and at most 1, got {self.alpha}. Try 0.33.")

    @property
    @override
    def needs_gradient_norms(self) -> bool:
        return self.use_gradient_norms

    @override
    def advance(self, frozen: float, num_layers: int, gradient_norms: Sequence[float] | None) -> float:
        proposed = frozen + self.alpha * (num_layers - frozen)
        if gradient_norms is None:
            return proposed
        first = _count(frozen)
        smallest = min(range(first, num_layers), key=lambda layer: gradient_norms[layer], default=first)
        return min(proposed, float(max(smallest, first)))


class LayerFreezingCallback(DynamismCallback):
    """Freezes more of the first layers at fixed intervals, and has the pipeline rebalanced each time.

    A frozen layer is in evaluation mode, has no backward and sends no gradient. Its optimizer state is dropped, which
    makes it cheap to move. The last layer is never frozen.

    Args:
        rule: Says how many layers to freeze.
        start_step: Optimizer step after which the first layers freeze.
        every_n_steps: Optimizer steps between decisions.
        rebalance_every_n_steps: Rebalance also at every so many optimizer steps; by default after freezing only.

    Raises:
        ValueError: If an interval is less than 1.
    """

    def __init__(
        self,
        rule: FreezingRule | None = None,
        start_step: int = 100,
        every_n_steps: int = 100,
        rebalance_every_n_steps: int | None = None,
    ) -> None:
        super().__init__(rebalance_every_n_steps)
        if start_step < 1 or every_n_steps < 1:
            raise ValueError(
                f"start_step and every_n_steps must be at least 1, got {start_step} and {every_n_steps}. For layers "
                "that never train, call requires_grad_(False) in the module's __init__."
            )
        self.rule = rule or PipeTransformerRule()
        self.start_step = start_step
        self.every_n_steps = every_n_steps
        self._frozen = 0.0
        self._num_frozen = 0
        self._num_layers = 0
        self._gradient_norms: Sequence[float] | None = None

    @property
    def num_frozen(self) -> int:
        """Number of layers that are frozen, counted from the first."""
        return self._num_frozen

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._num_layers = len(layers_of(trainer, pl_module))
        self._freeze(trainer, pl_module, self._num_frozen)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        for layer in layers_of(trainer, pl_module)[: self._num_frozen]:
            layer.eval()  # Lightning puts the whole module into training mode at times

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.rule.needs_gradient_norms and self._decides_at(trainer.global_step + 1):
            self._gradient_norms = _gradient_norms(trainer, pl_module)

    @override
    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        if not self._decides_at(step):
            return False
        num_layers = self._num_layers
        self._frozen = self.rule.advance(self._frozen, num_layers, self._gradient_norms)
        num_frozen = min(_count(self._frozen), num_layers - 1)
        changed = num_frozen > self._num_frozen
        if changed:
            self._freeze(trainer, pl_module, num_frozen)
            pl_module.print(f"[dynmo] step {step}: the first {num_frozen} of {num_layers} layers are frozen")
        pl_module.log("dynmo/freezing/num_frozen_layers", float(self._num_frozen))
        return changed

    @override
    def steps_until_change(self, step: int) -> float | None:
        if self._num_frozen and self._num_frozen == self._num_layers - 1:
            return math.inf
        if step < self.start_step:
            return self.start_step - step
        return (self.start_step - step) % self.every_n_steps

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self._frozen, "num_frozen": self._num_frozen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._frozen = state_dict["frozen"]
        self._num_frozen = state_dict["num_frozen"]

    def _decides_at(self, step: int) -> bool:
        return step >= self.start_step and (step - self.start_step) % self.every_n_steps == 0

    def _freeze(self, trainer: Trainer, pl_module: LightningModule, num_frozen: int) -> None:
        self._num_frozen = num_frozen
        for layer in layers_of(trainer, pl_module)[:num_frozen]:
            layer.eval()
            for parameter in layer.parameters():
                parameter.requires_grad_(False)
                parameter.grad = None
                for optimizer in trainer.optimizers:
                    optimizer.state.pop(parameter, None)


def _count(frozen: float) -> int:
    """Rounds up, but not for the last digits of a sum that is whole."""
    return math.ceil(round(frozen, 9))


def _gradient_norms(trainer: Trainer, pl_module: LightningModule) -> list[float]:
    """Returns the 2-norm of each layer's gradient, the same on every rank."""
    runtime = runtime_of(trainer)
    norms = {}
    for index, layer in enumerate(layers_of(trainer, pl_module)):
        gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        if runtime is None or runtime.chain.owns(index):
            norms[index] = float(torch.nn.utils.get_total_norm(gradients))
    if runtime is not None:
        with runtime.groups.guard("exchange of gradient norms"):
            norms = {index: norm for part in runtime.groups.gather(norms) for index, norm in part.items()}
    return [norms[index] for index in range(len(norms))]
