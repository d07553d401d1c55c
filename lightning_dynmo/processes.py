"""The processes of a pipeline, as Lightning sees them: which there are, and what they do together."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_dynmo._lightning import ScriptLauncher, gather_over, init_dist_connection, sync_over
from lightning_dynmo._torch import Store
from lightning_dynmo.pipeline import PipelineError, PipelineGroups, create_groups, store_of_this_attempt

T = TypeVar("T")


class PipelineProcesses(ParallelStrategy):
    """Starts the processes, knows their ranks, and does what Lightning asks of all of them at once.

    All ranks of a pipeline read the same batches and have the same values, so what other strategies reduce or gather
    over ranks is reduced and gathered over the replicas of the pipeline here.

    Args:
        pipeline_parallel_size: Ranks of each pipeline; ``"auto"`` for as many as there are.
        data_parallel_size: Replicas of the pipeline; ``"auto"`` for as many as there are.
        timeout: Longest wait for another rank.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Reads and writes checkpoint files.
        precision_plugin: Set by the Trainer.
    """

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"],
        data_parallel_size: int | Literal["auto"],
        timeout: timedelta,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._sizes = (pipeline_parallel_size, data_parallel_size)
        self.timeout = timeout
        self.num_nodes = 1
        self._groups: PipelineGroups | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks of each pipeline."""
        return self.ranks_of_pipeline(self.world_size)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the pipeline, which train on different samples."""
        replicas = self._sizes[1]
        return max(1, self.world_size // self.pipeline_parallel_size) if replicas == "auto" else replicas

    def ranks_of_pipeline(self, world_size: int) -> int:
        """Returns the number of ranks in each pipeline, given how many there are in all."""
        stages, replicas = self._sizes
        if stages != "auto":
            return stages
        return world_size if replicas == "auto" else max(1, world_size // replicas)

    @property
    def pp_rank(self) -> int:
        """Position of this rank in its pipeline."""
        return self.global_rank // self.data_parallel_size

    @property
    def dp_rank(self) -> int:
        """Replica that this rank belongs to."""
        return self.global_rank % self.data_parallel_size

    @property
    def is_distributed(self) -> bool:
        """Whether samples are divided between ranks: between replicas, for a pipeline's ranks read the same batches."""
        return self.data_parallel_size > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.dp_rank}

    @override
    def _configure_launcher(self) -> None:
        # Also where the processes exist already: the launcher then checks their number and shares the cores among them.
        assert self.cluster_environment is not None
        self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tells this process which one it is; the Trainer calls it before anything asks."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._groups is None:
            self._groups = create_groups(
                self.pipeline_parallel_size, self.data_parallel_size, self.root_device, self._connect
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._groups is not None:
            # All ranks have agreed on the end: no need to ask who else has failed.
            agreed = isinstance(exception, SIGTERMException)
            self._groups.fail(PipelineError(str(exception)) if agreed else exception)
            self._groups = None

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._groups is not None:
            with self._together(f"barrier {name or ''}".strip()) as groups:
                dist.barrier(group=groups.world)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._groups is None:
            return obj
        values = [obj]
        with self._together("broadcast") as groups:
            dist.broadcast_object_list(values, src=src, group=groups.world)
        return values[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the replicas; every rank of a pipeline has the same value."""
        if self._groups is None or self._groups.dp_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        with self._groups.guard("reduction over replicas") as groups:
            return sync_over(groups.replicas, tensor, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers from the replicas, in a new first dim; with one replica, returns the tensor as on one device."""
        if self._groups is None or self._groups.dp_size == 1:
            return tensor
        with self._groups.guard("gathering from replicas") as groups:
            return gather_over(groups.replicas, tensor, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._groups is None:
            return decision
        vote = torch.tensor([int(decision)])
        with self._together("decision") as groups:
            dist.all_reduce(vote, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=groups.world)
        return bool(vote.item())

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the picklable values that the ranks that read in step have passed, in order of their ranks."""
        with self._together("exchange between ranks") as groups:
            company = self._in_step(groups)
            values: list[Any] = [None] * dist.get_world_size(company)
            dist.all_gather_object(values, value, group=company)
        return values

    def gather_numbers(self, number: int, doing: str) -> list[int]:
        """Returns the numbers in [0, 255] that the ranks that read in step have passed; faster than `gather_objects`.

        Args:
            number: This rank's.
            doing: What they are for, for the text of errors.
        """
        with self._together(doing) as groups:
            company = self._in_step(groups)
            numbers = torch.zeros(dist.get_world_size(company), dtype=torch.uint8)
            numbers[dist.get_rank(company)] = number
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=company)
        return [int(value) for value in numbers.tolist()]

    def _in_step(self, groups: PipelineGroups) -> dist.ProcessGroup:
        """Returns the ranks that read batch for batch: all, but in prediction only those of one pipeline.

        Lightning repeats samples to give all replicas equally many, except in prediction.
        """
        return groups.control if self._trainer.state.fn == TrainerFn.PREDICTING else groups.world

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _in_step_method(self) -> bool:
        """Returns whether a step method of the user is running, which happens on the last stage alone."""
        return False

    def _connect(self, store: Store | None) -> None:
        assert self.cluster_environment is not None
        backend = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
        if store is None:
            store = store_of_this_attempt(self.global_rank, self.world_size, self.timeout)
        options: dict[str, Any] = {} if store is None else {"store": store}
        init_dist_connection(self.cluster_environment, backend, timeout=self.timeout, **options)

    def _together(self, doing: str) -> AbstractContextManager[PipelineGroups]:
        """Guards what all ranks do together; refuses it inside step methods, which run on the last stage alone."""
        assert self._groups is not None
        if self._in_step_method():
            raise RuntimeError(
                f"A step method called for a {doing} between ranks, but step methods run on the last stage only. Call "
                "it from a hook such as on_train_batch_end instead."
            )
        failed = sys.exc_info()[1]
        if isinstance(failed, SIGTERMException):  # raised by all ranks together, which are well
            failed = None
        if failed is not None and self._trainer.state.status == TrainerStatus.INTERRUPTED:
            self.on_exception(failed)
            raise PipelineError(
                f"{failed} (After that, a callback asked for a {doing} between ranks, such as for a checkpoint, which "
                "is not possible once a rank has failed. Save checkpoints while training goes on.)"
            )
        return self._groups.guard(doing)
