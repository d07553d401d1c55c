"""Clipping by the norm of the whole model, wherever it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import Block, Plan, model_of, square_loss, start, train, wide_batch

pytestmark = pytest.mark.distributed


def half_blocks() -> list[nn.Module]:
    """Blocks whose parameters are bfloat16 and float64 in turn."""
    layers = [nn.Linear(6, 6) for _ in range(5)]
    return [InDtype(layer, dtype) for layer, dtype in zip(layers, [torch.bfloat16] * 5, strict=True)]


class InDtype(nn.Module):
    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = layer.to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.dtype)).float()


def mixed_blocks() -> list[nn.Module]:
    return [InDtype(nn.Linear(6, 6), torch.float64), *(Block() for _ in range(4))]


PLANS = {
    "float32": Plan(),
    "bfloat16": Plan(layers=half_blocks),
    "mixed": Plan(layers=mixed_blocks),
    "prefix frozen": Plan(frozen={0: (0, 1, 2)}),
}


def _clip(rank: int, balance: tuple[int, ...], max_norm: float) -> dict[str, tuple[torch.Tensor, dict, int]]:
    from lightning_dynmo.pipeline import clip_grad_norm

    results, groups = {}, None
    for name, plan in PLANS.items():
        runtime = start(plan, balance, groups)
        groups, model = runtime.groups, runtime.chain.root
        for index in plan.frozen.get(0, ()):
            model.layers[index].requires_grad_(False)
        train(runtime, plan, 0)
        norm = clip_grad_norm(list(model.parameters()), max_norm, groups)
        gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
        local = torch.nn.utils.get_total_norm(list(gradients.values()))
        results[name] = (norm, gradients, local)
    return results


def clip_alone(plan: Plan, max_norm: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = model_of(plan)
    for index in plan.frozen.get(0, ()):
        model.layers[index].requires_grad_(False)
    for index, (args, _) in enumerate(batch := wide_batch(0)):
        (square_loss(model(*args), index) / len(batch)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm, {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("balance", [(5,), (2, 3), (1, 1, 1, 2)], ids=str)
def test_norm_and_clipped_gradients_equal_those_of_torch_bit_for_bit(balance: tuple[int, ...]) -> None:
    """With a frozen prefix, whole ranks join without gradients."""
    ranks = run_distributed(_clip, len(balance), balance, 0.5)
    for name, plan in PLANS.items():
        norm, gradients = clip_alone(plan, 0.5)
        assert norm > 0.5
        found: dict[str, torch.Tensor] = {}
        for results in ranks:
            assert torch.equal(results[name][0], norm), name
            assert results[name][0].dtype == norm.dtype, name
            found |= results[name][1]
        assert found.keys() == gradients.keys()
        assert all(torch.equal(found[key], gradients[key]) for key in gradients), name
    if len(balance) == 4:
        assert ranks[0]["prefix frozen"][1] == {}
        assert any(not torch.equal(rank["float32"][2], ranks[0]["float32"][0]) for rank in ranks)


def test_norm_below_the_limit_changes_nothing() -> None:
    [first, second] = run_distributed(_clip, 2, (2, 3), 1e6)
    _, gradients = clip_alone(PLANS["float32"], float("inf"))
    found = first["float32"][1] | second["float32"][1]
    assert all(torch.equal(found[key], gradients[key]) for key in gradients)


def test_norms_added_up_rank_by_rank_would_differ() -> None:
    """Hence the order of the model: the same numbers, added up per rank first, give other bits."""
    by_parameter, by_rank = [], []
    for _ in range(20):
        norms = torch.rand(20)
        by_parameter.append(torch.linalg.vector_norm(norms))
        by_rank.append(torch.linalg.vector_norm(torch.stack([part.norm() for part in norms.split(7)])))
    assert torch.allclose(torch.stack(by_parameter), torch.stack(by_rank))
    assert not torch.equal(torch.stack(by_parameter), torch.stack(by_rank))
