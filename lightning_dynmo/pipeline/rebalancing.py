"""From measurements to moves: what the policy is told, what it asks for, and when it wants to know more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_dynmo.pipeline.exchange import Profile, agree_on
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.migration import Migration
from lightning_dynmo.planning import (
    Assignment,
    BalancingProblem,
    Decision,
    LoadMetric,
    MemoryLimits,
    RebalancePolicy,
    load_values,
)

_USABLE = 0.9  # share of a CUDA device's memory; the rest is for what is computed in between


@dataclass(frozen=True, slots=True)
class Rebalance:
    """What one call of `PipelineRuntime.rebalance` decided and did.

    Attributes:
        before: Assignment until then.
        decision: What was decided, and why.
        migration: What moved; None if nothing did.
        duration_s: Seconds of it all, on this rank.
    """

    before: Assignment
    decision: Decision
    migration: Migration | None
    duration_s: float


class Rebalancer:
    """Turns profiles into decisions that are the same on every rank.

    Args:
        groups: Process groups of this rank.
        placement: The `pp_rank` that runs each stage.
        policy: Decides.
        load: What is evened out.
        rank_speeds: Speed of each `pp_rank`, relative to one another; by default all equal.
        memory_cap_bytes: Most bytes that layers may take on a rank. By default nine tenths of the device's memory on
            CUDA, and anything on the CPU.

    Attributes:
        problem: What was measured last.
        requested: Whether a decision was asked for and has not been made yet.
        measure_at: Number of the batch whose measurement could change the answer; None if none need be sought.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        placement: Sequence[int],
        policy: RebalancePolicy,
        *,
        load: LoadMetric = "time",
        rank_speeds: Sequence[float] | None = None,
        memory_cap_bytes: int | None = None,
    ) -> None:
        self.policy = policy
        self.load = load
        self.rank_speeds = rank_speeds
        self._groups = groups
        self._placement = tuple(placement)
        self._memory_cap_bytes = memory_cap_bytes
        self._caps: tuple[int, ...] | None = None
        self._changed = False
        self._step = 0
        self.measure_at: int | None = None
        self.problem: BalancingProblem | None = None
        self.requested = False

    @property
    def wants_measurement(self) -> bool:
        """Whether the next batch should be measured, since the answer could be another one then."""
        return self.measure_at is not None and self._step + 1 >= self.measure_at

    @property
    def limits_memory(self) -> bool:
        """Whether a split has to fit in memory, so that what layers keep has to be measured."""
        return self._memory_cap_bytes is not None or self._groups.device.type == "cuda"

    def model_changed(self) -> None:
        """Notes that layers cost something else from now on."""
        self._changed = True

    def trained(self, step: int) -> None:
        """Notes that a batch was trained on."""
        self._step = step

    def observe(self, profile: Profile, assignment: Assignment, step: int, in_flight: Sequence[int]) -> None:
        """Tells the policy what was measured.

        Args:
            profile: Of a batch.
            assignment: Which ran it.
            step: Number of the batch.
            in_flight: Most microbatches whose activations each stage holds.
        """
        owners = [self._placement[assignment.stage_of(layer)] for layer in range(assignment.num_layers)]
        speeds = self.rank_speeds or [1.0] * self._groups.pp_size
        # What a layer would take on a rank of speed 1.
        seconds = [load.time_s * speeds[owner] for load, owner in zip(profile.loads, owners, strict=True)]
        problem = BalancingProblem(
            seconds if self.load == "time" else load_values(profile.loads, self.load),
            assignment,
            self._placement,
            [load.state_bytes for load in profile.loads],
            self.rank_speeds,
            memory=self._memory(profile, in_flight),
        )
        self.problem = self._with_what_runs(problem)
        self.policy.observe(self.problem, step=step, seconds=seconds, changed=self._changed)
        self._changed = False

    def decide(self, horizon_steps: float | None, at_most_steps: float | None) -> Decision:
        """Returns what to do, once all ranks agree on it.

        Raises:
            RuntimeError: If the ranks came to different answers.
        """
        self.requested = False
        decision = self.policy.decide(horizon_steps=horizon_steps, at_most_steps=at_most_steps)
        agree_on(decision.proposed, decision.reason, self._groups)
        self.measure_at = None if decision.measure_in is None else self._step + decision.measure_in
        return decision

    def moved(self, decision: Decision, migration: Migration, seconds: float) -> None:
        """Tells the policy what a move has cost; of all ranks, the slowest counts."""
        seconds = max(self._groups.gather_replicas(max(self._groups.gather(seconds))))
        self.policy.moved(decision, migration.moved_bytes, seconds)

    def _memory(self, profile: Profile, in_flight: Sequence[int]) -> MemoryLimits | None:
        if self._caps is None:
            self._caps = self._gather_caps()
        if not self._caps:
            return None
        return MemoryLimits(
            [load.layer_bytes for load in profile.loads],
            [load.activation_bytes for load in profile.loads],
            tuple(in_flight),
            self._caps,
        )

    def _with_what_runs(self, problem: BalancingProblem) -> BalancingProblem:
        """Takes the split that runs as one that fits, unless the user has set the limit: sizes are estimates."""
        if problem.memory is None or self._memory_cap_bytes is not None:
            return problem
        caps = tuple(map(max, problem.memory.cap_bytes, problem.rank_bytes(problem.current)))
        return replace(problem, memory=replace(problem.memory, cap_bytes=caps))

    def _gather_caps(self) -> tuple[int, ...]:
        device, cap = self._groups.device, self._memory_cap_bytes
        if cap is None and self.limits_memory:
            cap = int(_USABLE * torch.cuda.get_device_properties(device).total_memory)
        caps = [min(caps) for caps in zip(*self._groups.gather_replicas(self._groups.gather(cap or 0)), strict=True)]
        return tuple(caps) if all(caps) else ()
