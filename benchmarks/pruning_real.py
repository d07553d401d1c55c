"""How much faster is a step once the pipeline is rebalanced, when 90 % of the weights are pruned?

Two ranks, real compute, one core each, schedule 1F1B. The weights of a GPT's blocks grow with depth, so one threshold
for the whole model prunes the first blocks far more than the last. It is pruned as `GradualPruningCallback` prunes it:
in the four steps of the cubic schedule, with matrices in compressed rows where that is faster here. Three steps take
turns within one run:

* `dense`: the model before pruning, uniformly split, in a pipeline of its own. A second baseline, for comparison only.
* `static`: the pruned model under the same split. This is the baseline.
* `rebalanced`: the pruned model under the split that the library finds: it profiles one step, plans, and moves layers.

`static_over_rebalanced` is the measured gain. `possible` is the gain that the layers' own costs allow: each pruned
layer is timed alone, outside the pipeline, on its usual input, while the other rank does the same, so that both cores
are busy as they are in the pipeline. A simulation of the schedule, in which messages cost nothing, turns these times
into the length of a step for every split; `possible` is that of the uniform split over that of the best split.
`rebalanced_of_possible` says how much of the possible gain is reached. `dense_over_rebalanced` is what pruning and
rebalancing gain together. Measured ratios are medians over rounds of the quotient of two median step times, since the
parts of a round follow each other and find the machine equally busy.

`resident` is what layers, gradients and optimizer state really hold on each rank, after a step.

`--null` prunes nothing: there is nothing to gain, and all ratios must be 1.00 +- 0.05. `--quick` takes a smaller model.
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
from torch import nn

from lightning_dynmo.callbacks.pruning import prunable_weights
from lightning_dynmo.nn import GPTConfig, SparseLinear, gpt_layers
from lightning_dynmo.pipeline import GlobalPruning
from lightning_dynmo.planning import Assignment, CubicSparsity, num_kept
from lightning_dynmo.simulation import LayerCost

MICROBATCH_SIZE = 2
CONFIG = GPTConfig(num_blocks=12, hidden_size=384, num_heads=6, context_length=64)
QUICK_CONFIG = GPTConfig(num_blocks=8, hidden_size=256, num_heads=4, context_length=64)
SPREAD, INIT_STD = 0.4, 0.02
ROUNDS, STEPS_PER_ROUND, BUDGET_S = 12, 3, 200.0
QUICK_ROUNDS, QUICK_STEPS_PER_ROUND, QUICK_BUDGET_S = 5, 1, 30.0


def model(config: GPTConfig) -> nn.ModuleList:
    """Returns layers whose weights grow with depth, from 1 - `SPREAD` to 1 + `SPREAD` times the usual deviation."""
    torch.manual_seed(0)
    layers = gpt_layers(config)
    for index, block in enumerate(layers[1:-1]):
        for part in block.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=INIT_STD * (1 + SPREAD * (2 * index / (config.num_blocks - 1) - 1)))
    return layers


def prune(pipeline: Pipeline) -> dict[str, float]:
    """Prunes the pipeline's layers as the callback does, and returns the density of each matrix."""
    chain, runtime = pipeline.runtime.chain, pipeline.runtime
    found = prunable_weights(chain.root, chain.layers)
    weights = {name: (index, SparseLinear.from_linear(linear)) for name, (index, linear) in found.items()}
    pruning, schedule = GlobalPruning(weights, chain, runtime.groups), CubicSparsity()
    matrices = {}
    for step in range(schedule.start_step, schedule.end_step + 1, schedule.every_n_steps):
        pipeline.step()
        kept = num_kept(pruning.num_weights, schedule.sparsity(step))
        matrices = pruning.prune(kept, runtime.optimizers)
    pipeline.forget_costs()
    return {name: matrix.density for name, matrix in matrices.items()}


