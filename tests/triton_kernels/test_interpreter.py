"""Runs the tests of the kernels in Triton's interpreter, on the CPU.

In a process of its own: whether a kernel is interpreted is decided when it is decorated, once and for all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "TRITON_DEFAULT_FP_FUSION": "1",  # Triton warns where it is not said
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # numpy's threads wait for torch's
}


def hindrance() -> str:
    """Returns why the kernels cannot be interpreted here; empty if they can."""
    if find_spec("triton") is None:
        return 'needs Triton: pip install "lightning-dynmo[triton]"'
    if find_spec("lightning_dynmo.triton_kernels") is None:
        return "needs the installed package: pip install -e ."
    if tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 7):
        return "needs Triton 3.7: the interpreter of earlier ones cannot loop as far as a tensor says with numpy 2.4"
    return ""


@pytest.mark.slow
@pytest.mark.skipif(bool(hindrance()), reason=hindrance())
@pytest.mark.parametrize("name", ["spmm", "sddmm", "csr"])
def test_kernels_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"test_{name}.py")]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, cwd=HERE.parents[1], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
