"""CASES row 48: private names of torch and Lightning live in one module each, whose import is the check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[2] / "lightning_dynmo"
_HOMES = {"_torch.py", "_lightning.py"}
_OUTSIDE = ("torch", "lightning", "lightning_fabric", "lightning_utilities", "torchmetrics")


def private_imports(source: str) -> list[str]:
    """Returns the private names of torch and Lightning that a file imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        private = [name for name in names if any(part.startswith("_") for part in name.split("."))]
        found += [name for name in private if name.split(".")[0] in _OUTSIDE]
    return found


def test_row_48_private_names_live_in_one_module_each() -> None:
    files = [path for path in _PACKAGE.rglob("*.py") if path.name not in _HOMES]
    assert len(files) > 40
    public = {"lightning.fabric.utilities.types._PATH"}  # documented as the type of paths
    found = {str(path): set(private_imports(path.read_text())) - public for path in files}
    assert {path: names for path, names in found.items() if names} == {}
    assert all(private_imports((_PACKAGE / name).read_text()) for name in _HOMES)


def test_row_48_a_name_that_torch_has_moved_is_said_at_import() -> None:
    script = (
        "import torch.distributed.pipelining.schedules as schedules\n"
        "del schedules._add_send_recv\n"
        "import lightning_dynmo\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=_PACKAGE.parent)
    assert ended.returncode != 0
    assert "lacks a name that lightning_dynmo builds on" in ended.stderr
    assert "_add_send_recv" in ended.stderr
    assert "Install torch>=2.11,<2.14" in ended.stderr
