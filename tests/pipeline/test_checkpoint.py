"""What ranks save together is what one process saves, and any number of ranks can load it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import Block, Plan, model_of, square_loss, start, train, wide_batch

pytestmark = pytest.mark.distributed


class Saved(Block):
    """Has state that is no tensor, buffers made on the way, and a submodule that other layers use too."""

    shared = nn.Tanh()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.act = Saved.shared
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.late = torch.full((2,), float(self.steps))
        return self.act(super().forward(x))

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def saved_layers() -> list[nn.Module]:
    return [Saved() for _ in range(5)]


def by_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups in an order of their own; one parameter has no place in it."""
    groups = [{"params": parameters[1::2][:-1], "lr": 0.01}, {"params": parameters[0::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


PLANS = [Plan(layers=saved_layers, optimizer=by_groups, steps=2), Plan(layers=saved_layers, optimizer=adagrad, steps=2)]


def train_alone(plan: Plan, first: int, state: Any = None) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    model = model_of(plan)
    optimizer = plan.optimizer(list(model.parameters()))
    if state is not None:
        model.load_state_dict(state[0], strict=False)
        optimizer.load_state_dict(copy.deepcopy(state[1]))
        for layer in model.layers:
            layer.late = torch.zeros(2)
    losses = []
    for step in range(first, first + plan.steps):
        optimizer.zero_grad()
        for index, (args, _) in enumerate(batch := wide_batch(step)):
            loss = square_loss(model(*args), index) / len(batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return model.state_dict(), optimizer.state_dict(), losses


def _train_together(
    rank: int, balances: list[tuple[int, ...]], first: int, states: list[Any]
) -> list[tuple[dict[str, Any], dict[str, Any], list[float]]]:
    from lightning_dynmo.pipeline import gather_optimizer_state, gather_state_dict, load_optimizer_state

    results, groups = [], None
    for plan, balance, state in zip(PLANS, balances, states, strict=True):
        runtime = start(plan, balance, groups)
        groups, chain = runtime.groups, runtime.chain
        if state is not None:
            runtime.make_whole()
            chain.root.load_state_dict(state[0], strict=False)
            runtime.distribute()
        optimizer = plan.optimizer(list(chain.root.parameters()))
        runtime.optimizers = [optimizer]
        if state is not None:
            load_optimizer_state(chain, optimizer, state[1])
            mine = {id(parameter) for index in chain.owned for parameter in chain.parameters(index)}
            assert {id(parameter) for parameter in optimizer.state} <= mine
        losses: list[float] = []
        for step in range(first, first + plan.steps):
            optimizer.zero_grad()
            losses += train(runtime, plan, step)
            optimizer.step()
        with torch.inference_mode():  # as in a checkpoint at the end of a validation
            weights = gather_state_dict(chain, runtime.owners, groups)
            state_dict = gather_optimizer_state(chain, runtime.owners, groups, optimizer)
        assert not any(value.is_inference() for value in weights.values() if isinstance(value, Tensor))
        results.append((weights, state_dict, losses))
    return results


def assert_same(left: Any, right: Any, path: str = "state") -> None:
    assert type(left) is type(right), path
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, list):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    else:
        assert left == right, path


def test_gathered_states_are_those_of_one_process_and_go_on_with_any_split() -> None:
    saved = run_distributed(_train_together, 3, [(1, 2, 2), (3, 1, 1)], 0, [None, None])
    for number, plan in enumerate(PLANS):
        weights, state, _ = train_alone(plan, 0)
        assert_same(saved[0][number][0], weights)
        assert_same(saved[0][number][1], state)
        assert saved[1][number][:2] == ({}, {})
    states = [saved[0][number][:2] for number in range(len(PLANS))]
    resumed = run_distributed(_train_together, 2, [(4, 1), (2, 3)], 2, states)
    for number, plan in enumerate(PLANS):
        weights, state, losses = train_alone(plan, 2, states[number])
        assert resumed[1][number][2] == losses
        assert_same(resumed[0][number][0], weights)
        assert_same(resumed[0][number][1], state)


def test_resuming_without_optimizer_state_would_show() -> None:
    plan = PLANS[0]
    weights, state, _ = train_alone(plan, 0)
    whole = train_alone(plan, 2, (weights, state))[2]
    assert whole != train_alone(plan, 2, (weights, {**state, "state": {}}))[2]
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] + 1e-7
    with pytest.raises(AssertionError, match="exp_avg"):
        assert_same(state, train_alone(plan, 0)[1])
