"""Starts the script of failing cases as a user would, and tells what each rank got, and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("run_cases.py")
_ROOT = Path(__file__).parents[3]
_LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"],
    "lightning": [],
}
_NUM_RANKS = 3
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What a launch left behind.

    Attributes:
        returncode: Exit code of the launcher; with Lightning's that is rank 0.
        ended_at: When each rank's process was gone.
        folder: Where the ranks have written.
        output: What all of them have printed.
    """

    returncode: int
    ended_at: dict[int, float]
    folder: Path
    output: str

    def records(self, name: str) -> dict[int, dict[str, Any]]:
        """Returns what the ranks recorded under a name, by rank."""
        paths = {rank: self.folder / f"{name}-{rank}.json" for rank in range(_NUM_RANKS)}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def began_at(self, case: str) -> float:
        """Returns when a case went wrong: when it raised, or when the first rank had its error."""
        found = self.records(f"{case}-raised") or self.records(case)
        return float(min(entry["at"] for entry in found.values()))

    def check_end(self, case: str, limit_s: float = 5.0) -> None:
        """Checks that all ranks have failed and come to their end in time; what Python does then is not ours."""
        assert self.returncode != 0
        for rank, entry in self.records("exit").items():
            assert entry["at"] - self.began_at(case) < limit_s, (rank, self.output[-3000:])
        assert max(self.ended_at.values()) - self.began_at(case) < 3 * limit_s, self.ended_at

    def slowest_s(self, case: str) -> float:
        """Returns the seconds until the last rank had its error."""
        return float(max(entry["at"] for entry in self.records(case).values())) - self.began_at(case)


def launch(launcher: str, folder: Path, cases: Sequence[str], **environment: str) -> Outcome:
    """Runs cases in one launch of three ranks; ends all processes after two minutes."""
    command = [sys.executable, *_LAUNCHERS[launcher], str(_SCRIPT), str(folder), *cases]
    variables = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **environment}
    output = folder / "output.txt"
    with output.open("w") as stream:
        process = subprocess.Popen(command, env=variables, stdout=stream, stderr=stream, start_new_session=True)
    deadline = time.time() + _LIMIT_S
    ended_at: dict[int, float] = {}
    try:
        while process.poll() is None or len(ended_at) < len(list(folder.glob("started-*.json"))):
            assert time.time() < deadline, f"still running: {output.read_text()[-3000:]}"
            for path in folder.glob("started-*.json"):
                rank = int(path.stem.rpartition("-")[2])
                text = path.read_text()
                if rank not in ended_at and text and not _is_running(json.loads(text)["pid"]):
                    ended_at[rank] = time.time()
            time.sleep(0.05)
    finally:
        for pid in [process.pid, *(json.loads(path.read_text())["pid"] for path in folder.glob("started-*.json"))]:
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return Outcome(process.returncode, ended_at, folder, output.read_text(errors="replace"))


def _is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
