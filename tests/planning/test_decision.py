"""The policy: what it moves, when, what that costs in hindsight, and what it takes back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dynmo.planning import (
    Assignment,
    BalancingProblem,
    Decision,
    PartitionBalancer,
    RebalancePolicy,
)
from tests.planning.policies import EVEN, UNEVEN, UNIFORM, policy


@dataclass
class Run:
    """Steps of a model whose pipeline the policy balances after each of them.

    Attributes:
        policy: Under test.
        current: Split that runs.
        cost_s: What a move really takes.
        measured: Seconds of each layer, given the step and the split that runs.
        loads: What is evened out, given the same; by default the seconds.
        horizon: Told to the policy.
    """

    policy: RebalancePolicy
    current: Assignment
    cost_s: float
    measured: Callable[[int, Assignment], Sequence[float]]
    loads: Callable[[int, Assignment], Sequence[float]] | None = None
    horizon: float | None = None
    total_s: float = 0.0
    moves: list[tuple[int, Assignment]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def steps(self, count: int, every: int = 1) -> Run:
        for step in range(1, count + 1):
            seconds = self.measured(step, self.current)
            self.total_s += BalancingProblem(seconds, self.current).bottleneck(self.current)
            if step % every == 0:
                self._rebalance(step, seconds)
        return self

    def _rebalance(self, step: int, seconds: Sequence[float]) -> None:
        loads = seconds if self.loads is None else self.loads(step, self.current)
        self.policy.observe(BalancingProblem(loads, self.current), step=step, seconds=seconds)
        decision = self.policy.decide(horizon_steps=self.horizon)
        self.decisions.append(decision)
        if decision.target is not None:
            self.policy.moved(decision, 0, self.cost_s)
            self.total_s += self.cost_s
            self.current = decision.target
            self.moves.append((step, decision.target))


def constant(loads: Sequence[float]) -> Callable[[int, Assignment], Sequence[float]]:
    return lambda step, current: loads


def rents(loads: Sequence[float], cost_s: float, duration: int, assumed_s: float) -> tuple[float, float, float]:
    """Returns what a gain of constant size and unknown duration costs the policy, the best in hindsight, and a step."""
    start = Assignment.uniform(len(loads), 2)
    problem = BalancingProblem(loads, start)
    best_s = problem.bottleneck(PartitionBalancer().balance(problem))
    gain_s = problem.bottleneck(start) - best_s
    run = Run(policy(assumed_s, min_gain=0.0), start, cost_s, constant(loads)).steps(duration)
    return run.total_s - duration * best_s, min(gain_s * duration, cost_s), gain_s


@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=8), st.floats(0.001, 20.0), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_a_gain_of_unknown_duration_costs_at_most_twice_what_it_would_in_hindsight(
    loads: list[float], cost_s: float, duration: int
) -> None:
    """Ski rental. Steps are whole, and the first one only makes the plan: so two steps' gains come on top."""
    ours, best, gain_s = rents(loads, cost_s, duration, assumed_s=cost_s)
    assume(gain_s > 1e-6)
    assert ours <= (2 * best + 2 * gain_s) * (1 + 1e-9)


def test_the_bound_does_not_hold_for_whoever_waits_longer() -> None:
    ours, best, gain_s = rents(UNEVEN, 30.0, 60, assumed_s=90.0)
    assert ours > 2 * best + 2 * gain_s


def test_layers_move_once_staying_has_cost_as_much_as_the_move() -> None:
    run = Run(policy(cost_s=10.0), UNIFORM, 10.0, constant(UNEVEN)).steps(20)
    assert run.moves == [(5, EVEN)]  # 3 s per step in steps 2, 3, 4 and 5
    assert [decision.measure_in for decision in run.decisions[:5]] == [4, 3, 2, 1, 2]
    assert "would gain 3.0 s per step for a move of 10.0 s; staying has cost 3.0 s so far" in run.decisions[1].reason
    assert run.decisions[4].reason == "gains 3.0 s per step, paid back after 4 steps"


def test_a_measurement_counts_for_the_steps_since_the_last_one() -> None:
    assert Run(policy(cost_s=290.0), UNIFORM, 290.0, constant(UNEVEN)).steps(400, every=100).moves == [(200, EVEN)]
    assert Run(policy(cost_s=310.0), UNIFORM, 310.0, constant(UNEVEN)).steps(400, every=100).moves == [(300, EVEN)]


@pytest.mark.parametrize(("horizon", "moves"), [(4, 1), (3, 0)])
def test_a_known_horizon_decides_at_once(horizon: int, moves: int) -> None:
    run = Run(policy(cost_s=10.0), UNIFORM, 10.0, constant(UNEVEN), horizon=horizon).steps(1)
    assert len(run.moves) == moves
    if not moves:
        assert run.decisions[0].reason.endswith("for a move of 10.0 s, but for 3 more steps only")


