"""DynMoStrategy: wires the pipeline into Lightning's hooks. No algorithm lives here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dynmo.checkpoints import PipelineCheckpoints
from lightning_dynmo.module import pipeline_layers
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import (
    PipelineRuntime,
    check_num_microbatches,
    check_schedule,
    clip_grad_norm,
)
from lightning_dynmo.planning import Assignment, Balancer, LoadMetric, check_load_metric, initial_assignment
from lightning_dynmo.refusals import check_types, refuse_optimizers, refuse_unsupported
from lightning_dynmo.replay import LocalMetrics, prepare_metrics
from lightning_dynmo.reporting import final_table
from lightning_dynmo.sameness import share_random_state
from lightning_dynmo.steps import PipelineSteps

T = TypeVar("T")


class DynMoStrategy(PipelineCheckpoints):
    """Trains a LightningModule as a pipeline over all devices, with the numbers of one device.

    The module needs one method, ``configure_pipeline()``, which returns the chain of layers that its forward runs.
    Its step methods stay as they are: each is called once per microbatch on the last stage, where ``self(...)``
    returns that microbatch's output. What they log is repeated on every rank.

    Args:
        num_microbatches: Equal parts into which each batch is cut. ``"auto"`` takes the largest divisor of the batch
            size up to 4 per stage, and keeps it.
        schedule: Order of forwards and backwards: ``"1f1b"`` or ``"gpipe"``.
        balance: First split: layers per stage, such as ``[3, 4, 3]``, or ``"uniform"`` for equal numbers of layers, or
            ``"parameters"`` for stages as equal in parameters as can be.
        balancer: Plans new splits when a callback asks; ``PartitionBalancer()`` by default.
        load: What is to be equal between stages: ``"time"`` as measured, or ``"parameters"``.
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
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: str = "1f1b",
        balance: list[int] | str = "uniform",
        balancer: Balancer | None = None,
        load: LoadMetric = "time",
        save_distributed_checkpoint: bool = False,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(timeout, accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        check_types(num_microbatches, schedule, balance, balancer, timeout)
        check_load_metric(load)
        self.schedule = check_schedule(schedule)
        self.num_microbatches = num_microbatches
        self.balance = balance
        self.balancer = balancer
        self.load = load
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._local_metrics = LocalMetrics()
        self._example_input: Any = None
        self._microbatches = None if num_microbatches == "auto" else num_microbatches

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
        refuse_unsupported(trainer, module, self.precision_plugin, divided=division.left is not None)
        if trainer.state.fn == TrainerFn.FITTING and self.num_microbatches != "auto":
            check_num_microbatches(self.schedule, self.num_microbatches, self.world_size)
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
            schedule=self.schedule,
            balancer=self.balancer,
            load=self.load,
            seed=seed,
            precision_context=self.precision_plugin.forward_context,
        )
        self._steps = PipelineSteps(module, self._runtime, self.schedule, self._microbatches)
        with self._groups.guard("distribution of the layers"):
            division.distribute(self._runtime)
        self.load_owned_layers()
        prepare_metrics(module, chain, self.root_device)
        self._local_metrics.begin()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
            self._runtime.optimizers = self.optimizers
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]

    @override
    def model_to_device(self) -> None:
        """Does nothing: `setup` moves each rank's own layers, since the whole model may not fit on its device."""

    @override
    def on_train_start(self) -> None:
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
        self._local_metrics.end()
        if self._example_input is not None and self.lightning_module is not None:
            self.lightning_module.example_input_array = self._example_input
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._runtime = self._steps = self._division = None
        self._to_load = ()

    # Steps

    @override
    def training_step(self, batch: Any, *args: Any) -> Any:
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        step, num_batches = loop.total_batch_idx, trainer.accumulate_grad_batches
        if loop.batch_idx == 0:
            self.steps.begin_loop()
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.steps.train(
            batch,
            args,
            step,
            num_batches=num_batches,
            starts_window=loop.batch_idx % num_batches == 0,
            ends_window=not trainer.fit_loop._should_accumulate(),
            measure=step == 1 or (every > 0 and (step + 1) % every == 0),
        )

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Puts the gradients of the schedule, which has run already, in place, between the hooks of a backward."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.steps.window.place(last=not self._trainer.fit_loop._should_accumulate())
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self.steps.evaluate("validation_step", batch, args)

    @override
    def test_step(self, batch: Any, *args: Any) -> Any:
        return self.steps.evaluate("test_step", batch, args)

    @override
    def predict_step(self, batch: Any, *args: Any) -> Any:
        output = self.steps.evaluate("predict_step", batch, args)
        return output if self.is_global_zero else None

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
        """Seeds workers alike on all ranks of the pipeline, so that random augmentation gives them the same samples."""
        init = getattr(dataloader, "worker_init_fn", None)
        if isinstance(init, partial) and init.func is pl_worker_init_function:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # type: ignore[attr-defined]
        return dataloader

    # Inside

    def _first_assignment(self, chain: LayerChain) -> Assignment:
        """Returns the split to begin with: that of the checkpoint where it fits, unless the user gave one."""
        saved = self._saved.get("balance")
        if isinstance(self.balance, str) and saved is not None:
            assignment = Assignment(tuple(saved))
            if (assignment.num_stages, assignment.num_layers) == (self.world_size, len(chain)):
                return assignment
        return initial_assignment(self.balance, [size.num_parameters for size in chain.sizes], self.world_size)

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

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        with self._together("clipping of gradients") as groups:
            clip_grad_norm(list(self.precision_plugin.main_params(optimizer)), clip_val, groups)


StrategyRegistry.register(
    DynMoStrategy.strategy_name, DynMoStrategy, description="Dynamic pipeline parallelism that stays balanced"
)
