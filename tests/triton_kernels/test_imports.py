"""Kernels are imported by the first call of one, and the package works where Triton is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_dynmo import _kernels

# Whether torch has imported Triton by then, which it does where it finds it, says nothing about us: so it finds none.
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, lightning_dynmo.triton_kernels.configs
from lightning_dynmo import _kernels
print([name for name in sys.modules if name.startswith("lightning_dynmo.triton_kernels")])
print(_kernels.available(torch.device("cuda")))
try:
    _kernels.sddmm(None, None, None, None)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(find_spec("lightning_dynmo.triton_kernels") is None, reason="needs pip install -e .")
def test_the_package_works_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    imported, available, error = done.stdout.strip().splitlines()
    assert imported == "['lightning_dynmo.triton_kernels', 'lightning_dynmo.triton_kernels.configs']"
    assert available == "False"
    assert error.startswith("The kernel sddmm needs Triton, but ")
    assert error.endswith('pip install "lightning-dynmo[triton]"')


@pytest.mark.skipif(find_spec("lightning_dynmo.triton_kernels") is None, reason="needs pip install -e .")
@pytest.mark.skipif(find_spec("triton") is None, reason='needs Triton: pip install "lightning-dynmo[triton]"')
def test_gpus_have_kernels_and_the_cpu_has_none() -> None:
    assert _kernels.available(torch.device("cuda", 1))
    assert not _kernels.available(torch.device("cpu"))
