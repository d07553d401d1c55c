"""Weights of files that others have written, loaded layer by layer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_dynmo.checkpoints import PipelineCheckpoints
from lightning_dynmo.pipeline import RenamedState, is_folder, load_folder

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_layer_weights(
    module: LightningModule,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] = str,
) -> None:
    """Loads weights from a file, of which each rank of a pipeline reads only the layers that it owns.

    Call it on every rank, in ``configure_model``, ``setup`` or a later hook; before the layers are with their ranks, it
    takes note of the file, and the weights are loaded once they are. Under another strategy it loads all at once.

    Args:
        module: The whole module.
        path: A Lightning checkpoint (file or folder), a file of ``torch.save``, a ``.safetensors`` file, the
            ``.index.json`` of several, or a folder with ``model.safetensors`` or its index.
        strict: Whether every key of the module must be there, and no other. If not, rank 0 warns of those that differ.
        rename: Returns what a key of the file is called in the module, such as ``lambda key: f"model.{key}"``; None
            leaves the key out.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file holds no weights.
        RuntimeError: If the weights do not fit the module.
    """
    found = open_weights(path)
    state = RenamedState(found, {name: key for key in found if (name := rename(key)) is not None})
    trainer = module._trainer
    if trainer is not None and isinstance(trainer.strategy, PipelineCheckpoints):
        trainer.strategy.load_weights(state, strict)
    else:
        module.load_state_dict(dict(state), strict=strict)


def open_weights(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Returns the weights in a file by key; each is read when it is asked for. Arguments as in `load_layer_weights`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There are no weights at {path}.")
    if path.is_dir():
        for name in (_INDEX, _SINGLE):
            if (path / name).is_file():
                return open_weights(path / name)
        if is_folder(path):
            state: Mapping[str, Any] = load_folder(path)["state_dict"]
            return state
    if path.name.endswith(".index.json"):
        return _Shards(path)
    if path.suffix == ".safetensors":
        return _Safetensors(path)
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, dict) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} holds no weights. Give a Lightning checkpoint, or a file with a module's state_dict()."
        )
    return state


class _Safetensors(Mapping[str, Tensor]):
    """The tensors of one ``.safetensors`` file."""

    def __init__(self, path: Path) -> None:
        try:
            import safetensors
        except ImportError as error:
            raise ImportError(f"{path} needs safetensors: pip install 'lightning-dynmo[safetensors]'.") from error
        opened: Any = safetensors.safe_open(path, framework="pt", device="cpu")
        self._file = opened
        self._keys: tuple[str, ...] = tuple(opened.keys())

    @override
    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    @override
    def __len__(self) -> int:
        return len(self._keys)


class _Shards(Mapping[str, Tensor]):
    """The tensors of several ``.safetensors`` files that an index lists; files are opened when they are needed."""

    def __init__(self, index: Path) -> None:
        self._folder = index.parent
        self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        self._open: dict[str, _Safetensors] = {}
        absent = sorted(name for name in set(self._files.values()) if not (self._folder / name).is_file())
        if absent:
            raise FileNotFoundError(f"{index} lists files that are not beside it: {', '.join(absent)}.")

    @override
    def __getitem__(self, key: str) -> Tensor:
        name = self._files[key]
        if name not in self._open:
            self._open[name] = _Safetensors(self._folder / name)
        return self._open[name][key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    @override
    def __len__(self) -> int:
        return len(self._files)
