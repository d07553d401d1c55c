"""How checkpoint files are written and read."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_dynmo._torch import tree_map_only
from lightning_dynmo.atomic import discard, replacing


def local_path(path: _PATH) -> Path | None:
    """Returns where a path or URL is in the local filesystem, or None if it is elsewhere."""
    filesystem, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(filesystem, LocalFileSystem) else None


def check_folder_path(path: _PATH, storage_options: Any | None) -> Path:
    """Returns where a checkpoint that is a folder goes.

    Raises:
        ValueError: If that is not a path of a filesystem.
        TypeError: If storage options are given, which no folder has.
    """
    local = local_path(path)
    if local is None:
        raise ValueError(
            f"save_distributed_checkpoint=True needs a path in a filesystem that every rank sees, got {str(path)!r}. "
            "Give such a path, or set save_distributed_checkpoint=False."
        )
    if storage_options is not None:
        raise TypeError("A checkpoint that is a folder has no storage_options; set save_distributed_checkpoint=False.")
    return local


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files on local paths, so that a crash while one is saved leaves the previous one whole.

    The file is written beside its place and renamed when all of it is on disk. When it is read, weights and optimizer
    state stay in the file until they are used, so that a rank reads no more than it needs.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        local = local_path(path)
        if storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(local) as file:
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        local = local_path(path)
        if local is None or not zipfile.is_zipfile(local):
            return super().load_checkpoint(path, map_location, weights_only)
        checkpoint = torch.load(local, map_location="cpu", mmap=True, weights_only=weights_only)
        return {
            key: value if key in ("state_dict", "optimizer_states") else tree_map_only(Tensor, torch.clone, value)
            for key, value in checkpoint.items()
        }

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        local = local_path(path)
        if local is None:
            super().remove_checkpoint(path)
        else:
            discard(local)
