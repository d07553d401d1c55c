"""Layers with all that may cross a border, run on the way, or be asked for by name."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tests.pipeline.chains import WIDTH, Block


class Spread(nn.Module):
    """Makes everything that may cross a border: activations, a mask, positions, a skip connection, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.linear(x).float()
        positions = torch.arange(x.shape[0])
        return hidden, x > 0, positions, hidden * 2, torch.complex(hidden, hidden * 0.5).conj(), hidden.sum()


class Through(nn.Module):
    """Uses and hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, skip: Tensor, wave: Tensor, total: Tensor) -> Any:
        x = torch.tanh(self.linear(x)) * mask + self.table(positions)
        return x, mask, positions.flip(0), skip, (wave * 1.5).conj(), total


class Gather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor, skip: Tensor, wave: Tensor, total: Tensor) -> Tensor:
        return self.linear(x + skip + wave.real + wave.imag * mask) + total + positions[:, None]


def layers_with_tuples() -> list[nn.Module]:
    return [Spread(), Through(), Through(), Through(), Gather()]


class Named(Block):
    """Takes side inputs by name."""

    takes = ("mask", "scale")

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * mask * scale


class OfAnyNumber(nn.Module):
    takes = ("mask",)

    def forward(self, *values: Tensor, mask: Tensor | None = None) -> Tensor:
        return sum(values) + mask


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("tokens", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.tokens += x.shape[0]
        self.calls += 1
        return self.norm(self.linear(x))


def batch_norm_layers() -> list[nn.Module]:
    return [WithBatchNorm() for _ in range(5)]


def half_precision() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)
