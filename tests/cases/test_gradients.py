"""CASES rows 11-16: gradients and precision."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.cases.modules import SPLIT, WIDTH, Chain, Layer, eight_layers, regression
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
_EIGHT = Case(partial(Chain, eight_layers), eights)


# Row 11: accumulation


def joined(size: int, count: int) -> list[Any]:
    """Returns the same samples in batches that are `count` times as large."""
    batches = regression((size,) * 6)
    return [
        tuple(torch.cat(parts) for parts in zip(*batches[start : start + count], strict=True))
        for start in range(0, len(batches), count)
    ]


_JOINED = Case(
    partial(Chain, eight_layers),
    eights,
    trainer={"accumulate_grad_batches": 3},
    plain_train=partial(joined, 8, 3),
    plain_trainer={"accumulate_grad_batches": 1},
)
ROW_11 = {
    **{f"11 {schedule}": replace(_JOINED, strategy={"schedule": schedule}) for schedule in ("gpipe", "1f1b", *SPLIT)},
    "11 replicas": replace(_JOINED, ranks=4, strategy={"data_parallel_size": 2, "num_microbatches": 2}),
    "11 clipped": replace(_JOINED, ranks=3, trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}),
    "11 twin": replace(_JOINED, ranks=3, trainer={"accumulate_grad_batches": 2}, plain="none"),
}

# Row 12: weighted means


class Masked(Chain):
    """A mean over the rows that count; with `weighted`, it says how many there were."""

    def __init__(self, weighted: bool, safe: bool = False) -> None:
        super().__init__(eight_layers)
        self.weighted, self.safe = weighted, safe

    def pipeline_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch[0],), {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, mask = batch
        errors = (self(x) - y).square().mean(1)
        total = mask.sum().clamp(min=1) if self.safe else mask.sum()
        loss = (errors * mask).sum() / total
        self.log("loss", loss, batch_size=int(mask.sum()), on_step=False, on_epoch=True)
        return {"loss": loss, "weight": mask.sum()} if self.weighted else loss


def masked(kind: str, joined: bool) -> list[Any]:
    """Returns batches with a mask over rows; `joined` makes one batch of each two."""
    batches = []
    for index, (x, y) in enumerate(regression((16,) * 6)):
        mask = (torch.arange(16) * 7 + index) % 5 < 2 + index % 3
        if kind == "empty microbatches":
            mask[:4], mask[8:12] = False, False  # for replicas too
        if kind == "nothing" and index // 2 == 1:
            mask[:] = False  # in the whole second step
        batches.append((x, y, mask.float()))
    pairs = zip(batches[::2], batches[1::2], strict=True)
    together = [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in pairs]
    return together if joined else batches


def _weighted(kind: str = "", **options: Any) -> Case:
    """The one-device run takes the mean over all rows of a step, which are in one batch there."""
    safe = kind == "nothing"
    return replace(
        Case(partial(Masked, True, safe), partial(masked, kind, False), trainer={"accumulate_grad_batches": 2}),
        plain_train=partial(masked, kind, True),
        plain_trainer={"accumulate_grad_batches": 1},
        **options,
    )


ROW_12 = {
    "12 accumulated": _weighted(ranks=3),
    **{f"12 {schedule}": _weighted(strategy={"schedule": schedule}) for schedule in SPLIT},
    "12 replicas": _weighted(ranks=4, strategy={"data_parallel_size": 2, "num_microbatches": 2}),
    "12 empty microbatches": _weighted("empty microbatches", ranks=3),
    "12 empty microbatches, replicas": _weighted(
        "empty microbatches", ranks=4, strategy={"data_parallel_size": 2, "num_microbatches": 2}
    ),
    "12 nothing counts in a step": _weighted("nothing", ranks=3),
    "12 twin": replace(_weighted(), module=partial(Masked, False), plain="none"),
}


class Negative(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": -1}


class Sometimes(Chain):
    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        loss = self.loss(batch)
        return {"loss": loss, "weight": 1} if self.seen % 2 else loss


ROW_12["12 negative"] = Case(Negative, partial(regression, (8,)), ranks=3, plain="none")
ROW_12["12 sometimes"] = Case(Sometimes, partial(regression, (8,)), ranks=3, plain="none")

# Row 13: the last, incomplete window

_WINDOW = replace(
    _EIGHT, train=partial(regression, (8, 8, 8, 8, 8)), trainer={"accumulate_grad_batches": 3, "max_epochs": 2}
)
ROW_13 = {
    **{f"13 {schedule}": replace(_WINDOW, strategy={"schedule": schedule}) for schedule in ("1f1b", "zbvzerobubble")},
    "13 and a short batch": replace(_WINDOW, train=partial(regression, (8, 8, 8, 3)), ranks=3),
    "13 replicas": replace(_WINDOW, ranks=4, strategy={"data_parallel_size": 2, "schedule": "dualpipev"}),
    "13 moves": replace(_WINDOW, ranks=3, moves=[(2, 3, 3), (4, 3, 1), (1, 1, 6)]),
}

# Row 14: clipping


class OwnClipping(Chain):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class NoWeights(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def partly_without_gradients() -> list[nn.Module]:
    """A rank of three has no parameter, another only frozen ones."""
    frozen = [Layer().requires_grad_(False) for _ in range(2)]
    return [Layer(), Layer(), NoWeights(), NoWeights(), *frozen, Layer(), Layer()]


def _clipped(algorithm: str, value: float, **options: Any) -> Case:
    trainer = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    return replace(_EIGHT, trainer=trainer, **options)


ROW_14 = {
    "14 norm": _clipped("norm", 0.1, ranks=4),
    "14 value": _clipped("value", 0.02, ranks=4),
    **{
        f"14 {kind}, {name}": _clipped(kind, value, strategy={"schedule": name})
        for kind, value in (("norm", 0.1), ("value", 0.02))
        for name in ("interleaved1f1b", "zbvzerobubble")
    },
    **{
        f"14 {kind}, replicas": _clipped(kind, value, ranks=4, strategy={"data_parallel_size": 2})
        for kind, value in (("norm", 0.1), ("value", 0.02))
    },
    **{
        f"14 {kind}, ranks without gradients": _clipped(
            kind, value, ranks=4, module=partial(Chain, partly_without_gradients), strategy={"balance": [2, 2, 2, 2]}
        )
        for kind, value in (("norm", 0.1), ("value", 0.02))
    },
    "14 own": replace(_EIGHT, module=partial(OwnClipping, eight_layers), ranks=3),
    "14 twin": replace(_EIGHT, plain="none"),
}

# Rows 15 and 16: precision


def scaler() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]


class NormsInFloat(Chain):
    """Keeps its layer norms in float32 under ``bf16-true``, as many large models do."""

    def on_fit_start(self) -> None:
        for layer in self.layers:
            layer.norm.float()


class CastingLayer(Layer):
    """Takes its norm in float32, whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        normed = F.layer_norm(x.float(), (WIDTH,), self.norm.weight.float(), self.norm.bias.float())
        return x + torch.tanh(self.linear(normed.to(self.linear.weight.dtype)))


