"""The table of situations is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_HERE = Path(__file__).parent
_ROWS = {*range(1, 31), *range(32, 35), *range(41, 49)}


def read_table(text: str) -> dict[int, list[str]]:
    """Returns the cells of each row by its number."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if cells[0].removeprefix("| ").isdigit():
            rows[int(cells[0])] = cells
    return rows


def names_in(path: Path) -> list[str]:
    """Returns the names of the tests in a file, which none of its lines may skip."""
    source = path.read_text()
    if path.name != Path(__file__).name:
        assert not re.search(r"pytest\.skip|mark\.skip|importorskip|xfail", source), f"{path} skips tests"
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def missing(rows: dict[int, list[str]]) -> list[str]:
    """Returns what the table lacks: rows, cells, tests."""
    found = [f"row {row}" for row in sorted(_ROWS ^ rows.keys())]
    for row, cells in rows.items():
        named = re.findall(r"`([\w/.]+\.py)::(\w+)`", cells[2]) if len(cells) == 4 else []
        if not named or not re.search(r"works|refused|every rank", cells[-1]):
            found.append(f"cells of row {row}")
        if not any("/" not in file for file, _ in named):
            found.append(f"a test of row {row} in this folder")
        for file, test in named:
            path = _HERE.parents[1] / file if "/" in file else _HERE / file
            if not path.exists() or test not in names_in(path):
                found.append(f"{file}::{test}")
    return found


def test_the_table_is_complete_and_its_tests_exist() -> None:
    assert missing(read_table((_HERE / "README.md").read_text())) == []


def test_every_test_of_a_row_is_in_the_table() -> None:
    text = (_HERE / "README.md").read_text()
    names = [name for path in _HERE.glob("test_*.py") for name in names_in(path) if name.startswith("test_row_")]
    assert len(names) > 50
    assert [name for name in names if f"::{name}`" not in text] == []


def test_what_is_missing_is_noticed() -> None:
    rows = read_table((_HERE / "README.md").read_text())
    del rows[7]
    rows[8][2] = "`test_evaluation.py::test_row_08_that_nobody_wrote`"
    rows[9][2] = ""
    assert missing(rows) == [
        "row 7",
        "test_evaluation.py::test_row_08_that_nobody_wrote",
        "cells of row 9",
        "a test of row 9 in this folder",
    ]
