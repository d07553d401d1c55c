"""What do Lightning and this library cost: a step over that of a hand-written loop, and a rebalance?

Two ranks, one core each, a GPT whose step takes more than 100 ms. A Trainer with `DynMoStrategy` trains one copy of the
model. Between windows of its steps, in the same processes, a hand-written loop trains another copy: torch's own
`PipelineStage` and `Schedule1F1B` on the same layers, microbatches, data loader and optimizer, without Lightning and
without this library. A window runs from the begin of its first step to the begin of the step after its last, so that
whatever the Trainer does between steps counts too. The Trainer logs the loss and has no progress bar, logger or
checkpoints, as the loop has none. `strategy_over_loop` is the median over rounds of the quotient of the two windows,
since they follow each other and find the machine equally busy.

`rebalance_share` is the share of the time that goes into rebalancing at every 100th step. It counts what a measured
step costs more than a plain one, the plan, the move of one layer to the other rank and back again, and what the first
step after each of the moves, in which stages are rebuilt, costs more than the steps that follow it. It is a median.

`--null` compares the hand-written loop with itself: `strategy_over_loop` must be 1.00 +- 0.05. Nothing is rebalanced,
so that there is no `rebalance_share`.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
import warnings
from collections.abc import Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Rounds, ratio, run, table
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

from lightning_dynmo import DynMoStrategy, PipelineModule
from lightning_dynmo.callbacks.base import runtime_of
from lightning_dynmo.nn import GPTConfig, gpt_layers
from lightning_dynmo.planning import Assignment

NUM_RANKS = 2
NUM_MICROBATCHES = 8
MICROBATCH_SIZE = 2
CONFIG = GPTConfig(num_blocks=8, hidden_size=256, num_heads=4, context_length=64)
WARMUP_STEPS = 5
ROUNDS, BUDGET_S = 50, 120.0
QUICK_ROUNDS, QUICK_BUDGET_S = 12, 12.0
CYCLES, CYCLES_BUDGET_S = 9, 60.0
QUICK_CYCLES, QUICK_CYCLES_BUDGET_S = 5, 15.0
STEPS_PER_WINDOW = 3
STEPS_BETWEEN_MOVES = 3
STEPS_PER_REBALANCE = 100

WINDOW_COLUMNS = ("round", "loop_ms", "strategy_ms")
REBALANCE_COLUMNS = ("cycle", "step_ms", "profile_ms", "plan_ms", "moves_ms", "rebuilds_ms")


class Model(PipelineModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = gpt_layers(CONFIG)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = cross_entropy(self(tokens), targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class HandWrittenLoop:
    """Trains layers as a pipeline by torch alone.

    Args:
        layers: All layers; this rank uses its half.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._rank = dist.get_rank()
        begin, end = ((0, len(layers) // 2), (len(layers) // 2, len(layers)))[self._rank]
        module = nn.Sequential(*(copy.deepcopy(layer) for layer in layers[begin:end]))
        tokens = torch.empty(MICROBATCH_SIZE, CONFIG.context_length, dtype=torch.int64, device="meta")
        shape = (MICROBATCH_SIZE, CONFIG.context_length)
        hidden, logits = (
            torch.empty(*shape, size, device="meta", requires_grad=True)
            for size in (CONFIG.hidden_size, CONFIG.vocab_size)
        )
        stage = PipelineStage(
            module,
            self._rank,
            NUM_RANKS,
            torch.device("cpu"),
            input_args=(hidden if self._rank else tokens,),
            output_args=(logits if self._rank else hidden,),
        )
        self._schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=cross_entropy)
        self._optimizer = torch.optim.AdamW(module.parameters())
        self._batches = iter(loader())

    def train(self, num_steps: int) -> float:
        """Runs some steps and returns their mean seconds."""
        begin = synchronized_now()
        for _ in range(num_steps):
            tokens, targets = next(self._batches)
            if self._rank == 0:
                self._schedule.step(tokens)
            else:
                self._schedule.step(target=targets, return_outputs=False)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return (synchronized_now() - begin) / num_steps


class Stopwatch(Callback):
    """Measures the Trainer's steps and the hand-written loop in turns, then what rebalancing costs.

    Args:
        quick: Fewer rounds.
        null: Measures the hand-written loop twice instead.
    """

    def __init__(self, quick: bool, null: bool) -> None:
        self._null = null
        self._rounds = Rounds(QUICK_ROUNDS, QUICK_BUDGET_S) if quick else Rounds(ROUNDS, BUDGET_S)
        self._cycles = Rounds(QUICK_CYCLES, QUICK_CYCLES_BUDGET_S) if quick else Rounds(CYCLES, CYCLES_BUDGET_S)
        self.windows: list[tuple[Any, ...]] = []
        self.rebalances: list[tuple[Any, ...]] = []
        self._plan: Iterator[None] = iter(())
        self._done = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan = self._measure(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        next(self._plan)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = self._done

    def _measure(self, trainer: Trainer) -> Iterator[None]:
        """Runs up to its next ``yield`` whenever a step of the Trainer is about to begin."""
        torch.manual_seed(0)
        layers = gpt_layers(CONFIG)
        loop, other_loop = HandWrittenLoop(layers), HandWrittenLoop(layers)
        loop.train(WARMUP_STEPS)
        other_loop.train(WARMUP_STEPS)
        yield from self._steps(WARMUP_STEPS)
        for index in self._rounds:
            loop_s = loop.train(STEPS_PER_WINDOW)
            if self._null:
                strategy_s = other_loop.train(STEPS_PER_WINDOW)
            else:
                strategy_s = yield from self._steps(STEPS_PER_WINDOW)
            self.windows.append((index, loop_s, strategy_s))
        if not self._null:
            for index in self._cycles:
                costs = yield from self._rebalance(trainer)
                self.rebalances.append((index, *costs))
        self._done = True
        yield

    def _steps(self, num_steps: int) -> Generator[None, None, float]:
        """Lets the Trainer run some steps and returns their mean seconds."""
        begin = synchronized_now()
        for _ in range(num_steps):
            yield
        return (synchronized_now() - begin) / num_steps

    def _rebalance(self, trainer: Trainer) -> Generator[None, None, tuple[float, ...]]:
        """Returns the seconds of a plain step, and of each part of a rebalance."""
        runtime = runtime_of(trainer)
        assert runtime is not None
        here = runtime.assignment
        first, second = here.balance
        there = Assignment((first - 1, second + 1))
        step_s = yield from self._steps(STEPS_BETWEEN_MOVES)

        runtime.request_profile()
        profile_s = (yield from self._steps(1)) - step_s
        begin = synchronized_now()
        runtime.rebalance(at_most_steps=0)  # plans only: no move pays if nothing comes after it
        plan_s = synchronized_now() - begin

        moves_s = rebuilds_s = 0.0
        for assignment in (there, here):
            begin = synchronized_now()
            runtime.move_to(assignment)
            moves_s += synchronized_now() - begin
            first_s = yield from self._steps(1)
            rebuilds_s += first_s - (yield from self._steps(STEPS_BETWEEN_MOVES))
        return step_s, profile_s, plan_s, moves_s, rebuilds_s


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loader() -> DataLoader[tuple[Tensor, ...]]:
    shape = (1000, MICROBATCH_SIZE * NUM_MICROBATCHES, CONFIG.context_length)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(CONFIG.vocab_size, (2, *shape), generator=generator).flatten(1, 2)
    return DataLoader(TensorDataset(tokens, targets), batch_size=MICROBATCH_SIZE * NUM_MICROBATCHES)


def synchronized_now() -> float:
    """Returns the time at which all ranks have come here."""
    dist.barrier()
    return time.perf_counter()


def main(arguments: argparse.Namespace) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stopwatch = Stopwatch(arguments.quick, arguments.null)
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=DynMoStrategy(num_microbatches=NUM_MICROBATCHES),
        callbacks=[stopwatch],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader())
    if trainer.is_global_zero:
        report(stopwatch)


def report(stopwatch: Stopwatch) -> None:
    print(f"\n{CONFIG.num_blocks + 2} layers, {NUM_MICROBATCHES} microbatches, 1F1B, {NUM_RANKS} ranks\n")
    print(table(f"Windows of {STEPS_PER_WINDOW} steps: one step", WINDOW_COLUMNS, stopwatch.windows))
    if stopwatch.rebalances:
        print(table("Rebalances: what they add", REBALANCE_COLUMNS, stopwatch.rebalances))
    quotients = [strategy_s / loop_s for _, loop_s, strategy_s in stopwatch.windows]
    print(ratio("strategy_over_loop", statistics.median(quotients)))
    if stopwatch.rebalances:
        step_s = statistics.median(row[1] for row in stopwatch.rebalances)
        rebalance_s = statistics.median(sum(row[2:]) for row in stopwatch.rebalances)
        print(ratio("rebalance_share", rebalance_s / (STEPS_PER_REBALANCE * step_s)))


if __name__ == "__main__":
    run(main, __doc__, NUM_RANKS)
