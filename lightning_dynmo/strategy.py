"""DynMoStrategy: wires the pipeline into Lightning's hooks. No algorithm lives here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dynmo.averaging import LayerwiseAverages
from lightning_dynmo.checkpoints import PipelineCheckpoints
from lightning_dynmo.hooks import GradientHooks
from lightning_dynmo.loaders import agree_on_loader, seed_workers
from lightning_dynmo.module import pipeline_layers
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import (
    PipelineRuntime,
    check_num_microbatches,
    check_stages_per_rank,
    clip_grad_norm,
    clip_grad_value,
    find_schedule,
)
from lightning_dynmo.planning import Assignment, Balancer, LoadMetric, MoveWhen, initial_assignment
from lightning_dynmo.refusals import (
    check_num_speeds,
    check_rebalancing,
    check_sizes,
    check_types,
    refuse_optimizers,
    refuse_unsupported,
)
from lightning_dynmo.replay import LocalMetrics, prepare_metrics
from lightning_dynmo.reporting import final_table
from lightning_dynmo.sameness import check_same_form, share_random_state
from lightning_dynmo.signals import Signals
from lightning_dynmo.steps import PipelineSteps, Window
from lightning_dynmo.summary import show_stages

T = TypeVar("T")


class DynMoStrategy(PipelineCheckpoints):
    """Trains a LightningModule as a pipeline over all devices, with the numbers of one device.

    The module needs one method, ``configure_pipeline()``, which returns the chain of layers that its forward runs.
    Its step methods stay as they are: each is called once per microbatch on the last stage, where ``self(...)``
    returns that microbatch's output. What they log is repeated on every rank.

    Args:
        pipeline_parallel_size: Ranks that a pipeline is spread over. ``"auto"`` takes all, or as many as
            `data_parallel_size` leaves.
        data_parallel_size: Pipelines side by side, which train on different samples as under DDP. ``"auto"`` takes as
            many as `pipeline_parallel_size` leaves.
        num_microbatches: Parts into which each batch is cut. ``"auto"`` takes up to 4 per stage, of equal size where
            that can be, and keeps the number.
        schedule: Order of forwards and backwards: ``"1f1b"``, ``"gpipe"``, ``"interleaved1f1b"``, ``"loopedbfs"``,
            ``"interleavedzerobubble"``, ``"zbvzerobubble"`` or ``"dualpipev"``.
        stages_per_rank: Stages that each rank runs, for the interleaved schedules and ``"loopedbfs"``; 2 by default.
        balance: First split: layers per stage, such as ``[3, 4, 3]``, or ``"uniform"`` for equal numbers of layers, or
            ``"parameters"`` for stages as equal in parameters as can be; ``"type:regex"`` for stages as equal as can be
            in layers whose class name matches, such as ``"type:block"``; ``"time"`` is as ``"parameters"``, until the
            second batch has been measured and layers move by what they cost.
        balancer: Plans new splits when a callback asks; ``PartitionBalancer()`` by default.
        activation_checkpointing: Whether activations inside layers are dropped after the forward and computed again in
            the backward, which takes less memory and more time.
        load: What is to be equal between stages: ``"time"`` as measured, ``"parameters"``, or ``"tokens"`` worked on,
            for models in which layers skip some (see ``count_tokens``).
        move_when: ``"worthwhile"`` moves layers only if that gains more time than it costs, and takes back moves that
            failed to; ``"always"`` moves them whenever another would have been better in the last measured step.
        rank_speeds: Relative speeds of the ranks of a pipeline, such as ``[1.0, 1.0, 0.5]``; all equal by default.
        memory_cap_bytes: Most bytes that layers with their activations may take on a rank. By default nine tenths of
            the device's memory on CUDA, and no limit on the CPU.
        save_distributed_checkpoint: Whether checkpoints are folders to which each rank writes the layers it owns,
            instead of one file for which the first rank gathers all layers. Both can be loaded with either setting.
        timeout: Longest wait for another rank.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Reads and writes checkpoint files.
        precision_plugin: Set by the Trainer.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If an argument has a value that cannot work.
    """

    strategy_name = "dynmo"

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        balance: list[int] | str = "uniform",
        balancer: Balancer | None = None,
        load: LoadMetric = "time",
        move_when: MoveWhen = "worthwhile",
        rank_speeds: list[float] | None = None,
        memory_cap_bytes: int | None = None,
        activation_checkpointing: bool = False,
        save_distributed_checkpoint: bool = False,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_types(num_microbatches, schedule, balance, balancer, timeout)
        check_sizes(pipeline_parallel_size, data_parallel_size, stages_per_rank)
        check_rebalancing(load, move_when, rank_speeds, memory_cap_bytes)
        super().__init__(
            pipeline_parallel_size,
            data_parallel_size,
            timeout,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )
        self.schedule = find_schedule(schedule)
        self.stages_per_rank = check_stages_per_rank(self.schedule, stages_per_rank)
        self.num_microbatches = num_microbatches
        self.balance = balance
        self.balancer = balancer
        self.load = load
        self.move_when: MoveWhen = move_when
        self.rank_speeds = rank_speeds
        self.memory_cap_bytes = memory_cap_bytes
        self.activation_checkpointing = activation_checkpointing
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._hooks: GradientHooks | None = None
        self._averages: LayerwiseAverages | None = None
        self._signals: Signals | None = None
        self._local_metrics = LocalMetrics()
        self._example_input: Any = None
        self._microbatches = None if num_microbatches == "auto" else num_microbatches
        self._balance_by_time = False

    # Start and end

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Creates the model without memory for layers that other ranks own; Lightning enters it for configure_model."""
        assert self._groups is not None
        with self.division.creating(self._groups):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        assert self._groups is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        # Its advice does not hold here: every rank logs the same values.
        warnings.filterwarnings("ignore", ".*sync_dist=True.*", module="lightning.*")
        division = self.division
        check_num_speeds(self.rank_speeds, self.pipeline_parallel_size)
        refuse_unsupported(trainer, module, self.precision_plugin, divided=division.left is not None)
        if trainer.state.fn == TrainerFn.FITTING and self.num_microbatches != "auto":
            num_ranks = self.pipeline_parallel_size
            check_num_microbatches(self.schedule, self.num_microbatches, num_ranks, num_ranks * self.stages_per_rank)
        if module.example_input_array is not None:
            rank_zero_warn("example_input_array is not used, since no rank of a pipeline can run the whole model.")
            self._example_input, module.example_input_array = module.example_input_array, None
        layers = pipeline_layers(module)
        self.model = division.convert(self.precision_plugin)
        chain, assignment = division.left or (LayerChain(module, layers), None)
        seed = share_random_state(self._groups)
        if trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path:
            seed = self._saved.get("seed", seed)  # a resumed run draws on, as if it had never stopped
        self._runtime = PipelineRuntime(
            chain,
            self._groups,
            assignment or self._first_assignment(chain),
            schedule=self.schedule.name,
            stages_per_rank=self.stages_per_rank,
            recompute=self.activation_checkpointing,
            balancer=self.balancer,
            load=self.load,
            move_when=self.move_when,
            rank_speeds=self.rank_speeds,
            memory_cap_bytes=self.memory_cap_bytes,
            seed=seed,
            precision_context=self.precision_plugin.forward_context,
        )
        self._steps = PipelineSteps(module, self._runtime, self._microbatches)
        self._hooks = GradientHooks(trainer, module, self._runtime)
        self._averages = LayerwiseAverages(trainer, self._runtime)
        show_stages(trainer)
        with self._groups.guard("distribution of the layers"):
            division.distribute(self._runtime)
            self._averages.share_stationary()
        self.load_owned_layers()
        prepare_metrics(module, chain, self.root_device)
        self._local_metrics.begin(self._groups)
        if self.world_size > 1:
            self._signals = Signals(trainer, self._groups.failures, self.gather_numbers)
            self._signals.take()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
            self._runtime.optimizers = self.optimizers
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self.precision_plugin.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]
        self.precision_plugin._after_closure = self._before_optimizer_step  # type: ignore[assignment, method-assign]

    @override
    def model_to_device(self) -> None:
        """Does nothing: `setup` moves each rank's own layers, since the whole model may not fit on its device."""

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        balance = list(self.runtime.assignment.balance)
        self.lightning_module.print(f"[dynmo] {sum(balance)} layers on {len(balance)} stages: balance={balance}")
        self.steps.begin_loop()
        self.runtime.restart_clock()

    @override
    def on_train_end(self) -> None:
        assert self.lightning_module is not None
        if self.runtime.profile is not None and self.steps.num_microbatches is not None:
            self.lightning_module.print("\n" + final_table(self.runtime, self.steps.num_microbatches))

    @override
    def teardown(self) -> None:
        if self._runtime is not None and self._steps is not None:
            self._saved, self._microbatches = self._plan(), self._steps.num_microbatches
            if self.division.is_divided:
                self.division.leave(self._runtime)
            else:
                self._make_whole(self._runtime)
                self._runtime = None
        self._steps = self._division = None
        if self._averages is not None:
            self._averages.end()
        self._local_metrics.end()
        if self._signals is not None:
            self._signals.release()
            self._signals = None
        if self._example_input is not None and self.lightning_module is not None:
            self.lightning_module.example_input_array = self._example_input
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._runtime = self._steps = self._division = None
        self._to_load = ()
        if self._averages is not None:
            self._averages.end()

    # Steps

    @override
    def training_step(self, batch: Any, *args: Any) -> Any:
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        step, num_batches = loop.total_batch_idx, trainer.accumulate_grad_batches
        if loop.batch_idx == 0:
            self.steps.begin_loop()
        measures = self.runtime.measures_next
        check_same_form(batch, f"training_step of batch {step}", self.runtime.groups, measures)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        window = Window(
            num_batches, starts=loop.batch_idx % num_batches == 0, ends=not trainer.fit_loop._should_accumulate()
        )
        if self._balance_by_time and window.starts and self.runtime.profile is not None:
            self._balance_by_time = False
            self.steps.rebalance_for_good(trainer)
        measure = step == 1 or (every > 0 and (step + 1) % every == 0)
        return self.steps.train(batch, args, step, window, measure=measure)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Puts the gradients of the schedule, which has run already, in place, between the hooks of a backward."""
        assert self.lightning_module is not None
        assert self._hooks is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._together("exchange of gradients"):
            self.steps.gradients.place()
        with self._hooks.around("on_after_backward"):
            closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._together(f"optimizer step of {self.steps.here}"):  # names who has run out of memory
            return super().optimizer_step(*args, **kwargs)

    @override
    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("validation_step", batch, args)

    @override
    def test_step(self, batch: Any, *args: Any) -> Any:
        return self._evaluate("test_step", batch, args)

    @override
    def predict_step(self, batch: Any, *args: Any) -> Any:
        output = self._evaluate("predict_step", batch, args)
        return output if self.pp_rank == 0 else None

    @override
    def on_validation_start(self) -> None:
        self.steps.begin_loop()

    @override
    def on_test_start(self) -> None:
        self.steps.begin_loop()

    @override
    def on_predict_start(self) -> None:
        self.steps.begin_loop()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._groups is not None
        seed_workers(dataloader, self._groups.dp_rank)
        return agree_on_loader(dataloader, self.gather_objects, self.gather_numbers)

    # Inside

    def _evaluate(self, name: str, batch: Any, args: tuple[Any, ...]) -> Any:
        where = f"{name} of batch {args[0] if args else 0}"
        if self._signals is not None:
            self._signals.heed(where)
        check_same_form(batch, where, self.runtime.groups)
        return self.steps.evaluate(name, batch, args)

    def _first_assignment(self, chain: LayerChain) -> Assignment:
        """Returns the split to begin with: that of the checkpoint where it fits, unless the user gave one."""
        saved, num_stages = self._saved.get("balance"), self.pipeline_parallel_size * self.stages_per_rank
        if isinstance(self.balance, str) and saved is not None:
            assignment = Assignment(tuple(saved))
            if (assignment.num_stages, assignment.num_layers) == (num_stages, len(chain)):
                return assignment
        self._balance_by_time = self.balance == "time"
        counts, names = [size.num_parameters for size in chain.sizes], [type(layer).__name__ for layer in chain.layers]
        return initial_assignment(self.balance, counts, names, num_stages)

    def _make_whole(self, runtime: PipelineRuntime) -> None:
        """Gives every rank the whole model, and rank 0 the optimizers' state, so that it can save by itself."""
        gathers = self._trainer.state.fn == TrainerFn.FITTING and not self.save_distributed_checkpoint
        trained = self.optimizers if gathers else []
        states = [self.optimizer_state(optimizer) for optimizer in trained]
        with self._together("end of the run"):
            runtime.make_whole()
        for optimizer, state in zip(trained, states, strict=True):
            if state:
                optimizer.load_state_dict(state)

    @override
    def _in_step_method(self) -> bool:
        return self._steps is not None and self._steps.running

    def _before_optimizer_step(self, model: LightningModule, optimizer: Optimizer) -> None:
        """Runs the hooks between backward and optimizer step, and clips."""
        assert self._hooks is not None
        plugin = self.precision_plugin
        with self._hooks.around("on_before_optimizer_step", "configure_gradient_clipping"):
            type(plugin)._after_closure(plugin, model, optimizer)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        with self._together("clipping of gradients") as groups:
            clip_grad_norm(list(self.precision_plugin.main_params(optimizer)), clip_val, groups)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_grad_value(list(self.precision_plugin.main_params(optimizer)), clip_val)


StrategyRegistry.register(
    DynMoStrategy.strategy_name, DynMoStrategy, description="Dynamic pipeline parallelism that stays balanced"
)
