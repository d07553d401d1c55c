"""Kernels with a mistake, made from the text of the right ones: what the tests must not let pass."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


@contextmanager
def with_mistake(module: ModuleType, right: str, wrong: str) -> Iterator[ModuleType]:
    """Imports a copy of a module in which a piece of text, which it has exactly once, is another."""
    text = Path(module.__file__).read_text("utf-8")
    assert text.count(right) == 1, f"{module.__file__} has {right!r} {text.count(right)} times, not once"
    name = f"{module.__name__}_broken"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "broken.py")
        path.write_text(text.replace(right, wrong), "utf-8")
        spec = spec_from_file_location(name, path)
        broken = module_from_spec(spec)
        sys.modules[name] = broken
        try:
            spec.loader.exec_module(broken)
            yield broken
        finally:
            del sys.modules[name]
