"""CASES rows 1-6: batches, shapes, dtypes."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.cases.border_layers import (
    all_dtypes,
    dicts_and,
    tuples_of_all_lengths,
    with_a_changing_constant,
    with_an_object,
)
from tests.cases.modules import SCHEDULES, WIDTH, Chain, Layer, eight_layers, regression
from tests.cases.running import (
    Case,
    Comparison,
    assert_equal_to_one_device,
    assert_refused_alike,
    run_cases,
    weights_differ,
)
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

# Row 1: batches that do not divide

uneven = partial(regression, (10, 10, 5, 3, 2, 1, 10, 7))
tens = partial(regression, (10, 10, 10))
_EIGHT = Case(partial(Chain, eight_layers), uneven)


def epochs_with_a_short_end() -> DataLoader:
    (batch,) = regression([23])
    samples = list(zip(*batch, strict=True))
    generator = torch.Generator().manual_seed(5)
    return DataLoader(samples, batch_size=10, shuffle=True, generator=generator)


class MeanOfMeans(Chain):
    """The negative twin: weighs microbatches alike, whatever their size."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (2.5 / len(batch[0]))


ROW_1 = {
    **{f"1 {schedule}": replace(_EIGHT, strategy={"schedule": schedule}) for schedule in SCHEDULES},
    "1 accumulated": replace(_EIGHT, trainer={"accumulate_grad_batches": 3}, strategy={"schedule": "zbvzerobubble"}),
    "1 fewer than stages": replace(_EIGHT, ranks=4),
    "1 fewer than stages, dualpipev": replace(
        _EIGHT, ranks=4, strategy={"schedule": "dualpipev", "num_microbatches": 8}
    ),
    "1 chosen number": replace(_EIGHT, ranks=4, strategy={"num_microbatches": "auto"}),
    "1 replicas": replace(
        _EIGHT,
        train=partial(regression, (20, 20, 10, 6, 4, 2, 20)),
        ranks=4,
        strategy={"data_parallel_size": 2, "schedule": "interleaved1f1b"},
        trainer={"accumulate_grad_batches": 2},
    ),
    "1 short end of shuffled epochs": replace(
        _EIGHT, train=epochs_with_a_short_end, trainer={"max_epochs": 3, "accumulate_grad_batches": 2}
    ),
    "1 twin": Case(MeanOfMeans, tens, plain="none"),
    "1 twin's model": Case(Chain, tens),
}

# Row 2: lengths that change


