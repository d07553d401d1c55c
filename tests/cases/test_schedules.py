"""CASES rows 26-30: schedules, compiled layers, failures, large messages, replicas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.cases.modules import SCHEDULES, SPLIT, WIDTH, Chain, Layer, eight_layers, regression
from tests.cases.running import (
    LIMIT_S,
    Case,
    Comparison,
    assert_equal_to_one_device,
    assert_refused_alike,
    run_cases,
    weights_differ,
)
from tests.cases.test_structure import Sided, WithSides, with_sides
from tests.helpers.fitting import QUIET

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

# Row 27: compiled and checkpointed layers


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


_COMPILED = Case(partial(Chain, compiled_layers), eights)
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
CASES = {**ROW_26, **ROW_27, **REENTRANT, **SAVED, **FAILURES, **ROW_29, **ROW_30}


def of_row(row: int) -> list[str]:
    return [name for name, case in CASES.items() if name.startswith(f"{row} ") and case.plain != "none"]


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", of_row(26))
def test_row_26_v_shaped_schedules(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


@pytest.mark.parametrize("name", of_row(27))
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
