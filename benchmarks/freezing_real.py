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
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from compute import NUM_MICROBATCHES, NUM_RANKS, AloneTimer, Pipeline, best_split, split_text, step_time
from harness import Rounds, ratio, run, table

from lightning_dynmo.nn import GPTConfig, gpt_layers
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import LayerCost

MICROBATCH_SIZE = 2
CONFIG = GPTConfig(num_blocks=12, hidden_size=256, num_heads=4, context_length=64)
ROUNDS, STEPS_PER_ROUND, BUDGET_S = 15, 4, 180.0
QUICK_ROUNDS, QUICK_STEPS_PER_ROUND, QUICK_BUDGET_S = 5, 2, 30.0


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


if __name__ == "__main__":
    run(main, __doc__, NUM_RANKS)
