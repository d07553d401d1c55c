"""Runs a function on several ranks, each a process of its own, and brings back what they return.

[Note: how the ranks are started]
`fork` copies locks that another thread may hold, and can hang; `spawn` imports torch and Lightning anew in each
process, which takes many seconds. So the ranks are forked from a server (`forkserver`) that has imported the heavy
packages and has one thread only. The server starts with the first call and lives as long as the calling process. It
never imports `lightning_dynmo`, so that a reference run can stay free of it.

[Note: files, not pipes]
Everything the ranks say goes through files in one temporary directory: the store of the process group, the returned
values, tracebacks, stacks, output. A file survives a killed rank, and cannot fill up and block it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_PRELOAD = ["pytest", "torch", "torch.distributed", "torch.distributed.pipelining", "torchmetrics", "lightning.pytorch"]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Variables of a launcher or an earlier run, which would tell a rank that it is somewhere else.
_STALE = re.compile(
    r"(RANK|WORLD_SIZE|NODE_RANK|(LOCAL|GROUP|ROLE)_.*|MASTER_(ADDR|PORT)"
    r"|(TORCHELASTIC|SLURM|OMPI|PMI|PMIX|LSB|JSM|PL|GLOO)_.*)"
)
# What a rank says when the rank it talked to is gone.
_SYMPTOM = re.compile(r"connection (was )?(likely )?(closed|reset|refused)|broken pipe", re.IGNORECASE)

_GRACE_S = 1.0  # what peers of a failed rank have left to say
_STACK_S = 1.0  # how long a rank may take to write its stacks
_ORPHAN_S = 30.0  # how long after the deadline a rank ends itself if nobody has ended it


class RankError(RuntimeError):
    """The first failure among the ranks.

    Attributes:
        rank: The rank that failed first.
        text: Its traceback, or how it died.
    """

    def __init__(self, message: str, rank: int, text: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.text = text


@dataclass(frozen=True)
class _Failure:
    rank: int
    time_s: float  # on the monotonic clock, which all processes of a machine share
    summary: str
    text: str
    exception: BaseException | None = None

    @property
    def order(self) -> tuple[bool, float]:
        # A signal's time is known only once the parent has seen it, maybe after the peers' complaints.
        return bool(_SYMPTOM.search(self.summary)), self.time_s


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    init_process_group: bool = True,
) -> list[Any]:
    """Calls `fn(rank, *args)` on `world_size` ranks and returns what they return, in rank order.

    Each rank is a process with one torch thread, torchelastic's environment variables, seeds set to 0, and (by
    default) a gloo process group over a file store; a whole `Trainer.fit` runs inside. Arguments and values are
    copied, never shared.

    Args:
        fn: A function at the top level of a module.
        world_size: Number of ranks.
        *args: Passed to `fn` after the rank; anything `torch.save` can write.
        timeout_s: After this many seconds all ranks are killed. Starting the server does not count.
        init_process_group: False leaves the process group to `fn`.

    Raises:
        RankError: A rank failed: the message has the traceback of the first one, its exception is the cause.
        TimeoutError: Some ranks were still running at the deadline: the message says which, and where.
        TypeError: `fn` is not at the top level of a module.
    """
    if "<" in getattr(fn, "__qualname__", "<?>"):
        raise TypeError(f"run_distributed needs a function at the top level of a module, got {fn!r}: move it there")
    _start_server()
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        torch.save((fn, args), directory / "call.pt")
        processes = _start_ranks(directory, world_size, timeout_s, init_process_group)
        try:
            died = _wait(directory, processes, timeout_s)
        finally:
            _kill(processes)
            _replay_output(directory, world_size)
        if failures := _failures(directory, died):
            _raise_first(failures, directory, world_size)
        return [torch.load(directory / f"result-{rank}.pt", weights_only=False) for rank in range(world_size)]


# The parent's side.


def _start_server() -> None:
    """Starts the fork server, unless it runs, and waits until it has imported everything."""
    if getattr(_start_server, "pid", None) == os.getpid():
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with _environment(_ONE_THREAD):
        process = context.Process(target=_do_nothing)
        process.start()
        process.join()
    _start_server.pid = os.getpid()  # type: ignore[attr-defined]


def _do_nothing() -> None:
    pass


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start_ranks(
    directory: Path, world_size: int, timeout_s: float, init_process_group: bool
) -> list[ForkServerProcess]:
    context = multiprocessing.get_context("forkserver")
    environment = {key: value for key, value in os.environ.items() if not _STALE.fullmatch(key)}
    environment |= _ONE_THREAD | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RUN_ID": directory.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    if loopback := {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        environment["GLOO_SOCKET_IFNAME"] = loopback.pop()
    processes = []
    for rank in range(world_size):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
        process = context.Process(
            target=_run_rank,
            args=(directory, rank, world_size, own, timeout_s, init_process_group),
            name=f"rank {rank}",
        )
        process.start()
        processes.append(process)
    return processes


def _free_port() -> int:
    """A port for functions that open a store of their own; nothing here listens on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(directory: Path, processes: list[ForkServerProcess], timeout_s: float) -> list[_Failure]:
    """Waits until all ranks have ended, one has failed and its peers had their grace, or the deadline.

    Returns:
        The ranks that ended without leaving a word.
    """
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(processes))
    died: list[_Failure] = []
    failed = False
    while running:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            if not failed:
                _raise_timeout(directory, running, len(processes), timeout_s)
            break
        connection.wait([process.sentinel for process in running.values()], left_s)
        for rank, process in list(running.items()):
            if connection.wait([process.sentinel], 0):
                process.join()
                del running[rank]
                if process.exitcode != 0 or not (directory / f"result-{rank}.pt").exists():
                    if not failed:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                    failed = True
                    if not (directory / f"failure-{rank}.pkl").exists():
                        summary = _how_it_ended(process.exitcode)
                        died.append(_Failure(rank, time.monotonic(), summary, summary))
        if failed and all((directory / f"result-{rank}.pt").exists() for rank in running):
            break
    return died


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} inside the function"