def casting_layers() -> list[nn.Module]:
    return [CastingLayer() for _ in range(8)]


class Precise(Chain):
    """Takes the loss in float32."""

    def loss(self, batch: Any) -> Tensor:
        output = self(batch[0])
        self.notes.append(str(output.dtype))
        return F.mse_loss(output.float(), batch[1].float())


class PreciseWithNormsInFloat(Precise, NormsInFloat):
    pass


_PRECISE = Case(partial(Precise, casting_layers), eights, plain="microbatches")
ROW_16 = {
    **{
        f"16 {kind}": replace(_PRECISE, trainer={"precision": kind}, ranks=3)
        for kind in ("bf16-mixed", "bf16-true", "64-true", "32-true", "16-true")
    },
    "16 bf16-true, zbvzerobubble": replace(
        _PRECISE, trainer={"precision": "bf16-true"}, strategy={"schedule": "zbvzerobubble"}
    ),
    "16 bf16-mixed, dualpipev": replace(
        _PRECISE, trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.1}, strategy={"schedule": "dualpipev"}
    ),
    "16 norms in float32": replace(
        _PRECISE,
        module=partial(PreciseWithNormsInFloat, casting_layers),
        trainer={"precision": "bf16-true"},
        ranks=3,
        moves=[(1, 1, 6), (3, 3, 2), (6, 1, 1)],
    ),
}
ROW_15 = {
    "15 scaler": replace(_EIGHT, plugins=scaler, ranks=3, plain="none"),
    # On the CPU, Lightning itself takes bf16-mixed for it.
    "15 16-mixed on the CPU": replace(_PRECISE, trainer={"precision": "16-mixed"}, ranks=3),
}

