"""Rebalancing at fixed intervals, whatever it is that changes."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_dynmo.callbacks.base import DynamismCallback, runtime_of


class RebalanceCallback(DynamismCallback):
    """Treats the model as a black box (paper section 3.2): measures and rebalances at fixed intervals.

    For models that change by themselves, or ranks of different speed.

    Args:
        every_n_steps: Optimizer steps between rebalances.

    Raises:
        ValueError: If the interval is less than 1.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        super().__init__(rebalance_every_n_steps=every_n_steps)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if runtime_of(trainer) is None:
            raise TypeError(
                f"RebalanceCallback moves layers between pipeline stages, but the strategy is "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=DynMoStrategy()), or remove the callback."
            )

    @override
    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        return False
