"""The policy where memory is short, or where a balancer answers what cannot be carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from typing_extensions import override

from lightning_dynmo.planning import (
    Assignment,
    Balancer,
    BalancingProblem,
    Decision,
    MemoryLimits,
    RebalancePolicy,
)
from tests.planning.policies import EVEN, UNEVEN, UNIFORM, policy

# Memory


def limits(cap: int) -> MemoryLimits:
    return MemoryLimits([10] * 6, [0] * 6, [1, 1], [cap, cap])


def decide_within(cap: int, loads: Sequence[float], current: Assignment) -> Decision:
    ours = policy(1e-9)
    ours.observe(BalancingProblem(loads, current, memory=limits(cap)), step=0)
    return ours.decide(horizon_steps=100)


def test_nothing_moves_where_no_split_fits() -> None:
    decision = decide_within(20, UNEVEN, UNIFORM)
    assert (decision.proposed, decision.target) == (UNIFORM, None)
    assert "No split of 6 layers" in decision.reason
    assert decide_within(40, UNEVEN, UNIFORM).target == EVEN


def test_a_split_that_does_not_fit_is_left_whatever_that_costs() -> None:
    decision = decide_within(30, UNEVEN, EVEN)
    assert decision.target == UNIFORM
    assert decision.prediction.gain < 0
    assert "more memory than there is" in decision.reason


@pytest.mark.parametrize("move_when", ["worthwhile", "always"])
def test_and_nothing_goes_back_to_it(move_when: str) -> None:
    ours, current = policy(1e-9, move_when=move_when), EVEN
    for step in range(8):
        ours.observe(BalancingProblem(UNEVEN, current, memory=limits(30)), step=step)
        decision = ours.decide(horizon_steps=100)
        if decision.target is not None:
            ours.moved(decision, 0, 1e-9)
            current = decision.target
    assert current == UNIFORM


@dataclass
class Answers(Balancer):
    """Answers whatever it is told to, without looking at the memory."""

    answer: object

    @override
    def balance(self, problem: BalancingProblem) -> Assignment:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(("cap", "current"), [(30, UNIFORM), (20, UNIFORM), (20, EVEN)])
@pytest.mark.parametrize("move_when", ["worthwhile", "always"])
def test_a_plan_that_does_not_fit_is_not_carried_out(move_when: str, cap: int, current: Assignment) -> None:
    ours = RebalancePolicy(Answers(EVEN), move_when=move_when)  # type: ignore[arg-type]
    ours.observe(BalancingProblem(UNEVEN, current, memory=limits(cap)), step=0)
    decision = ours.decide(horizon_steps=1e9)
    assert decision.target is None
    assert decision.reason == f"[4, 2] takes 40 bytes on rank 0, which has {cap}"


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (None, TypeError, r"Answers.balance\(\) to return an Assignment, got None. Return for example Assignment"),
        ([4, 2], TypeError, r"an Assignment, got \[4, 2\]"),
        (Assignment((2, 2, 2)), ValueError, r"6 layers on 2 stages, got \[2, 2, 2\]"),
        (Assignment((4, 3)), ValueError, r"6 layers on 2 stages, got \[4, 3\]"),
    ],
)
@pytest.mark.parametrize("memory", [None, limits(100)])
def test_what_is_no_plan_is_an_error(answer: object, kind: type, text: str, memory: MemoryLimits | None) -> None:
    with pytest.raises(kind, match=text):
        RebalancePolicy(Answers(answer)).observe(BalancingProblem(UNEVEN, UNIFORM, memory=memory), step=0)


def test_a_plan_that_is_slower_is_called_so() -> None:
    ours = RebalancePolicy(Answers(Assignment((1, 5))))
    ours.observe(BalancingProblem(UNEVEN, UNIFORM), step=0)
    assert ours.decide().reason == "[1, 5] would take 22.2% longer"


class Broken(Balancer):
    @override
    def balance(self, problem: BalancingProblem) -> Assignment:
        raise ValueError("a mistake of mine")


def test_errors_of_a_balancer_that_are_not_about_memory_are_errors() -> None:
    with pytest.raises(ValueError, match="a mistake of mine"):
        RebalancePolicy(Broken()).observe(BalancingProblem(UNEVEN, UNIFORM), step=0)
