"""Runs a chain of layers as a pipeline: steps, profiles, and moves of layers between ranks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_dynmo._torch import Order
from lightning_dynmo.ownership import LayerChain, release_freed_memory
from lightning_dynmo.pipeline.borders import Border, condition_of, form_of, infer_borders
from lightning_dynmo.pipeline.exchange import Profile, gather_profile
from lightning_dynmo.pipeline.execution import ScheduleRun
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.microbatches import Inputs
from lightning_dynmo.pipeline.migration import Migration, make_whole, migrate
from lightning_dynmo.pipeline.randomness import keyed_python_randomness
from lightning_dynmo.pipeline.rebalancing import Rebalance, Rebalancer
from lightning_dynmo.pipeline.replicas import same_on_all_replicas
from lightning_dynmo.pipeline.schedules import (
    check_stages_per_rank,
    evaluation_order_of,
    find_schedule,
    order_of,
    simulated_order,
)
from lightning_dynmo.pipeline.stage import Iteration, LastStep, Stage
from lightning_dynmo.planning import Assignment, LoadMetric, Move, MoveWhen, PartitionBalancer, RebalancePolicy
from lightning_dynmo.planning.balancers import Balancer
from lightning_dynmo.profiling import LayerTimer
from lightning_dynmo.simulation import in_flight

_MAX_BORDERS = 64
"""Shapes of inputs for which borders are remembered."""


class PipelineRuntime:
    """What one rank of a pipeline does. All ranks call its methods in the same order with equal arguments.

    Args:
        chain: The model's layers, whole on every rank; `distribute` then leaves each rank its own.
        groups: Process groups of this rank.
        assignment: Which stage runs which layers.
        schedule: Name of the training schedule, which also says on which rank each stage runs.
        stages_per_rank: Stages on each rank; by default as many as the schedule needs.
        recompute: Whether activations inside layers are dropped and computed again in the backward.
        balancer: Plans new assignments.
        load: What the balancer evens out.
        move_when: Whether layers move only where that is worth its cost, or whenever a plan is better.
        rank_speeds: Speed of each rank of a pipeline, relative to one another; by default all equal.
        memory_cap_bytes: Most bytes that layers and activations may take on a rank; see `Rebalancer`.
        seed: Base of all random numbers drawn inside layers.
        precision_context: Entered around each layer, such as autocast.
    """

    def __init__(
        self,
        chain: LayerChain,
        groups: PipelineGroups,
        assignment: Assignment,
        *,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        recompute: bool = False,
        balancer: Balancer | None = None,
        load: LoadMetric = "time",
        move_when: MoveWhen = "worthwhile",
        rank_speeds: Sequence[float] | None = None,
        memory_cap_bytes: int | None = None,
        seed: int = 0,
        precision_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.chain = chain
        self.groups = groups
        self.assignment = assignment
        self.initial_assignment = assignment
        self._optimizers: Sequence[Optimizer] = ()
        self.profile: Profile | None = None
        self._overhead_s = 0.0
        self._clock_began = time.perf_counter()
        self.schedule = find_schedule(schedule)
        self.stages_per_rank = check_stages_per_rank(self.schedule, stages_per_rank)
        self.placement = self.schedule.place(groups.pp_size, self.stages_per_rank)
        self.rebalancer = Rebalancer(
            groups,
            self.placement,
            RebalancePolicy(balancer or PartitionBalancer(), move_when=move_when),
            load=load,
            rank_speeds=rank_speeds,
            memory_cap_bytes=memory_cap_bytes,
        )
        self._recompute = recompute
        self.seed = seed
        self._precision_context = precision_context
        self.accumulating = False
        self._profile_next = False
        self._stages: dict[int, Stage] = {}
        self._borders: OrderedDict[tuple[Any, ...], list[Border]] = OrderedDict()

    @property
    def owners(self) -> tuple[int, ...]:
        """The `pp_rank` that owns each layer."""
        return self._owners(self.assignment)

    @property
    def last_rank(self) -> int:
        """The `pp_rank` that runs the last stage, and with it the step methods."""
        return self.placement[-1]

    @property
    def load(self) -> LoadMetric:
        """What is evened out."""
        return self.rebalancer.load

    @property
    def is_last(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.groups.pp_rank == self.last_rank

    @property
    def measures_next(self) -> bool:
        """Whether somebody has asked that the next training batch be measured."""
        return self._profile_next

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Optimizers of the whole model, whose state moves with the layers."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        for index in range(len(self.chain)):
            for parameter in self.chain.parameters(index):
                if not self.chain.holds(parameter):  # some, such as Adagrad, make their state for all at once
                    for optimizer in optimizers:
                        optimizer.state.pop(parameter, None)

    @property
    def overhead_s(self) -> float:
        """Seconds of profiles, plans and moves on this rank since `restart_clock`."""
        return self._overhead_s

    @property
    def overhead_share(self) -> float:
        """Share of the time since `restart_clock` that went into profiles, plans and moves, in ``[0, 1]``."""
        return self._overhead_s / (time.perf_counter() - self._clock_began)

    def restart_clock(self) -> None:
        """Begins to count overhead and time anew."""
        self._overhead_s, self._clock_began = 0.0, time.perf_counter()

    def distribute(self, in_place: Collection[int] = ()) -> None:
        """Leaves each rank the layers that it owns, on the device, with the values of the first rank of all.

        Args:
            in_place: Layers that are with their owners already, and need not come from the first rank.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._distribute(in_place)

    def _distribute(self, in_place: Collection[int]) -> None:
        owners, device = self.owners, self.groups.device
        moves = [Move(layer, 0, owner) for layer, owner in enumerate(owners) if owner and layer not in in_place]
        migrate(self.chain, moves, self.groups, ())
        for layer, owner in enumerate(owners):
            if owner == self.groups.pp_rank:
                for _, tensor in self.chain.tensors(layer):
                    tensor.data = tensor.data.to(device)
            else:
                self.chain.let_go(layer, owner, device)
        stationary = [tensor for _, tensor in self.chain.stationary()]
        values = self.groups.share_from(0, [tensor.detach().cpu() for tensor in stationary])
        for tensor, value in zip(stationary, values, strict=True):
            tensor.data = value.to(device)
        same_on_all_replicas(self.chain, self.groups)
        release_freed_memory()

    def make_whole(self) -> None:
        """Gives every rank every layer again, on the CPU."""
        make_whole(self.chain, self.owners, self.groups)
        self._stages.clear()

    def train(
        self,
        inputs: Sequence[Inputs],
        last_step: LastStep,
        step: int,
        on_gradients: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Runs forward and backward of one batch; gradients are added to those of the parameters.

        Args:
            inputs: One entry per microbatch.
            last_step: Called on the last stage for each microbatch in order; returns its loss, already scaled.
            step: Number of the batch, for random numbers.
            on_gradients: Called with each stage of this rank once its gradients are all there.

        Raises:
            ValueError: If no parameter of the chain is trainable.
        """
        if not any(p.requires_grad for index in range(len(self.chain)) for p in self.chain.parameters(index)):
            raise ValueError(
                "No parameter of the pipeline requires a gradient, so there is nothing to train. Leave at least one "
                "layer unfrozen, or end the training."
            )
        timer = None
        if self._profile_next:
            timer = LayerTimer(self.groups.device, counts_activations=self.rebalancer.limits_memory)
        groups, num_microbatches = self.groups, len(inputs)
        order = order_of(self.schedule, groups.pp_size, self.stages_per_rank, num_microbatches)
        with keyed_python_randomness(self.seed, step), nullcontext() if timer is None else timer.step():
            self._run(order, self._iteration(inputs, last_step, step, timer), on_gradients)
        self.rebalancer.trained(step)
        if timer is not None:
            begin = time.perf_counter()
            self._observe(timer, step, num_microbatches)
            self._overhead_s += time.perf_counter() - begin

    def evaluate(self, inputs: Sequence[Inputs], last_step: LastStep, step: int) -> None:
        """Runs the forward of one batch; call it without gradients. Arguments as in `train`."""
        order = evaluation_order_of(self.placement, len(inputs))
        with keyed_python_randomness(self.seed, step):
            self._run(order, self._iteration(inputs, last_step, step, None), lambda stage: None)

    def request_profile(self) -> None:
        """Asks that the next training batch be measured; `profile` holds the result afterwards."""
        self._profile_next = True

    def request_rebalance(self) -> None:
        """Asks that the next batch be measured, and that `rebalance` be called after its optimizer step."""
        self._profile_next = self.rebalancer.requested = True

    def rebalance(self, *, horizon_steps: float | None = None, at_most_steps: float | None = None) -> Rebalance:
        """Decides from the batches measured so far whether layers move, and moves them.

        Call it between optimizer steps.

        Args:
            horizon_steps: Batches for which layers will cost what they cost now, where that is known.
            at_most_steps: Batches after which they will not, where only that is known.

        Raises:
            RuntimeError: If nothing was measured yet, or the ranks' plans differ.
        """
        if self.profile is None:
            raise RuntimeError(
                "There is no profile to plan from. Call request_profile() before the training batch that rebalance() "
                "is to follow."
            )
        begin = time.perf_counter()
        before, migration = self.assignment, None
        decision = self.rebalancer.decide(horizon_steps, at_most_steps)
        if decision.target is not None:
            agreed = time.perf_counter()
            migration = self._migrate(decision.target)
            self.rebalancer.moved(decision, migration, time.perf_counter() - agreed)
        duration_s = time.perf_counter() - begin
        self._overhead_s += duration_s
        return Rebalance(before, decision, migration, duration_s)

    def move_to(self, assignment: Assignment) -> Migration:
        """Moves layers so that the pipeline has the given assignment. Call it between optimizer steps."""
        begin = time.perf_counter()
        migration = self._migrate(assignment)
        self.rebalancer.policy.placed(assignment)
        self._overhead_s += time.perf_counter() - begin
        return migration

    def _observe(self, timer: LayerTimer, step: int, num_microbatches: int) -> None:
        self.profile = gather_profile(
            self.chain, timer, self.groups, self.optimizers, self.assignment, num_microbatches
        )
        self._profile_next = False
        order = simulated_order(self.schedule, self.groups.pp_size, self.stages_per_rank, num_microbatches)
        self.rebalancer.observe(self.profile, self.assignment, step, in_flight(order, len(self.placement)))

    def _migrate(self, assignment: Assignment) -> Migration:
        if self.accumulating:
            raise RuntimeError(
                "Layers can move only between optimizer steps, but gradients are being accumulated now and would be "
                "lost. Move them after the last batch of the step, when trainer.global_step has changed."
            )
        moves = self._moves_to(assignment)
        self._stages.clear()
        with self.groups.guard("move of layers"):
            migration = migrate(self.chain, moves, self.groups, self.optimizers)
        self.assignment = assignment
        return migration

    def _moves_to(self, assignment: Assignment) -> list[Move]:
        """Returns the layers that change their rank; sources and targets are `pp_rank`s."""
        owners = self._owners(assignment)
        pairs = enumerate(zip(self.owners, owners, strict=True))
        return [Move(layer, source, target) for layer, (source, target) in pairs if source != target]

    def _owners(self, assignment: Assignment) -> tuple[int, ...]:
        return tuple(self.placement[assignment.stage_of(layer)] for layer in range(len(self.chain)))

    def _iteration(
        self, inputs: Sequence[Inputs], last_step: LastStep, step: int, timer: LayerTimer | None
    ) -> Iteration:
        condition = condition_of(self.chain)
        borders = [self._borders_for(entry, condition) for entry in inputs]
        first = self.groups.dp_rank * len(inputs)
        return Iteration(inputs, borders, last_step, (self.seed, step), first, timer)

    def _run(self, order: Order, iteration: Iteration, on_gradients: Callable[[Stage], None]) -> None:
        groups, stages = self.groups, self._own_stages()
        for stage in stages.values():
            stage.begin(iteration)
        try:
            run = ScheduleRun(stages, self.placement, groups, iteration.timer, on_gradients)
            run.run(order[groups.pp_rank], len(iteration.inputs))
        finally:
            for stage in stages.values():
                stage.end()

    def _own_stages(self) -> dict[int, Stage]:
        """Returns the stages of this rank, made anew after every move."""
        rank = self.groups.pp_rank
        for index, owner in enumerate(self.placement):
            if owner == rank and index not in self._stages:
                self._stages[index] = Stage(
                    self.chain,
                    index,
                    self.assignment.layers_of(index),
                    f"rank {self.groups.global_rank}, stage {index}",
                    self.groups.device,
                    self._precision_context,
                    self._recompute,
                    self.schedule.splits_backward,
                )
        return self._stages

    def _borders_for(self, inputs: Inputs, condition: tuple[Any, ...]) -> list[Border]:
        """Returns what crosses between layers, which does not depend on where the layers are."""
        signature = (form_of(inputs), condition)
        if signature not in self._borders:
            self._borders[signature] = infer_borders(self.chain, inputs, self._precision_context)
            if len(self._borders) > _MAX_BORDERS:
                self._borders.popitem(last=False)
        self._borders.move_to_end(signature)
        return self._borders[signature]