def test_nothing_moves_shortly_before_the_end() -> None:
    ours = policy(cost_s=1.0)
    for step in (1, 2):
        ours.observe(BalancingProblem(UNEVEN, UNIFORM), step=step)
    assert ours.decide(at_most_steps=1).target == EVEN
    assert policy_after(UNEVEN, 1.0, 2).decide(at_most_steps=0).target is None


def policy_after(loads: Sequence[float], cost_s: float, measurements: int) -> RebalancePolicy:
    ours = policy(cost_s)
    for step in range(measurements):
        ours.observe(BalancingProblem(loads, UNIFORM), step=step)
    return ours


def test_gains_below_the_gap_are_worth_nothing_unless_always() -> None:
    loads, current = [1.0, 1.0, 1.0, 0.06, 1.0, 1.0, 0.94], Assignment((4, 3))  # 3.06 s; (3, 4) has 3.00
    worthwhile = Run(policy(1e-6), current, 1e-6, constant(loads)).steps(50)
    assert worthwhile.moves == []
    assert worthwhile.decisions[-1].reason == "[3, 4] would gain only 2.0%"
    always = Run(policy(1e-6, move_when="always"), current, 1e-6, constant(loads)).steps(50)
    assert always.moves == [(1, Assignment((3, 4)))]
    assert always.decisions[-1].reason == "[3, 4] is the best split already"


def memoryless(seed: int, num_layers: int = 16) -> Callable[[int, Assignment], Sequence[float]]:
    def loads(step: int, current: Assignment) -> Sequence[float]:
        draw = random.Random(seed * 1000 + step)
        return [0.35 + 0.65 * math.exp(0.65 * draw.gauss(0, 1) - 0.65**2 / 2) for _ in range(num_layers)]

    return loads


def over_static(move_when: str, cost_s: float) -> float:
    """Returns how much faster than a fixed split, on average over runs; all layers cost the same in the mean."""
    quotients = []
    for seed in range(10):
        ours = Run(policy(cost_s, move_when=move_when), Assignment.uniform(16, 4), cost_s, memoryless(seed)).steps(100)
        fixed = Run(policy(), Assignment.uniform(16, 4), cost_s, memoryless(seed)).steps(100, every=101)
        quotients.append(fixed.total_s / ours.total_s)
    return math.fsum(quotients) / len(quotients)


@pytest.mark.parametrize("cost_s", [0.04, 4.0])
def test_loads_drawn_anew_at_every_step_do_no_harm(cost_s: float) -> None:
    assert over_static("worthwhile", cost_s) >= 0.99


def test_moving_always_on_such_loads_does() -> None:
    assert over_static("always", 4.0) < 0.96


def test_loads_that_are_uneven_beneath_the_noise_are_found() -> None:
    noise = memoryless(5, 6)

    def loads(step: int, current: Assignment) -> Sequence[float]:
        return [base * factor for base, factor in zip(UNEVEN, noise(step, current), strict=True)]

    run = Run(policy(10.0), UNIFORM, 10.0, loads).steps(100)
    assert run.current == EVEN


@given(
    st.lists(st.lists(st.floats(0.5, 2.0), min_size=6, max_size=6), min_size=1, max_size=12),
    st.sampled_from([2.0**-30, 2.0**30]),
    st.sampled_from([2.0**-30, 2.0**30]),
)
@settings(max_examples=50, deadline=None)
def test_equal_measurements_give_equal_decisions_in_any_unit(
    measured: list[list[float]], unit: float, second: float
) -> None:
    def decisions(unit: float, second: float) -> Run:
        loads = [[load * unit for load in row] for row in measured]
        seconds = [[load * second for load in row] for row in measured]
        run = Run(
            policy(2.0 * second),
            UNIFORM,
            2.0 * second,
            lambda step, current: seconds[step - 1],
            lambda step, current: loads[step - 1],
        )
        return run.steps(len(measured))

    plain = decisions(1.0, 1.0)
    assert decisions(1.0, 1.0).decisions == plain.decisions
    scaled = decisions(unit, second)
    assert scaled.moves == plain.moves
    assert [decision.measure_in for decision in scaled.decisions] == [d.measure_in for d in plain.decisions]


def test_a_change_of_the_model_starts_the_average_anew() -> None:
    ours = policy()
    for step in range(10):
        ours.observe(BalancingProblem([1.0] * 6, UNIFORM), step=step)
    ours.observe(BalancingProblem(UNEVEN, UNIFORM), step=10)
    assert ours.decide().prediction.bottleneck_before < 5
    ours.observe(BalancingProblem(UNEVEN, UNIFORM), step=11, changed=True)
    assert ours.decide().prediction.bottleneck_before == 9


def test_a_plan_that_a_change_has_made_pointless_is_no_noise() -> None:
    before, after, current = [1.5, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0, 5.0], Assignment((4, 2))
    targets = []
    for changed in (True, False):
        ours = policy(cost_s=0.5)
        for step, loads in enumerate([before, after, after]):
            ours.observe(BalancingProblem(loads, current), step=step, changed=changed and step == 1)
        targets.append(ours.decide().target)
    assert targets == [Assignment((5, 1)), None]