class AnyLength(TinyGPT):
    """Sequences of any length, also in validation; the loss is the batch's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def of_lengths(lengths: Sequence[int], size: int = 8) -> list[tuple[Tensor, Tensor]]:
    tokens, targets = next(iter(token_loader(size, size)))
    return [(tokens[:, :length], targets[:, :length]) for length in lengths]


_LENGTHS = Case(AnyLength, partial(of_lengths, (8, 3, 5, 8, 1, 7, 4, 2)), val=partial(of_lengths, (2, 6, 3), 6))
ROW_2 = {
    "2 every step": replace(_LENGTHS, ranks=3),
    "2 within accumulation": replace(
        _LENGTHS, ranks=3, trainer={"accumulate_grad_batches": 3, "val_check_interval": 4}
    ),
    "2 zbvzerobubble": replace(_LENGTHS, strategy={"schedule": "zbvzerobubble"}, trainer={"val_check_interval": 2}),
    "2 interleaved1f1b, moves": replace(
        _LENGTHS, strategy={"schedule": "interleaved1f1b"}, moves=[(1, 2, 2, 2), (3, 1, 1, 2), (2, 2, 2, 1)]
    ),
}

# Row 3: numbers of microbatches


def _counts(schedule: str, count: int, **options: Any) -> Case:
    options = {"ranks": 3, "plain": "none", **options}
    return replace(_EIGHT, strategy={"schedule": schedule, "num_microbatches": count}, **options)


ROW_3 = {
    "1f1b with 2": (_counts("1f1b", 2), ("at least as many microbatches as stages (3)", "num_microbatches=3")),
    "dualpipev with 5": (_counts("dualpipev", 5), ("as many microbatches as stages (6)", "num_microbatches=6")),
    "interleaved1f1b with 7": (
        _counts("interleaved1f1b", 7),
        ("equal rounds of 3 or more", "num_microbatches=6 or num_microbatches=8", "'loopedbfs'"),
    ),
    "interleavedzerobubble with 5": (
        _counts("interleavedzerobubble", 5, ranks=2),
        ("equal rounds of 2 or more", "num_microbatches=4 or num_microbatches=6"),
    ),
}

# Row 4: kinds of batches

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    scale: float = 1.0
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor

    def to(self, device: Any) -> Frozen:
        return Frozen(self.x.to(device), self.y.to(device))


def _as_kind(kind: str, x: Tensor, y: Tensor) -> Any:
    names = [f"sample {index}" for index in range(len(x))]
    if kind == "BatchEncoding":
        from transformers import BatchEncoding

        return BatchEncoding({"x": x, "y": y})
    return {
        "dict": {"x": x, "y": y, "names": names},
        "list": [x, y],
        "namedtuple": Pair(x, y),
        "dataclass": Sample(x, y, names=names),
        "frozen dataclass": Frozen(x, y),
        "nested": {"inputs": ({"x": x}, names), "targets": [Pair(x, y)], "version": 3, "none": None},
    }[kind]


def _parts(batch: Any) -> tuple[Tensor, Tensor, list[str] | None]:
    if isinstance(batch, Sample):
        return batch.x, batch.y, batch.names
    if isinstance(batch, Pair | Frozen):
        return batch.x, batch.y, None
    if isinstance(batch, list):
        return batch[0], batch[1], None
    if "inputs" in batch:
        assert batch["version"] == 3
        return batch["inputs"][0]["x"], batch["targets"][0].y, batch["inputs"][1]
    return batch["x"], batch["y"], batch.get("names")


class AnyKind(Chain):
    """Takes its batch apart, and says what goes into the pipeline."""

    def pipeline_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (_parts(batch)[0],), {}

    def loss(self, batch: Any) -> Tensor:
        x, y, names = _parts(batch)
        assert names is None or len(names) == len(x)
        return F.mse_loss(self(x), y)


def of_kind(kind: str) -> list[Any]:
    return [_as_kind(kind, *batch) for batch in regression((10, 8, 9, 3))]


KINDS = ("dict", "list", "namedtuple", "dataclass", "frozen dataclass", "nested", "BatchEncoding")


class LaterAutocast(Callback):
    """Autocast from the second step on, as a user may do in hooks."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.context = torch.autocast("cpu", torch.bfloat16)
            self.context.__enter__()

    def on_train_end(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)


def later_autocast() -> list[Callback]:
    return [LaterAutocast()]


class Moody(Layer):
    """Changes its dtype for no reason that anyone could know."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        output = super().forward(x)
        return output.half() if self.steps > 4 else output


class LossInFloat(Chain):
    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]).float(), batch[1])


class Linear(nn.Module):
    """Returns what autocast makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def linears() -> list[nn.Module]:
    return [Linear() for _ in range(5)]


def moody_layers() -> list[nn.Module]:
    return [Layer(), Layer(), Layer(), Moody(), Layer()]


eights = partial(regression, (8, 8, 8, 8))
ROW_4 = {
    **{f"4 {kind}": Case(AnyKind, partial(of_kind, kind), val=partial(of_kind, kind)) for kind in KINDS},
    "4 autocast": Case(
        partial(LossInFloat, linears),
        eights,
        plain="microbatches",
        trainer={"precision": "bf16-mixed"},
        strategy={"schedule": "zbvzerobubble", "num_microbatches": 4},
    ),
    "4 autocast later": Case(partial(LossInFloat, linears), eights, ranks=3, callbacks=later_autocast, plain="none"),
    "4 autocast never": Case(partial(LossInFloat, linears), eights, ranks=3, plain="none"),
    "4 moody": Case(partial(LossInFloat, moody_layers), eights, ranks=3, plain="none"),
}

