"""Modules and data of the cases, as a user writes them: nothing here imports the package under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

WIDTH = 6
NUM_LAYERS = 5

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")


class Layer(nn.Module):
    """Norm, linear, activation, residual; counts its forwards."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(self.norm(x)))


def plain_layers() -> list[nn.Module]:
    return [Layer() for _ in range(NUM_LAYERS)]


def eight_layers() -> list[nn.Module]:
    return [Layer() for _ in range(8)]


class Chain(LightningModule):
    """A chain of layers trained by mean squared errors; keywords go to the layers that list them in `takes`."""

    def __init__(self, layers: Callable[[], list[nn.Module]] = plain_layers, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers())
        self.learning_rate = learning_rate
        self.notes: Any = []

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def forward(self, *values: Any, **side: Any) -> Any:
        for layer in self.layers:
            output = layer(*values, **{name: side[name] for name in getattr(layer, "takes", ()) if name in side})
            values = output if isinstance(output, tuple) else (output,)
        return output

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def regression(sizes: Sequence[int], seed: int = 1, width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    """Returns batches of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, width, generator=generator)
    inputs = [torch.randn(size, width, generator=generator) for size in sizes]
    return [(x, torch.tanh(x @ weight) + x) for x in inputs]
