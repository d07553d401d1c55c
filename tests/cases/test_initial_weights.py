"""CASES row 24: initial weights are those of one process, whatever the number of stages."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed


class NotesWeights(TinyGPT):
    """Draws weights in ``__init__``, and again in ``configure_model``."""

    start: dict[str, Tensor]

    def configure_model(self) -> None:
        nn.init.normal_(self.head[1].weight)


def initial_weights(rank: int, seed: int | None, pipeline: bool) -> dict[str, Tensor]:
    """Returns the weights after no step at all; without a seed, every process has drawn its own."""
    if seed is None:
        torch.manual_seed(1000 + rank)
    else:
        torch.manual_seed(seed)
    model = NotesWeights()
    options: dict[str, Any] = {"devices": 1}
    if pipeline:
        from lightning_dynmo import DynMoStrategy

        options = {"devices": int(os.environ["WORLD_SIZE"]), "strategy": DynMoStrategy(num_microbatches=4)}
    trainer = Trainer(max_steps=0, **QUIET, **options)
    trainer.fit(model, token_loader(8, 8))
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("seed", [3, None], ids=["seeded", "unseeded"])
def test_row_24_initial_weights_do_not_depend_on_the_number_of_stages(seed: int | None) -> None:
    (expected,) = run_distributed(initial_weights, 1, seed, False, init_process_group=False)
    for ranks in (1, 2, 3, 4):
        for found in run_distributed(initial_weights, ranks, seed, True, init_process_group=False):
            assert differences(found, expected) == []
    blocks = [expected[f"blocks.{index}.out.weight"] for index in range(5)]
    assert not any(torch.equal(blocks[0], other) for other in blocks[1:])
