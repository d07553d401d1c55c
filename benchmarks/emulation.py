"""Pipelines of layers that sleep, on the ranks of a benchmark: many devices on few cores."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import start_ranks, wait_for
from torch import Tensor, nn

from lightning_dynmo.nn import EmulatedLayer
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import Inputs, PipelineGroups, PipelineRuntime, create_groups
from lightning_dynmo.planning import Assignment, MoveWhen
from lightning_dynmo.simulation import LayerCost

NUM_RANKS = 8


def on_all_ranks(function: Callable[..., Any], *args: Any, num_ranks: int = NUM_RANKS) -> Any:
    """Calls ``function(groups, *args)`` on all ranks of a pipeline and returns what the first returns.

    Args:
        function: At the top level of its module.
        *args: Passed on.
        num_ranks: Number of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.pt"
        wait_for(start_ranks(_call, num_ranks, path, num_ranks, function, args))
        return torch.load(path, weights_only=False)


def _call(rank: int, path: Path, num_ranks: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
    dist.init_process_group("gloo")
    gc.freeze()  # else the first full collection copies all pages that are shared with the server, in some step
    result = function(create_groups(num_ranks, 1, torch.device("cpu")), *args)
    if rank == 0:
        torch.save(result, path)
    dist.barrier()
    dist.destroy_process_group()


def _nothing() -> None:
    pass


class EmulatedPipeline:
    """One pipeline, uniformly split at first, with its optimizer. All ranks call its methods alike.

    `next_step` is the number of the step that comes next.

    Args:
        groups: Process groups of this rank; several pipelines may share them.
        costs: Cost of each layer at first.
        num_microbatches: Microbatches per step.
        schedule: Schedule.
        stages_per_rank: Stages on each rank.
        num_parameters: Elements of each layer's weight.
        move_when: When the library moves layers.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        costs: Sequence[LayerCost],
        num_microbatches: int,
        schedule: str = "1f1b",
        stages_per_rank: int = 1,
        num_parameters: int = 1024,
        move_when: MoveWhen = "worthwhile",
    ) -> None:
        self.layers = nn.ModuleList([EmulatedLayer(cost, num_parameters) for cost in costs])
        self.uniform = Assignment.uniform(len(costs), groups.pp_size * stages_per_rank)
        self.runtime = PipelineRuntime(
            LayerChain(self.layers, list(self.layers)),
            groups,
            self.uniform,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            move_when=move_when,
        )
        self.runtime.distribute()
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-3)
        self.runtime.optimizers = [self.optimizer]
        self._inputs = [Inputs((torch.full((1, 4), float(index)),), {}) for index in range(num_microbatches)]
        self.next_step = 0

    def set_costs(self, costs: Sequence[LayerCost]) -> None:
        """Changes what the layers cost and which of them train; frozen ones lose their optimizer state."""
        for layer, cost in zip(self.layers, costs, strict=True):
            assert isinstance(layer, EmulatedLayer)
            layer.set_cost(cost)
            if not cost.trains:
                layer.weight.grad = None
                self.optimizer.state.pop(layer.weight, None)

    @property
    def trains(self) -> list[bool]:
        """Which layers train."""
        return [parameter.requires_grad for parameter in self.layers.parameters()]

    def warm_up(self, costs: Sequence[LayerCost]) -> None:
        """Runs a step with these layers that takes no time of theirs, and leaves them with their costs."""
        self.set_costs([LayerCost(0.0, 0.0, 0.0, trains=cost.trains) for cost in costs])
        self.step()
        self.next_step -= 1
        self.set_costs(costs)

    def forward_and_backward(self) -> float:
        """Runs a step without the optimizer and returns its seconds."""
        dist.barrier()
        begin = time.perf_counter()
        self.runtime.train(self._inputs, self._loss, self.next_step)
        dist.barrier()
        seconds = time.perf_counter() - begin
        self.optimizer.zero_grad()
        self.next_step += 1
        return seconds

    def step(self, before: Callable[[], object] = _nothing, after: Callable[[], object] = _nothing) -> float:
        """Runs a training step and returns its seconds.

        Args:
            before: Called before the forward; its time counts.
            after: Called after the optimizer; its time counts.
        """
        dist.barrier()
        begin = time.perf_counter()
        before()
        self.runtime.train(self._inputs, self._loss, self.next_step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        after()
        dist.barrier()
        self.next_step += 1
        return time.perf_counter() - begin

    def _loss(self, index: int, output: Tensor) -> Tensor:
        return output.square().mean() / len(self._inputs)
