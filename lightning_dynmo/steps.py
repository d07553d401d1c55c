"""Runs the steps that Lightning asks for as a pipeline: batch in, microbatches through, one result on every rank."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from lightning_dynmo.module import pipeline_inputs
from lightning_dynmo.pipeline import (
    GradientWindow,
    PipelineError,
    PipelineRuntime,
    batch_size_of,
    check_num_microbatches,
    choose_num_microbatches,
    largest_divisor,
    split_batch,
)
from lightning_dynmo.planning import imbalance, load_values
from lightning_dynmo.replay import StepMethod, StepResult, replay
from lightning_dynmo.sameness import check_same_batch


class PipelineSteps:
    """Steps of one module on one pipeline.

    Args:
        module: The user's module.
        runtime: The pipeline.
        schedule: Name of the training schedule.
        num_microbatches: Parts into which training batches are cut; None to choose by the first of them.
    """

    def __init__(
        self, module: LightningModule, runtime: PipelineRuntime, schedule: str, num_microbatches: int | None
    ) -> None:
        self.module = module
        self.runtime = runtime
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.window = GradientWindow()
        self.running = False
        self._first_of_loop = True

    def begin_loop(self) -> None:
        """Has the next batch checked: that all ranks read the same, and that the inputs are those of ``self(...)``."""
        self._first_of_loop = True

    def train(
        self,
        batch: Any,
        args: tuple[Any, ...],
        step: int,
        *,
        num_batches: int,
        starts_window: bool,
        ends_window: bool,
        measure: bool,
    ) -> Any:
        """Runs ``training_step`` with forward and backward; gradients stay aside until the window places them.

        Args:
            batch: The whole batch, the same on every rank.
            args: Further arguments of ``training_step``.
            step: Number of the batch since training began, for random numbers.
            num_batches: Batches per optimizer step.
            starts_window: Whether this is the first of them.
            ends_window: Whether this is the last of them.
            measure: Whether the batch is measured, whatever callbacks ask.

        Returns:
            The merged results of ``training_step``: the loss is the batch's.

        Raises:
            ValueError: If the batch cannot be cut up, or the schedule cannot run so many microbatches.
        """
        runtime = self.runtime
        num_microbatches = self._training_microbatches(batch)
        parameters = [parameter for layer in runtime.chain.owned for parameter in runtime.chain.parameters(layer)]
        self.window.begin_batch(parameters, starts=starts_window)
        if measure:
            runtime.request_profile()
        measured = runtime.profile
        num_losses = num_microbatches * num_batches
        output, weight = self._run("training_step", batch, args, num_microbatches, step, num_losses)
        runtime.accumulating = not ends_window
        self.window.end_batch(None if weight is None else weight / num_losses)
        if runtime.profile is not measured:
            self._log_profile()
        return output

    def evaluate(self, name: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs another step method; the batch may have any size. Arguments as in `train`."""
        most = self.num_microbatches or 4 * self.runtime.groups.pp_size
        num_microbatches = largest_divisor(batch_size_of(batch), most)
        return self._run(name, batch, args, num_microbatches, step=args[0] if args else 0)[0]

    def _training_microbatches(self, batch: Any) -> int:
        num_stages = self.runtime.groups.pp_size
        if self.num_microbatches is None:
            batch_size = batch_size_of(batch)
            self.num_microbatches = choose_num_microbatches(batch_size, num_stages)
            size = batch_size // self.num_microbatches
            self.module.print(f"[dynmo] {self.num_microbatches} microbatches of {size} samples")
        check_num_microbatches(self.schedule, self.num_microbatches, num_stages)
        return self.num_microbatches

    def _run(
        self, name: str, batch: Any, args: tuple[Any, ...], num_microbatches: int, step: int, num_losses: int = 1
    ) -> tuple[Any, float | None]:
        """Runs a step method as a pipeline; returns its merged result and the sum of its weights."""
        runtime, module, groups = self.runtime, self.module, self.runtime.groups
        microbatches = split_batch(batch, num_microbatches)
        inputs = [pipeline_inputs(module, runtime.chain, microbatch) for microbatch in microbatches]
        check, self._first_of_loop = self._first_of_loop, False
        with groups.guard(f"{name} of batch {step}"):
            if check:
                check_same_batch(batch, groups)
            method = StepMethod(
                module,
                name,
                runtime.chain,
                microbatches,
                args,
                inputs,
                num_losses=num_losses,
                check_inputs=check,
            )
            self.running = True
            try:
                if name == "training_step":
                    runtime.train(inputs, method, step)
                else:
                    runtime.evaluate(inputs, method, step)
            finally:
                self.running = False
            last = groups.pp_size - 1
            result: StepResult = groups.share_from(last, self._result(method, name) if groups.is_last else None)
        batch_size = batch_size_of(batch) if num_microbatches > 1 else None
        return replay(module, runtime.chain, result, batch_size), result.weight

    def _result(self, method: StepMethod, name: str) -> StepResult:
        try:
            return method.result()
        except Exception as error:
            raise PipelineError(f"rank {self.runtime.groups.global_rank}, {name}: {error}") from error

    def _log_profile(self) -> None:
        runtime = self.runtime
        assert runtime.profile is not None
        stage_loads = runtime.assignment.stage_loads(load_values(runtime.profile.loads, runtime.load))
        self.module.log("dynmo/imbalance", imbalance(stage_loads), prog_bar=True)
        self.module.log("dynmo/bubble_ratio", runtime.profile.bubble_ratio, prog_bar=True)
        self.module.log("dynmo/step_time_s", runtime.profile.step_s)
        for stage, stage_load in enumerate(stage_loads):
            self.module.log(f"dynmo/load/stage_{stage}", stage_load)
        for stage, (busy_s, wait_s) in enumerate(zip(runtime.profile.busy_s, runtime.profile.wait_s, strict=True)):
            self.module.log(f"dynmo/busy_s/stage_{stage}", busy_s)
            self.module.log(f"dynmo/wait_s/stage_{stage}", wait_s)