def resident_mb(pipeline: Pipeline) -> list[float]:
    """Returns the megabytes that each rank holds for its layers, gradients and optimizer state."""
    chain, state = pipeline.runtime.chain, pipeline.optimizer.state
    held = [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    mine = chain.resident_bytes() + sum(value.untyped_storage().nbytes() for value in held)
    return [size / 2**20 for size in pipeline.runtime.groups.gather(mine)]


def main(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    config = QUICK_CONFIG if arguments.quick else CONFIG
    layers = model(config)
    batch = [
        (tokens, targets)
        for tokens, targets in torch.randint(
            config.vocab_size, (NUM_MICROBATCHES, 2, MICROBATCH_SIZE, config.context_length)
        )
    ]
    dense, pruned = Pipeline(copy.deepcopy(layers), batch), Pipeline(layers, batch)
    densities = {} if arguments.null else prune(pruned)
    alone = AloneTimer(pruned.whole_copy())
    num_steps = QUICK_STEPS_PER_ROUND if arguments.quick else STEPS_PER_ROUND
    rounds: list[tuple[int, str, float, float, float]] = []
    memory: dict[str, list[float]] = {}
    for index in Rounds(QUICK_ROUNDS, QUICK_BUDGET_S) if arguments.quick else Rounds(ROUNDS, BUDGET_S):
        dense_s = dense.steps(num_steps)
        pruned.runtime.move_to(pruned.uniform)
        static_s = pruned.steps(num_steps)
        memory |= {"dense": resident_mb(dense), "static": resident_mb(pruned)}
        pruned.rebalance()
        rebalanced_s = pruned.steps(num_steps)
        rounds.append((index, split_text(pruned.runtime.assignment.balance), dense_s, static_s, rebalanced_s))
        dist.barrier()
        alone.measure(batch)
    memory["rebalanced"] = resident_mb(pruned)
    costs = alone.costs()
    if dist.get_rank() == 0:
        print(config)
        report(costs, densities, pruned.uniform, rounds, memory)
    dist.destroy_process_group()


def report(
    costs: Sequence[LayerCost],
    densities: dict[str, float],
    uniform: Assignment,
    rounds: Sequence[tuple[int, str, float, float, float]],
    memory: dict[str, list[float]],
) -> None:
    print(f"{len(costs)} layers, {NUM_MICROBATCHES} microbatches, 1F1B, {NUM_RANKS} ranks\n")
    rows = []
    for index, cost in enumerate(costs):
        mine = [value for name, value in densities.items() if name.split(".")[0] == str(index)]
        density = f"{statistics.mean(mine):.3f}" if mine else "-"
        rows.append((index, density, cost.forward_s, cost.weight_gradient_s, cost.update_s))
    columns = ("layer", "density", "forward_ms", "backward_ms", "update_ms")
    print(table("Layers, timed alone: per microbatch, and the optimizer", columns, rows))
    best = best_split(costs)
    best_s, uniform_s = step_time(costs, best), step_time(costs, uniform)
    possible_rows = [
        ("uniform", split_text(uniform.balance), uniform_s),
        ("best", split_text(best.balance), best_s),
    ]
    print(table("Possible steps, from these times", ("which", "split", "step_ms"), possible_rows))
    columns = ("round", "split", "dense_ms", "static_ms", "rebalanced_ms")
    print(table("Steps measured, median of each round", columns, rounds))
    columns = ("which", *(f"rank_{rank}_mb" for rank in range(NUM_RANKS)))
    text = [(name, *(f"{value:.1f}" for value in sizes)) for name, sizes in memory.items()]
    print(table("Memory, resident", columns, text))
    measured = statistics.median(static_s / rebalanced_s for *_, static_s, rebalanced_s in rounds)
    possible = uniform_s / best_s
    print(ratio("static_over_rebalanced", measured))
    print(ratio("possible", possible))
    print(ratio("rebalanced_of_possible", measured / possible))
    print(ratio("dense_over_rebalanced", statistics.median(row[2] / row[4] for row in rounds)))


if __name__ == "__main__":
    run(main, __doc__, NUM_RANKS)
