"""Tile sizes by architecture, op and type: a table, so that the first step is as fast as the others, on every rank."""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.resources import files

import torch


@cache
def config_table() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Returns the table: architecture, such as ``"sm_90"``, op, type, then the kernel's block sizes and warps."""
    table: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(
        files(__package__).joinpath("configs.json").read_text("utf-8")
    )
    return table


@cache
def config_for(op: str, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Returns an op's block sizes and warps: those of the newest architecture that is not newer than the device's.

    Raises:
        TypeError: The kernels do not take this type.
        ValueError: They do not run on this device.
    """
    table = config_table()
    architectures = sorted(table, key=_number)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        older = [name for name in architectures if _number(name) <= 10 * major + minor]
        architecture = older[-1] if older else architectures[0]
    elif os.environ.get("TRITON_INTERPRET", "0") == "0":
        raise ValueError(f"{op} expects tensors on a GPU, got {device}; move them with .to('cuda').")
    else:
        architecture = architectures[-1]
    by_type = table[architecture][op]
    name = str(dtype).removeprefix("torch.")
    if name not in by_type:
        raise TypeError(
            f"{op} expects values of type {', '.join(by_type)}, got {name}; convert with .to(torch.float32)."
        )
    return by_type[name]


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))
