"""What is measured besides time, what the policy makes of it in a real pipeline, and what is taken back."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import (
    WIDTH,
    Block,
    Plan,
    Run,
    run_loop,
    run_pipeline,
    start,
    train,
    two_microbatches,
    wide_batch,
)

pytestmark = pytest.mark.distributed

FLOAT = 4


class Sleeper(nn.Module):
    """Sleeps, and has parameters that it does not need."""

    def __init__(self, seconds: float, num_parameters: int = 1) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x + self.weight.sum()


def rebalanced(runtime: Any, plan: Plan, steps: int, **known: Any) -> list[Any]:
    """Measures and rebalances after every step; returns what was decided."""
    results = []
    for step in range(steps):
        runtime.request_profile()
        train(runtime, plan, step)
        results.append(runtime.rebalance(**known))
    return results


def misleading_parameters() -> list[nn.Module]:
    """By parameters, layer 2 should go to the first stage, which takes long already."""
    return [Sleeper(0.03), Sleeper(0.03), Sleeper(0.03, 1000), Sleeper(0.0, 3000)]


def _undo(rank: int) -> list[tuple[list[int] | None, bool, str]]:
    plan = Plan(layers=misleading_parameters, batch=two_microbatches)
    runtime = start(plan, (2, 2), load="parameters")
    results = rebalanced(runtime, plan, 16)
    assert runtime.assignment.balance == (2, 2)
    return [
        (
            None if result.migration is None else list(result.decision.target.balance),
            result.decision.undone,
            result.decision.reason,
        )
        for result in results
    ]


def test_a_plan_that_makes_steps_slower_is_undone_once_and_does_not_come_back() -> None:
    first, second = run_distributed(_undo, 2)
    assert first == second
    moves = [(target, undone) for target, undone, _ in first if target]
    assert moves == [([3, 1], False), ([2, 2], True)]
    undone = next(reason for _, undone, reason in first if undone)
    found = re.fullmatch(r"the last move was to gain 25.0%, but measured -(\d+\.\d)%", undone)
    assert found, undone
    assert float(found[1]) == pytest.approx(50, abs=10)  # 90 ms instead of 60
    assert first[-1][2] == "[3, 1] was undone before"


class Half(Block):
    """Works on every other sample, and says so."""

    def forward(self, x: Tensor) -> Tensor:
        from lightning_dynmo import count_tokens

        count_tokens(len(x) // 2)
        return super().forward(x)


def some_layers_skip() -> list[nn.Module]:
    return [Block(), Block(), Half(), Half(), Half(), Half()]


def batch_of_four(step: int) -> list[Any]:
    return wide_batch(step, size=4)


def _tokens(rank: int) -> list[Any]:
    found = []
    groups = None
    for recompute in (False, True):
        plan = Plan(layers=some_layers_skip, batch=batch_of_four, recompute=recompute)
        runtime = start(plan, (3, 3), groups, load="tokens")
        groups = runtime.groups
        (result,) = rebalanced(runtime, plan, 1, horizon_steps=1e9)
        found.append(([load.num_tokens for load in runtime.profile.loads], result))
    return [(tokens, result.decision.proposed.balance, result.migration is not None) for tokens, result in found]


def test_layers_say_how_many_tokens_they_work_on_and_these_are_evened_out() -> None:
    for rank in run_distributed(_tokens, 2):
        for tokens, balance, moved in rank:
            assert tokens == [16, 16, 8, 8, 8, 8]  # of 4 microbatches, however often the forward runs
            assert balance == (2, 4)  # 32 and 32, before 40 and 24
            assert moved


class Transformed(Block):
    """Works in place, and then runs a transform of torch.func, which allows no hooks on what autograd saves."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2)
        return super().forward(x) + torch.func.grad(lambda value: value.square().sum())(x.detach())


def layers_that_keep() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.ReLU()]


def layers_without_hooks() -> list[nn.Module]:
    return [*layers_that_keep()[:4], Transformed()]


def _memory(rank: int) -> list[list[tuple[int, int, int]]]:
    rows, groups = [], None
    for layers, recompute in ((layers_without_hooks, False), (layers_that_keep, True)):
        plan = Plan(layers=layers, recompute=recompute)
        runtime = start(plan, (2, 3), groups, memory_cap_bytes=2**40)
        groups = runtime.groups
        optimizer = plan.optimizer(list(runtime.chain.root.parameters()))
        runtime.optimizers = [optimizer]
        runtime.chain.layers[0].requires_grad_(False)
        for step in range(2):
            if step == 1:
                runtime.chain.layers[0].requires_grad_(True)  # trains from now on, and has no state yet
            runtime.request_profile()
            train(runtime, plan, step)
            if step == 0:
                optimizer.step()
        loads = runtime.profile.loads
        rows.append([(load.layer_bytes, load.state_bytes, load.activation_bytes) for load in loads])
    return rows


