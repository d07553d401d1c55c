"""The ranks of a run, arranged as pipelines and replicas, and the process groups between them."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_dynmo._torch import PrefixStore, Store, TCPStore, abort_process_groups, default_store
from lightning_dynmo.pipeline.failures import (
    FailureBoard,
    PipelineError,
    describe,
    find_pipeline_error,
    is_lost_connection,
    is_out_of_memory,
)

MESH_AXES = ("pipeline_parallel", "data_parallel")

_WATCH_S = 0.25  # how often each rank looks for a failure of another one
_GRACE_S = 0.5  # for ranks that make the same mistake, to find it out by themselves
_ROLL_CALL_S = 0.5  # for ranks to say that they are alive
_LEAVE_S = 2.0  # for ranks to learn of a failure before the first of them ends
_RETURN_S = 60.0  # for ranks to come back to a new run after a failed one


@dataclass(slots=True, eq=False)
class PipelineGroups:
    """The process groups of one rank.

    Attributes:
        mesh: Device mesh with axes ``("pipeline_parallel", "data_parallel")``, pipeline outermost, so that the replicas
            of a layer are neighbours and the ranks that a repack frees fill whole nodes.
        pipeline: Ranks of this rank's pipeline; activations, gradients and layers travel here.
        replicas: Ranks that hold the same layers in other pipelines.
        control: Ranks of this rank's pipeline again, always over gloo: small objects travel here.
        counterparts: Ranks that hold the same layers again, always over gloo.
        world: All ranks, always over gloo.
        device: Where the layers of this rank live.
        failures: Tells the other ranks when this one fails.
    """

    mesh: DeviceMesh
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup
    control: dist.ProcessGroup
    counterparts: dist.ProcessGroup
    world: dist.ProcessGroup
    device: torch.device
    failures: FailureBoard
    _store: Store
    _default: dist.ProcessGroup
    _sockets: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def closed(self) -> bool:
        """Whether these groups can no longer be used, because the run failed or the groups were replaced."""
        return self._stop.is_set()

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return dist.get_rank()

    @property
    def pp_rank(self) -> int:
        """Position of this rank in its pipeline, in ``[0, pp_size)``."""
        return dist.get_rank(self.pipeline)

    @property
    def pp_size(self) -> int:
        """Number of ranks in a pipeline."""
        return dist.get_world_size(self.pipeline)

    @property
    def dp_rank(self) -> int:
        """Which replica of the pipeline this rank belongs to, in ``[0, dp_size)``."""
        return dist.get_rank(self.replicas)

    @property
    def dp_size(self) -> int:
        """Number of replicas of the pipeline."""
        return dist.get_world_size(self.replicas)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its pipeline, which runs the first stage."""
        return self.pp_rank == 0

    def peer(self, pp_rank: int) -> int:
        """Returns the global rank of position `pp_rank` in this rank's pipeline."""
        return dist.get_global_rank(self.pipeline, pp_rank)

    def gather(self, value: Any) -> list[Any]:
        """Gathers one picklable value from each rank of the pipeline, in order of `pp_rank`."""
        with self.guard("exchange between ranks"):
            return _gather(value, self.control)

    def gather_replicas(self, value: Any) -> list[Any]:
        """Gathers one picklable value from each rank that holds the same layers, in order of `dp_rank`."""
        if self.dp_size == 1:
            return [value]
        with self.guard("exchange between replicas"):
            return _gather(value, self.counterparts)

    def share_from(self, pp_rank: int, value: Any) -> Any:
        """Returns on every rank of the pipeline the picklable value that rank `pp_rank` passed."""
        values = [value]
        with self.guard("exchange between ranks"):
            dist.broadcast_object_list(values, src=self.peer(pp_rank), group=self.control)
        return values[0]

    def all_agree(self, ok: bool) -> bool:
        """Returns whether every rank of the pipeline passed True."""
        vote = torch.tensor([int(ok)])
        with self.guard("vote between ranks"):
            dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.control)
        return bool(vote.item())

    @contextmanager
    def guard(self, doing: str) -> Iterator[PipelineGroups]:
        """Guards what ranks do together: a lost connection becomes the text of the rank that failed.

        What this rank itself does wrong keeps its type; the strategy's `on_exception` tells the others.

        Args:
            doing: What the body does, for the text, such as ``"training step 12"``.

        Raises:
            PipelineError: If a layer or step method failed here, memory ran out, or another rank failed in any way.
        """
        if self.closed:
            raise PipelineError(self.failures.read() or f"The connections between ranks are closed, so no {doing}.")
        try:
            yield self
        except Exception as error:
            known = find_pipeline_error(error)
            if known is not None:
                raise PipelineError(self.failures.publish(str(known))) from known.__cause__
            if is_lost_connection(error):
                raise PipelineError(self._why_lost(doing, error)) from error
            if is_out_of_memory(error):  # says by itself neither where nor why
                text = describe(f"rank {self.failures.rank}, {doing}", error)
                raise PipelineError(self.failures.publish(text)) from error
            raise

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why this one fails, ends what they wait for, and closes the groups.

        Returns once the others have learned of it, or after a few seconds. See [Note: how a failure travels].

        Args:
            error: What this rank raises. If it is but a lost connection, it gets the text of the rank that failed.
        """
        rank = self.failures.rank
        if isinstance(error, PipelineError):
            self.failures.publish(str(error))
        elif is_lost_connection(error):
            error.args = (self._why_lost("a call between ranks", error),)
        else:
            self.failures.publish(describe(f"rank {rank}", error))
            self.failures.meet("noticed", _GRACE_S)
        self.cut()
        self.failures.meet("noticed", _LEAVE_S)
        self.close()

    def cut(self) -> None:
        """Cuts this rank's connections, so that peers that wait for it stop waiting, and this rank for them.

        gloo has no abort, and its connections stay open as long as anything, such as a traceback, refers to the group;
        so the sockets that were opened when the groups were made are shut down here.
        """
        for group in {self._default, self.pipeline, self.replicas}:
            with suppress(Exception):  # aborts NCCL; there is nothing to do about a group that cannot be aborted
                group.abort()
        for fd, inode in self._sockets:
            try:
                if os.fstat(fd).st_ino == inode:  # else it was closed, and the number is another file's now
                    with socket.socket(fileno=os.dup(fd)) as connection:
                        connection.getpeername()  # raises on a listening socket, whose end gloo does not survive
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already
                continue

    def close(self) -> None:
        """Forgets the process groups, so that torch counts as not initialised and a new run can begin."""
        self._stop.set()
        if dist.is_initialized() and dist.group.WORLD is self._default:
            abort_process_groups()

    def watch(self) -> None:
        """Cuts the connections when another rank has failed; runs in a thread of its own.

        A rank may wait for one that knows nothing of the failure either, and what waits in NCCL does not notice that
        its peer is gone.
        """
        while not self._stop.wait(_WATCH_S):
            if self.failures.read() is not None:
                if not self._stop.wait(_GRACE_S):
                    self.cut()
                return

    def _why_lost(self, doing: str, error: BaseException) -> str:
        """Returns why a connection is lost: what the rank that failed has published, else who does not answer."""
        text = self.failures.read()
        if text is not None:
            return text
        self.cut()  # so that all notice, and come to the roll call
        self.close()  # at once, for Lightning's handler of the SIGTERM that may follow talks to whatever is open
        rank, dead = self.failures.rank, self.failures.meet("noticed", _ROLL_CALL_S)
        if not self.failures.reachable():
            return (
                f"rank {rank} lost its connections during {doing}: the process that hosts the key-value store, rank 0 "
                f"or the launcher, died. {_KILLED} The connection reported: {error}"
            )
        who = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))} died" if dead else "the network failed"
        text = f"{who}: rank {rank} lost its connection during {doing}. {_KILLED if dead else ''}".rstrip()
        return self.failures.publish(f"{text} The connection reported: {error}", dead)


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gathers picklable values over gloo; where torch's own way is a ring, this one has all wait for few messages."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([len(data)]).view(torch.uint8)
    rows = _gather_rows(torch.cat([size, _padded(data[:_AT_ONCE], _AT_ONCE)]), group)
    sizes = rows[:, : len(size)].contiguous().view(torch.int64).flatten().tolist()
    rows = rows[:, len(size) :]
    if max(sizes) > _AT_ONCE:
        rows = torch.cat([rows, _gather_rows(_padded(data[_AT_ONCE:], max(sizes) - _AT_ONCE), group)], dim=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's own tree structures, unpickled
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - len(data)))


def _gather_rows(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers a row from each rank to the first, and from there to all."""
    rows, first = row.new_empty(dist.get_world_size(group), len(row)), dist.get_global_rank(group, 0)
    dist.gather(row, list(rows) if dist.get_rank() == first else None, dst=first, group=group)
    dist.broadcast(rows, src=first, group=group)
    return rows


