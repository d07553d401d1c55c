"""How much faster is a step once the pipeline is rebalanced, when half of the layers are frozen?

Two ranks, real compute, one core each, schedule 1F1B. The first half of a GPT's layers is frozen. The baseline is the
same frozen model under the split that a static pipeline keeps: equally many layers per rank. Against it stands the
split that the library itself finds: it profiles one step, plans, and moves layers. Both take turns within one run.

`static_over_rebalanced` is the measured gain. `possible` is the gain that the layers' own costs allow: each layer is
timed alone, outside the pipeline, on its usual input, while the other rank does the same, so that both cores are busy
as they are in the pipeline. A simulation of the schedule, in which messages cost nothing, turns these times into the
length of a step for every split; `possible` is that of the uniform split over that of the best split.
`rebalanced_of_possible` says how much of the possible gain is reached.

`static_over_rebalanced` is the median over rounds of the quotient of the two median step times, since the two halves of
a round follow each other and find the machine equally busy.

A step is all microbatches' forwards and backwards, and the optimizer, from one barrier to the next. The first step
after a move, in which stages are rebuilt, is not counted here: benchmarks/overhead.py measures it.

`--null` freezes nothing: there is nothing to gain, and all three ratios must be 1.00 +- 0.05.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Rounds, ratio, run, table
from torch import Tensor, nn

from lightning_dynmo.nn import GPTConfig, gpt_layers
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import Inputs, PipelineRuntime, create_groups
from lightning_dynmo.pipeline.schedules import find_schedule, simulated_order
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import LayerCost, simulate, stage_costs

NUM_RANKS = 2
NUM_MICROBATCHES = 16
MICROBATCH_SIZE = 2
CONFIG = GPTConfig(num_blocks=12, hidden_size=256, num_heads=4, context_length=64)
ROUNDS, STEPS_PER_ROUND, BUDGET_S = 15, 4, 180.0
QUICK_ROUNDS, QUICK_STEPS_PER_ROUND, QUICK_BUDGET_S = 5, 2, 30.0


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

    def _loss(self, index: int, logits: Tensor) -> Tensor:
        return cross_entropy(logits, self._batch[index][1])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / NUM_MICROBATCHES


def main(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = gpt_layers(CONFIG)
    num_frozen = 0 if arguments.null else len(layers) // 2
    for layer in layers[:num_frozen]:
        layer.requires_grad_(False)
    shape = (NUM_MICROBATCHES, 2, MICROBATCH_SIZE, CONFIG.context_length)
    batch = [(tokens, targets) for tokens, targets in torch.randint(CONFIG.vocab_size, shape)]
    alone = AloneTimer(copy.deepcopy(layers))
    pipeline = Pipeline(layers, batch)

    num_steps = QUICK_STEPS_PER_ROUND if arguments.quick else STEPS_PER_ROUND
    rounds: list[tuple[int, str, float, float]] = []
    for index in Rounds(QUICK_ROUNDS, QUICK_BUDGET_S) if arguments.quick else Rounds(ROUNDS, BUDGET_S):
        pipeline.runtime.move_to(pipeline.uniform)
        static_s = pipeline.steps(num_steps)
        pipeline.rebalance()
        rebalanced_s = pipeline.steps(num_steps)
        rounds.append((index, split_text(pipeline.runtime.assignment.balance), static_s, rebalanced_s))
        dist.barrier()
        alone.measure(batch)
    costs = alone.costs()
    if dist.get_rank() == 0:
        report(costs, num_frozen, pipeline.uniform, rounds)
    dist.destroy_process_group()


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


def report(
    costs: Sequence[LayerCost],
    num_frozen: int,
    uniform: Assignment,
    rounds: Sequence[tuple[int, str, float, float]],
) -> None:
    print(f"{len(costs)} layers, {num_frozen} frozen, {NUM_MICROBATCHES} microbatches, 1F1B, {NUM_RANKS} ranks\n")
    rows = [
        (index, cost.trains, cost.forward_s, cost.weight_gradient_s, cost.update_s) for index, cost in enumerate(costs)
    ]
    columns = ("layer", "trains", "forward_ms", "backward_ms", "update_ms")
    print(table("Layers, timed alone: per microbatch, and the optimizer", columns, rows))
    best = best_split(costs)
    best_s, uniform_s = step_time(costs, best), step_time(costs, uniform)
    predictions = [
        ("uniform", split_text(uniform.balance), uniform_s),
        ("best", split_text(best.balance), best_s),
    ]
    print(table("Possible steps, from these times", ("which", "split", "step_ms"), predictions))
    print(table("Steps measured, median of each round", ("round", "split", "static_ms", "rebalanced_ms"), rounds))
    measured = statistics.median(static_s / rebalanced_s for _, _, static_s, rebalanced_s in rounds)
    possible = uniform_s / best_s
    print(ratio("static_over_rebalanced", measured))
    print(ratio("possible", possible))
    print(ratio("rebalanced_of_possible", measured / possible))


def split_text(balance: Sequence[int]) -> str:
    return "+".join(map(str, balance))


if __name__ == "__main__":
    run(main, __doc__, NUM_RANKS)
