"""The same run as a pipeline over all ranks and, as its reference, under plain Lightning on one device."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from tests.helpers.fitting import NUM_MICROBATCHES, QUIET
from tests.helpers.models import token_loader


def make_trainer(pipeline: bool, **options: Any) -> Trainer:
    """Returns a Trainer that cuts batches into microbatches, or one that accumulates batches of that size."""
    options = {**QUIET, **options}
    if not pipeline:
        assert "lightning_dynmo" not in sys.modules
        return Trainer(devices=1, accumulate_grad_batches=NUM_MICROBATCHES, **options)
    from lightning_dynmo import DynMoStrategy

    strategy = DynMoStrategy(num_microbatches=NUM_MICROBATCHES)
    return Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **options)


def make_loader(pipeline: bool, num_samples: int = 64, seed: int = 1) -> DataLoader:
    """Returns tokens in batches of 16, or in batches of one microbatch."""
    return token_loader(num_samples, 16 if pipeline else 16 // NUM_MICROBATCHES, seed=seed)


def batches(pipeline: bool, count: int) -> int:
    """Returns how many of the loader's batches hold as much as `count` batches of the pipeline."""
    return count if pipeline else count * NUM_MICROBATCHES