CASES = {**ROW_11, **ROW_12, **ROW_13, **ROW_14, **ROW_15, **ROW_16}


def of_row(row: int) -> list[str]:
    return [name for name, case in CASES.items() if name.startswith(f"{row} ") and case.plain != "none"]


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", of_row(11))
def test_row_11_accumulation_equals_a_larger_batch(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


def test_row_11_another_window_would_be_noticed(found: dict[str, Comparison]) -> None:
    assert weights_differ(found["11 twin"].ranks[0], found["11 1f1b"].plain, ignore=["calls"])


@pytest.mark.parametrize("name", of_row(12))
def test_row_12_weighted_means_over_the_whole_step(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    assert all(value.isfinite().all() for value in found[name].ranks[0].weights.values())
    expected = found[name].plain.logged["loss"]
    torch.testing.assert_close(found[name].ranks[0].logged["loss"], expected, rtol=1e-5, atol=1e-5)


def test_row_12_a_mean_of_means_would_be_noticed(found: dict[str, Comparison]) -> None:
    assert weights_differ(found["12 twin"].ranks[0], found["12 accumulated"].plain, ignore=["calls"])


def test_row_12_weights_that_cannot_be(found: dict[str, Comparison]) -> None:
    assert_refused_alike(found["12 negative"], "PipelineError", "'weight': -1.0; expected a number of at least 0")
    assert_refused_alike(
        found["12 sometimes"], "PipelineError", "for some microbatches only; return it for all or none"
    )


@pytest.mark.parametrize("name", of_row(13))
def test_row_13_the_last_incomplete_window(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


@pytest.mark.parametrize("name", of_row(14))
def test_row_14_clipping_over_the_whole_model(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


def test_row_14_no_clipping_would_be_noticed(found: dict[str, Comparison]) -> None:
    for name in ("14 norm", "14 value"):
        assert weights_differ(found["14 twin"].ranks[0], found[name].plain, ignore=["calls"])


def test_row_15_loss_scaling_is_refused(found: dict[str, Comparison]) -> None:
    parts = ("precision='16-mixed' scales losses", "use precision='bf16-mixed'")
    assert_refused_alike(found["15 scaler"], "ValueError", *parts)


@pytest.mark.parametrize("name", of_row(15) + of_row(16))
def test_row_16_precision_holds_at_both_ends_of_every_border(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], exact=True)
    comparison = found[name]
    for outcome in comparison.ranks:
        assert set(outcome.notes) == set(comparison.plain.notes)


def test_row_16_the_precision_is_what_was_asked_for(found: dict[str, Comparison]) -> None:
    weights = {
        kind: found[f"16 {kind}"].ranks[0].weights["layers.3.linear.weight"].dtype
        for kind in ("bf16-mixed", "bf16-true", "64-true", "16-true")
    }
    expected = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    assert list(weights.values()) == expected
    norms = found["16 norms in float32"].ranks[0].weights
    assert (norms["layers.3.norm.weight"].dtype, norms["layers.3.linear.weight"].dtype) == (
        torch.float32,
        torch.bfloat16,
    )
