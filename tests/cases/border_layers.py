"""Layers that return all that may cross a border between stages, and some that return what may not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.modules import WIDTH, Layer


class Spread(nn.Module):
    """Makes integers, booleans, complex numbers, scalars, empty tensors and constants of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        wave = torch.complex(hidden, hidden * 0.5)
        return hidden, x > 0, torch.arange(len(x)), wave, torch.fft.rfft(x), (x * 10).to(torch.int8), x.new_zeros(0, 3)


class Pass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor, order: Tensor, wave: Tensor, spectrum: Tensor, small: Tensor, empty: Tensor
    ) -> Any:
        x = torch.tanh(self.linear(x)) * mask + 0.01 * small
        return x, ~mask, order.flip(0), wave.conj() * 1.5, spectrum * 1j, small, empty


class Collect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor, order: Tensor, wave: Tensor, spectrum: Tensor, small: Tensor, empty: Tensor
    ) -> Tensor:
        signal = torch.fft.irfft(spectrum, n=WIDTH)
        return self.linear(x + wave.real * mask + wave.imag) + signal + 0.1 * order[:, None] + empty.sum()


def all_dtypes() -> list[nn.Module]:
    return [Spread(), Pass(), Pass(), Pass(), Pass(), Collect()]


class Growing(nn.Module):
    """Returns one more value than it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return (*values, torch.tanh(self.linear(values[-1])))


class Shrinking(Growing):
    def forward(self, *values: Tensor) -> Any:
        *others, before, last = values
        total = before + torch.tanh(self.linear(last))
        return (*others, total) if others else total


def tuples_of_all_lengths() -> list[nn.Module]:
    return [Growing(), Growing(), Growing(), Shrinking(), Shrinking(), Shrinking()]


class ToDict(Growing):
    def forward(self, x: Tensor) -> tuple[dict[str, Any]]:
        hidden = torch.tanh(self.linear(x))
        return ({"hidden": [hidden, None], "skip": (x, {"scale": 0.5}), "name": "first", "none": None, "on": True},)


class ThroughDict(Growing):
    def forward(self, values: dict[str, Any]) -> tuple[dict[str, Any]]:
        assert values["name"] == "first"
        assert values["none"] is None
        hidden, nothing = values["hidden"]
        skip, options = values["skip"]
        scale = options["scale"]
        return (
            {**values, "hidden": [hidden + torch.tanh(self.linear(hidden)) * scale, nothing], "skip": (skip, options)},
        )


class FromDict(Growing):
    """The last layer: a dict, or what models of Hugging Face return."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, values: dict[str, Any]) -> Any:
        logits = self.linear(values["hidden"][0] + values["skip"][0])
        if self.kind == "dict":
            return {"logits": logits, "aux": values["skip"][0], "name": "last", "object": object()}
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=logits)


def dicts_and(kind: str) -> list[nn.Module]:
    return [ToDict(), ThroughDict(), ThroughDict(), FromDict(kind)]


class ReturnsObject(Growing):
    def forward(self, x: Tensor) -> Any:
        return x, {"state": [torch.tanh(self.linear(x)), object()]}


def with_an_object() -> list[nn.Module]:
    return [Layer(), ReturnsObject(), Layer()]


class Counting(Growing):
    """Returns a constant that changes from microbatch to microbatch."""

    count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return torch.tanh(self.linear(x)), self.count // 3


class Ignoring(Growing):
    def forward(self, x: Tensor, count: int) -> Tensor:
        return self.linear(x) + count


def with_a_changing_constant() -> list[nn.Module]:
    return [Layer(), Counting(), Ignoring(), Layer()]
