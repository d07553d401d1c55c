"""What the benchmarks share: ranks with a core each, and tables from which every ratio can be computed again."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

FEWEST_ROUNDS = 5
_RANK = "BENCHMARK_RANK"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run(main: Callable[[argparse.Namespace], None], docstring: str | None, world_size: int = 2) -> None:
    """Runs a benchmark script on several ranks, each a process with one thread on a core of its own.

    Args:
        main: Called on every rank with the parsed arguments. The rank is in the environment, as under a launcher.
        docstring: The script's; becomes its help.
        world_size: Number of ranks.
    """
    arguments = arguments_of(docstring)
    if _RANK in os.environ:
        main(arguments)
    else:
        sys.exit(_launch(world_size))


def arguments_of(docstring: str | None) -> argparse.Namespace:
    """Returns the parsed command line, of which the script's docstring is the help."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within 60 s")
    parser.add_argument("--null", action="store_true", help="turn the feature off: what the text above says of it")
    return parser.parse_args()


def start_ranks(function: Callable[..., None], world_size: int, *args: Any) -> ProcessContext:
    """Starts ``function(rank, *args)`` on several ranks, where many short runs make it worth to start processes fast.

    The processes are forked from a server that has imported torch and Lightning, not what is measured.

    Args:
        function: At the top level of its module.
        world_size: Number of ranks.
        *args: Passed on.
    """
    os.environ.update(_ONE_THREAD)
    multiprocessing.set_forkserver_preload(["torch.distributed.pipelining", "lightning.pytorch"])
    surroundings = {**_surroundings(world_size), "TORCHELASTIC_RUN_ID": "benchmark"}
    arguments = (function, surroundings, args)
    return start_processes(_run_rank, arguments, world_size, join=False, daemon=True, start_method="forkserver")


def wait_for(started: ProcessContext) -> None:
    """Waits until all ranks have ended.

    Raises:
        torch.multiprocessing.ProcessException: If one has failed, with its text; the others are ended.
    """
    while not started.join():
        pass


def _run_rank(rank: int, function: Callable[..., None], surroundings: dict[str, str], args: Sequence[Any]) -> None:
    os.environ.update({**surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        function(rank, *args)


def _surroundings(world_size: int) -> dict[str, str]:
    """Returns what all ranks find in their environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**_ONE_THREAD, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if loopback := {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        environment["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return environment


def _launch(world_size: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < world_size:
        print(f"warning: {world_size} ranks share {len(cores)} core(s), so the times mean little", file=sys.stderr)
    environment = {**os.environ, **_surroundings(world_size)}
    processes = []
    for rank in range(world_size):
        own = {**environment, _RANK: str(rank), "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        # Pinned before it starts, so that the threads of its libraries stay on its core too.
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env=own))
    os.sched_setaffinity(0, set(cores))
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                return 1
            time.sleep(0.2)
        return max(abs(process.returncode) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Rounds:
    """Counts rounds on all ranks alike; on a busy machine it ends early rather than late.

    Args:
        most: Rounds where time allows.
        budget_s: No round begins later than so many seconds after the first one, once there are five.
    """

    def __init__(self, most: int, budget_s: float) -> None:
        self._most = most
        self._budget_s = budget_s

    def __iter__(self) -> Iterator[int]:
        begin = time.perf_counter()
        for index in range(self._most):
            in_time = torch.tensor(float(index < FEWEST_ROUNDS or time.perf_counter() - begin < self._budget_s))
            dist.broadcast(in_time, src=0)
            if not in_time:
                return
            yield index


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns rows as text, columns two or more spaces apart; seconds are shown in milliseconds.

    Args:
        title: First line.
        columns: One name per column; values of columns that end in ``_ms`` are given in seconds.
        rows: One value per column.
    """
    cells = [list(columns)]
    for row in rows:
        cells.append(
            [
                f"{value * 1e3:.3f}" if name.endswith("_ms") and isinstance(value, float) else str(value)
                for name, value in zip(columns, row, strict=True)
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([f"== {title}", *lines, ""])


def ratio(name: str, value: float, form: str = ".4f") -> str:
    """Returns the line by which a benchmark states one result, in the given format."""
    return f"ratio: {name} {value:{form}}"
