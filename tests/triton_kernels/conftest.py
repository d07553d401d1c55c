"""Outputs that a kernel leaves out are NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fills what torch allocates with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
