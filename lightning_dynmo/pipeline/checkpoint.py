"""State of the whole model on one rank: what one device would have saved, whatever the assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.migration import Package, state_of, transfer
from lightning_dynmo.planning import Move


def gather_state_dict(chain: LayerChain, owners: Sequence[int], groups: PipelineGroups) -> dict[str, Any]:
    """Returns on the first rank the model's ``state_dict`` with every layer's data on the CPU; elsewhere an empty one.

    Keys are those of the model without ``torch.compile``.

    Args:
        chain: All layers.
        owners: The `pp_rank` that owns each layer.
        groups: Process groups of this rank.
    """
    real: dict[int, Tensor] = {}
    extra: dict[int, Any] = {}
    for index, package in _fetch(chain, owners, groups, (), with_tensors=True):
        chain.match_buffers(index, package.manifest.buffers)
        shells = dict(chain.tensors(index))
        for name, tensor in zip(package.manifest.names, package.tensors, strict=True):
            real[id(shells[name])] = tensor
        for name, state in package.manifest.extra_state.items():
            extra[id(chain.layers[index].get_submodule(name))] = state
    if not groups.is_first:
        return {}
    state_dict: dict[str, Any] = chain.root.state_dict(keep_vars=True)
    for key, value in state_dict.items():
        if isinstance(value, Tensor):
            state_dict[key] = real[id(value)] if id(value) in real else value.detach()
    for prefix, module in chain.root.named_modules(remove_duplicate=False):
        if id(module) in extra:
            state_dict[f"{prefix}._extra_state"] = extra[id(module)]
    return with_plain_keys(state_dict)


def with_plain_keys(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with the keys that it has without ``torch.compile``, which puts ``_orig_mod`` into them."""
    return {_plain_key(key): value for key, value in state_dict.items()}


def with_keys_of(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with the keys that a module has, whose layers may be compiled while those saved were not."""
    own = {_plain_key(key): key for key in module.state_dict(keep_vars=True)}
    return {own.get(_plain_key(key), key): value for key, value in state_dict.items()}


def _plain_key(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def gather_optimizer_state(
    chain: LayerChain, owners: Sequence[int], groups: PipelineGroups, optimizer: Optimizer
) -> dict[str, Any]:
    """Returns on the first rank the optimizer's ``state_dict`` for all parameters; elsewhere an empty one."""
    positions = _positions(optimizer)
    fetched: dict[int, Any] = {}
    for index, package in _fetch(chain, owners, groups, (optimizer,), with_tensors=False):
        for parameter, state in zip(chain.parameters(index), state_of(package, 0), strict=True):
            if state:
                fetched[positions[id(parameter)]] = state
    if not groups.is_first:
        return {}
    state_dict: dict[str, Any] = optimizer.state_dict()
    if "state" in state_dict:  # not where configure_optimizers returned None
        state_dict["state"] = dict(sorted({**state_dict["state"], **fetched}.items()))
    return state_dict


def load_optimizer_state(chain: LayerChain, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads a whole model's optimizer state and keeps what belongs to the layers of this rank."""
    positions = _positions(optimizer)
    away = {
        positions[id(parameter)]
        for index in range(len(chain))
        for parameter in chain.parameters(index)
        if id(parameter) in positions and not chain.holds(parameter)
    }
    if "state" in state_dict:
        state = {position: value for position, value in state_dict["state"].items() if position not in away}
        state_dict = {**state_dict, "state": state}
    optimizer.load_state_dict(dict(state_dict))


def _fetch(
    chain: LayerChain,
    owners: Sequence[int],
    groups: PipelineGroups,
    optimizers: Sequence[Optimizer],
    *,
    with_tensors: bool,
) -> list[tuple[int, Package]]:
    """Copies the layers of all other ranks to the CPU of the first, one rank after the other."""
    fetched = []
    for owner in range(1, groups.pp_size):
        moves = [Move(layer, owner, 0) for layer in range(len(chain)) if owners[layer] == owner]
        with torch.inference_mode(False), torch.no_grad():
            arrived, _ = transfer(chain, moves, groups, optimizers, with_tensors=with_tensors)
        for index, package in arrived.items():
            fetched.append((index, Package(package.manifest, tuple(tensor.cpu() for tensor in package.tensors))))
    return fetched


def _positions(optimizer: Optimizer) -> dict[int, int]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): position for position, parameter in enumerate(parameters)}
