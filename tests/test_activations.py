"""Bytes that a layer keeps until its backward: each piece of memory once, and not its own parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dynmo.activations import KeptActivations

ROWS, WIDTH, FLOAT = 5, 8, 4
SAMPLE = ROWS * WIDTH * FLOAT


class Saves(nn.Module):
    """Runs a function with a weight and a buffer of its own."""

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight, self.table)


def kept(run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> int:
    layer = Saves(run)
    counter, x = KeptActivations(layer), torch.randn(ROWS, WIDTH, requires_grad=True)
    with counter.saving():
        output = layer(x)
    plain = torch.autograd.grad(layer(x).sum(), [x, layer.weight], allow_unused=True)
    counted = torch.autograd.grad(output.sum(), [x, layer.weight], allow_unused=True)
    assert all(a is b or torch.equal(a, b) for a, b in zip(plain, counted, strict=True)), "counting changes nothing"
    return counter.num_bytes


def test_inputs_and_results_count_once_and_own_tensors_not_at_all() -> None:
    assert kept(lambda x, weight, table: x @ weight) == SAMPLE
    assert kept(lambda x, weight, table: x @ weight.t() @ table) == SAMPLE
    assert kept(lambda x, weight, table: (x @ weight).tanh()) == 2 * SAMPLE
    assert kept(lambda x, weight, table: x @ weight + x.view(WIDTH, ROWS).view(ROWS, WIDTH) @ weight) == SAMPLE
    assert kept(lambda x, weight, table: x[:, :4] @ weight[:4] + x[:, 4:] @ weight[4:]) == SAMPLE
    assert kept(lambda x, weight, table: x + weight[0]) == 0


def test_what_is_computed_again_is_not_kept() -> None:
    def again(x: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        return checkpoint(lambda x: (x @ weight).tanh().tanh(), x, use_reentrant=False)

    assert kept(again) == SAMPLE  # its input
    assert kept(lambda x, weight, table: (x @ weight).tanh().tanh()) == 3 * SAMPLE


def test_tensors_kept_by_other_means_can_be_added() -> None:
    counter = KeptActivations(Saves(lambda x, weight, table: x))
    x = torch.randn(ROWS, WIDTH)
    counter.add((x, {"again": x[1:], "sparse": x.to_sparse()}, 3))
    assert counter.num_bytes == SAMPLE
