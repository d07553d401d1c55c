import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dynmo.planning import Assignment, BalancingProblem, PartitionBalancer, Prediction, predict


def test_prediction_of_a_known_change() -> None:
    prediction = predict(BalancingProblem([1.0, 1.0, 1.0, 3.0], Assignment((2, 2))), Assignment((3, 1)))
    assert prediction == Prediction(bottleneck_before=4.0, bottleneck_after=3.0)
    assert prediction.gain == 0.25


def test_a_worse_proposal_has_a_negative_gain() -> None:
    assert predict(
        BalancingProblem([1.0, 1.0, 1.0, 3.0], Assignment((3, 1))), Assignment((1, 3))
    ).gain == pytest.approx(-2 / 3, abs=1e-15)
    assert predict(
        BalancingProblem([1.0, 1.0, 1.0, 3.0], Assignment((3, 1))), Assignment((2, 2))
    ).gain != pytest.approx(-2 / 3, abs=0.1)


def test_no_load_no_gain() -> None:
    assert predict(BalancingProblem([0.0, 0.0, 0.0], Assignment((1, 2))), Assignment((2, 1))).gain == 0.0


def test_checks_its_inputs() -> None:
    with pytest.raises(ValueError, match=r"layer 1 .*got nan"):
        predict(BalancingProblem([1.0, math.nan], Assignment((1, 1))), Assignment((2,)))
    with pytest.raises(ValueError, match="3 in all, got 2"):
        predict(BalancingProblem([1.0, 1.0], Assignment((1, 1))), Assignment((1, 2)))


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=20), st.integers(1, 4))
def test_balancing_gains_at_most_the_layers_per_stage(loads: list[int], num_stages: int) -> None:
    # A uniform stage has at most q layers, and no split gets below the largest layer: the speedup is at most q.
    uniform = Assignment.uniform(len(loads), num_stages)
    gain = predict(BalancingProblem(loads, uniform), PartitionBalancer().balance(BalancingProblem(loads, uniform))).gain
    assert 0.0 <= gain <= 1 - 1 / max(uniform.balance) + 1e-12