def test_what_moves_cost_is_learnt() -> None:
    run = Run(policy(cost_s=1.0), UNIFORM, 50.0, constant(UNEVEN), horizon=10).steps(1)
    assert run.moves == [(1, EVEN)]
    run.policy.observe(BalancingProblem(UNEVEN, UNIFORM), step=2, changed=True)
    assert run.policy.decide(horizon_steps=10).cost_s == 50.0
    assert run.policy.decide(horizon_steps=10).target is None


# Taking back


def by_parameters(step: int, current: Assignment) -> Sequence[float]:
    return UNEVEN


def slower_when_even(step: int, current: Assignment) -> Sequence[float]:
    """Says nothing of parameters: the first layers are those that take long."""
    return [3.0, 3.0, 3.0, 3.0, 1.0, 1.0]


def test_a_plan_by_parameters_that_makes_steps_slower_is_undone_once() -> None:
    run = Run(policy(cost_s=10.0), UNIFORM, 10.0, slower_when_even, by_parameters).steps(200)
    assert [split for _, split in run.moves] == [EVEN, UNIFORM]
    undone = next(decision for decision in run.decisions if decision.undone)
    assert undone.reason == "the last move was to gain 33.3%, but measured -33.3%"
    assert run.decisions[-1].reason == "[4, 2] was undone before"


def test_a_plan_that_was_undone_is_tried_again_when_the_model_has_changed() -> None:
    run = Run(policy(cost_s=10.0), UNIFORM, 10.0, slower_when_even, by_parameters).steps(50)
    assert run.current == UNIFORM
    for step in (51, 52, 53, 54, 55):
        run.policy.observe(BalancingProblem(UNEVEN, UNIFORM), step=step, changed=step == 51)
    assert run.policy.decide().target == EVEN


def test_a_rank_that_is_slow_without_saying_so() -> None:
    """Layers take three times as long on rank 1, so that the plan by rank 0's measurements makes things worse."""

    def measured(step: int, current: Assignment) -> Sequence[float]:
        costs = [4.0, 4.0, 4.0, 1.0, 1.0]
        return [cost * (3.0 if current.stage_of(layer) == 1 else 1.0) for layer, cost in enumerate(costs)]

    run = Run(policy(cost_s=1.0), Assignment((3, 2)), 1.0, measured).steps(100)  # 12 and 6; (2, 3) takes 8 and 18
    assert run.current == Assignment((3, 2))
    assert len(run.moves) <= 2
    assert run.total_s <= 100 * 12 + 2 * 1.0 + 6 * 6


def after_a_move(*factors: float, everywhere: bool = False) -> Run:
    """Runs a good plan whose moved layer is measured wrong by some factors in the steps after the move."""

    def measured(step: int, current: Assignment) -> Sequence[float]:
        since = step - 7  # the first step after the move is not looked at
        factor = factors[since] if 0 <= since < len(factors) else 1.0
        return [load * (factor if layer == 3 or everywhere else 1.0) for layer, load in enumerate(UNEVEN)]

    run = Run(policy(cost_s=10.0), UNIFORM, 10.0, measured).steps(20)
    assert run.moves[0] == (5, EVEN)
    return run


def test_one_bad_measurement_does_not_undo_a_good_plan() -> None:
    assert after_a_move(5.0).current == EVEN
    assert "measuring once more" in after_a_move(5.0).decisions[6].reason


def test_bad_measurements_that_go_on_do() -> None:
    run = after_a_move(*[5.0] * 15)
    assert run.moves[1] == (8, UNIFORM)


def test_a_model_that_became_slower_as_a_whole_undoes_nothing() -> None:
    assert after_a_move(*[5.0] * 15, everywhere=True).moves == [(5, EVEN)]


def test_a_gain_that_misses_its_prediction_stays_and_is_told() -> None:
    run = after_a_move(*[1.8] * 15)  # the moved layer takes 5.4 s instead of 3
    assert run.current == EVEN
    told = next(decision.reason for decision in run.decisions if "only" in decision.reason)
    assert told.startswith("the last move gained only 6.7% of 33.3% predicted")


def test_undoing_has_to_pay_too() -> None:
    run = Run(policy(cost_s=100.0), UNIFORM, 100.0, slower_when_even, by_parameters).steps(60)
    assert [step for step, _ in run.moves] == [35]  # 3 s per step in 34 steps
    assert run.decisions[-1].reason.endswith("but measured -33.3%; undoing it costs 100.0 s")
    run = Run(policy(cost_s=100.0), UNIFORM, 100.0, slower_when_even, by_parameters).steps(80)
    assert [step for step, _ in run.moves] == [35, 69]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"move_when": "never"}, "'worthwhile' or 'always', got 'never'"),
        ({"min_gain": 1.0}, r"min_gain in \[0, 1\), got 1.0"),
        ({"smoothing": 0.0}, r"in \(0, 1\], got 0.0"),
    ],
)
def test_checks_its_settings(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        policy(**options)


def test_needs_a_measurement() -> None:
    with pytest.raises(RuntimeError, match="no measurement to decide from"):
        policy().decide()
