"""Runs the steps that Lightning asks for as a pipeline: batch in, microbatches through, one result on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_dynmo.callbacks.base import remaining_steps
from lightning_dynmo.module import pipeline_inputs
from lightning_dynmo.pipeline import (
    GradientWindow,
    PipelineError,
    PipelineRuntime,
    batch_size_of,
    check_num_microbatches,
    choose_num_microbatches,
    nearest_num_microbatches,
    split_batch,
)
from lightning_dynmo.planning import imbalance, load_values
from lightning_dynmo.replay import StepMethod, StepResult, merge_replicas, replay
from lightning_dynmo.reporting import rebalance_line
from lightning_dynmo.sameness import SharedBuffers, check_same_batch


@dataclass(frozen=True, slots=True)
class Window:
    """Where a training batch stands among the batches of its optimizer step.

    Attributes:
        num_batches: Batches per optimizer step.
        starts: Whether this is the first of them.
        ends: Whether this is the last of them.
    """

    num_batches: int
    starts: bool
    ends: bool


class PipelineSteps:
    """Steps of one module on one pipeline.

    Args:
        module: The user's module.
        runtime: The pipeline.
        num_microbatches: Parts into which training batches are cut; None to choose by the first of them.
    """

    def __init__(self, module: LightningModule, runtime: PipelineRuntime, num_microbatches: int | None) -> None:
        self.module = module
        self.runtime = runtime
        self.num_microbatches = num_microbatches
        own_clearing = is_overridden("optimizer_zero_grad", module)
        self.gradients = GradientWindow(runtime.chain, runtime.groups, watch_clearing=own_clearing)
        self.running = False
        self._first_of_loop = True

    @property
    def here(self) -> str:
        """Stages and layers of this rank, for errors."""
        layers = self.runtime.chain.owned
        stages = sorted({self.runtime.assignment.stage_of(layer) for layer in layers})
        return f"stage {', '.join(map(str, stages))}, layers {', '.join(map(str, layers))}"

    def begin_loop(self) -> None:
        """Has the next batch checked: that all ranks read the same, and that the inputs are those of ``self(...)``."""
        self._first_of_loop = True

    def train(self, batch: Any, args: tuple[Any, ...], step: int, window: Window, *, measure: bool) -> Any:
        """Runs ``training_step`` with forward and backward; gradients stay aside until `gradients` places them.

        A batch of fewer samples than microbatches is cut into single samples.

        Args:
            batch: The whole batch, the same on every rank of the pipeline.
            args: Further arguments of ``training_step``.
            step: Number of the batch since training began, for random numbers.
            window: Where the batch stands in its optimizer step.
            measure: Whether the batch is measured, whatever callbacks ask.

        Returns:
            The merged results of ``training_step``: the loss is the batch's.

        Raises:
            ValueError: If the batch cannot be cut up, or the schedule cannot run so many microbatches.
        """
        runtime = self.runtime
        num_microbatches = self._training_microbatches(batch)
        self.gradients.begin_batch(starts=window.starts, ends=window.ends)
        if measure:
            runtime.request_profile()
        measured = runtime.profile
        num_batches = window.num_batches * runtime.groups.dp_size
        result = self._run("training_step", batch, args, num_microbatches, step, num_batches)
        runtime.accumulating = not window.ends
        self.gradients.end_batch(result.shared.weight)
        if runtime.profile is not measured:
            self._log_profile()
        return result.output

    def rebalance_for_good(self, trainer: Trainer) -> None:
        """Moves layers so that the split is right for the rest of the run, as far as has been measured."""
        horizon = remaining_steps(trainer) * trainer.accumulate_grad_batches
        with self.runtime.groups.guard("first rebalance"):
            rebalance = self.runtime.rebalance(horizon_steps=horizon)
        self.module.print(rebalance_line(trainer.global_step, rebalance, self.runtime))

    def evaluate(self, name: str, batch: Any, args: tuple[Any, ...]) -> Any:
        """Runs another step method; the batch may have any size. Arguments as in `train`."""
        most = self.num_microbatches or 4 * len(self.runtime.placement)
        num_microbatches = 1 if most == 1 else min(most, batch_size_of(batch))
        return self._run(name, batch, args, num_microbatches, step=args[0] if args else 0).output

    def _training_microbatches(self, batch: Any) -> int:
        runtime = self.runtime
        num_ranks, num_stages = runtime.groups.pp_size, len(runtime.placement)
        if self.num_microbatches is None:
            batch_size = batch_size_of(batch)
            chosen = choose_num_microbatches(batch_size, num_stages)
            self.num_microbatches = nearest_num_microbatches(runtime.schedule, chosen, num_ranks, num_stages) or chosen
            size = batch_size // self.num_microbatches
            self.module.print(f"[dynmo] {self.num_microbatches} microbatches of {size} samples")
        check_num_microbatches(runtime.schedule, self.num_microbatches, num_ranks, num_stages)
        return self.num_microbatches if self.num_microbatches == 1 else min(self.num_microbatches, batch_size_of(batch))

    def _run(
        self, name: str, batch: Any, args: tuple[Any, ...], num_microbatches: int, step: int, num_batches: int = 1
    ) -> StepResult:
        """Runs a step method as a pipeline, repeats on this rank what it did, and returns what came of it."""
        runtime, module, groups = self.runtime, self.module, self.runtime.groups
        microbatches = split_batch(batch, num_microbatches)
        inputs = [pipeline_inputs(module, runtime.chain, microbatch) for microbatch in microbatches]
        check, self._first_of_loop = self._first_of_loop, False
        with groups.guard(f"{name} of batch {step}"):
            shared = None
            if check:
                check_same_batch(batch, groups)
                shared = SharedBuffers(runtime.chain, runtime.owners)
            method = StepMethod(
                module,
                name,
                runtime.chain,
                microbatches,
                args,
                inputs,
                num_batches=num_batches,
                check_inputs=check,
            )
            self.running = True
            try:
                if name == "training_step":
                    runtime.train(inputs, method, step, lambda stage: self.gradients.have_arrived(stage.parameters))
                else:
                    runtime.evaluate(inputs, method, step)
            finally:
                self.running = False
            if shared is not None:
                shared.check(groups)
            mine = self._result(method, name) if runtime.is_last else None
            result: StepResult = groups.share_from(runtime.last_rank, mine)
        replay(module, runtime.chain, result)
        return result

    def _result(self, method: StepMethod, name: str) -> StepResult:
        """Returns what the step method did here, and what it logged in all replicas."""
        groups = self.runtime.groups
        try:
            result = method.result()
        except Exception as error:
            raise PipelineError(f"rank {groups.global_rank}, {name}: {error}") from error
        if name == "predict_step":  # logs nothing, and replicas may have batches of different number
            return result
        return merge_replicas(result, groups.gather_replicas(result.shared))

    def _log_profile(self) -> None:
        runtime = self.runtime
        assert runtime.profile is not None
        assert runtime.rebalancer.problem is not None
        self.module.log(
            "dynmo/imbalance", imbalance(runtime.rebalancer.problem.rank_times(runtime.assignment)), prog_bar=True
        )
        self.module.log("dynmo/bubble_ratio", runtime.profile.bubble_ratio, prog_bar=True)
        self.module.log("dynmo/step_time_s", runtime.profile.step_s)
        stage_loads = runtime.assignment.stage_loads(load_values(runtime.profile.loads, runtime.load))
        for stage, stage_load in enumerate(stage_loads):
            self.module.log(f"dynmo/load/stage_{stage}", stage_load)
        unit = "stage" if runtime.stages_per_rank == 1 else "rank"
        for index, (busy_s, wait_s) in enumerate(zip(runtime.profile.busy_s, runtime.profile.wait_s, strict=True)):
            self.module.log(f"dynmo/busy_s/{unit}_{index}", busy_s)
            self.module.log(f"dynmo/wait_s/{unit}_{index}", wait_s)
