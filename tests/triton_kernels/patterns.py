"""What the kernels are tested on: patterns of kept entries, types with their tolerances, and the device they run on.

The tests run in Triton's interpreter, in a process of their own (`test_interpreter.py` starts it), or on a GPU.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from lightning_dynmo.nn.csr import CSRPattern

# Relative, in the Frobenius norm, against float64 of the same inputs.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Neither is a multiple of a block; N has a last slice that is not full.
SHAPE = (9, 37)
NUM_TOKENS = 70


def require_kernels() -> torch.device:
    """Returns the device for the kernels, or skips the module that asks, saying why."""
    if find_spec("triton") is None:
        pytest.skip('needs Triton: pip install "lightning-dynmo[triton]"', allow_module_level=True)
    if find_spec("lightning_dynmo.triton_kernels") is None:
        pytest.skip("needs the installed package: pip install -e .", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("run by test_interpreter.py, in a process with TRITON_INTERPRET=1", allow_module_level=True)


def masks() -> dict[str, Tensor]:
    """Returns what is kept of a weight of `SHAPE`, case by case."""
    ragged = (
        torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) < torch.linspace(0.05, 0.95, SHAPE[0])[:, None]
    )
    holes = ragged.clone()
    holes[[0, 3, 4, 8]] = False
    holes[:, [0, 5, 36]] = False
    nothing = torch.zeros(SHAPE, dtype=torch.bool)
    row, column, entry = nothing.clone(), nothing.clone(), nothing.clone()
    row[5] = True
    column[:, 11] = True
    entry[6, 36] = True
    return {
        "rows of all lengths": ragged,
        "empty rows and columns": holes,
        "one dense row": row,
        "one dense column": column,
        "one entry": entry,
        "nothing": nothing,
        "everything": ~nothing,
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over that of what was expected; 0 / 0 is 0."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).norm().item()
    return difference / expected.double().norm().item() if difference else 0.0


def pattern_of(mask: Tensor, device: torch.device, *, wide: bool = False) -> CSRPattern:
    """Returns the pattern of a mask, with int32 columns if `wide`."""
    pattern = CSRPattern.from_mask(mask.to(device))
    if not wide:
        return pattern
    return CSRPattern(
        pattern.shape,
        pattern.row_offsets,
        pattern.columns.int(),
        pattern.t_row_offsets,
        pattern.t_columns.int(),
        pattern.t_order,
    )
