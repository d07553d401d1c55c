"""A whole training run under a balancer: what the steps take, and what balancing costs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from lightning_dynmo.planning import (
    Assignment,
    Balancer,
    BalancingProblem,
    Decision,
    LoadMetric,
    MigrationCost,
    PartitionBalancer,
    RebalancePolicy,
    initial_assignment,
    moves_between,
    speedup_bound,
)
from lightning_dynmo.simulation.actions import Order
from lightning_dynmo.simulation.batch import StepTime, simulate_steps
from lightning_dynmo.simulation.costs import LayerCost, Network, StageCost, stage_costs
from lightning_dynmo.simulation.sources import RunCosts

DENSE, STATIC, OPTIMUM = "dense model", "static uniform", "optimum"
"""Names of the runs that all others are compared with."""


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """The pipelines that train.

    Args:
        order: What each rank does in a step.
        placement: The rank of each stage, ``[S]``.
        num_microbatches: Microbatches per step and replica.
        num_replicas: Pipelines side by side.
        network: How long messages take.
        profiling_s: What it costs to measure a step.
    """

    order: Order
    placement: tuple[int, ...]
    num_microbatches: int
    num_replicas: int = 1
    network: Network = field(default_factory=Network)
    profiling_s: float = 0.05

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return len(set(self.placement))


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to place layers on stages.

    Args:
        name: For tables and files.
        balance: The first split, as for `initial_assignment`.
        balancer: Plans new splits; None to keep the first.
        load: What it evens out.
    """

    name: str
    balance: str = "uniform"
    balancer: Balancer | None = None
    load: LoadMetric = "time"


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps between two decisions.

    Args:
        num_steps: How many.
        typical_step: The step whose costs stand for all of them.
        assignment: The split that ran.
    """

    num_steps: int
    typical_step: int
    assignment: Assignment


@dataclass(slots=True)
class Run:
    """A training run.

    Attributes:
        name: Of the plan.
        segments: The steps.
        times: A step of each segment.
        profiling_s: Seconds spent on measuring.
        deciding_s: Seconds spent on deciding, measured while the simulation decided.
        migrating_s: Seconds in which layers moved.
        num_measurements: Steps that were measured, each followed by a decision.
        num_moves: Rebalances that moved layers.
        moved_layers: Layers moved by them.
    """

    name: str
    segments: list[Segment] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)
    profiling_s: float = 0.0
    deciding_s: float = 0.0
    migrating_s: float = 0.0
    num_measurements: int = 0
    num_moves: int = 0
    moved_layers: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return sum(part.num_steps for part in self.segments)

    @property
    def training_s(self) -> float:
        """Seconds of all steps."""
        return sum(part.num_steps * time.makespan_s for part, time in zip(self.segments, self.times, strict=True))

    @property
    def total_s(self) -> float:
        """Seconds of all steps and of all that balancing costs."""
        return self.training_s + self.profiling_s + self.deciding_s + self.migrating_s

    @property
    def steps_per_s(self) -> float:
        """Throughput, with all that balancing costs."""
        return self.num_steps / self.total_s if self.total_s > 0 else 0.0

    @property
    def idleness(self) -> float:
        """Share of the time of all steps in which ranks do not compute, in ``[0, 1]``."""
        pairs = zip(self.segments, self.times, strict=True)
        idle_s = sum(part.num_steps * time.makespan_s * time.bubble_ratio for part, time in pairs)
        return idle_s / self.training_s if self.training_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same training under several plans.

    Attributes:
        runs: By name: those of the plans, and `DENSE`, `STATIC` and `OPTIMUM`.
        bound: What balancing can gain at most over equally many layers per rank: as much as there are layers on a rank,
            since layers move whole.
    """

    runs: Mapping[str, Run]
    bound: int

    def speedup(self, name: str, over: str = STATIC) -> float:
        """Returns the time of one run over that of another."""
        return self.runs[over].total_s / self.runs[name].total_s


def compare(costs: RunCosts, machine: Machine, plans: Sequence[Plan]) -> Comparison:
    """Simulates a training under each plan, with every layer equally often on a rank, and without the scheme.

    The optimum has in each period the fastest of the exact split for its expected costs and the splits of all runs,
    with moves that cost nothing. The exact one alone is not always that: it evens out a mean, but replicas wait for the
    slowest of them, and schedules do more than wait for the slowest rank.

    Args:
        costs: What the layers cost.
        machine: What they train on.
        plans: Besides those that all are compared with.
    """
    uniform = Assignment.uniform(costs.num_layers, len(machine.placement))
    runs = {DENSE: Run(DENSE), STATIC: Run(STATIC), OPTIMUM: Run(OPTIMUM)}
    for period in costs.periods:
        problem = _problem(costs, machine, period.typical_step, uniform)
        expected = _seconds([costs.expected(period.typical_step)], machine)
        best = PartitionBalancer(tolerance=0.0).balance(replace(problem, loads=expected))
        for name, assignment in ((DENSE, uniform), (STATIC, uniform), (OPTIMUM, best)):
            num_steps = period.last_step - period.first_step
            runs[name].segments.append(Segment(num_steps, period.typical_step, assignment))
    for plan in plans:
        runs[plan.name] = _Balancing(costs, machine, plan).run()
    _time_steps(costs, machine, runs)
    layers_of_rank = [0] * machine.num_ranks
    for stage, size in enumerate(uniform.balance):
        layers_of_rank[machine.placement[stage]] += size
    return Comparison(runs, speedup_bound(layers_of_rank))


