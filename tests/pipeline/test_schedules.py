"""Every schedule gives the numbers of a plain loop, wherever its stages are and whatever is frozen or shared."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo._torch import ActionType
from lightning_dynmo.pipeline import check_num_microbatches, check_stages_per_rank, find_schedule
from lightning_dynmo.pipeline.schedules import SCHEDULES, evaluation_order_of, order_of
from tests.pipeline.chains import WIDTH, Block, Microbatch, Plan, assert_same_as_loop, wide_batch

# Microbatches run backward in the order of a loop, so that gradients are added up in the same order, to the last bit.
IN_ORDER = ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble")
COMPUTES = (
    ActionType.FORWARD,
    ActionType.FULL_BACKWARD,
    ActionType.BACKWARD_INPUT,
    ActionType.BACKWARD_WEIGHT,
)
MULTIPLE = [name for name, schedule in SCHEDULES.items() if not (schedule.fixed and schedule.stages_per_rank == 1)]


def nine_blocks() -> list[nn.Module]:
    return [Block() for _ in range(9)]


def tied_blocks() -> list[nn.Module]:
    """The first layer's weight is the last one's, and two in the middle share theirs."""
    layers = nine_blocks()
    layers[8].linear.weight = layers[0].linear.weight
    layers[5].linear.weight = layers[3].linear.weight
    layers[5].norm = layers[3].norm
    return layers


class OfTwoParts(nn.Module):
    """Has weights whose gradients do not pass through anything that leads to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(4, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.alone = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, side: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weight = self.linear.weight * torch.sigmoid(self.scale)  # a weight of a weight
        x = torch.tanh(x @ weight + x @ self.linear.weight.T) + self.table(torch.arange(x.shape[0]))
        return x * self.scale, (torch.zeros(()) if side is None else side) + self.alone.sin()


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return self.linear(x) * side


def entangled_layers() -> list[nn.Module]:
    return [*(OfTwoParts() for _ in range(8)), Joined()]


def eight_microbatches(step: int) -> list[Microbatch]:
    return wide_batch(step, count=8)


def uneven_microbatches(step: int) -> list[Microbatch]:
    parts = wide_batch(step, count=8, size=3)
    return [((args[0][: 3 - index // 4],), kwargs) for index, (args, kwargs) in enumerate(parts)]


def few_microbatches(step: int) -> list[Microbatch]:
    return wide_batch(step, count=1 + step % 2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def plans(schedule: str, num_ranks: int) -> list[tuple[Plan, tuple[int, ...]]]:
    stages = num_ranks * find_schedule(schedule).stages_per_rank
    even, front, back = (_balance(stages, 9, kind) for kind in ("even", "front", "back"))
    plain = Plan(layers=nine_blocks, batch=eight_microbatches, schedule=schedule, optimizer=sgd)
    frozen = {0: (0, 1), 1: tuple(range(6)), 2: (2, 3, 7)}
    return [
        (plain, even),
        (replace(plain, moves={1: front, 2: back}), even),
        (replace(plain, frozen=frozen, moves={2: back}), even),
        (replace(plain, layers=tied_blocks, moves={1: back, 2: front}), even),
        (replace(plain, layers=entangled_layers, moves={1: front}), even),
        (replace(plain, batch=uneven_microbatches, moves={1: front}), even),
        (replace(plain, batch=few_microbatches), even),
        (replace(plain, recompute=True, frozen={1: (0, 1, 2)}), even),
    ]


def _balance(num_stages: int, num_layers: int, kind: str) -> tuple[int, ...]:
    if kind == "even":
        return tuple(num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages))
    rest = num_layers - num_stages + 1
    return (rest, *(1,) * (num_stages - 1)) if kind == "front" else (*(1,) * (num_stages - 1), rest)


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_a_loop(schedule: str, num_ranks: int) -> None:
    runs = plans(schedule, num_ranks)
    tied = [run for run in runs if run[0].layers is tied_blocks]
    exact = [run for run in runs if run not in tied]
    if schedule in IN_ORDER and not find_schedule(schedule).splits_backward:
        assert_same_as_loop(exact, num_ranks)
        assert_same_as_loop(tied, num_ranks, tolerance=1e-5)
    else:
        assert_same_as_loop(runs, num_ranks, tolerance=1e-5)


@pytest.mark.distributed
def test_comparison_sees_lost_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(layers=nine_blocks, batch=eight_microbatches, schedule="zbvzerobubble", frozen={0: (0, 1, 2)})
    with pytest.raises(AssertionError, match="losses of step 1"):
        assert_same_as_loop([(replace(plan, layers=LosesWeights()), (3, 2, 2, 2))], 2, tolerance=1e-5)


class LosesWeights:
    """Forgets the weights behind a frozen prefix, as torch's own stages do under such a schedule."""

    def __call__(self) -> list[nn.Module]:
        import sys

        stage = sys.modules.get("lightning_dynmo.pipeline.stage")
        if stage is not None and torch.distributed.is_initialized():
            original = stage.Stage.backward_of_weights

            def forgetful(self: Any, microbatch: int) -> None:
                if self._saved.get(microbatch) is None or self._saved[microbatch].split is not None or self.is_first:
                    original(self, microbatch)

            stage.Stage.backward_of_weights = forgetful
        return nine_blocks()


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", MULTIPLE)
def test_one_rank_and_more_stages_per_rank(schedule: str) -> None:
    plan = Plan(layers=nine_blocks, batch=eight_microbatches, schedule=schedule)
    alone = (5, 4)
    assert_same_as_loop([(replace(plan, moves={1: (1, 8)}), alone)], 1, tolerance=1e-5)
    if not find_schedule(schedule).fixed:
        runs = [
            (replace(plan, stages_per_rank=3), (2, 2, 2, 1, 1, 1)),
            (replace(plan, stages_per_rank=1), (4, 5)),
        ]
        assert_same_as_loop(runs, 2, tolerance=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_are_complete_and_free_of_deadlock(name: str) -> None:
    """Runs the orders with messages that nobody buffers: a send waits until its receive has been posted."""
    schedule = SCHEDULES[name]
    for num_ranks in range(1, 9):
        stages_per_rank = schedule.stages_per_rank
        placement = schedule.place(num_ranks, stages_per_rank)
        for num_microbatches in (1, 2, 3, 5, 8, 16, 17):
            order = order_of(schedule, num_ranks, stages_per_rank, num_microbatches)
            done = _play(order, placement)
            for stage in range(len(placement)):
                parts = [kind for kind, at, _ in done if at == stage]
                backwards = parts.count(ActionType.FULL_BACKWARD)
                assert parts.count(ActionType.FORWARD) == num_microbatches
                assert backwards + parts.count(ActionType.BACKWARD_INPUT) == num_microbatches
                assert backwards + parts.count(ActionType.BACKWARD_WEIGHT) == num_microbatches
            evaluation = _play(evaluation_order_of(placement, num_microbatches), placement)
            assert len(evaluation) == num_microbatches * len(placement)


def _play(order: Any, placement: tuple[int, ...]) -> list[tuple[ActionType, int, int]]:
    """Plays an order through; a message goes, in order, once its sender and its receiver have both come to it."""
    position, done = dict.fromkeys(order, 0), []
    sent: dict[tuple[int, int], list[Any]] = {}
    posted: dict[tuple[int, int], list[Any]] = {}
    arrived: set[Any] = set()
    while any(position[rank] < len(order[rank]) for rank in order):
        progress = False
        for rank, actions in order.items():
            while position[rank] < len(actions):
                stage, kind, microbatch = actions[position[rank]][:3]
                if kind in (ActionType.SEND_F, ActionType.SEND_B):
                    target = stage + (1 if kind == ActionType.SEND_F else -1)
                    message = (kind == ActionType.SEND_F, target, microbatch)
                    sent.setdefault((rank, placement[target]), []).append(message)
                elif kind in (ActionType.RECV_F, ActionType.RECV_B):
                    source = stage - (1 if kind == ActionType.RECV_F else -1)
                    message = (kind == ActionType.RECV_F, stage, microbatch)
                    posted.setdefault((placement[source], rank), []).append(message)
                elif kind in COMPUTES:
                    if not _ready(kind, stage, microbatch, placement, rank, arrived, done):
                        break
                    done.append((kind, stage, microbatch))
                position[rank] += 1
                progress = True
        for pair in posted.keys() & sent.keys():
            while posted[pair] and sent[pair]:
                message = sent[pair].pop(0)
                assert posted[pair].pop(0) == message, f"messages between ranks {pair} are out of order"
                arrived.add(message)
                progress = True
        assert progress, "every rank waits for another"
    assert not any(sent.values()), "a message was never received"
    return done


def _ready(
    kind: ActionType, stage: int, microbatch: int, placement: tuple[int, ...], rank: int, arrived: Any, done: Any
) -> bool:
    forward = kind == ActionType.FORWARD
    if kind == ActionType.BACKWARD_WEIGHT:
        return (ActionType.BACKWARD_INPUT, stage, microbatch) in done
    if not forward and (ActionType.FORWARD, stage, microbatch) not in done:
        return False
    neighbour = stage - 1 if forward else stage + 1
    if not 0 <= neighbour < len(placement):
        return True
    if placement[neighbour] != rank:
        return (forward, stage, microbatch) in arrived
    kinds = (ActionType.FORWARD,) if forward else (ActionType.FULL_BACKWARD, ActionType.BACKWARD_INPUT)
    return any((part, neighbour, microbatch) in done for part in kinds)


@pytest.mark.parametrize(
    ("name", "count", "text"),
    [
        (
            "1f1b",
            3,
            "needs at least as many microbatches as stages (4), got num_microbatches=3 on 4 ranks",
        ),
        ("dualpipev", 7, "needs at least as many microbatches as stages (8), got num_microbatches=7 on 4 ranks."),
        (
            "interleaved1f1b",
            9,
            "needs microbatches in equal rounds of 4 or more, got num_microbatches=9 on 4 ranks.",
        ),
        ("interleavedzerobubble", 13, "Use num_microbatches=12 or num_microbatches=15, or a schedule that takes any"),
        ("gpipe", 0, "num_microbatches must be at least 1, got 0"),
    ],
)
def test_illegal_number_of_microbatches_names_the_nearest_legal_ones(name: str, count: int, text: str) -> None:
    schedule = find_schedule(name)
    with pytest.raises(ValueError, match=re.escape(text)):
        check_num_microbatches(schedule, count, 4, 4 * schedule.stages_per_rank)


def test_stages_per_rank_are_checked() -> None:
    assert check_stages_per_rank(find_schedule("1F1B"), None) == 1
    assert check_stages_per_rank(find_schedule("loopedbfs"), 3) == 3
    with pytest.raises(ValueError, match="'zbvzerobubble' runs exactly 2 stages on each rank, got stages_per_rank=3"):
        check_stages_per_rank(find_schedule("zbvzerobubble"), 3)
    with pytest.raises(ValueError, match="'interleaved1f1b' runs 1 or more stages on each rank, got stages_per_rank=0"):
        check_stages_per_rank(find_schedule("interleaved1f1b"), 0)
    with pytest.raises(ValueError, match="Did you mean 'zbvzerobubble'"):
        find_schedule("zbvzerobuble")


class Odd(nn.Module):
    """Its weights' gradients are one element expanded, or the same tensor for two weights; a hook changes gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return torch.tanh(x) + (self.left + self.right) * x.mean() + self.bias.sum()


def odd_layers() -> list[nn.Module]:
    return [Odd() for _ in range(9)]


class WithStatistics(nn.Module):
    """What it computes depends on buffers that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def layers_with_statistics() -> list[nn.Module]:
    return [WithStatistics() for _ in range(9)]


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "interleavedzerobubble", "dualpipev"])
def test_odd_gradients_and_recomputed_statistics(schedule: str) -> None:
    balance = _balance(2 * find_schedule(schedule).stages_per_rank, 9, "even")
    plan = Plan(layers=odd_layers, batch=eight_microbatches, schedule=schedule, optimizer=sgd)
    recomputed = replace(plan, layers=layers_with_statistics, recompute=True)
    assert_same_as_loop([(plan, balance), (recomputed, balance)], 2, tolerance=1e-5)
