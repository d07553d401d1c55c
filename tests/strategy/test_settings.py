"""Settings of the strategy that cannot work are refused where they are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_dynmo import DynMoStrategy


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"load": "token"}, ValueError, "Use one of 'time', 'parameters', 'tokens'"),
        ({"move_when": "never"}, ValueError, "'worthwhile' or 'always', got 'never'"),
        ({"rank_speeds": 2.0}, TypeError, r"must be a list of numbers, such as \[1.0, 0.5\], got 2.0"),
        ({"rank_speeds": [1.0, "fast"]}, TypeError, r"got \[1.0, 'fast'\]"),
        ({"rank_speeds": [1.0, 0.0]}, ValueError, r"finite and above 0, such as \[1.0, 0.5\], got \[1.0, 0.0\]"),
        ({"rank_speeds": [1.0, math.inf]}, ValueError, "finite and above 0"),
        ({"memory_cap_bytes": 1e9}, TypeError, "must be a whole number, such as 8000000000, got 1000000000.0"),
        ({"memory_cap_bytes": 0}, ValueError, "must be at least 1, such as 8000000000, got 0"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        DynMoStrategy(**options)


def test_settings_that_can() -> None:
    strategy = DynMoStrategy(load="tokens", move_when="always", rank_speeds=[1, 0.5], memory_cap_bytes=10)
    assert (strategy.load, strategy.move_when, strategy.rank_speeds) == ("tokens", "always", [1, 0.5])
