"""A scheme of your own is one callback: it changes the model, and has the pipeline rebalanced after each change.

This one is LISA (Pan et al. 2024, "Layerwise Importance Sampling for Memory-Efficient LLM Fine-Tuning"): the first and
the last layer always train, and of those between only a few at a time, drawn anew every few steps.

    python examples/add_a_scheme.py
"""

import random

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_dynmo import GPT, DynamismCallback, DynMoStrategy, TextDataModule, layers_of


class LISACallback(DynamismCallback):
    """Trains a few layers at a time.

    Args:
        num_active: How many of the layers between the first and the last train.
        every_n_steps: Optimizer steps after which others are drawn.
        seed: Of the draws, which must be the same on every rank.
    """

    def __init__(self, num_active: int = 2, every_n_steps: int = 20, seed: int = 0) -> None:
        super().__init__()
        self.num_active = num_active
        self.every_n_steps = every_n_steps
        self.seed = seed

    @override
    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        if step % self.every_n_steps:
            return False
        between = layers_of(trainer, pl_module)[1:-1]
        active = random.Random(f"{self.seed} {step}").sample(range(len(between)), self.num_active)
        for index, layer in enumerate(between):
            layer.requires_grad_(index in active)
            for parameter in layer.parameters():
                parameter.grad = None  # or the optimizer would go on with the last one
        pl_module.print(f"[lisa] step {step}: layers {sorted(index + 1 for index in active)} train")
        return True

    @override
    def steps_until_change(self, step: int) -> float:
        return -step % self.every_n_steps  # so that layers move if that pays within these steps


def main() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=90,
        strategy=DynMoStrategy(),
        callbacks=[LISACallback()],
        limit_val_batches=0,
    )
    trainer.fit(GPT(num_blocks=8), TextDataModule())


if __name__ == "__main__":
    main()