def _raise_timeout(directory: Path, running: dict[int, ForkServerProcess], world_size: int, timeout_s: float) -> None:
    finished = [rank for rank in range(world_size) if (directory / f"result-{rank}.pt").exists()]
    stuck = [rank for rank in running if rank not in finished] or list(running)  # or they cannot exit
    for rank in stuck:
        # Before it has registered the handler, the signal would kill the rank: no harm, it is next anyway.
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(running[rank].pid, signal.SIGUSR2)  # type: ignore[arg-type]
    stacks = [directory / f"stack-{rank}.txt" for rank in stuck]
    until = time.monotonic() + _STACK_S
    while time.monotonic() < until and not all(path.exists() and path.stat().st_size for path in stacks):
        time.sleep(0.02)
    time.sleep(0.05)  # the first bytes are there; let the rest follow
    lines = [
        f"{_ranks(stuck)} of {world_size} still running after {timeout_s:g} s"
        + (f" ({_ranks(finished)} had finished)" if finished else "")
        + ". Give a larger timeout_s if they are slow; this is where they were:"
    ]
    for rank, path in zip(stuck, stacks, strict=True):
        stack = path.read_text(errors="replace").strip() if path.exists() else ""
        lines.append(f"--- rank {rank}\n{stack or 'no stack: it had not begun, or did not answer'}")
    raise TimeoutError("\n".join(lines))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _kill(processes: list[ForkServerProcess]) -> None:
    """Ends the ranks and what they started, such as data loader workers: each rank leads a process group."""
    for process in processes:
        if process.pid is None:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()


def _replay_output(directory: Path, world_size: int) -> None:
    """Writes what the ranks have printed, so that pytest shows it with a failing test."""
    for rank in range(world_size):
        path = directory / f"output-{rank}.txt"
        if path.exists() and (text := path.read_text(errors="replace").rstrip()):
            sys.stdout.write(f"--- output of rank {rank}\n{text}\n")


def _failures(directory: Path, died: list[_Failure]) -> list[_Failure]:
    written = [pickle.loads(path.read_bytes()) for path in directory.glob("failure-*.pkl")]
    return sorted([*written, *died], key=lambda failure: failure.order)


def _raise_first(failures: list[_Failure], directory: Path, world_size: int) -> None:
    first, *others = failures
    lines = [f"rank {first.rank} of {world_size} failed first: {first.summary}", first.text.rstrip()]
    if first.exception is None and (path := directory / f"output-{first.rank}.txt").exists():
        lines += ["its last words:", *path.read_text(errors="replace").splitlines()[-10:]]
    lines += [f"then rank {other.rank}: {other.summary}" for other in others]
    raise RankError("\n".join(lines), first.rank, first.text) from first.exception


# The rank's side.


def _run_rank(
    directory: Path, rank: int, world_size: int, environment: dict[str, str], timeout_s: float, init_process_group: bool
) -> None:
    _settle(directory, rank, environment, timeout_s)
    try:
        fn, args = torch.load(directory / "call.pt", weights_only=False)
        if init_process_group:
            # The group never times out by itself: the deadline's message says more.
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(directory / "store"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s + _ORPHAN_S),
            )
            # A rank that fails at once must not spoil the connecting of its peers.
            (directory / f"ready-{rank}").touch()
            _wait_for_all(directory, "ready-{}", world_size)
        result = fn(rank, *args)
        with _whole_file(directory / f"result-{rank}.pt") as path:
            torch.save(result, path)
    except BaseException as error:
        _write_failure(directory, rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: peers may wait for this rank
    # Leaving early would close connections on which peers may still be reading.
    _wait_for_all(directory, "result-{}.pt", world_size)
    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _wait_for_all(directory: Path, name: str, world_size: int) -> None:
    """Waits until every rank has written its file; if one never does, the parent ends the wait."""
    while not all((directory / name.format(rank)).exists() for rank in range(world_size)):
        time.sleep(0.002)


def _settle(directory: Path, rank: int, environment: dict[str, str], timeout_s: float) -> None:
    """Makes the forked process a rank: its own process group, output, stacks, environment, threads and seeds."""
    os.setsid()
    output = os.open(directory / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    stack = os.open(directory / f"stack-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
    # Should the parent die without a word, so does the rank.
    faulthandler.dump_traceback_later(timeout_s + _ORPHAN_S, exit=True, file=stack)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _write_failure(directory: Path, rank: int, error: BaseException) -> None:
    time_s = time.monotonic()
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    data = pickle.dumps(_Failure(rank, time_s, summary, text))
    # Not every exception survives pickling, and some only fail when they are read.
    with contextlib.suppress(Exception):
        pickle.loads(with_error := pickle.dumps(_Failure(rank, time_s, summary, text, error)))
        data = with_error
    with _whole_file(directory / f"failure-{rank}.pkl") as path:
        path.write_bytes(data)


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """Gives another name to write to; the file appears under `path` when it is complete."""
    draft = path.with_name(f"{path.name}.draft")
    yield draft
    draft.rename(path)
