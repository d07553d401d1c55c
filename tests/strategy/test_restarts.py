"""torchrun starts the ranks anew when one of them dies, and training ends with the weights of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import differences, load
from tests.strategy.scripts.processes import run_all, torchrun
from tests.strategy.scripts.train import fit

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = 2


def undisturbed(rank: int, folder: str) -> None:
    fit(Path(folder), devices=RANKS)


def test_restart_ends_with_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    run_distributed(undisturbed, RANKS, str(tmp_path / "undisturbed"))
    folder = tmp_path / "restarted"
    command = torchrun(
        folder,
        {"devices": RANKS, "signals": {1: ["SIGKILL"]}},
        "--standalone",
        f"--nproc-per-node={RANKS}",
        "--max-restarts=1",
    )
    ended = run_all(folder, [command])
    assert ended.returncodes == [0], ended.output[-5000:]
    notes = ended.notes
    assert [notes[f"start-{attempt}-{rank}"]["step"] for attempt in (0, 1) for rank in range(RANKS)] == [0, 0, 4, 4]
    assert notes["exit-0-0"]["at"] - notes["SIGKILL-0-1"]["at"] < 5.0
    assert "rank 1 died" in ended.output
    assert differences(load(folder / "weights.pt"), load(tmp_path / "undisturbed" / "weights.pt")) == []
