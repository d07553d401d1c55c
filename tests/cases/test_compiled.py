"""CASES row 27: compiled layers, and layers that compute their activations again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases.modules import SCHEDULES, SPLIT, Chain, Layer, eight_layers, regression
from tests.cases.running import (
    Case,
    Comparison,
    assert_equal_to_one_device,
    assert_refused_alike,
    run_cases,
)
from tests.cases.test_structure import Sided, WithSides, with_sides
from tests.helpers.fitting import QUIET

pytestmark = pytest.mark.distributed

_EIGHT = Case(partial(Chain, eight_layers), partial(regression, (8,) * 4))


def compiled_layers() -> list[nn.Module]:
    """Wrapped, in place, one inside another, and not at all."""
    in_place = Layer()
    in_place.compile(backend="aot_eager")
    inside = nn.Sequential(torch.compile(Layer(), backend="aot_eager"))
    return [torch.compile(Layer(), backend="aot_eager"), in_place, inside, Layer()]


def uncompiled_layers() -> list[nn.Module]:
    return [Layer(), Layer(), nn.Sequential(Layer()), Layer()]


class CompiledSided(WithSides):
    """Compiled layers with side inputs."""

    def __init__(self) -> None:
        super().__init__(lambda: [Sided() for _ in range(4)])
        for index, layer in enumerate(self.layers):
            self.layers[index] = torch.compile(layer, backend="aot_eager")

    def forward(self, x: Tensor, **side: Any) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x, mask=side["mask"], scale=side["scale"])
        return x

    def pipeline_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["x"],), {"mask": batch["mask"], "scale": 0.5}

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch["x"], mask=batch["mask"], scale=0.5), batch["y"])


def saves_and_loads(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> dict[str, Any]:
    """Saves compiled layers; then both spellings go into compiled layers and into others, and come to the same loss."""
    from lightning_dynmo import DynMoStrategy

    trainer.callbacks.append(ModelCheckpoint(folder))
    trainer.fit(module, train)
    trainer.save_checkpoint(folder / "after.ckpt")
    during = next(folder.glob("epoch*.ckpt"))
    saved = torch.load(during, weights_only=True)
    keys = {"during": list(saved["state_dict"]), "after": list(torch.load(folder / "after.ckpt")["state_dict"])}
    if trainer.is_global_zero:
        marked = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
        torch.save({**saved, "state_dict": marked}, folder / "marked.ckpt")
    losses = {}
    for layers in (compiled_layers, uncompiled_layers):
        for path in (during, folder / "marked.ckpt"):
            again = Trainer(
                devices=trainer.world_size, strategy=DynMoStrategy(num_microbatches=4), num_sanity_val_steps=0, **QUIET
            )
            trainer.strategy.barrier()
            (result,) = again.validate(Chain(layers), val, ckpt_path=str(path), verbose=False)
            losses[layers.__name__, path == during] = result["val_loss"]
    alone = Chain.load_from_checkpoint(during, layers=uncompiled_layers, weights_only=False)
    losses["alone"] = float(torch.stack([alone.loss(batch) for batch in val]).mean())
    return {"keys": keys, "losses": losses, "own keys": list(module.state_dict())}


def compiled_as_a_whole(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> None:
    trainer.fit(torch.compile(module, backend="aot_eager"), train)


class Checkpointed(Layer):
    """Drops its activations and computes them again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + checkpoint(self._inside, x, use_reentrant=self.reentrant)

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


def checkpointed_layers(reentrant: bool, count: int = 8) -> list[nn.Module]:
    return [Layer(), *(Checkpointed(reentrant) for _ in range(count - 1))]


def last_is_checkpointed() -> list[nn.Module]:
    return [*(Layer() for _ in range(7)), Checkpointed(True)]


_COMPILED = Case(partial(Chain, compiled_layers), partial(regression, (8,) * 4))
ROW_27 = {
    **{f"27 {schedule}": replace(_COMPILED, strategy={"schedule": schedule}) for schedule in ("1f1b", *SPLIT)},
    "27 moves, short batch": replace(
        _COMPILED, train=partial(regression, (8, 8, 3)), ranks=3, moves=[(1, 1, 2), (2, 1, 1)]
    ),
    "27 side inputs": Case(CompiledSided, with_sides, strategy={"schedule": "zbvzerobubble"}),
    **{
        f"27 use_reentrant=True, {schedule}": replace(
            _EIGHT, module=partial(Chain, partial(checkpointed_layers, True)), strategy={"schedule": schedule}
        )
        for schedule in SCHEDULES
        if schedule not in SPLIT
    },
    **{
        f"27 use_reentrant=False, {schedule}": replace(
            _EIGHT, module=partial(Chain, partial(checkpointed_layers, False)), strategy={"schedule": schedule}
        )
        for schedule in SPLIT
    },
}
REENTRANT = {
    **{
        f"27 refused, {schedule}": replace(
            _EIGHT,
            module=partial(Chain, partial(checkpointed_layers, True)),
            strategy={"schedule": schedule},
            plain="none",
        )
        for schedule in SPLIT
    },
    "27 refused, last layer": replace(
        _EIGHT, module=partial(Chain, last_is_checkpointed), strategy={"schedule": "zbvzerobubble"}, plain="none"
    ),
}
SAVED = {
    "27 saved": replace(
        _COMPILED,
        val=partial(regression, (8, 8), 2),
        ranks=3,
        drive=saves_and_loads,
        plain="none",
        trainer={"enable_checkpointing": True},
    ),
    "27 whole module": replace(_EIGHT, drive=compiled_as_a_whole, ranks=3, plain="none"),
}

CASES = {**ROW_27, **REENTRANT, **SAVED}


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", ROW_27)
def test_row_27_compiled_and_checkpointed_layers(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


def test_row_27_a_module_compiled_as_a_whole_is_refused_by_lightning(found: dict[str, Comparison]) -> None:
    assert_refused_alike(
        found["27 whole module"], "RuntimeError", "Using a compiled model is incompatible", "DynMoStrategy"
    )


@pytest.mark.parametrize("name", REENTRANT)
def test_row_27_reentrant_checkpointing_is_refused_where_the_backward_is_split(
    name: str, found: dict[str, Comparison]
) -> None:
    layer = 7 if name.endswith("last layer") else 1
    parts = (f"layer {layer} (Checkpointed)", "use_reentrant=True", "Call checkpoint(..., use_reentrant=False)")
    texts = {outcome.text for outcome in found[name].ranks}
    assert_refused_alike(found[name], "PipelineError", *(parts if layer == 7 else parts[1:]))
    assert all("(Checkpointed)" in text for text in texts)


def test_row_27_checkpoints_carry_no_mark_of_compilation(found: dict[str, Comparison]) -> None:
    expected = list(Chain(uncompiled_layers).state_dict())
    for outcome in found["27 saved"].ranks:
        assert outcome.kind is None, outcome.text
        assert outcome.result["keys"] == {"during": expected, "after": expected}
        assert any("_orig_mod" in key for key in outcome.result["own keys"])  # the module itself keeps them
        losses = list(outcome.result["losses"].values())
        assert losses == pytest.approx([losses[0]] * 5, abs=1e-5)
