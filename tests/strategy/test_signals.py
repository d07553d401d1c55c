"""SIGTERM on one rank or on all ends the run everywhere, at one step, with a text that names who received it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.strategy.scripts.launch import Outcome, launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LIMIT_S = 5.0


def check(outcome: Outcome, case: str, pattern: str, kind: str = "SIGTERMException") -> None:
    found = outcome.records(case)
    assert sorted(found) == [0, 1, 2], f"{case}: {found}\n{outcome.output[-3000:]}"
    assert {entry["kind"] for entry in found.values()} == {kind}, found
    assert len({entry["text"] for entry in found.values()}) == 1, found
    assert re.search(pattern, found[0]["text"]), found
    assert outcome.slowest_s(case) < LIMIT_S, found


def test_one_rank_is_terminated(tmp_path: Path) -> None:
    cases = ["terminated_while_waiting", "terminated_in_validation", "terminated_and_stuck", "succeeds", "terminated"]
    outcome = launch("torchrun", tmp_path, cases)
    check(outcome, "terminated_while_waiting", r"^rank 1 received SIGTERM; .* before training_step of batch 3")
    check(outcome, "terminated_in_validation", r"^rank 2 received SIGTERM; .* before validation_step of batch 2")
    stuck = r"^rank 0 received SIGTERM, and the ranks did not come to the next batch within 1 s"
    check(outcome, "terminated_and_stuck", stuck, "PipelineError")
    assert all(entry["kind"] is None for entry in outcome.records("succeeds").values()), outcome.records("succeeds")
    check(outcome, "terminated", r"^rank 1 received SIGTERM; all ranks ended together before training_step of batch 2")
    seen = outcome.records("noticed")
    assert [(seen[rank]["received"], seen[rank]["step"]) for rank in range(3)] == [(True, 2)] * 3
    outcome.check_end("terminated")


@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_launcher_is_terminated_and_the_ranks_save_a_checkpoint(launcher: str, tmp_path: Path) -> None:
    case = "terminated_with_checkpoints"
    outcome = launch(launcher, tmp_path, [case])
    check(outcome, case, r"^ranks? [012, ]+ received SIGTERM; all ranks ended together before training_step of")
    outcome.check_end(case)
    steps = {entry["step"] for entry in outcome.records("noticed").values()}
    for name in ("emergency.ckpt", "last.ckpt"):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert {checkpoint["global_step"]} == steps
        values = [value for value in checkpoint["state_dict"].values() if value.is_floating_point()]
        assert len(values) > 10
        assert not any(value.isnan().any() for value in values)  # a shell's elements are NaN
