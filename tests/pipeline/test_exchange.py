from __future__ import annotations

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import Plan, start, train, wide_batch

pytestmark = pytest.mark.distributed


def _agree(rank: int) -> str:
    from lightning_dynmo.pipeline import create_groups
    from lightning_dynmo.pipeline.exchange import agree_on
    from lightning_dynmo.planning import Assignment

    groups = create_groups(3, 1, torch.device("cpu"))
    agree_on(Assignment((2, 1, 2)), "", groups)
    with pytest.raises(RuntimeError) as info:
        agree_on(Assignment((2, 1, 2) if rank < 2 else (1, 2, 2)), "", groups)
    return str(info.value)


def test_plans_that_differ_are_an_error_on_every_rank_that_shows_all_plans() -> None:
    texts = run_distributed(_agree, 3)
    assert texts[0] == texts[1] == texts[2]
    assert "rank 0: [2, 1, 2]; rank 1: [2, 1, 2]; rank 2: [1, 2, 2]" in texts[0]
    assert "nothing was moved. A balancer must be a pure function" in texts[0]


def _rebalance_by_rank(rank: int) -> tuple[tuple[int, ...], tuple[int, ...], list[float]]:
    from lightning_dynmo.planning import Assignment, Balancer

    class OwnOpinion(Balancer):
        def balance(self, problem):
            return Assignment((2, 3) if rank else (3, 2))

    plan = Plan()
    runtime = start(plan, (1, 4))
    runtime.rebalancer.policy.balancer = OwnOpinion()
    runtime.request_profile()
    train(runtime, plan, 0)
    with pytest.raises(RuntimeError, match="different plans"):
        runtime.rebalance()
    return runtime.assignment.balance, runtime.chain.owned, train(runtime, plan, 1)


def test_nothing_moves_when_plans_differ() -> None:
    first, second = run_distributed(_rebalance_by_rank, 2)
    assert (first[:2], second[:2]) == (((1, 4), (0,)), ((1, 4), (1, 2, 3, 4)))
    assert len(second[2]) == len(wide_batch(0))


def _profile(rank: int) -> list[object]:
    plan = Plan(frozen={0: (0,)})
    runtime = start(plan, (1, 2, 2))
    runtime.chain.layers[0].requires_grad_(False)
    optimizer = plan.optimizer(list(runtime.chain.root.parameters()))
    runtime.optimizers = [optimizer]
    profiles = []
    for step in range(2):
        runtime.request_profile()
        train(runtime, plan, step)
        optimizer.step()
        profiles.append(runtime.profile)
    train(runtime, plan, 2)
    assert runtime.profile is profiles[1], "only what was asked for is measured"
    return profiles


def test_profile_is_the_same_on_every_rank_and_counts_state_that_travels() -> None:
    ranks = run_distributed(_profile, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    before, after = ranks[0]
    state = (6 * 6 + 6 + 6 + 6) * 4  # bytes of a block's parameters
    assert [load.num_parameters for load in after.loads] == [state // 4] * 5
    assert [load.state_bytes for load in before.loads] == [state + 8] * 5
    assert [load.state_bytes for load in after.loads] == [state + 8, *[3 * state + 8 + 4 * 4] * 4]
    assert all(load.forward_s > 0 for load in after.loads)
    assert [load.backward_s > 0 for load in after.loads] == [False, True, True, True, True]
    assert max(after.busy_s) <= after.step_s
    assert 0 <= after.bubble_ratio < 1
