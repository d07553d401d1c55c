"""Bytes that a layer keeps from its forward until its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_dynmo._torch import tree_leaves


class KeptActivations:
    """What one layer keeps of one microbatch: each piece of memory once, without its parameters and buffers.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._own = set(map(_storage, _strided([*layer.parameters(), *layer.buffers()])))
        self._kept: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes kept so far."""
        return sum(self._kept.values())

    def saving(self) -> AbstractContextManager[Any]:
        """Counts what autograd saves in the body; tensors that other hooks put away, as recomputation does, are not."""
        return saved_tensors_hooks(self._saved, _as_it_is)

    def add(self, values: Sequence[Any]) -> None:
        """Counts tensors that are kept by other means, such as the inputs from which a forward is computed again."""
        for leaf in tree_leaves(tuple(values)):
            if isinstance(leaf, Tensor):
                self._saved(leaf)

    def _saved(self, tensor: Tensor) -> Tensor:
        for found in _strided([tensor]):
            if _storage(found) not in self._own:
                self._kept[_storage(found)] = found.untyped_storage().nbytes()
        return tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _strided(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors that have one block of memory; sparse ones have several."""
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
