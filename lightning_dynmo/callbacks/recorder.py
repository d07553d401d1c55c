"""Writes down what each measured batch cost, so that it can be looked at, and simulated, afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_dynmo.callbacks.base import runtime_of
from lightning_dynmo.pipeline import PipelineRuntime, Profile
from lightning_dynmo.planning import moves_between
from lightning_dynmo.simulation import RecordedStep, check_appendable, header_line, step_line


class ProfileRecorderCallback(Callback):
    """Records each measured batch as a line of JSON: the costs of every layer, the split, and what moved since.

    Whoever asks for a measurement, it is recorded; where nobody does, this callback asks itself. The first process
    writes, and each line is on disk before the next batch begins. A resumed run goes on in the same file.
    `lightning-dynmo simulate --recorded FILE` shows what each balancer would have made of the run.

    Args:
        path: The file. Lines are added to it.
        every_n_steps: Most optimizer steps without a measurement; after so many, this callback asks for one.

    Raises:
        ValueError: If `every_n_steps` is less than 1.
    """

    def __init__(self, path: str = "dynmo_profiles.jsonl", every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}. Use for example 50.")
        self.path = path
        self.every_n_steps = every_n_steps
        self._recorded: Profile | None = None
        self._step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        problem = None
        if stage == "fit" and trainer.is_global_zero:
            try:
                check_appendable(self.path)
            except ValueError as error:
                problem = str(error)
        problem = trainer.strategy.broadcast(problem)  # the same error everywhere, before anything has begun
        if problem is not None:
            raise ValueError(problem)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        runtime = runtime_of(trainer)
        if runtime is None:
            raise TypeError(
                f"ProfileRecorderCallback records what a pipeline measures, but the strategy is "
                f"{type(trainer.strategy).__name__}. Use Trainer(strategy=DynMoStrategy()), or remove the callback."
            )
        self._recorded, self._step = runtime.profile, trainer.global_step
        if trainer.is_global_zero:
            settings = {
                "num_layers": len(runtime.chain),
                "layers": [type(layer).__name__ for layer in runtime.chain.layers],
                "pipeline_parallel_size": runtime.groups.pp_size,
                "data_parallel_size": runtime.groups.dp_size,
                "schedule": runtime.schedule.name,
                "stages_per_rank": runtime.stages_per_rank,
                "balancer": type(runtime.rebalancer.policy.balancer).__name__,
                "move_when": runtime.rebalancer.policy.move_when,
                "load": runtime.load,
            }
            self._append(header_line(settings, trainer.global_step))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        runtime = runtime_of(trainer)
        if runtime is not None and trainer.global_step + 1 - self._step >= self.every_n_steps:
            runtime.request_profile()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        runtime = runtime_of(trainer)
        if runtime is None or runtime.profile is None or runtime.profile is self._recorded:
            return
        before, self._recorded, self._step = self._recorded, runtime.profile, trainer.global_step
        if trainer.is_global_zero:
            self._append(step_line(_recorded_step(runtime, runtime.profile, before, trainer.global_step)))

    def _append(self, line: str) -> None:
        with Path(self.path).open("a+b") as file:
            # What a killed process has left half-written stays a line of its own.
            if file.tell() > 0:
                file.seek(-1, 2)
                if file.read() != b"\n":
                    line = "\n" + line
            file.write(line.encode())


def _recorded_step(runtime: PipelineRuntime, profile: Profile, before: Profile | None, step: int) -> RecordedStep:
    ran = profile.assignment
    was = runtime.initial_assignment if before is None else before.assignment
    moves = moves_between(was, ran)
    return RecordedStep(
        step=step,
        balance=ran.balance,
        placement=runtime.placement,
        schedule=runtime.schedule.name,
        num_microbatches=profile.num_microbatches,
        loads=profile.loads,
        step_s=profile.step_s,
        busy_s=profile.busy_s,
        moved_layers=sum(runtime.placement[move.source] != runtime.placement[move.target] for move in moves),
        overhead_s=runtime.overhead_s,
    )
