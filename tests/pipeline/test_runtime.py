"""The pipeline computes what a plain loop over the same layers and microbatches computes, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import (
    WIDTH,
    Block,
    Microbatch,
    Plan,
    assert_same_as_loop,
    blocks,
    difference,
    one_microbatch,
    run_loop,
    start,
    train,
    two_microbatches,
    wide_batch,
)
from tests.pipeline.layers import Named, OfAnyNumber, half_precision, layers_with_tuples

pytestmark = pytest.mark.distributed


# Counts, schedules and splits


@pytest.mark.parametrize("balance", [(5,), (2, 3), (1, 3, 1), (1, 1, 2, 1)], ids=str)
def test_losses_gradients_and_weights_equal_those_of_a_loop(balance: tuple[int, ...]) -> None:
    """More microbatches than stages, as many, and one alone."""
    plans = [Plan(), Plan(schedule="gpipe"), Plan(schedule="gpipe", batch=one_microbatch)]
    if len(balance) <= 2:
        plans.append(Plan(batch=two_microbatches))
    assert_same_as_loop([(plan, balance) for plan in plans])


def four_blocks() -> list[nn.Module]:
    return blocks(4)


def test_one_layer_per_stage_and_moves_change_nothing() -> None:
    moves = {1: (2, 1, 1, 2), 2: (1, 3, 1, 1)}
    assert_same_as_loop(
        [(Plan(layers=four_blocks), (1, 1, 1, 1)), (Plan(layers=six_blocks, moves=moves), (3, 1, 1, 1))]
    )


def six_blocks() -> list[nn.Module]:
    return blocks(6)


def swapped_blocks() -> list[nn.Module]:
    layers = blocks(5)
    layers[1], layers[2] = layers[2], layers[1]
    return layers


def test_comparison_sees_swapped_layers() -> None:
    [run] = assert_same_as_loop([(Plan(), (2, 3))])
    assert difference(run, run_loop(Plan(layers=swapped_blocks)))
    nudged = replace(run, weights={key: value + 1e-7 for key, value in run.weights.items()})
    assert difference(nudged, run_loop(Plan()))


# What crosses borders


class WithExtra(Block):
    """Returns a tensor that nobody uses."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x * 2 + self.linear.weight.sum()


class WithoutExtra(Block):
    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return super().forward(x)


def layers_with_an_unused_tensor() -> list[nn.Module]:
    return [WithExtra(), WithoutExtra(), WithExtra(), WithoutExtra()]


class Transposed(Block):
    """Its output is a view that is not contiguous, and so is its input's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).contiguous().transpose(1, 2)).transpose(1, 2)


def square_batch(step: int) -> list[Microbatch]:
    return [((args[0].reshape(-1, WIDTH, WIDTH),), {}) for args, _ in wide_batch(step, size=2 * WIDTH)]


def transposed_layers() -> list[nn.Module]:
    return [Transposed() for _ in range(4)]


class InPlace(nn.Module):
    """Changes its input in place, as activations with ``inplace=True`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(0.1) * self.scale


def layers_in_place() -> list[nn.Module]:
    return [Block(), nn.ReLU(inplace=True), Block(), InPlace(), nn.Dropout(0.0, inplace=True)]


def test_tuples_and_views_cross_every_border() -> None:
    runs = [
        (Plan(layers=layers_with_tuples), (1, 1, 1, 2)),
        (Plan(layers=layers_with_tuples, schedule="gpipe", moves={1: (2, 1, 1, 1)}), (1, 2, 1, 1)),
        (Plan(layers=layers_with_an_unused_tensor), (1, 1, 1, 1)),
        (Plan(layers=transposed_layers, batch=square_batch), (1, 1, 1, 1)),
    ]
    assert_same_as_loop(runs)


def test_layers_may_work_in_place_on_what_they_receive() -> None:
    plans = [(Plan(layers=layers_in_place), (1, 2, 2)), (Plan(layers=layers_in_place), (3, 1, 1))]
    assert_same_as_loop([*plans, (Plan(layers=layers_in_place, recompute=True), (1, 2, 2))])


def layers_with_keywords() -> list[nn.Module]:
    return [Named(), Block(), Named(), OfAnyNumber(), Named()]


def batch_with_keywords(step: int) -> list[Microbatch]:
    return [(args, {"mask": args[0] > 0, "scale": 0.5 + index}) for index, (args, _) in enumerate(wide_batch(step))]


def with_linears() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(5)]


def test_keywords_reach_every_layer_that_names_them_and_precision_holds_at_borders() -> None:
    assert_same_as_loop(
        [
            (Plan(layers=layers_with_keywords, batch=batch_with_keywords), (1, 2, 2)),
            (Plan(layers=with_linears, precision=half_precision), (1, 2, 2)),
        ]
    )


# Freezing


def test_freezing_and_unfreezing_in_mid_run() -> None:
    runs = [
        (Plan(frozen={0: (0, 1, 2)}), (1, 1, 2, 1)),  # a prefix of whole stages and half of one
        (Plan(frozen={1: (0, 1), 2: ()}), (1, 1, 2, 1)),  # frozen, then thawed
        (Plan(frozen={1: (2,), 2: (1, 3)}), (1, 1, 2, 1)),  # in the middle
        (Plan(frozen={0: (4,)}, schedule="gpipe"), (2, 1, 1, 1)),  # the last stage
        (Plan(frozen={0: (0, 1)}, moves={1: (2, 1, 1, 1), 2: (1, 1, 1, 2)}), (1, 1, 2, 1)),
    ]
    assert_same_as_loop(runs)


def _count_sends(rank: int) -> list[int]:
    counts, groups = [], None
    for frozen in ((), (0, 1, 2)):
        plan = Plan(frozen={0: frozen})
        runtime = start(plan, (1, 2, 2), groups)
        groups = runtime.groups
        for index in frozen:
            runtime.chain.layers[index].requires_grad_(False)
        train(runtime, plan, 0)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            train(runtime, plan, 1)
        counts.append(sum(event.name == "gloo:send" for event in recorded.events()))
    return counts


def test_frozen_prefix_sends_no_gradients() -> None:
    """4 microbatches: every rank but the last sends 4 activations; every rank but the first 4 gradients."""
    assert run_distributed(_count_sends, 3) == [[4, 4], [8, 4], [4, 0]]


def _train_all_frozen(rank: int) -> str:
    plan = Plan()
    runtime = start(plan, (2, 3))
    runtime.chain.root.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train") as info:
        train(runtime, plan, 0)
    return str(info.value)


def test_everything_frozen_is_an_error_on_every_rank() -> None:
    texts = run_distributed(_train_all_frozen, 2)
    assert texts[0] == texts[1]
    assert "Leave at least one layer unfrozen" in texts[0]
