"""CASES rows 7-10: forwards that nobody asked for, evaluation in any order, memory."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.cases.modules import SCHEDULES, WIDTH, Chain, eight_layers, regression
from tests.cases.running import (
    Case,
    Comparison,
    Outcome,
    assert_equal_to_one_device,
    run_cases,
    weights_differ,
)

pytestmark = pytest.mark.distributed

# Row 7: forwards that nobody asked for


class Counted(nn.Module):
    """BatchNorm, a router's counter, a non-persistent counter, and a hook that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("rows", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("hooked", torch.zeros((), dtype=torch.int64))
        self.register_forward_hook(_count)

    def forward(self, x: Tensor) -> Tensor:
        self.rows[int(self.training)] += len(x)
        return x + torch.tanh(self.norm(self.linear(x)))


def _count(layer: Any, args: Any, output: Tensor) -> None:
    layer.hooked += 1


def counted_layers() -> list[nn.Module]:
    return [Counted() for _ in range(8)]


batches = partial(regression, (32, 32, 64, 32))
_COUNTED = Case(partial(Chain, counted_layers, 0.01), batches, plain="microbatches", trainer={"max_epochs": 2})
ROW_7 = {
    **{f"7 {schedule}": Case(**{**vars(_COUNTED), "strategy": {"schedule": schedule}}) for schedule in SCHEDULES},
    "7 moves": Case(**{**vars(_COUNTED), "ranks": 3, "moves": [(1, 1, 6), (5, 2, 1), (3, 3, 2)]}),
    "7 validation": Case(
        **{**vars(_COUNTED), "ranks": 4, "val": partial(regression, (4, 8), 2), "trainer": {"num_sanity_val_steps": 2}}
    ),
}

# Rows 8 and 9: evaluation in any order, of any size, with metrics


class Evaluated(Chain):
    """Evaluates in all ways."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def in_any_order(trainer: Trainer, module: LightningModule, train: Any, val: Any, folder: Path) -> dict[str, Any]:
    """Evaluates before, between and after two fits."""
    found: dict[str, Any] = {"before": trainer.validate(module, val, verbose=False)}
    found["predicted before"] = trainer.predict(module, val)
    trainer.fit(module, train, val)
    found["first fit"] = float(trainer.callback_metrics["val_loss"])
    found["test"] = trainer.test(module, val, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, train, val)
    found["after"] = trainer.validate(module, val, verbose=False)
    found["predicted"] = trainer.predict(module, val)
    found["left alone"] = float(F.mse_loss(module(torch.ones(2, WIDTH)), torch.zeros(2, WIDTH)))
    return found


_ANY = Case(
    partial(Evaluated, eight_layers),
    partial(regression, (8, 8, 5)),
    val=partial(regression, (3, 1, 7), 2),
    drive=in_any_order,
    trainer={"num_sanity_val_steps": 2},
)
ROW_8 = {
    f"8 {schedule} on {ranks}": Case(**{**vars(_ANY), "ranks": ranks, "strategy": {"schedule": schedule}})
    for schedule, ranks in (("1f1b", 3), ("zbvzerobubble", 2), ("interleaved1f1b", 2), ("dualpipev", 2), ("gpipe", 4))
}


class Measured(Chain):
    """Has a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.error.update(loss, weight=len(batch[0]))
        self.log("val_loss", loss, batch_size=len(batch[0]))
        self.log("val_error", self.error)


class InHalf(Measured):
    """Computes its loss in half precision, and logs it as it is."""

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1].bfloat16())


_OWN_SIZE = Case(Measured, partial(regression, (8, 8)), val=partial(regression, (3, 17, 1, 2), 3))
ROW_9 = {
    "9 own sizes": Case(**{**vars(_OWN_SIZE), "ranks": 4, "strategy": {"num_microbatches": 4}}),
    "9 within an epoch": Case(
        **{**vars(_OWN_SIZE), "trainer": {"val_check_interval": 1, "limit_val_batches": 3, "max_epochs": 2}}
    ),
    "9 bf16-true": Case(
        **{**vars(_OWN_SIZE), "module": InHalf, "trainer": {"precision": "bf16-true"}, "ranks": 3, "plain": "none"}
    ),
}

# Row 10: memory


