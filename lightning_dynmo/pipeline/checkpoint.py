"""State of the whole model on one rank, as one device would have saved it; or of each rank's own layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dynmo._torch import tree_map_only
from lightning_dynmo.nn import SparseLinear, sparse_weights
from lightning_dynmo.ownership import LayerChain, enumerate_names, release_freed_memory
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.migration import Package, state_of, transfer
from lightning_dynmo.planning import Move

_COMPILED = "_orig_mod"
"""What torch.compile puts into the keys of a module that it wraps."""


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
    sparse = sparse_weights(chain.root)
    state_dict: dict[str, Any] = chain.root.state_dict(keep_vars=True)
    for key, value in state_dict.items():
        if isinstance(value, Tensor):
            state_dict[key] = real[id(value)] if id(value) in real else _as_saved(value, sparse)
    for prefix, module in chain.root.named_modules(remove_duplicate=False):
        if id(module) in extra:
            state_dict[f"{prefix}._extra_state"] = extra[id(module)]
    return with_plain_keys(state_dict)


def _as_saved(value: Tensor, sparse: Mapping[int, SparseLinear]) -> Tensor:
    return sparse[id(value)].dense_weight() if id(value) in sparse else value.detach()


def with_plain_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state with the keys that it has without ``torch.compile``, which puts ``_orig_mod`` into them."""
    if not any(_COMPILED in key for key in state):
        return state
    return OrderedDict((_plain_key(key), value) for key, value in state.items())


def with_keys_of(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state with the keys of a module whose layers may be compiled while those saved were not, or were."""
    own = list(module.state_dict(keep_vars=True))
    if not any(_COMPILED in key for key in (*own, *state)):
        return state
    names = {_plain_key(key): key for key in own}
    return RenamedState(state, {names.get(_plain_key(key), key): key for key in state})


class RenamedState(Mapping[str, Any]):
    """A state under other keys, whose values are read only when they are asked for.

    Args:
        state: Values by their own keys.
        keys: For each new key, the old one.
    """

    def __init__(self, state: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        self._state = state
        self._keys = keys

    @override
    def __getitem__(self, key: str) -> Any:
        return self._state[self._keys[key]]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    @override
    def __len__(self) -> int:
        return len(self._keys)


def _plain_key(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != _COMPILED)


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


def owned_state_dict(chain: LayerChain, groups: PipelineGroups) -> dict[str, Any]:
    """Returns the part of the model's ``state_dict`` that this rank owns; the first rank has what is in no layer.

    Args:
        chain: All layers.
        groups: Process groups of this rank.
    """
    for buffers in groups.gather({index: chain.buffers(index) for index in chain.owned}):
        for index in buffers.keys() - set(chain.owned):
            chain.match_buffers(index, buffers[index])
    state_dict: dict[str, Any] = chain.root.state_dict(keep_vars=True)
    mine, others = _tensors_and_modules(chain)
    sparse = sparse_weights(chain.root)
    kept = {}
    for key, value in state_dict.items():
        if key.endswith("._extra_state"):
            value_id = id(chain.root.get_submodule(key.removesuffix("._extra_state")))
        else:
            value_id = id(value)
        if value_id in mine or (groups.is_first and value_id not in others):
            kept[key] = _as_saved(value, sparse) if isinstance(value, Tensor) else value
    return with_plain_keys(kept)


def owned_optimizer_state(chain: LayerChain, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the optimizer's ``state_dict`` with the state of the parameters that this rank owns."""
    away, state_dict = _positions_away(chain, optimizer), optimizer.state_dict()
    if "state" in state_dict:
        state_dict["state"] = {key: value for key, value in state_dict["state"].items() if key not in away}
    return state_dict


def load_state_dict(
    chain: LayerChain, state: Mapping[str, Any], groups: PipelineGroups, *, strict: bool
) -> tuple[list[str], list[str]]:
    """Loads into each rank's layers their part of a whole model's state, layer by layer; the rest is not even read.

    Args:
        chain: All layers.
        state: Values by key; they may be read only when they are asked for.
        groups: Process groups of this rank.
        strict: Whether every key must be there, and no other.

    Returns:
        The keys that are missing and those that are unexpected, alike on every rank.

    Raises:
        RuntimeError: If a tensor has another shape, or keys are missing or unexpected and `strict` is set; alike on
            every rank.
    """
    own, away = _prefixes(chain)
    elsewhere = _keys_elsewhere(chain)
    parts: dict[str, list[str]] = {"": []}
    for key in state:
        if not key.startswith(away) and key not in elsewhere:
            parts.setdefault(next((prefix for prefix in own if key.startswith(prefix)), ""), []).append(key)
    missing, unexpected, problem = set(chain.root.state_dict(keep_vars=True)), set[str](), ""
    try:
        for keys in parts.values():
            result = chain.root.load_state_dict({key: state[key] for key in keys}, strict=False)
            missing &= set(result.missing_keys)
            unexpected |= set(result.unexpected_keys)
            release_freed_memory()
    except RuntimeError as error:  # a size that differs
        problem = str(error)
    missing = {key for key in missing if not key.startswith(away) and key not in elsewhere}
    reports = groups.gather((missing, unexpected, problem))
    all_missing, all_unexpected = (sorted(set().union(*(report[kind] for report in reports))) for kind in (0, 1))
    problems = [text for *_, text in reports if text]
    for kind, names in (("Missing", all_missing), ("Unexpected", all_unexpected)):
        if strict and names:
            problems.append(f"{kind} keys in what is to be loaded: {enumerate_names(names, 10)}.")
    if problems:
        raise RuntimeError(
            f"The weights do not fit {type(chain.root).__name__}. {' '.join(problems)} Load weights of the same model, "
            "or, where only keys differ and that is intended, with strict=False (strict_loading=False in the module)."
        )
    return all_missing, all_unexpected


def load_optimizer_state(chain: LayerChain, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads a whole model's optimizer state and keeps what belongs to the layers of this rank."""
    away = _positions_away(chain, optimizer)
    if "state" in state_dict:
        saved = state_dict["state"]  # maybe read only when asked for, and from a file that is mapped into memory
        state = {position: tree_map_only(Tensor, torch.clone, saved[position]) for position in saved.keys() - away}
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
            arrived, _ = transfer(chain, moves, groups, optimizers, with_tensors=with_tensors, as_saved=True)
        for index, package in arrived.items():
            fetched.append((index, Package(package.manifest, tuple(tensor.cpu() for tensor in package.tensors))))
    return fetched


def _positions(optimizer: Optimizer) -> dict[int, int]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): position for position, parameter in enumerate(parameters)}


