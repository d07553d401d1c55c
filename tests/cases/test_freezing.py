"""CASES rows 17-19: freezing, unfreezing, and going on with frozen layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn

from tests.cases.modules import SCHEDULES, SPLIT, Chain, Layer, eight_layers, regression
from tests.cases.running import (
    Case,
    Comparison,
    assert_equal_to_one_device,
    assert_refused_alike,
    run_cases,
    weights_differ,
)

pytestmark = pytest.mark.distributed

eights = partial(regression, (8,) * 6)


class Freezes(Callback):
    """Freezes layers at given steps, and only those: all others train from then on."""

    def __init__(self, plan: dict[int, Sequence[int]]) -> None:
        self.plan = plan

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.plan:
            for index, layer in enumerate(module.layers):
                layer.requires_grad_(index not in self.plan[batch_idx])
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    parameter.grad = None


def freezes(plan: dict[int, Sequence[int]]) -> list[Callback]:
    return [Freezes(plan)]


# Row 17

PLANS: dict[str, dict[int, Sequence[int]]] = {
    "first": {0: range(3)},
    "middle": {0: (2, 3, 4)},
    "last": {0: (6, 7)},
    "more and more": {0: (0,), 1: range(2), 2: range(4), 3: range(5), 4: range(7)},
    "and back": {1: range(4), 2: (), 3: (3, 4), 4: range(7), 5: (0, 2, 4, 6)},
}
_FROZEN = Case(partial(Chain, eight_layers), eights)
ROW_17 = {
    f"17 {name}, {schedule}": replace(_FROZEN, strategy={"schedule": schedule}, callbacks=partial(freezes, plan))
    for name, plan in PLANS.items()
    for schedule in (SCHEDULES if name == "and back" else ("1f1b", "zbvzerobubble"))
}
ROW_17 |= {
    "17 and back, moves": replace(
        _FROZEN,
        callbacks=partial(freezes, PLANS["and back"]),
        ranks=3,
        moves=[(1, 1, 6), (4, 3, 1), (6, 1, 1), (2, 3, 3)],
        trainer={"gradient_clip_val": 0.2},
    ),
    "17 and back, replicas": replace(
        _FROZEN,
        callbacks=partial(freezes, PLANS["and back"]),
        ranks=4,
        strategy={"data_parallel_size": 2, "schedule": "dualpipev"},
    ),
    "17 all": replace(_FROZEN, callbacks=partial(freezes, {0: (), 2: range(8)}), ranks=3, plain="none"),
    "17 all from the start": replace(_FROZEN, callbacks=partial(freezes, {0: range(8)}), ranks=3, plain="none"),
    "17 twin": replace(_FROZEN, plain="none"),
}


class CountsBackwards(Layer):
    """Counts the backwards that reach its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("backwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(self._count)
        return output

    def _count(self, gradient: Tensor) -> None:
        self.backwards += 1


def counting_layers() -> list[nn.Module]:
    return [CountsBackwards() for _ in range(8)]


ROW_17["17 no backward"] = replace(
    _FROZEN,
    module=partial(Chain, counting_layers),
    callbacks=partial(freezes, {0: range(5)}),
    plain="microbatches",
    strategy={"schedule": "interleaved1f1b"},
)

# Row 18: Lightning's own way of fine-tuning, and going on from a checkpoint


class Thaws(BaseFinetuning):
    """Trains the last layers, and from the second epoch on those before, in a parameter group of their own."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(list(pl_module.layers[:5]))

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(list(pl_module.layers[2:5]), optimizer, lr=0.05)


class TrainsTheRest(Chain):
    """Gives its optimizer the trainable parameters only, as fine-tuning asks for."""

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trainable, lr=0.01, eps=1e-3)


def thaws() -> list[Callback]:
    return [Thaws()]


def freezing_by_the_rule() -> list[Callback]:
    from lightning_dynmo import LayerFreezingCallback

    return [LayerFreezingCallback(start_step=2, every_n_steps=3)]


def goes_on(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> dict[str, Any]:
    """Trains to the end, saving on the way; then goes on from the middle, as if nothing were known."""
    trainer.callbacks.append(ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1, filename="{epoch}"))
    trainer.fit(module, train)
    found = {"frozen": _frozen(module), "weights": {key: value.clone() for key, value in module.state_dict().items()}}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5).requires_grad_(True)
    again = _again(trainer)
    again.fit(module, train, ckpt_path=str(folder / "epoch=1.ckpt"))
    assert again.global_step == trainer.global_step
    return {**found, "frozen again": _frozen(module)}


def _frozen(module: Any) -> list[bool]:
    return [not any(parameter.requires_grad for parameter in layer.parameters()) for layer in module.layers]


def _again(trainer: Trainer) -> Trainer:
    """Returns a Trainer as new, with callbacks as new; on other stages where there are stages."""
    from tests.helpers.fitting import QUIET

    tunes = any(isinstance(callback, Thaws) for callback in trainer.callbacks)
    callbacks = thaws() if tunes else freezing_by_the_rule()
    options: dict[str, Any] = {"devices": 1}
    if trainer.world_size > 1:
        from lightning_dynmo import DynMoStrategy

        strategy = DynMoStrategy(num_microbatches=4, schedule="interleaved1f1b")
        options = {"devices": trainer.world_size, "strategy": strategy}
    return Trainer(**{**QUIET, **options}, max_epochs=4, num_sanity_val_steps=0, callbacks=callbacks)


_TUNED = Case(
    partial(TrainsTheRest, eight_layers),
    partial(regression, (8, 8, 8)),
    callbacks=thaws,
    trainer={"max_epochs": 4, "enable_checkpointing": True},
    drive=goes_on,
)
ROW_18 = {
    "18 fine-tuning": replace(_TUNED, ranks=3),
    "18 fine-tuning, zbvzerobubble": replace(_TUNED, strategy={"schedule": "zbvzerobubble"}),
    "18 freezing": replace(
        _TUNED, module=partial(Chain, eight_layers), callbacks=freezing_by_the_rule, ranks=3, plain="none"
    ),
}

# Row 19: split backward behind frozen layers

ROW_19 = {
    f"19 {schedule}, {frozen} frozen, on {ranks}": replace(
        _FROZEN,
        strategy={"schedule": schedule, "num_microbatches": 8 if ranks == 4 else 4},
        callbacks=partial(freezes, {0: range(frozen)}),
        ranks=ranks,
    )
    for schedule in SPLIT
    for frozen, ranks in ((1, 2), (2, 2), (4, 2), (5, 2), (7, 2), (1, 4), (3, 4), (6, 4))
}

CASES = {**ROW_17, **ROW_18, **ROW_19}


def of_row(row: int) -> list[str]:
    return [name for name, case in CASES.items() if name.startswith(f"{row} ") and case.plain != "none"]


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", of_row(17))
def test_row_17_freezing_and_unfreezing_on_the_way(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls", "backwards"])


def test_row_17_training_everything_would_be_noticed(found: dict[str, Comparison]) -> None:
    for name in PLANS:
        assert weights_differ(found["17 twin"].ranks[0], found[f"17 {name}, 1f1b"].plain, ignore=["calls"])


def test_row_17_a_frozen_front_has_no_backward(found: dict[str, Comparison]) -> None:
    for outcome in found["17 no backward"].ranks:
        counts = [int(outcome.weights[f"layers.{layer}.backwards"]) for layer in range(8)]
        assert counts == [0] * 5 + [4 * 6] * 3


@pytest.mark.parametrize("name", ["17 all", "17 all from the start"])
def test_row_17_nothing_to_train_is_an_error(name: str, found: dict[str, Comparison]) -> None:
    parts = ("No parameter of the pipeline requires a gradient", "Leave at least one layer unfrozen")
    assert_refused_alike(found[name], "ValueError", *parts)


@pytest.mark.parametrize("name", of_row(18))
def test_row_18_fine_tuning_goes_on_as_on_one_device(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    expected = found[name].plain.result
    for outcome in found[name].ranks:
        assert outcome.result["frozen"] == expected["frozen"] == [True, True] + [False] * 6
        # As Lightning has it, what was unfrozen on the way is frozen again in a resumed run.
        assert outcome.result["frozen again"] == expected["frozen again"]


def test_row_18_freezing_goes_on_as_if_it_had_not_stopped(found: dict[str, Comparison]) -> None:
    for outcome in found["18 freezing"].ranks:
        assert outcome.kind is None, outcome.text
        result = outcome.result
        assert result["frozen again"] == result["frozen"]
        assert sum(result["frozen"]) == 7
        for name, value in result["weights"].items():
            torch.testing.assert_close(outcome.weights[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", of_row(19))
def test_row_19_split_backward_behind_frozen_layers(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
