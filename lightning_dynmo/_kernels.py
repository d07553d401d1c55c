"""The Triton kernels, imported when one of them is called: the package works where Triton is missing."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_FOLDER = "lightning_dynmo.triton_kernels"


def available(device: torch.device) -> bool:
    """Returns whether the kernels run on a device: a GPU, with Triton installed."""
    return device.type == "cuda" and _installed()


def spmm(
    values: Tensor,
    row_offsets: Tensor,
    columns: Tensor,
    x: Tensor,
    num_rows: int,
    *,
    order: Tensor | None = None,
    tasks: Tensor | None = None,
) -> Tensor:
    """Multiplies a sparse weight [M, K] by activations [K, N], without gradient; see `triton_kernels/spmm.py`.

    Raises:
        RuntimeError: Triton is not installed.
    """
    product: Tensor = _load("spmm").spmm(values, row_offsets, columns, x, num_rows, order=order, tasks=tasks)
    return product


def row_tasks(row_offsets: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    """Returns the `tasks` of `spmm`, which stay the same as long as the indices do: make them once.

    Raises:
        RuntimeError: Triton is not installed.
    """
    tasks: Tensor = _load("spmm").row_tasks(row_offsets, columns, num_columns)
    return tasks


def sddmm(row_offsets: Tensor, columns: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Returns ``g[i] @ x[j]`` for each kept entry (i, j), the gradient of the values; see `triton_kernels/sddmm.py`.

    Raises:
        RuntimeError: Triton is not installed.
    """
    products: Tensor = _load("sddmm").sddmm(row_offsets, columns, g, x)
    return products


@cache
def _installed() -> bool:
    return find_spec("triton") is not None and find_spec(_FOLDER) is not None


def _load(op: str) -> Any:
    try:
        return import_module(f"{_FOLDER}.{op}")
    except ImportError as error:
        if error.name == "triton":
            cure = 'pip install "lightning-dynmo[triton]"'
        else:
            cure = "install the package, of which they are a part, with pip install -e ."
        raise RuntimeError(f"The kernel {op} needs Triton, but {error}: {cure}") from error