_AT_ONCE = 4096  # bytes of a value that go along with its size

_KILLED = "The process was probably killed; look for 'out of memory' in the system log, or at its own output."

_last: PipelineGroups | None = None
"""The groups made last in this process. Runs share them; after a failed run, new ones are made through their store."""


@atexit.register
def _leave_together() -> None:
    """Keeps a rank of a failed run until all have told their users: launchers kill the rest when the first one ends."""
    if _last is not None:
        failed = _last.closed
        _last._stop.set()
        if failed:
            _last.failures.meet("exit", _LEAVE_S)


def create_groups(
    pipeline_parallel_size: int,
    data_parallel_size: int,
    device: torch.device,
    connect: Callable[[Store | None], None] = lambda store: None,
) -> PipelineGroups:
    """Arranges the processes as `data_parallel_size` pipelines of `pipeline_parallel_size` ranks each.

    Groups of the same shape that this process has already are used again. After a failed run new ones are made.

    Args:
        pipeline_parallel_size: Ranks in each pipeline.
        data_parallel_size: Number of pipelines.
        device: Where the layers of this rank live.
        connect: Initialises the default process group where it is not yet, through the store that it is given or, where
            that is None, one that it makes.

    Raises:
        ValueError: If the two sizes do not multiply to the number of processes.
        RuntimeError: If this follows a failed run and not all ranks have come back.
    """
    global _last
    if _last is not None and not _last.closed and _last._default is dist.group.WORLD:
        if (_last.pp_size, _last.dp_size, _last.device) == (pipeline_parallel_size, data_parallel_size, device):
            return _last
        _last._stop.set()
    before = _open_sockets()
    connect(None if dist.is_initialized() or _last is None else _store_after(_last))
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if pipeline_parallel_size * data_parallel_size != world_size:
        raise ValueError(
            f"pipeline_parallel_size={pipeline_parallel_size} times data_parallel_size={data_parallel_size} is "
            f"{pipeline_parallel_size * data_parallel_size}, but there are {world_size} processes. Leave both at "
            f"'auto', or choose sizes whose product is {world_size}."
        )
    layout = torch.arange(world_size).reshape(pipeline_parallel_size, data_parallel_size)
    columns, rows = layout.T.tolist(), layout.tolist()
    pipeline = _new_group_with(rank, columns, backend=None)
    replicas = _new_group_with(rank, rows, backend=None)
    control = _new_group_with(rank, columns, backend="gloo")
    counterparts = _new_group_with(rank, rows, backend="gloo")
    world = control if data_parallel_size == 1 else _new_group_with(rank, [list(range(world_size))], backend="gloo")
    mesh = DeviceMesh.from_group([pipeline, replicas], device.type, mesh=layout, mesh_dim_names=MESH_AXES)
    assert dist.group.WORLD is not None
    _last = PipelineGroups(
        mesh=mesh,
        pipeline=pipeline,
        replicas=replicas,
        control=control,
        counterparts=counterparts,
        world=world,
        device=device,
        failures=FailureBoard(PrefixStore("lightning_dynmo", default_store()), rank, world_size),
        _store=default_store(),
        _default=dist.group.WORLD,
        _sockets=frozenset(_open_sockets() - before - _store_sockets()),
    )
    threading.Thread(target=_last.watch, name="lightning_dynmo failures", daemon=True).start()
    return _last


