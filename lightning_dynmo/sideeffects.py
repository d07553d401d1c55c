"""What a step method changes besides what it returns and logs, told to the other ranks.

Step methods run on the last stage only. A user's module may keep things in attributes all the same, such as a list of
outputs that ``on_validation_epoch_end`` reads, on every rank. So attributes that a step has changed are repeated, and
so are buffers outside the chain and settings of parameter groups.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dynmo.ownership import LayerChain

_MAX_DEPTH = 3
_MANY = 64
"""What has more entries than these, such as a vocabulary, is not looked through: it seldom changes in a step."""


@dataclass(frozen=True, slots=True)
class SideEffects:
    """Changes by one batch's steps.

    Attributes:
        attributes: New values of the module's attributes; of a list that grew, where and by what.
        tensors: New values of tensors outside the chain, by name.
        groups: New settings of the parameter groups of each optimizer; None if none changed.
    """

    attributes: dict[str, Any]
    tensors: dict[str, Tensor]
    groups: list[list[dict[str, Any]]] | None


@dataclass(frozen=True, slots=True)
class _Grown:
    """A list that had `length` entries before and has these more now."""

    length: int
    entries: list[Any]


class Watch:
    """Remembers the module as it is before a batch's steps, to tell what they have changed.

    Args:
        module: The user's module.
        chain: The layers.
    """

    def __init__(self, module: LightningModule, chain: LayerChain) -> None:
        self._module = module
        self._chain = chain
        self._values = _attributes(module)
        self._prints = {name: _fingerprint(value) for name, value in self._values.items()}
        self._lengths = {name: len(value) for name, value in self._values.items() if isinstance(value, list)}
        self._versions = {name: _fingerprint(tensor) for name, tensor in chain.stationary()}
        self._groups = _settings(module)

    def changes(self) -> SideEffects:
        """Returns what has changed since.

        Raises:
            TypeError: If an attribute has changed that cannot be sent to another process.
        """
        attributes = {}
        for name, value in _attributes(self._module).items():
            if name not in self._values or _fingerprint(value) != self._prints[name]:
                attributes[name] = self._told(name, value)
        groups = _settings(self._module)
        return SideEffects(
            attributes=attributes,
            tensors={
                name: tensor.detach().cpu()
                for name, tensor in self._chain.stationary()
                if self._versions.get(name) != _fingerprint(tensor)
            },
            groups=None if groups == self._groups else groups,
        )

    def _told(self, name: str, value: Any) -> Any:
        """Returns what the other ranks are told of an attribute's new value."""
        length, same = self._lengths.get(name), value is self._values.get(name)
        grown = length is not None and same and len(value) >= length
        told = _Grown(length or 0, without_graph(value[length:])) if grown else without_graph(value)
        try:
            pickle.dumps(told)
        except Exception as error:
            raise TypeError(
                f"A step method changed self.{name}, a {type(value).__name__}, which cannot be sent to the other ranks "
                f"({error}). Keep numbers, tensors, lists and dicts of them in attributes that steps change, or change "
                "it in a hook, which runs on every rank."
            ) from error
        return told


def apply(module: LightningModule, chain: LayerChain, effects: SideEffects) -> None:
    """Repeats on this rank what steps have changed on the last stage."""
    for name, value in effects.attributes.items():
        if isinstance(value, _Grown):
            getattr(module, name)[value.length :] = move_data_to_device(value.entries, module.device)
        else:
            setattr(module, name, move_data_to_device(value, module.device))
    stationary = dict(chain.stationary())
    with torch.no_grad():
        for name, value in effects.tensors.items():
            stationary[name].copy_(value)
    if effects.groups is not None:
        for optimizer, groups in zip(module.trainer.optimizers, effects.groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)


def without_graph(value: Any) -> Any:
    """Returns tensors in nested containers without their graph, on the CPU; everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, MutableMapping):
        replica = copy.copy(value)
        replica.update((key, without_graph(entry)) for key, entry in value.items())
        return replica
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(without_graph, value))
    if isinstance(value, tuple | list):
        return type(value)(map(without_graph, value))
    return value


def _attributes(module: LightningModule) -> dict[str, Any]:
    """Returns the attributes that the user's code has given to the module."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _LIGHTNING_ATTRIBUTES and not isinstance(value, nn.Module) and not callable(value)
    }


_LIGHTNING_ATTRIBUTES = {*vars(LightningModule()), "forward", "log"}


def _fingerprint(value: Any, depth: int = 0) -> Any:
    """Returns something that differs when the value has changed, without looking into large tensors and lists."""
    if isinstance(value, Tensor):
        if not value.is_inference():
            return (id(value), value._version)
        # Such tensors keep no versions; those that steps add to are small.
        return (id(value), tuple(value.flatten().tolist()) if value.numel() <= _MANY else None)
    if isinstance(value, int | float | str | bool | None):
        return value
    if isinstance(value, list):
        return (id(value), len(value), id(value[-1]) if value else None)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping) and len(value) <= _MANY:
            return (id(value), tuple((key, _fingerprint(entry, depth + 1)) for key, entry in value.items()))
        if hasattr(value, "__dict__") and not isinstance(value, Metric | type):
            return (id(value), _fingerprint(vars(value), depth + 1))
    return (id(value), len(value) if isinstance(value, Sequence) else None)


def _settings(module: LightningModule) -> list[list[dict[str, Any]]]:
    """Returns the settings of all parameter groups, such as learning rates, without the parameters."""
    return [
        [
            {key: without_graph(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in module.trainer.optimizers
    ]