# Rows 5 and 6: what crosses a border


class LossOfDict(Chain):
    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0])["logits"], batch[1])


ROW_5 = {
    f"5 {schedule}": Case(partial(Chain, all_dtypes), partial(regression, (8, 8, 4)), strategy={"schedule": schedule})
    for schedule in ("1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev")
}
# Positions are counted in each microbatch, as its layers see nothing else.
ROW_5 = {name: replace(case, plain="microbatches", trainer={"max_epochs": 2}) for name, case in ROW_5.items()}
ROW_6 = {
    "6 tuples": Case(partial(Chain, tuples_of_all_lengths), tens, ranks=3),
    "6 tuples, dualpipev": Case(partial(Chain, tuples_of_all_lengths), tens, strategy={"schedule": "dualpipev"}),
    "6 dict": Case(partial(LossOfDict, partial(dicts_and, "dict")), tens, val=tens, ranks=3),
    "6 ModelOutput": Case(partial(LossOfDict, partial(dicts_and, "hf")), tens, strategy={"schedule": "zbvzerobubble"}),
    "6 object": Case(partial(Chain, with_an_object), tens, ranks=3, plain="none"),
    "6 changing constant": Case(partial(Chain, with_a_changing_constant), tens, ranks=3, plain="none"),
}

CASES = {**ROW_1, **ROW_2, **{f"3 {k}": v[0] for k, v in ROW_3.items()}, **ROW_4, **ROW_5, **ROW_6}
EQUAL = [name for name, case in CASES.items() if case.plain != "none"]


def of_row(row: int) -> list[str]:
    return [name for name in EQUAL if name.startswith(f"{row} ") and "twin" not in name]


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", of_row(1))
def test_row_01_batches_that_do_not_divide(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


def test_row_01_a_mean_of_means_would_be_noticed(found: dict[str, Comparison]) -> None:
    assert weights_differ(found["1 twin"].ranks[0], found["1 twin's model"].plain, ignore=["calls"])


@pytest.mark.parametrize("name", of_row(2))
def test_row_02_sequence_length_changes(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    for outcome in found[name].ranks:
        torch.testing.assert_close(
            outcome.logged["val_loss"], found[name].plain.logged["val_loss"], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", ROW_3)
def test_row_03_illegal_numbers_of_microbatches(name: str, found: dict[str, Comparison]) -> None:
    assert_refused_alike(found[f"3 {name}"], "ValueError", *ROW_3[name][1])


@pytest.mark.parametrize("name", of_row(4))
def test_row_04_kinds_of_batches_and_autocast(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], exact=name == "4 autocast", ignore=["calls"])


def test_row_04_autocast_from_the_second_step_on(found: dict[str, Comparison]) -> None:
    later, never = found["4 autocast later"].ranks, found["4 autocast never"].ranks
    assert [outcome.text for outcome in later] == [""] * 3
    assert weights_differ(later[0], never[0])
    assert all(weights_differ(outcome, later[0], exact=True) == [] for outcome in later)


def test_row_04_a_dtype_that_changes_by_itself(found: dict[str, Comparison]) -> None:
    assert_refused_alike(
        found["4 moody"],
        "PipelineError",
        "layer 3 (Moody)",
        "float16[2, 6]",
        "expects float32[2, 6]",
        "Make the layer's",
    )


@pytest.mark.parametrize("name", of_row(5))
def test_row_05_integers_booleans_and_complex_numbers_at_borders(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name])


@pytest.mark.parametrize("name", of_row(6))
def test_row_06_tuples_dicts_none_and_constants_at_borders(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name])


def test_row_06_what_cannot_cross_is_named(found: dict[str, Comparison]) -> None:
    assert_refused_alike(
        found["6 object"],
        "ValueError",
        "layer 1 (ReturnsObject) returns a object at position [1]['state'][1]",
        "only the last layer may",
    )
    assert_refused_alike(
        found["6 changing constant"], "PipelineError", "layer 1 (Counting) returned float32[2, 6]", ", 1, but the next"
    )
