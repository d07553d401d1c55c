"""CASES rows 26 and 28-30: schedules, failures, large messages, replicas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from tests.cases.modules import SCHEDULES, WIDTH, Chain, eight_layers, regression
from tests.cases.running import (
    LIMIT_S,
    Case,
    Comparison,
    assert_equal_to_one_device,
    run_cases,
    weights_differ,
)

pytestmark = pytest.mark.distributed

eights = partial(regression, (8,) * 4)
_EIGHT = Case(partial(Chain, eight_layers), eights)

# Row 26: V-shaped schedules

ROW_26 = {
    f"26 {schedule} on {ranks}": replace(
        _EIGHT, ranks=ranks, strategy={"schedule": schedule, "num_microbatches": max(4, 2 * ranks)}
    )
    for schedule in ("zbvzerobubble", "dualpipev")
    for ranks in (1, 2, 3, 4)
}

# Row 28: failures


class FailsInLayer(Chain):
    """A layer fails, in the forward or the backward of its microbatch `count`."""

    def __init__(self, layer: int, count: int, backward: bool = False) -> None:
        super().__init__(eight_layers)
        self.count, self.backward_fails = count, backward
        self.layers[layer].register_forward_hook(self._fail)

    def _fail(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.count -= 1
        if self.count == 0:
            if self.backward_fails:
                output.register_hook(_boom)
            else:
                _boom()


def _boom(*args: Any) -> None:
    raise ValueError("boom")


class FailsInStep(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            _boom()
        return super().training_step(batch, batch_idx)


class FailsInHook(Chain):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 2:
            _boom()


class FailsInData(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == 16 and dist.get_rank() == 2:
            _boom()
        return torch.zeros(WIDTH), torch.zeros(WIDTH)


def failing_data() -> Any:
    return torch.utils.data.DataLoader(FailsInData(), batch_size=8)


_FAILS = Case(partial(FailsInLayer, 3, 6), eights, ranks=4, plain="none")
_ZBV = {"schedule": "zbvzerobubble", "num_microbatches": 4}
ROW_28 = {
    "28 forward": (_FAILS, "layer 3 (Layer), microbatch 1: ValueError: boom"),
    "28 forward, zbvzerobubble": (
        replace(_FAILS, strategy=_ZBV),
        "rank 3, stage 3, layer 3 (Layer), microbatch 1: ValueError: boom",
    ),
    "28 backward": (
        replace(_FAILS, module=partial(FailsInLayer, 1, 1, True)),
        "rank 0, stage 0, layers 0-1, backward of microbatch 0: ValueError: boom",
    ),
    "28 backward, zbvzerobubble": (
        replace(_FAILS, module=partial(FailsInLayer, 6, 1, True), strategy=_ZBV),
        "rank 1, stage 6, layer 6 (Layer), backward of microbatch 0: ValueError: boom",
    ),
    "28 step": (
        replace(_FAILS, module=FailsInStep, ranks=3),
        "rank 2, stage 2, step method, microbatch 0: ValueError: boom",
    ),
    "28 hook": (replace(_FAILS, module=FailsInHook, ranks=3), "boom"),
    "28 replicas": (
        replace(_FAILS, module=FailsInHook, ranks=4, strategy={"data_parallel_size": 2, "num_microbatches": 2}),
        "boom",
    ),
    "28 data": (replace(_FAILS, module=Chain, train=failing_data, ranks=3), "boom"),
}

# Row 29: large messages in both directions at once

_LARGE = 2**18


class Scale(nn.Module):
    """Cheap to compute, expensive to send."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(_LARGE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def scales() -> list[nn.Module]:
    return [Scale() for _ in range(8)]


def large_batches() -> list[Any]:
    """Microbatches of 4 MB: 4 samples of a quarter of a million numbers."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.rand(16, _LARGE, generator=generator) for _ in range(2))]


ROW_29 = {
    f"29 {schedule} on {ranks}": Case(
        partial(Chain, scales, 100.0),
        large_batches,
        ranks=ranks,
        strategy={"schedule": schedule, "num_microbatches": 8 if ranks == 4 else 4},
    )
    for schedule, ranks in [*((schedule, 2) for schedule in SCHEDULES), ("1f1b", 4), ("zbvzerobubble", 4)]
}

# Row 30: one reduction per optimizer step


class CountsReductions(Callback):
    """Notes the numbers that are added up over replicas, step by step, and how many this rank trains."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.original, self.reduced = dist.all_reduce, 0
        groups = getattr(trainer.strategy, "_groups", None)
        if groups is None:
            return

        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is groups.replicas:
                self.reduced += tensor.numel()
            return self.original(tensor, *args, **kwargs)

        dist.all_reduce = counting

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        runtime = getattr(trainer.strategy, "runtime", None)
        if runtime is not None:
            parameters = runtime.chain.owned_parameters()
            trained = sum(parameter.numel() for parameter in parameters)
            module.notes.append((trainer.global_step, self.reduced, trained, len(parameters)))
        self.reduced = 0

    def on_train_end(self, *args: Any) -> None:
        dist.all_reduce = self.original


def counts_reductions() -> list[Callback]:
    return [CountsReductions()]


_REDUCED = Case(
    partial(Chain, eight_layers),
    partial(regression, (16,) * 6),
    ranks=4,
    callbacks=counts_reductions,
    strategy={"data_parallel_size": 2},
    trainer={"accumulate_grad_batches": 2},
)
ROW_30 = {
    "30 moves": replace(_REDUCED, moves=[(2, 6), (7, 1), (4, 4)]),
    **{
        f"30 {schedule}": replace(_REDUCED, strategy={"data_parallel_size": 2, "schedule": schedule})
        for schedule in ("gpipe", "interleaved1f1b", "zbvzerobubble")
    },
    "30 twin": replace(_REDUCED, plain="none", strategy={"data_parallel_size": 2}, moves=[(2, 6)]),
}

FAILURES = {name: case for name, (case, _) in ROW_28.items()}
CASES = {**ROW_26, **FAILURES, **ROW_29, **ROW_30}


def of_row(row: int) -> list[str]:
    return [name for name, case in CASES.items() if name.startswith(f"{row} ") and case.plain != "none"]


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", of_row(26))
def test_row_26_v_shaped_schedules(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


@pytest.mark.parametrize("name", ROW_28)
def test_row_28_a_failing_rank_is_named_everywhere_within_seconds(name: str, found: dict[str, Comparison]) -> None:
    outcomes = found[name].ranks
    for outcome in outcomes:
        assert outcome.kind in ("PipelineError", "ValueError"), (outcome.kind, outcome.text)
        assert ROW_28[name][1] in outcome.text
    at = [outcome.error_at for outcome in outcomes]
    assert max(at) - min(at) < LIMIT_S


@pytest.mark.parametrize("name", of_row(29))
def test_row_29_large_messages_in_both_directions(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name])


@pytest.mark.parametrize("name", of_row(30))
def test_row_30_one_reduction_per_optimizer_step(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    for outcome in found[name].ranks:
        done = 0
        for step, reduced, trained, count in outcome.notes:
            assert reduced == (trained + count if step > done else 0), outcome.notes
            done = step
        assert done == 3


def test_row_30_the_sum_is_needed(found: dict[str, Comparison]) -> None:
    assert weights_differ(found["30 twin"].ranks[0], found["26 zbvzerobubble on 2"].plain, ignore=["calls"])
