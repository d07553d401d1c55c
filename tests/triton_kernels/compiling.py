"""Compiles every kernel of the table without a GPU, and says what each needs of it: python compiling.py.

It prints them in JSON, and two that must not pass. Not for a process in which TRITON_INTERPRET is set, where there is
nothing to compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_dynmo.triton_kernels.configs import config_table
from lightning_dynmo.triton_kernels.sddmm import sddmm_kernel
from lightning_dynmo.triton_kernels.spmm import spmm_kernel

_POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int16": "*i16", "int32": "*i32"}


def variants() -> Iterator[dict[str, Any]]:
    """Yields every kernel that the wrappers can launch: entry of the table, type of the columns, and, of the product,
    whether it is a later panel's and whether places need 64 bits."""
    for architecture, ops in config_table().items():
        for op, by_type in ops.items():
            for dtype, config in by_type.items():
                switches = ("add", "large") if op == "spmm" else ()
                for columns, *on in product(("int16", "int32"), *[(False, True)] * len(switches)):
                    kernel = {"architecture": architecture, "op": op, "dtype": dtype, "columns": columns}
                    yield kernel | dict(zip(switches, on, strict=True)) | {"config": config}


def compile_variant(variant: dict[str, Any], *, aligned: bool = True) -> dict[str, Any]:
    """Returns a variant with the resources of its machine code; `aligned` as N and the pointers are in training."""
    dtype, columns = _POINTERS[variant["dtype"]], _POINTERS[variant["columns"]]
    config = dict(variant["config"])
    warps = config.pop("num_warps")
    if variant["op"] == "spmm":
        kernel = spmm_kernel
        types = ["*i32", dtype, columns, dtype, "*fp32", dtype, "i32", "i32"]
        constants = {"ADD": variant["add"], "INDEX": tl.int64 if variant["large"] else tl.int32, **config}
    else:
        kernel = sddmm_kernel
        types = ["*i32", columns, dtype, dtype, dtype, "i32", "i32", "i32", "i32"]
        constants = config
    names = kernel.arg_names
    signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    # num_tokens, and all pointers.
    divisible = [i for i, name in enumerate(names[: len(types)]) if name == "num_tokens" or types[i][0] == "*"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in divisible} if aligned else {}
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", int(variant["architecture"].removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 1})
    return {**variant, **_resources(compiled)}


def _resources(compiled: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        usage = _cuobjdump("--dump-resource-usage", path)
        code = _cuobjdump("-sass", path)
    counts = {name.lower(): int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        **counts,
        "target": re.search(r"\.target (\w+)", compiled.asm["ptx"])[1],
        "shared": compiled.metadata.shared,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wide_loads": len(re.findall(r"\bLDG\.E\.(?:\w+\.)*128\b", code)),
        "barriers": len(re.findall(r"\bBAR\.SYNC", code)),
    }


def _cuobjdump(option: str, path: Path) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, str(path)], check=True, capture_output=True, text=True).stdout


def counterexamples() -> dict[str, dict[str, Any]]:
    """Returns kernels that the checks must not let pass: more numbers than registers, and an N that is not even."""
    first = next(variants())
    crowded = {**first, "config": {"BLOCK_K": 64, "BLOCK_N": 128, "num_warps": 1}}
    return {"crowded": compile_variant(crowded), "odd": compile_variant(first, aligned=False)}


if __name__ == "__main__":
    report = {"table": [compile_variant(variant) for variant in variants()], **counterexamples()}
    json.dump(report, sys.stdout, indent=1)
