"""Checkpoints as folders: each rank writes the layers it owns, and reads the layers it owns, whatever the assignment.

The tensors are a torch.distributed.checkpoint: weights by their name in the ``state_dict``, optimizer state by the name
of its parameter. Everything else is in ``meta.pt``, in plain types. Both are named as Lightning names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dynmo.atomic import beside, discard, put_in_place, remove_leftovers
from lightning_dynmo.pipeline.groups import PipelineGroups

_META = "meta.pt"
_LAYOUT = "lightning_dynmo_folder"

Entry = tuple[tuple[str, ...], Any]
"""A value that is no tensor, with its place."""


def is_folder(path: Path) -> bool:
    """Returns whether a path is a checkpoint that `save_folder` has written.

    Raises:
        ValueError: If it is some other folder.
    """
    if not path.is_dir():
        return False
    if (path / _META).is_file() and (path / ".metadata").is_file():
        return True
    raise ValueError(
        f"{path} is a folder, but not a checkpoint: {_META} and .metadata are not both in it. Give the path of a "
        "checkpoint file, or of a folder saved with save_distributed_checkpoint=True."
    )


def save_folder(
    checkpoint: Mapping[str, Any],
    path: Path,
    root: nn.Module,
    optimizers: Sequence[Optimizer],
    groups: PipelineGroups,
) -> None:
    """Writes a checkpoint as a folder; every rank of one pipeline calls this, each with its own part.

    The folder is written beside its place and renamed when it is complete.

    Args:
        checkpoint: What Lightning saves. ``"state_dict"`` and ``"optimizer_states"`` hold what this rank owns; the
            rest is taken from the first rank.
        path: Where to; the same on every rank.
        root: The model, which gives parameters their names.
        optimizers: Optimizers to which ``"optimizer_states"`` belong.
        groups: Process groups of this rank.

    Raises:
        OSError: If the folder cannot be written, raised on every rank.
    """
    temporary = _begin(path, groups)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    parameters = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in optimizers]
    tensors: dict[str, Any] = {}
    others: list[Entry] = []
    _split(checkpoint.get("state_dict", {}), ("state_dict",), tensors, others)
    states = checkpoint.get("optimizer_states", [])
    for number, state in enumerate(states):
        by_name = {parameters[number][key]: value for key, value in state.get("state", {}).items()}
        _split(by_name, (f"optimizer_{number}", "state"), tensors, others)
    try:
        save(_nested(tensors), storage_writer=FileSystemWriter(temporary), process_group=groups.control)
    except BaseException:
        if groups.is_first:
            discard(temporary)
        raise
    parts = groups.gather((list(checkpoint.get("state_dict", {})), others))
    problem = None
    if groups.is_first:
        order = {key: position for position, key in enumerate(root.state_dict(keep_vars=True))}
        keys = sorted({key for part, _ in parts for key in part}, key=lambda key: order.get(key, len(order)))
        meta = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        meta[_LAYOUT] = {
            "keys": keys,
            "others": [[list(place), value] for _, entries in parts for place, value in entries],
            "parameters": parameters if "optimizer_states" in checkpoint else None,
            "optimizers": [{key: value for key, value in state.items() if key != "state"} for state in states],
        }
        problem = _attempt(lambda: _finish(meta, temporary, path))
    _raise_problem(groups.share_from(0, problem), path)


def load_folder(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Returns a checkpoint whose weights and optimizer states are read from the folder when they are asked for.

    Args:
        path: A folder that `save_folder` has written.
        weights_only: As in ``torch.load``.

    Raises:
        ValueError: If another program has written the folder.
    """
    checkpoint: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=weights_only)
    if _LAYOUT not in checkpoint:
        raise ValueError(
            f"{path} was not written by DynMoStrategy. Turn it into a file with `python -m "
            f"lightning.fabric.utilities.consolidate_checkpoint {path}`, and give the path of that file."
        )
    layout = checkpoint.pop(_LAYOUT)
    reader = _Reader(path)
    tree = reader.tree()
    for place, value in layout["others"]:
        _put(tree, tuple(place), value)
    weights = tree.get("state_dict", {})
    checkpoint["state_dict"] = StoredState({key: weights[key] for key in layout["keys"]}, reader)
    if layout["parameters"] is not None:
        checkpoint["optimizer_states"] = []
        for number, (names, rest) in enumerate(zip(layout["parameters"], layout["optimizers"], strict=True)):
            by_name = tree.get(f"optimizer_{number}", {}).get("state", {})
            state = {position: by_name[name] for position, name in enumerate(names) if name in by_name}
            checkpoint["optimizer_states"].append({"state": StoredState(state, reader), **rest})
    return checkpoint


