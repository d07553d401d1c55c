"""Trains a small GPT on two devices, half of its layers on each.

Needs no GPU and no data set: on a machine without GPUs it starts two processes, and the text is Python's documentation.

    python examples/train_gpt.py
"""

from lightning.pytorch import Trainer, seed_everything

from lightning_dynmo import DynMoStrategy
from lightning_dynmo.data import TextDataModule
from lightning_dynmo.models import GPT


def main() -> None:
    seed_everything(0)
    trainer = Trainer(accelerator="auto", devices=2, max_steps=100, val_check_interval=50, strategy=DynMoStrategy())
    trainer.fit(GPT(), datamodule=TextDataModule())


# The guard matters: the trainer starts the other process by importing or running this file again.
if __name__ == "__main__":
    main()
