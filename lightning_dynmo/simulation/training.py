"""A whole training run under a balancer: what the steps take, and what balancing costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
)
from lightning_dynmo.simulation.actions import Order
from lightning_dynmo.simulation.batch import StepTime, simulate_steps
from lightning_dynmo.simulation.costs import LayerCost, Network, StageCost, stage_costs
from lightning_dynmo.simulation.sources import RunCosts

DENSE, STATIC, OPTIMUM = "dense model", "static uniform", "optimum"
"""Names of the runs that all others are compared with."""


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class Run:
    """A training run.

    Attributes:
        name: Of the plan.
        assignments: The split in each period.
        times: A step of each period.
        num_steps: Steps of each period.
        profiling_s: Seconds spent on measuring.
        deciding_s: Seconds spent on deciding, measured while the simulation decided.
        migrating_s: Seconds in which layers moved.
        num_moves: Rebalances that moved layers.
        moved_layers: Layers moved by them.
    """

    name: str
    assignments: list[Assignment] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    profiling_s: float = 0.0
    deciding_s: float = 0.0
    migrating_s: float = 0.0
    num_moves: int = 0
    moved_layers: int = 0

    @property
    def training_s(self) -> float:
        """Seconds of all steps."""
        return sum(steps * time.makespan_s for steps, time in zip(self.num_steps, self.times, strict=True))

    @property
    def total_s(self) -> float:
        """Seconds of all steps and of all that balancing costs."""
        return self.training_s + self.profiling_s + self.deciding_s + self.migrating_s

    @property
    def idleness(self) -> float:
        """Share of the time of all steps in which ranks do not compute, in ``[0, 1]``."""
        pairs = zip(self.num_steps, self.times, strict=True)
        idle_s = sum(steps * time.makespan_s * time.bubble_ratio for steps, time in pairs)
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


def compare(
    costs: RunCosts, machine: Machine, plans: Sequence[Plan], on_progress: Callable[[float], None] = lambda share: None
) -> Comparison:
    """Simulates a training under each plan, with every layer equally often on a rank, and without the scheme.

    The optimum is the exact split for the expected costs of each period, with moves that cost nothing.

    Args:
        costs: What the layers cost.
        machine: What they train on.
        plans: Besides those that all are compared with.
        on_progress: Called with the share that is done, in ``[0, 1]``.
    """
    uniform = Assignment.uniform(costs.num_layers, len(machine.placement))
    runs = {DENSE: Run(DENSE), STATIC: Run(STATIC), OPTIMUM: Run(OPTIMUM)}
    for period in costs.periods:
        runs[DENSE].assignments.append(uniform)
        runs[STATIC].assignments.append(uniform)
        problem = _problem(costs, machine, period.typical_step, uniform)
        expected = _seconds([costs.expected(period.typical_step)], machine)
        runs[OPTIMUM].assignments.append(PartitionBalancer().balance(replace(problem, loads=expected)))
    for number, plan in enumerate(plans):
        on_progress(0.5 * number / len(plans))
        runs[plan.name] = _balanced(costs, machine, plan)
    on_progress(0.5)
    _time_steps(costs, machine, runs)
    on_progress(1.0)
    layers_of_rank = [0] * machine.num_ranks
    for stage, size in enumerate(uniform.balance):
        layers_of_rank[machine.placement[stage]] += size
    return Comparison(runs, max(layers_of_rank))


def stages_at(costs: RunCosts, machine: Machine, assignment: Assignment, step: int) -> list[list[StageCost]]:
    """Returns the costs of the stages in each replica at a step."""
    return [stage_costs(costs.layer_costs(step, replica), assignment) for replica in range(machine.num_replicas)]


def _balanced(costs: RunCosts, machine: Machine, plan: Plan) -> Run:
    """Returns a run with its splits and what they cost; its steps are timed later, many at once."""
    run = Run(plan.name)
    assignment = initial_assignment(plan.balance, costs.num_parameters(0), len(machine.placement))
    cost = MigrationCost(s_per_byte=1 / machine.network.bytes_per_s)
    policy = None if plan.balancer is None else RebalancePolicy(plan.balancer, cost=cost)
    measured = 0
    for number, period in enumerate(costs.periods):
        run.assignments.append(assignment)
        if policy is None or number == len(costs.periods) - 1:
            continue
        step, remaining = period.last_step, costs.periods[-1].last_step - period.last_step
        problem = _problem(costs, machine, step, assignment)
        drawn = [costs.layer_costs(step, replica) for replica in range(machine.num_replicas)]
        seconds = _seconds(drawn, machine)
        loads = seconds if plan.load == "time" else [float(count) for count in costs.num_parameters(step)]
        changed, horizon = costs.changed(measured, step), costs.steps_until_change(step)
        begin_s = time.perf_counter()
        policy.observe(replace(problem, loads=loads), step=step, seconds=seconds, changed=changed)
        decision = policy.decide(horizon_steps=horizon, remaining_steps=remaining)
        run.deciding_s += time.perf_counter() - begin_s
        run.profiling_s += machine.profiling_s
        if decision.target is not None:
            assignment = _move(run, policy, decision, problem, machine)
        measured = step
    return run


def _move(
    run: Run, policy: RebalancePolicy, decision: Decision, problem: BalancingProblem, machine: Machine
) -> Assignment:
    assert decision.target is not None
    moves = [
        move
        for move in moves_between(problem.current, decision.target)
        if machine.placement[move.source] != machine.placement[move.target]
    ]
    # Each rank sends and receives at the same time, one layer after the other; the busiest one ends last.
    seconds = [[0.0] * machine.num_ranks for _ in range(2)]
    for move in moves:
        size = problem.state_bytes[move.layer] if problem.state_bytes is not None else 0
        for direction, stage in enumerate((move.source, move.target)):
            seconds[direction][machine.placement[stage]] += (
                machine.network.latency_s + size / machine.network.bytes_per_s
            )
    slowest_s = max(max(part) for part in seconds)
    policy.moved(decision, problem.moved_bytes(decision.target), slowest_s)
    run.migrating_s += slowest_s
    run.num_moves += 1
    run.moved_layers += len(moves)
    return decision.target


def _problem(costs: RunCosts, machine: Machine, step: int, current: Assignment) -> BalancingProblem:
    loads = [0.0] * costs.num_layers
    return BalancingProblem(loads, current, machine.placement, costs.state_bytes(step))


def _seconds(replicas: Sequence[Sequence[LayerCost]], machine: Machine) -> list[float]:
    """Returns the seconds of each layer per step; of the replicas, the slowest counts, as in a measured profile."""
    return [max(times) for times in zip(*(_step_seconds(layers, machine) for layers in replicas), strict=True)]


def _step_seconds(layers: Sequence[LayerCost], machine: Machine) -> list[float]:
    alone = stage_costs(layers, Assignment((1,) * len(layers)))
    return [
        machine.num_microbatches * (cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s) for cost in alone
    ]


def _time_steps(costs: RunCosts, machine: Machine, runs: Mapping[str, Run]) -> None:
    """Times each period of each run by a typical step; equal splits of a step are simulated once."""
    cases: dict[tuple[int, Assignment], list[list[StageCost]]] = {}
    for name, run in runs.items():
        for period, assignment in zip(costs.periods, run.assignments, strict=True):
            step = -1 if name == DENSE else period.typical_step
            if (step, assignment) not in cases:
                cases[step, assignment] = (
                    [stage_costs(costs.dense(), assignment)] * machine.num_replicas
                    if name == DENSE
                    else stages_at(costs, machine, assignment, step)
                )
    times = simulate_steps(machine.order, machine.placement, list(cases.values()), machine.network)
    found = dict(zip(cases, times, strict=True))
    for name, run in runs.items():
        run.num_steps = [period.num_steps for period in costs.periods]
        run.times = [
            found[-1 if name == DENSE else period.typical_step, assignment]
            for period, assignment in zip(costs.periods, run.assignments, strict=True)
        ]