class StoredState(MutableMapping[Any, Any]):
    """A mapping whose values are read from a folder each time they are asked for.

    Args:
        entries: What there is, by key: places in the folder, or values that are no tensors.
        reader: Reads the folder.
    """

    def __init__(self, entries: dict[Any, Any], reader: _Reader) -> None:
        self._entries = entries
        self._reader = reader

    @override
    def __getitem__(self, key: Any) -> Any:
        return self._reader.resolve(self._entries[key])

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        self._entries[key] = value

    @override
    def __delitem__(self, key: Any) -> None:
        del self._entries[key]

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    @override
    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in the folder."""

    name: str


class _Reader:
    """Reads tensors of a torch.distributed.checkpoint one by one, without talking to other ranks."""

    def __init__(self, path: Path) -> None:
        self._storage = FileSystemReader(path)
        self._metadata = self._storage.read_metadata()
        self._storage.set_up_storage_reader(self._metadata, is_coordinator=True)

    def tree(self) -> dict[str, Any]:
        """Returns the nested structure that was saved, with places of tensors."""
        tree: dict[str, Any] = {}
        for name in self._metadata.state_dict_metadata:
            _put(tree, self._metadata.planner_data[name], _Stored(name))
        return tree

    def resolve(self, entry: Any) -> Any:
        """Returns an entry of the tree with its tensors."""
        if isinstance(entry, _Stored):
            return self._read(entry.name)
        if isinstance(entry, dict):
            return {key: self.resolve(value) for key, value in entry.items()}
        return entry

    def _read(self, name: str) -> Tensor:
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        self._storage.read_data(planner.create_local_plan(), planner).wait()
        return tensor


def _split(value: Any, place: tuple[str, ...], tensors: dict[Any, Tensor], others: list[Entry]) -> None:
    """Divides nested dicts with names as keys into tensors and the rest, each with its place."""
    for key, entry in value.items():
        if isinstance(entry, Tensor):
            tensors[(*place, key)] = entry
        elif isinstance(entry, dict) and entry and all(isinstance(name, str) for name in entry):
            _split(entry, (*place, key), tensors, others)
        else:
            others.append(((*place, key), entry))


def _nested(tensors: Mapping[Any, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for place, tensor in tensors.items():
        _put(tree, place, tensor.detach())
    return tree


def _put(tree: dict[str, Any], place: Iterable[Any], value: Any) -> None:
    *path, last = place
    for key in path:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _begin(path: Path, groups: PipelineGroups) -> Path:
    """Makes the folder to write to, and checks that every rank sees it."""

    def make() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        discard(beside(path))
        beside(path).mkdir()

    problem = _attempt(make) if groups.is_first else None
    temporary, problem = groups.share_from(0, (beside(path), problem))
    _raise_problem(problem, path)
    blind = [rank for rank, seen in enumerate(groups.gather(temporary.is_dir())) if not seen]
    if blind:
        if groups.is_first:
            discard(temporary)
        raise OSError(
            f"Pipeline ranks {blind} do not see the folder {path.parent}, to which every rank writes its part of a "
            "checkpoint. Save to a filesystem that all nodes share, or set save_distributed_checkpoint=False."
        )
    return Path(temporary)


def _finish(meta: dict[str, Any], temporary: Path, path: Path) -> None:
    with (temporary / _META).open("wb") as file:
        torch.save(meta, file)
        file.flush()
        os.fsync(file.fileno())
    put_in_place(temporary, path)


def _attempt(action: Callable[[], None]) -> str | None:
    """Returns what went wrong, to be told to all ranks."""
    try:
        action()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _raise_problem(problem: str | None, path: Path) -> None:
    if problem is not None:
        raise OSError(f"The checkpoint {path} could not be saved by rank 0: {problem}. Save to a folder it may write.")
