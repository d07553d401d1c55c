"""Models that compute, on two ranks with a core each: as a pipeline, and layer by layer to know what is possible."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import Inputs, PipelineRuntime, create_groups
from lightning_dynmo.pipeline.migration import make_whole
from lightning_dynmo.pipeline.schedules import find_schedule, simulated_order
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import LayerCost, simulate, stage_costs

NUM_RANKS = 2
NUM_MICROBATCHES = 16


class AloneTimer:
    """Times each layer alone, on the input that it gets in the chain.

    Args:
        layers: A copy of the model's layers, of its own.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers
        # What does not need a gradient gets none, as in the pipeline.
        self._trains = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
        self._needs_gradient = [any(self._trains[:index]) for index in range(len(layers))]
        self._optimizers = [
            torch.optim.AdamW(layer.parameters()) if is_trained else None
            for layer, is_trained in zip(layers, self._trains, strict=True)
        ]
        self._forward_s: list[list[float]] = [[] for _ in layers]
        self._backward_s: list[list[float]] = [[] for _ in layers]
        self._update_s: list[list[float]] = [[] for _ in layers]

    def measure(self, batch: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Runs one batch through the layers, one layer at a time."""
        for tokens, targets in batch:
            self._measure_microbatch(tokens, targets)
        for optimizer, seconds in zip(self._optimizers, self._update_s, strict=True):
            begin = time.perf_counter()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)

    def costs(self) -> list[LayerCost]:
        """Returns the median cost of each layer, of both ranks; the whole backward counts as that of the parameters."""
        mine = [
            [statistics.median(seconds) for seconds in kind]
            for kind in (self._forward_s, self._backward_s, self._update_s)
        ]
        mean = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(mean)
        forward_s, backward_s, update_s = (mean / dist.get_world_size()).tolist()
        rows = zip(forward_s, backward_s, self._trains, update_s, strict=True)
        return [
            LayerCost(forward, 0.0, backward, trains, update_s=update) for forward, backward, trains, update in rows
        ]

    def _measure_microbatch(self, tokens: Tensor, targets: Tensor) -> None:
        value, passed = tokens, []
        for index, layer in enumerate(self._layers):
            source = value.detach().requires_grad_(self._needs_gradient[index])
            begin = time.perf_counter()
            value = layer(source)
            if layer is self._layers[-1]:
                value = cross_entropy(value, targets)
            self._forward_s[index].append(time.perf_counter() - begin)
            passed.append((source, value))
        gradient = None
        for index in reversed(range(len(self._layers))):
            source, value = passed[index]
            begin = time.perf_counter()
            if value.requires_grad:
                value.backward(gradient)
            self._backward_s[index].append(time.perf_counter() - begin)
            gradient = source.grad


class Pipeline:
    """The model as a pipeline of the library, with its optimizer.

    Args:
        layers: The model's layers.
        batch: Tokens and targets of each microbatch.
    """

    def __init__(self, layers: nn.ModuleList, batch: Sequence[tuple[Tensor, Tensor]]) -> None:
        groups = create_groups(NUM_RANKS, 1, torch.device("cpu"))
        self.uniform = Assignment.uniform(len(layers), NUM_RANKS)
        self.runtime = PipelineRuntime(LayerChain(layers, list(layers)), groups, self.uniform)
        self.runtime.distribute()
        self.optimizer = torch.optim.AdamW(layers.parameters())
        self.runtime.optimizers = [self.optimizer]
        self._batch = batch
        self._inputs = [Inputs((tokens,), {}) for tokens, _ in batch]
        self._step = 0

    def step(self) -> float:
        """Runs one training step and returns its seconds."""
        dist.barrier()
        begin = time.perf_counter()
        self.runtime.train(self._inputs, self._loss, self._step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        self._step += 1
        return time.perf_counter() - begin

    def steps(self, count: int) -> float:
        """Returns the median seconds of `count` steps, after one that is not counted."""
        self.step()
        return statistics.median(self.step() for _ in range(count))

    def rebalance(self) -> None:
        """Lets the library find its split: from a profile of the next step."""
        self.runtime.request_profile()
        self.step()
        self.runtime.rebalance(horizon_steps=math.inf)

    def forget_costs(self) -> None:
        """Tells the library that the model has changed, so that what it has measured no longer holds."""
        self.runtime.rebalancer.model_changed()

    def whole_copy(self) -> nn.ModuleList:
        """Returns a copy of all layers, on every rank, and leaves them where they are."""
        chain, groups = self.runtime.chain, self.runtime.groups
        layers = copy.deepcopy(chain.root)
        assert isinstance(layers, nn.ModuleList)
        whole = LayerChain(layers, list(layers))
        for index, owner in enumerate(self.runtime.owners):
            if owner != groups.pp_rank:
                whole.let_go(index, owner)
        make_whole(whole, self.runtime.owners, groups)
        return layers

    def _loss(self, index: int, logits: Tensor) -> Tensor:
        return cross_entropy(logits, self._batch[index][1])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / NUM_MICROBATCHES


def step_time(costs: Sequence[LayerCost], assignment: Assignment) -> float:
    """Returns the seconds of a step under a split."""
    schedule = find_schedule("1f1b")
    order, placement = simulated_order(schedule, NUM_RANKS, 1, NUM_MICROBATCHES), schedule.place(NUM_RANKS, 1)
    return simulate(order, placement, stage_costs(costs, assignment)).makespan_s


def best_split(costs: Sequence[LayerCost]) -> Assignment:
    """Returns the split with the shortest step, of all that there are."""
    splits = [
        Assignment(tuple(end - start for start, end in pairwise((0, *borders, len(costs)))))
        for borders in combinations(range(1, len(costs)), NUM_RANKS - 1)
    ]
    return min(splits, key=lambda split: step_time(costs, split))


def split_text(balance: Sequence[int]) -> str:
    return "+".join(map(str, balance))