class _Balancing:
    """One training under one plan: its splits and what they cost. Its steps are timed later, many at once."""

    def __init__(self, costs: RunCosts, machine: Machine, plan: Plan) -> None:
        self._costs, self._machine, self._plan = costs, machine, plan
        self._run = Run(plan.name)
        names = ["Layer"] * costs.num_layers
        self._assignment = initial_assignment(plan.balance, costs.num_parameters(0), names, len(machine.placement))
        cost = MigrationCost(s_per_byte=1 / machine.network.bytes_per_s)
        self._policy = None if plan.balancer is None else RebalancePolicy(plan.balancer, cost=cost)
        self._measured_step = 0
        self._measure_at: float = math.inf

    def run(self) -> Run:
        """Returns the run."""
        last_step = self._costs.periods[-1].last_step
        for period in self._costs.periods:
            begin = period.first_step
            while begin < period.last_step:
                end = int(min(period.last_step, self._measure_at))
                self._run.segments.append(Segment(end - begin, period.typical_step, self._assignment))
                if self._policy is not None and end < last_step:
                    self._rebalance(self._policy, end, last_step - end)
                begin = end
        return self._run

    def _rebalance(self, policy: RebalancePolicy, step: int, remaining: int) -> None:
        costs, machine, run = self._costs, self._machine, self._run
        problem = _problem(costs, machine, step, self._assignment)
        seconds = _measured(costs, machine, step)
        loads = seconds if self._plan.load == "time" else [float(count) for count in costs.num_parameters(step)]
        changed, until_change = costs.changed(self._measured_step, step), costs.steps_until_change(step)
        horizon = None if until_change is None else min(until_change, remaining)
        begin_s = time.perf_counter()
        policy.observe(replace(problem, loads=loads), step=step, seconds=seconds, changed=changed)
        decision = policy.decide(horizon_steps=horizon, at_most_steps=remaining)
        run.deciding_s += time.perf_counter() - begin_s
        run.profiling_s += machine.profiling_s
        run.num_measurements += 1
        self._measured_step = step
        wanted = costs.between and decision.measure_in is not None
        self._measure_at = step + decision.measure_in if wanted and decision.measure_in is not None else math.inf
        if decision.target is not None:
            self._move(policy, decision, problem)

    def _move(self, policy: RebalancePolicy, decision: Decision, problem: BalancingProblem) -> None:
        assert decision.target is not None
        assert problem.state_bytes is not None
        placement, network = self._machine.placement, self._machine.network
        moves = [
            move
            for move in moves_between(problem.current, decision.target)
            if placement[move.source] != placement[move.target]
        ]
        # Each rank sends and receives at the same time, one layer after the other; the busiest one ends last.
        sending_s, receiving_s = [0.0] * self._machine.num_ranks, [0.0] * self._machine.num_ranks
        for move in moves:
            seconds = network.latency_s + problem.state_bytes[move.layer] / network.bytes_per_s
            sending_s[placement[move.source]] += seconds
            receiving_s[placement[move.target]] += seconds
        slowest_s = max(*sending_s, *receiving_s)
        policy.moved(decision, problem.moved_bytes(decision.target), slowest_s)
        self._assignment = decision.target
        self._run.migrating_s += slowest_s
        self._run.num_moves += 1
        self._run.moved_layers += len(moves)


def _problem(costs: RunCosts, machine: Machine, step: int, current: Assignment) -> BalancingProblem:
    loads = [0.0] * costs.num_layers
    return BalancingProblem(loads, current, machine.placement, costs.state_bytes(step))


@lru_cache(maxsize=512)
def _measured(costs: RunCosts, machine: Machine, step: int) -> list[float]:
    """Returns what a measured step says of each layer; all plans measure at the same steps."""
    return _seconds([costs.layer_costs(step, replica) for replica in range(machine.num_replicas)], machine)


def _seconds(replicas: Sequence[Sequence[LayerCost]], machine: Machine) -> list[float]:
    """Returns the seconds of each layer per step; of the replicas, the slowest counts, as in a measured profile."""
    return [max(times) for times in zip(*(_step_seconds(layers, machine) for layers in replicas), strict=True)]


def _step_seconds(layers: Sequence[LayerCost], machine: Machine) -> list[float]:
    alone = stage_costs(layers, Assignment((1,) * len(layers)))
    return [
        machine.num_microbatches * (cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s) for cost in alone
    ]


def _time_steps(costs: RunCosts, machine: Machine, runs: Mapping[str, Run]) -> None:
    """Times a typical step of each segment; the same step with the same split is simulated once."""
    cases: dict[tuple[int | None, Assignment], list[list[StageCost]]] = {}
    for name, run in runs.items():
        for segment in run.segments:
            step = None if name == DENSE else segment.typical_step
            if (step, segment.assignment) not in cases:
                cases[step, segment.assignment] = [
                    stage_costs(costs.dense() if step is None else costs.layer_costs(step, replica), segment.assignment)
                    for replica in range(machine.num_replicas)
                ]
    times = simulate_steps(machine.order, machine.placement, list(cases.values()), machine.network)
    found = dict(zip(cases, times, strict=True))
    fastest: dict[int | None, tuple[float, Assignment]] = {}
    for (step, assignment), time_of_step in found.items():
        if step not in fastest or time_of_step.makespan_s < fastest[step][0]:
            fastest[step] = (time_of_step.makespan_s, assignment)
    optimum = runs[OPTIMUM]
    optimum.segments = [replace(part, assignment=fastest[part.typical_step][1]) for part in optimum.segments]
    for name, run in runs.items():
        run.times = [found[None if name == DENSE else part.typical_step, part.assignment] for part in run.segments]