def _store_after(failed: PipelineGroups) -> Store:
    """Returns the store for the groups that follow failed ones: theirs, with keys of its own."""
    absent = failed.failures.meet("return", _RETURN_S)
    if absent:
        raise RuntimeError(
            f"After a failed run, rank {failed.failures.rank} began a new one, but ranks {absent} did not within "
            f"{_RETURN_S:.0f} s. Let every rank handle the exception in the same way, or start all processes anew."
        )
    return PrefixStore("return", failed._store)


def _new_group_with(rank: int, members: list[list[int]], backend: str | None) -> dist.ProcessGroup:
    """Makes one group for each list of ranks, as torch demands of every rank, and returns the one that holds `rank`."""
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, backend=backend) for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)


def _open_sockets() -> set[tuple[int, int]]:
    """Returns this process's open sockets: file descriptor and inode. Empty where the system has no ``/dev/fd``."""
    folder = "/dev/fd"
    found = set()
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        with suppress(OSError):  # closed since it was listed
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _store_sockets() -> set[tuple[int, int]]:
    """Returns the sockets of the key-value store, which must outlive a cut: failures are read from it."""
    port = _store_port()
    found = set()
    for fd, inode in _open_sockets() if port is not None else ():
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                ends = [connection.getsockname()]
                with suppress(OSError):  # a listening socket has no peer
                    ends.append(connection.getpeername())
                if any(isinstance(end, tuple) and end[1] == port for end in ends):
                    found.add((fd, inode))
        except OSError:
            continue
    return found


def _store_port() -> int | None:
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None
