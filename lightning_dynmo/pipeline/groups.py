"""The ranks of a run, arranged as pipelines and replicas, and the process groups between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_dynmo.pipeline._torch import PrefixStore, TCPStore, abort_process_groups, default_store
from lightning_dynmo.pipeline.failures import FailureBoard

MESH_AXES = ("pipeline_parallel", "data_parallel")


@dataclass(slots=True, eq=False)
class PipelineGroups:
    """The process groups of one rank.

    Attributes:
        mesh: Device mesh with axes ``("pipeline_parallel", "data_parallel")``, pipeline outermost, so that the replicas
            of a layer are neighbours and the ranks that a repack frees fill whole nodes.
        pipeline: Ranks of this rank's pipeline; activations, gradients and layers travel here.
        replicas: Ranks that hold the same layers in other pipelines.
        control: Ranks of this rank's pipeline again, always over gloo: small objects travel here.
        world: All ranks, always over gloo.
        device: Where the layers of this rank live.
        failures: Tells the other ranks when this one fails.
    """

    mesh: DeviceMesh
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup
    control: dist.ProcessGroup
    world: dist.ProcessGroup
    device: torch.device
    failures: FailureBoard
    _sockets: frozenset[int] = field(default_factory=frozenset)

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
        """Whether this rank runs the first stage."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.pp_rank == self.pp_size - 1

    def peer(self, pp_rank: int) -> int:
        """Returns the global rank of position `pp_rank` in this rank's pipeline."""
        return dist.get_global_rank(self.pipeline, pp_rank)

    def gather(self, value: Any) -> list[Any]:
        """Gathers one picklable value from each rank of the pipeline, in order of `pp_rank`."""
        values: list[Any] = [None] * self.pp_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share_from(self, pp_rank: int, value: Any) -> Any:
        """Returns on every rank of the pipeline the picklable value that rank `pp_rank` passed."""
        values = [value]
        dist.broadcast_object_list(values, src=self.peer(pp_rank), group=self.control)
        return values[0]

    def all_agree(self, ok: bool) -> bool:
        """Returns whether every rank of the pipeline passed True."""
        vote = torch.tensor([int(ok)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.control)
        return bool(vote.item())

    @contextmanager
    def guard(self, doing: str) -> Iterator[PipelineGroups]:
        """Guards what ranks do together; see `FailureBoard.guard`."""
        with self.failures.guard(doing):
            yield self

    def abort(self) -> None:
        """Cuts this rank's connections, so that peers that wait for it stop waiting.

        gloo has no abort, and its connections stay open as long as anything, such as a traceback, refers to the group;
        so the sockets that were opened when the groups were made are shut down here.
        """
        abort_process_groups()
        for fd in self._sockets:
            try:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already
                continue


def create_groups(
    pipeline_parallel_size: int,
    data_parallel_size: int,
    device: torch.device,
    connect: Callable[[], None] = lambda: None,
) -> PipelineGroups:
    """Arranges the processes as `data_parallel_size` pipelines of `pipeline_parallel_size` ranks each.

    Args:
        pipeline_parallel_size: Ranks in each pipeline.
        data_parallel_size: Number of pipelines.
        device: Where the layers of this rank live.
        connect: Initialises the default process group where it is not yet.

    Raises:
        ValueError: If the two sizes do not multiply to the number of processes.
    """
    before = _open_sockets()
    connect()
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
    world = control if data_parallel_size == 1 else _new_group_with(rank, [list(range(world_size))], backend="gloo")
    mesh = DeviceMesh.from_group([pipeline, replicas], device.type, mesh=layout, mesh_dim_names=MESH_AXES)
    store = PrefixStore("lightning_dynmo", default_store())
    return PipelineGroups(
        mesh=mesh,
        pipeline=pipeline,
        replicas=replicas,
        control=control,
        world=world,
        device=device,
        failures=FailureBoard(store, rank, world_size),
        _sockets=frozenset(_open_sockets() - before - _store_sockets()),
    )


def _new_group_with(rank: int, members: list[list[int]], backend: str | None) -> dist.ProcessGroup:
    """Makes one group for each list of ranks, as torch demands of every rank, and returns the one that holds `rank`."""
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, backend=backend) for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)


def _open_sockets() -> set[int]:
    """Returns the file descriptors of this process's open sockets; empty where the system has no ``/proc``."""
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return set()
    found = set()
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}").startswith("socket:"):
                found.add(int(name))
        except OSError:  # closed since it was listed
            continue
    return found


def _store_sockets() -> set[int]:
    """Returns the sockets of the key-value store, which must outlive an abort: failures are read from it."""
    port = _store_port()
    found = set()
    for fd in _open_sockets() if port is not None else ():
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                ends = [connection.getsockname()]
                with suppress(OSError):  # a listening socket has no peer
                    ends.append(connection.getpeername())
                if any(isinstance(end, tuple) and end[1] == port for end in ends):
                    found.add(fd)
        except OSError:
            continue
    return found


def _store_port() -> int | None:
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None
