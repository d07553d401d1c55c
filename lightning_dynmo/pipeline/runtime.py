"""Runs a chain of layers as a pipeline: steps, profiles, and moves of layers between ranks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer

from lightning_dynmo.ownership import LayerChain, release_freed_memory
from lightning_dynmo.pipeline.borders import Border, infer_borders, signature_of
from lightning_dynmo.pipeline.exchange import Profile, agree_on, gather_profile
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.microbatches import Inputs
from lightning_dynmo.pipeline.migration import Migration, make_whole, migrate
from lightning_dynmo.pipeline.randomness import keyed_python_randomness
from lightning_dynmo.pipeline.schedules import build_schedule
from lightning_dynmo.pipeline.stage import LastStep, Stage, StageModule
from lightning_dynmo.planning import (
    Assignment,
    Balancer,
    LoadMetric,
    Move,
    PartitionBalancer,
    Prediction,
    load_values,
    moves_between,
    predict,
)
from lightning_dynmo.profiling import LayerTimer

T = TypeVar("T")

_MAX_PREPARED = 4
"""Shapes for which stages are kept ready."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """What one call of `PipelineRuntime.rebalance` decided and did.

    Attributes:
        before: Assignment until then.
        proposed: What the balancer proposed.
        prediction: Largest stage load before and after.
        migration: What moved; None if nothing did.
        duration_s: Seconds of it all, on this rank.
    """

    before: Assignment
    proposed: Assignment
    prediction: Prediction
    migration: Migration | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Prepared:
    module: StageModule
    stage: Stage
    schedule: ScheduleGPipe | Schedule1F1B


class PipelineRuntime:
    """One rank of a pipeline. All ranks call its methods in the same order with equal arguments.

    Args:
        chain: The model's layers, whole on every rank; `distribute` then leaves each rank its own.
        groups: Process groups of this rank.
        assignment: Which stage runs which layers; stage s runs on `pp_rank` s.
        schedule: Training schedule, ``"gpipe"`` or ``"1f1b"``.
        balancer: Plans new assignments.
        load: What the balancer evens out.
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
        balancer: Balancer | None = None,
        load: LoadMetric = "time",
        seed: int = 0,
        precision_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.chain = chain
        self.groups = groups
        self.assignment = assignment
        self.initial_assignment = assignment
        self.balancer = balancer or PartitionBalancer()
        self.load = load
        self._optimizers: Sequence[Optimizer] = ()
        self.profile: Profile | None = None
        self._overhead_s = 0.0
        self._clock_began = time.perf_counter()
        self._schedule = schedule
        self.seed = seed
        self._precision_context = precision_context
        self.accumulating = False
        self._profile_next = False
        self._prepared: OrderedDict[tuple[Any, ...], _Prepared] = OrderedDict()
        self._borders: OrderedDict[tuple[Any, ...], list[Border]] = OrderedDict()

    @property
    def owners(self) -> tuple[int, ...]:
        """The `pp_rank` that owns each layer."""
        return tuple(self.assignment.stage_of(layer) for layer in range(len(self.chain)))

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Optimizers of the whole model, whose state moves with the layers."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        for index in range(len(self.chain)):
            if not self.chain.owns(index):  # some, such as Adagrad, make their state for all parameters at once
                for parameter in self.chain.parameters(index):
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
        """Leaves each rank the layers that it owns, with the first rank's values, and moves them to the device.

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
        release_freed_memory()

    def make_whole(self) -> None:
        """Gives every rank every layer again, on the CPU."""
        make_whole(self.chain, self.owners, self.groups)
        self._prepared.clear()

    def train(self, inputs: Sequence[Inputs], last_step: LastStep, step: int) -> None:
        """Runs forward and backward of one batch; gradients are added to those of the parameters.

        Args:
            inputs: One entry per microbatch, equal in shape.
            last_step: Called on the last stage for each microbatch in order; returns its loss, already scaled.
            step: Number of the batch, for random numbers.

        Raises:
            ValueError: If no parameter of the chain is trainable.
        """
        if not any(p.requires_grad for index in range(len(self.chain)) for p in self.chain.parameters(index)):
            raise ValueError(
                "No parameter of the pipeline requires a gradient, so there is nothing to train. Leave at least one "
                "layer unfrozen, or end the training."
            )
        timer = LayerTimer(self.groups.device) if self._profile_next else None
        prepared = self._prepare(inputs, self._schedule)
        prepared.module.prepare(inputs, last_step, (self.seed, step), timer)
        numbers = torch.arange(len(inputs))
        measured = nullcontext() if timer is None else timer.step()
        with keyed_python_randomness(self.seed, step), measured:
            prepared.schedule.step(target=numbers, return_outputs=False, microbatch=numbers)
        prepared.module.finish()
        if timer is not None:
            begin = time.perf_counter()
            self.profile = gather_profile(self.chain, timer, self.groups, self.optimizers)
            self._profile_next = False
            self._overhead_s += time.perf_counter() - begin

    def evaluate(self, inputs: Sequence[Inputs], last_step: LastStep, step: int) -> None:
        """Runs the forward of one batch; call it without gradients. Arguments as in `train`."""
        prepared = self._prepare(inputs, "gpipe")
        prepared.module.prepare(inputs, last_step, (self.seed, step), None)
        numbers = torch.arange(len(inputs))
        with keyed_python_randomness(self.seed, step):
            prepared.schedule.eval(target=numbers, microbatch=numbers)
        prepared.stage.clear_runtime_states()  # torch keeps the activations until the next batch of this shape
        prepared.module.finish()

    def request_profile(self) -> None:
        """Asks that the next training batch be measured; `profile` holds the result afterwards."""
        self._profile_next = True

    def rebalance(self, min_gain: float = 0.02) -> Rebalance:
        """Plans from the last profile and moves layers if the largest stage load falls by enough.

        Call it between optimizer steps.

        Args:
            min_gain: Smallest predicted fall of the largest stage load, as a share of it, that is worth a move.

        Raises:
            RuntimeError: If nothing was measured yet, or the ranks' plans differ.
        """
        if self.profile is None:
            raise RuntimeError(
                "There is no profile to plan from. Call request_profile() before the training batch that rebalance() "
                "is to follow."
            )
        begin = time.perf_counter()
        before = self.assignment
        loads = load_values(self.profile.loads, self.load)
        state_bytes = [load.state_bytes for load in self.profile.loads]
        proposed = self.balancer.balance(loads, before, state_bytes=state_bytes)
        agree_on(proposed, self.groups)
        prediction = predict(loads, before, proposed)
        migration = None
        if prediction.gain > min_gain:
            migration = self._migrate(proposed)
        duration_s = time.perf_counter() - begin
        self._overhead_s += duration_s
        return Rebalance(before, proposed, prediction, migration, duration_s)

    def move_to(self, assignment: Assignment) -> Migration:
        """Moves layers so that the pipeline has the given assignment. Call it between optimizer steps."""
        begin = time.perf_counter()
        migration = self._migrate(assignment)
        self._overhead_s += time.perf_counter() - begin
        return migration

    def _migrate(self, assignment: Assignment) -> Migration:
        if self.accumulating:
            raise RuntimeError(
                "Layers can move only between optimizer steps, but gradients are being accumulated now and would be "
                "lost. Move them after the last batch of the step, when trainer.global_step has changed."
            )
        moves = moves_between(self.assignment, assignment)
        self._prepared.clear()
        with self.groups.guard("move of layers"):
            migration = migrate(self.chain, moves, self.groups, self.optimizers)
        self.assignment = assignment
        return migration

    def _prepare(self, inputs: Sequence[Inputs], schedule: str) -> _Prepared:
        """Returns stage and schedule for inputs of this shape, built on first use and after every move."""
        key = (schedule, len(inputs), signature_of(inputs[0], self.chain))
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return self._prepared[key]
        borders = self._borders_for(key[-1], inputs[0])
        groups, stage_index = self.groups, self.groups.pp_rank
        layers = self.assignment.layers_of(stage_index)
        module = StageModule(
            self.chain,
            layers,
            None if groups.is_last else borders[layers[-1]],
            f"rank {groups.global_rank}, stage {stage_index}",
            groups.device,
            self._precision_context,
        )
        stage = Stage(module, stage_index, borders, groups)
        prepared = _Prepared(module, stage, build_schedule(schedule, stage, len(inputs), module.loss))
        _keep(self._prepared, key, prepared)
        return prepared

    def _borders_for(self, signature: tuple[Any, ...], inputs: Inputs) -> list[Border]:
        """Returns what crosses between layers, which does not depend on where the layers are."""
        if signature not in self._borders:
            _keep(self._borders, signature, infer_borders(self.chain, inputs, self._precision_context))
        return self._borders[signature]


def _keep(cache: OrderedDict[tuple[Any, ...], T], key: tuple[Any, ...], value: T) -> None:
    cache[key] = value
    if len(cache) > _MAX_PREPARED:
        cache.popitem(last=False)