def test_memory_counts_gradients_and_state_to_come_and_what_is_kept() -> None:
    first, second = run_distributed(_memory, 2)
    assert first == second
    plain, recomputed = first
    sample = 3 * WIDTH * FLOAT  # bytes of what crosses a border
    small, wide = (WIDTH + 1) * WIDTH * FLOAT, (WIDTH + 1) * 2 * WIDTH * FLOAT
    assert plain[0][:2] == (pytest.approx(4 * small, rel=0.05), small)  # with gradients and, soon, two moments
    assert plain[2][:2] == (4 * wide + 8, 3 * wide + 8)  # and two step counters
    assert [kept for *_, kept in plain[:4]] == [sample, sample, sample, 2 * sample]
    assert plain[4][2] == 2 * sample, "its input, and the output that the loss is made of"
    assert [kept for *_, kept in recomputed[:4]] == [sample, sample, sample, 2 * sample]
    assert recomputed[4][2] == 2 * sample, "its input and the chain's output"


def layers_that_forbid_hooks() -> list[nn.Module]:
    return [Block(), Transformed(), nn.ReLU(inplace=True), Block(), Transformed()]


def _measured(rank: int) -> Run:
    plan = Plan(layers=layers_that_forbid_hooks)
    runtime = start(plan, (2, 3), memory_cap_bytes=2**40)
    train_batch = runtime.train

    def measure(*args: Any) -> None:
        runtime.request_profile()
        train_batch(*args)

    runtime.train = measure
    return run_pipeline(runtime, plan)


def test_measured_steps_run_each_layer_once_even_where_it_forbids_to_be_watched() -> None:
    expected = run_loop(Plan(layers=layers_that_forbid_hooks))
    run, _ = run_distributed(_measured, 2)
    assert run.weights.keys() == expected.weights.keys()
    assert all(torch.equal(value, expected.weights[name]) for name, value in run.weights.items())
    assert int(run.weights["layers.1.calls"]) == 3 * 4


def uneven_sleepers() -> list[nn.Module]:
    return [Sleeper(0.02), Sleeper(0.02), Sleeper(0.03), Sleeper(0.0), Sleeper(0.0), Sleeper(0.0, 1000)]


def _capped(rank: int) -> list[tuple[bool, str, tuple[int, ...]]]:
    found, groups = [], None
    for cap in (None, 100, 10_000_000):
        plan = Plan(layers=uneven_sleepers, batch=two_microbatches)
        runtime = start(plan, (3, 3), groups, memory_cap_bytes=cap)
        groups = runtime.groups
        (result,) = rebalanced(runtime, plan, 1, horizon_steps=1e9)
        train(runtime, plan, 1)
        found.append((result.migration is not None, result.decision.reason, runtime.assignment.balance))
    return found


def test_nothing_moves_where_nothing_fits_and_the_run_goes_on() -> None:
    for free, tight, wide in run_distributed(_capped, 2):
        assert free[0]
        assert free[2] == (2, 4)
        assert not tight[0]
        assert tight[2] == (3, 3)
        assert "No split of 6 layers over 2 stages" in tight[1]
        assert wide[2] == free[2]


class OnSlowRank(Sleeper):
    """Sleeps three times as long on the second rank."""

    def forward(self, x: Tensor) -> Tensor:
        slow = torch.distributed.get_rank() == 1
        time.sleep(self.seconds * (2 if slow else 0))
        return super().forward(x)


def equal_layers() -> list[nn.Module]:
    return [OnSlowRank(0.01) for _ in range(8)]


def _speeds(rank: int) -> list[Any]:
    found, groups = [], None
    for speeds in (None, [3.0, 1.0]):
        plan = Plan(layers=equal_layers, batch=two_microbatches)
        runtime = start(plan, (4, 4), groups, rank_speeds=speeds)
        groups = runtime.groups
        (result,) = rebalanced(runtime, plan, 1, horizon_steps=1e9)
        found.append((result.decision.proposed.balance, result.decision.prediction.bottleneck_before))
    return found


def test_times_are_those_of_a_rank_of_speed_one() -> None:
    for plain, known in run_distributed(_speeds, 2):
        assert plain[0] == (5, 3)  # the first plan believes that the last layers take three times as long everywhere
        assert known[0] == (6, 2)  # 6 and 6, before 4 and 12
        assert known[1] == pytest.approx(plain[1], rel=0.2), "but a rank's time is what was measured"