class MovesAndLooks(Callback):
    """Moves layers after every step, and counts what is alive."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        runtime = getattr(trainer.strategy, "runtime", None)
        if runtime is None:
            return
        from lightning_dynmo import Assignment

        runtime.move_to(Assignment([(4, 4), (1, 7), (7, 1), (2, 6)][trainer.global_step % 4]))
        gc.collect()
        tensors = [entry for entry in gc.get_objects() if isinstance(entry, Tensor)]
        storages = {entry.untyped_storage().data_ptr(): entry.untyped_storage().nbytes() for entry in tensors}
        stages = sum(type(entry).__name__ == "Stage" for entry in gc.get_objects())
        module.notes.append((runtime.assignment.balance, len(tensors), sum(storages.values()), stages))


def moves_and_looks() -> list[Callback]:
    return [MovesAndLooks()]


class Leaking(Chain):
    """The negative twin: a hook that keeps every activation."""

    kept: list[Tensor]

    def on_train_start(self) -> None:
        self.kept = []
        for layer in self.layers:
            layer.register_forward_hook(lambda layer, args, output: self.kept.append(output))


_MOVES = Case(partial(Chain, eight_layers), partial(regression, (8,) * 24), callbacks=moves_and_looks)
ROW_10 = {
    "10 rebuilds": Case(**{**vars(_MOVES), "strategy": {"schedule": "1f1b"}}),
    "10 twin": Case(**{**vars(_MOVES), "module": partial(Leaking, eight_layers), "plain": "none"}),
}

CASES = {**ROW_7, **ROW_8, **ROW_9, **ROW_10}


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", ROW_7)
def test_row_07_statistics_counters_and_hooks_see_each_microbatch_once(name: str, found: dict[str, Comparison]) -> None:
    # Evaluation has other microbatches, which the counters see as they come.
    evaluated = ["hooked", "rows"] if "validation" in name else []
    # Under "loopedbfs" the last microbatch's gradients come first, and are added up in that order.
    assert_equal_to_one_device(found[name], exact="loopedbfs" not in name, ignore=evaluated)
    weights = found[name].ranks[0].weights
    assert all(value.isfinite().all() for value in weights.values())
    steps = 4 * (1 if "validation" in name else 2)
    assert all(weights[f"layers.{layer}.rows"][1] == 40 * steps for layer in range(8))
    assert all(weights[f"layers.{layer}.norm.num_batches_tracked"] == 4 * steps for layer in range(8))


@pytest.mark.parametrize("name", ROW_8)
def test_row_08_evaluation_in_any_order(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    expected = found[name].plain.result
    for rank, outcome in enumerate(found[name].ranks):
        for key in ("before", "test", "after"):
            assert outcome.result[key][0] == pytest.approx(expected[key][0], abs=1e-5)
        for key in ("first fit", "left alone"):
            assert outcome.result[key] == pytest.approx(expected[key], abs=1e-5)
        for key in ("predicted before", "predicted"):
            if rank == 0:
                torch.testing.assert_close(outcome.result[key], expected[key], rtol=1e-5, atol=1e-5)
            else:
                assert all(entry is None for entry in outcome.result[key] or [])


@pytest.mark.parametrize("name", [name for name in ROW_9 if CASES[name].plain != "none"])
def test_row_09_validation_has_sizes_of_its_own(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    expected = found[name].plain.logged
    for outcome in found[name].ranks:
        for key in ("val_loss", "val_error"):
            assert outcome.logged[key].dtype == torch.float32
            torch.testing.assert_close(outcome.logged[key], expected[key], rtol=1e-5, atol=1e-5)


def test_row_09_metrics_are_float32_on_every_rank(found: dict[str, Comparison]) -> None:
    ranks = found["9 bf16-true"].ranks
    assert [outcome.text for outcome in ranks] == [""] * 3
    for outcome in ranks:
        assert outcome.weights["layers.0.linear.weight"].dtype == torch.bfloat16
        assert outcome.logged["val_loss"].dtype == torch.float32
        assert outcome.logged == ranks[0].logged


def _alive(outcome: Outcome, balance: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [note[1:] for note in outcome.notes if note[0] == balance]


def test_row_10_memory_is_flat_over_20_rebuilds(found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found["10 rebuilds"], ignore=["calls"])
    for outcome in found["10 rebuilds"].ranks:
        assert len(outcome.notes) == 24
        for balance in ((4, 4), (1, 7), (7, 1), (2, 6)):
            alive = _alive(outcome, balance)
            tensors, sizes, stages = zip(*alive[1:], strict=True)
            assert max(tensors) - min(tensors) <= 2, alive  # a measured batch leaves a number or two
            assert max(sizes) - min(sizes) <= 64, alive
            assert max(stages) <= 1


def test_row_10_a_leak_would_be_noticed(found: dict[str, Comparison]) -> None:
    for outcome in found["10 twin"].ranks:
        alive = _alive(outcome, (4, 4))
        assert alive[1][1] + 64 < alive[-1][1]
    assert weights_differ(found["10 twin"].ranks[0], found["10 rebuilds"].plain, ignore=["calls"]) == []
