"""Every kernel of the table, compiled for its GPU without one: registers, shared memory, width of loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason='needs Triton: pip install "lightning-dynmo[triton]"'),
    pytest.mark.skipif(find_spec("lightning_dynmo.triton_kernels") is None, reason="needs pip install -e ."),
]
SHARED_BYTES = 232_448  # what a block may have on sm_90
REGISTERS = 255


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what the compiler made of the kernels, in a process that compiles rather than interprets."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=script.parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def complaints(kernel: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a kernel's machine code."""
    vectors = 4 if kernel["op"] == "spmm" else 8  # loads of 16 bytes a thread has to do for a block
    found = {
        f"for {kernel['target']}": kernel["target"] != f"{kernel['architecture']}a",
        f"{kernel['spills']} spills": kernel["spills"] > 0,
        f"{kernel['stack']} bytes on the stack": kernel["stack"] + kernel["local"] > 0,
        f"{kernel['reg']} registers": kernel["reg"] > REGISTERS,
        f"{kernel['shared']} bytes of shared memory": kernel["shared"] > SHARED_BYTES,
        f"{kernel['wide_loads']} wide loads": kernel["wide_loads"] < vectors,
    }
    return [text for text, wrong in found.items() if wrong]


def test_every_kernel_of_the_table_is_compiled_well(report: dict[str, Any]) -> None:
    # Three types, two types of columns; the product for first and later panels and for 32 and 64 bits.
    assert len(report["table"]) == 3 * 2 * (4 + 1)
    assert {kernel["target"] for kernel in report["table"]} == {"sm_90a"}
    wrong = {json.dumps(kernel): complaints(kernel) for kernel in report["table"]}
    assert {kernel: found for kernel, found in wrong.items() if found} == {}


def test_one_warp_never_waits_for_another(report: dict[str, Any]) -> None:
    assert {kernel["barriers"] for kernel in report["table"] if kernel["op"] == "spmm"} == {0}


def test_a_kernel_that_spills_fails(report: dict[str, Any]) -> None:
    assert report["crowded"]["spills"] > 0
    assert any("spills" in text for text in complaints(report["crowded"]))


def test_a_kernel_with_narrow_loads_fails(report: dict[str, Any]) -> None:
    assert complaints(report["odd"]) == ["0 wide loads"]


def test_too_much_shared_memory_fails(report: dict[str, Any]) -> None:
    kernel = report["table"][0]
    assert complaints({**kernel, "shared": SHARED_BYTES}) == []
    assert complaints({**kernel, "shared": SHARED_BYTES + 1}) == ["232449 bytes of shared memory"]
