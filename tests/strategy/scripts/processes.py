"""Starts several commands at once, such as one launcher per node, and waits for all of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRAIN = Path(__file__).with_name("train.py")
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Ended:
    """What the commands left behind: exit codes, all that they printed, and the ranks' notes by name."""

    returncodes: list[int]
    output: str
    notes: dict[str, Any]


def torchrun(folder: Path, options: dict[str, Any], *arguments: str) -> list[str]:
    """Returns the command of a torchrun of the training script."""
    return [sys.executable, "-m", "torch.distributed.run", *arguments, str(_TRAIN), str(folder), json.dumps(options)]


def plain(folder: Path, options: dict[str, Any]) -> list[str]:
    """Returns the command of one process of the training script."""
    return [sys.executable, str(_TRAIN), str(folder), json.dumps(options)]


def run_all(folder: Path, commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]] = ()) -> Ended:
    """Runs the commands side by side, and ends what is left after two minutes."""
    folder.mkdir(exist_ok=True)
    output = folder / "output.txt"
    processes = []
    with output.open("a") as stream:
        for command, own in zip(commands, environments or [{}] * len(commands), strict=True):
            variables = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **own}
            processes.append(
                subprocess.Popen(command, env=variables, stdout=stream, stderr=stream, start_new_session=True)
            )
    deadline = time.monotonic() + 120.0
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    notes = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return Ended([process.returncode for process in processes], output.read_text(errors="replace"), notes)


def free_port() -> int:
    """Returns a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
