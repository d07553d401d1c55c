"""One rank's failure ends all ranks within seconds, with that rank's text, however the ranks were started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.strategy.scripts.launch import Outcome, launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LIMIT_S = 5.0

EXPECTED = {
    "forward_first": r"rank 0, stage 0, layer 0 \(Embedding\), microbatch 0: ValueError: forward_first went wrong",
    "forward_middle": r"rank 1, stage 1, layer 2 \(Block\), microbatch 1: ValueError: forward_middle went wrong",
    "forward_last": r"rank 2, stage 2, layer 4 \(Sequential\), microbatch 2: ValueError: forward_last went wrong",
    "backward_first": r"rank 0, stage 0, layers 0-1, backward of microbatch 0: ValueError: backward_first went wrong",
    "backward_middle": r"rank 1, stage 1, layers 2-3, backward of microbatch 0: ValueError: backward_middle went wrong",
    "backward_last": r"rank 2, stage 2, layer 4 \(Sequential\), backward of microbatch 1: ValueError: backward_last",
    "validation": r"rank 1, stage 1, layer 3 \(Block\), microbatch 1: ValueError: validation went wrong",
    "border": r"rank 1, stage 1, .*layer 3 \(Block\) returned float32\[2, 7, 16\] .* expects float32\[2, 8, 16\]",
    "step_method": r"rank 2, stage 2, step method, microbatch 0: ValueError: step_method went wrong",
    "callback": r"(rank 1: ValueError: )?callback went wrong",
    "callback_and_busy_peer": r"(rank 2: ValueError: )?callback_and_busy_peer went wrong",
    "checkpoint_on_exception": r"checkpoint_on_exception went wrong",
    "data": r"(rank 2: ValueError: )?data went wrong",
    "data_worker": r"(rank 0: ValueError: )?Caught ValueError in DataLoader worker.*data_worker went wrong",
    "exit_in_callback": r"^7$|rank 0: SystemExit: 7",
}


def check(outcome: Outcome, case: str, pattern: str, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    found = outcome.records(case)
    assert tuple(sorted(found)) == ranks, f"{case}: {found}\n{outcome.output[-3000:]}"
    for rank, entry in found.items():
        assert re.search(pattern, entry["text"], re.DOTALL), (case, rank, entry)
    assert outcome.slowest_s(case) < LIMIT_S, (case, found)


def test_failures_of_one_rank_reach_all(tmp_path: Path) -> None:
    outcome = launch("torchrun", tmp_path, [*EXPECTED, "succeeds", "forward_middle"])
    for case, pattern in EXPECTED.items():
        check(outcome, case, pattern)
    assert all(entry["kind"] is None for entry in outcome.records("succeeds").values()), outcome.records("succeeds")
    outcome.check_end("forward_middle")
    assert outcome.output.count("PipelineError: rank 1, stage 1, layer 2 (Block)") >= 3  # every rank's own traceback


def test_failures_under_the_launcher_of_lightning(tmp_path: Path) -> None:
    cases = ["forward_last", "backward_first", "validation", "data", "callback"]
    outcome = launch("lightning", tmp_path, cases)
    for case in cases:
        check(outcome, case, EXPECTED[case])
    outcome.check_end("callback")


def test_memory_runs_out(tmp_path: Path) -> None:
    error = "RuntimeError: .*can't allocate memory"
    expected = {
        "memory_in_forward": rf"^rank 1, stage 1, layer 2 \(Block\), microbatch 0: {error}",
        "memory_in_backward": rf"^rank 1, stage 1, layers 2-3, backward of microbatch 0: {error}",
        "memory_in_optimizer": rf"^rank 1, optimizer step of stage 1, layers 2, 3: {error}",
        "memory_in_checkpoint": rf"^rank 0: {error}|^\[enforce fail .*can't allocate memory",
    }
    outcome = launch("torchrun", tmp_path, [*expected, "succeeds"])
    for case, pattern in expected.items():
        check(outcome, case, pattern)
    assert all(entry["kind"] is None for entry in outcome.records("succeeds").values()), outcome.records("succeeds")


@pytest.mark.parametrize(
    ("launcher", "killed", "pattern"),
    [
        ("torchrun", 2, r"^rank 2 died: rank \d lost its connection during training_step of batch 2.*probably killed"),
        ("lightning", 1, r"^rank 1 died: rank \d lost its connection during training_step of batch 2.*probably killed"),
        ("lightning", 0, r"hosts the key-value store, rank 0 or the launcher, died.*probably killed"),
    ],
)
def test_killed_rank(launcher: str, killed: int, pattern: str, tmp_path: Path) -> None:
    outcome = launch(launcher, tmp_path, ["killed"], KILLED_RANK=str(killed))
    check(outcome, "killed", pattern, ranks=tuple(rank for rank in range(3) if rank != killed))
    outcome.check_end("killed")


def test_rank_that_catches_the_exception_holds_nobody(tmp_path: Path) -> None:
    outcome = launch("lightning", tmp_path, ["callback"], STAYS_ALIVE="0")
    check(outcome, "callback", EXPECTED["callback"])
    assert outcome.returncode != 0
    seconds = [entry["at"] - outcome.began_at("callback") for _, entry in sorted(outcome.records("exit").items())]
    assert max(seconds[1:]) < LIMIT_S < seconds[0]