def _positions_away(chain: LayerChain, optimizer: Optimizer) -> set[int]:
    """Returns the positions of parameters that only other ranks hold."""
    positions = _positions(optimizer)
    return {
        positions[id(parameter)]
        for index in range(len(chain))
        for parameter in chain.parameters(index)
        if id(parameter) in positions and not chain.holds(parameter)
    }


def _tensors_and_modules(chain: LayerChain) -> tuple[set[int], set[int]]:
    """Returns the ids of tensors and modules in layers that this rank owns, and in layers of other ranks."""
    ids: tuple[set[int], set[int]] = (set(), set())
    for index, layer in enumerate(chain.layers):
        kind = ids[0] if chain.owns(index) else ids[1]
        kind.update(id(tensor) for _, tensor in chain.tensors(index))
        kind.update(map(id, layer.modules()))
    return ids


def _keys_elsewhere(chain: LayerChain) -> set[str]:
    """Returns the keys of the ``state_dict`` whose tensors only other ranks hold."""
    mine, others = _tensors_and_modules(chain)
    state_dict = chain.root.state_dict(keep_vars=True)
    return {key for key, value in state_dict.items() if id(value) in others and id(value) not in mine}


def _prefixes(chain: LayerChain) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns how keys of the ``state_dict`` begin that belong to layers of this rank, and to those of others only."""
    mine = {id(chain.layers[index]) for index in chain.owned}
    away = {id(layer) for index, layer in enumerate(chain.layers) if not chain.owns(index)}
    away -= {id(module) for index in chain.owned for module in chain.layers[index].modules()}
    modules = list(chain.root.named_modules(remove_duplicate=False))
    own, others = ([f"{name}." for name, module in modules if id(module) in ids] for ids in (mine, away))
    return tuple(own), tuple(others)
