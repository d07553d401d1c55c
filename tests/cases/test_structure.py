"""CASES rows 20-23 and 25: side inputs, skips, buffers, tied weights, memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.cases.modules import SPLIT, WIDTH, Chain, Layer, regression
from tests.cases.running import Case, Comparison, assert_equal_to_one_device, run_cases, weights_differ
from tests.helpers.fitting import QUIET
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

tens = partial(regression, (10, 8, 3, 10))
SOME_SCHEDULES = ("1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev")

# Row 20: side inputs


class Sided(nn.Module):
    """Takes a mask and, where it names them, positions."""

    takes: tuple[str, ...] = ("mask", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        assert mask is not None
        return x + torch.tanh(self.linear(x)) * mask[:, None] * scale


class Placed(Sided):
    takes = ("positions",)

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(x) + self.places(positions)


def sided_layers() -> list[nn.Module]:
    return [Sided(), Placed(), Sided(), Layer(), Placed(), Sided(), Sided(), Placed()]


class WithSides(Chain):
    """Batches are dicts; `scale` is a number that all samples share."""

    def pipeline_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["x"],), {"mask": batch["mask"], "positions": batch["positions"], "scale": 0.5}

    def loss(self, batch: Any) -> Tensor:
        output = self(batch["x"], mask=batch["mask"], positions=batch["positions"], scale=0.5)
        return F.mse_loss(output, batch["y"])


def with_sides() -> list[Any]:
    batches = []
    for x, y in tens():
        numbers = torch.arange(len(x))
        batches.append({"x": x, "y": y, "mask": (numbers % 3 > 0).float(), "positions": (numbers * 5) % 16})
    return batches


_SIDED = Case(partial(WithSides, sided_layers), with_sides, val=with_sides)
ROW_20 = {
    **{f"20 {schedule}": replace(_SIDED, strategy={"schedule": schedule}) for schedule in SOME_SCHEDULES},
    "20 moves": replace(_SIDED, ranks=4, moves=[(1, 2, 2, 3), (4, 2, 1, 1), (1, 1, 1, 5)]),
}

# Row 21: long skips, encoder and decoder


class Down(nn.Module):
    """Keeps what it was given for the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return (torch.tanh(self.linear(x)), *skips, x)


class Up(Down):
    def forward(self, x: Tensor, *skips: Tensor) -> Any:
        *others, last = skips
        output = torch.tanh(self.linear(x)) + last
        return (output, *others) if others else output


def hourglass() -> list[nn.Module]:
    return [Down(), Down(), Down(), Down(), Up(), Up(), Up(), Up()]


class Encode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        return target, source + torch.tanh(self.linear(source))


class Decode(nn.Module):
    """Attends to the memory, which goes on to the next."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = last

    def forward(self, target: Tensor, memory: Tensor) -> Any:
        output = target + self.attention(target, memory, memory, need_weights=False)[0]
        return output if self.last else (output, memory)


def encoder_and_decoder() -> list[nn.Module]:
    return [Encode(), Encode(), Encode(), Decode(), Decode(), Decode(), Decode(True)]


class Translates(Chain):
    def pipeline_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch[0], batch[1]), {}

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0], batch[1]), batch[2])


def sentences() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    lengths = [(8, 3, 5), (8, 4, 2), (5, 1, 6)]
    return [
        (
            torch.randn(size, target, WIDTH, generator=generator),
            torch.randn(size, source, WIDTH, generator=generator),
            torch.randn(size, target, WIDTH, generator=generator),
        )
        for size, target, source in lengths
    ]


_HOURGLASS = Case(partial(Chain, hourglass), tens)
_TRANSLATES = Case(partial(Translates, encoder_and_decoder), sentences, val=sentences)
ROW_21 = {
    **{f"21 skips, {schedule}": replace(_HOURGLASS, strategy={"schedule": schedule}) for schedule in SOME_SCHEDULES},
    "21 skips, moves": replace(_HOURGLASS, ranks=4, moves=[(1, 1, 1, 5), (5, 1, 1, 1), (2, 2, 2, 2)]),
    **{f"21 decoder, {schedule}": replace(_TRANSLATES, strategy={"schedule": schedule}) for schedule in SOME_SCHEDULES},
    "21 decoder, 4 ranks": replace(_TRANSLATES, ranks=4),
}

# Row 22: buffers


class Rotary(nn.Module):
    """Its own non-persistent table, one that all layers share, and a buffer that the forward changes."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shared = shared
        self.register_buffer("own", torch.rand(WIDTH), persistent=False)
        self.register_buffer("running", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.lerp_(x.detach().mean(0), 0.1)
        turned = x * self.shared.cos + x.roll(1, -1) * self.shared.sin
        return x + torch.tanh(self.linear(turned) * self.own) - 0.1 * self.running


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.rand(WIDTH)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)


def rotary_layers() -> list[nn.Module]:
    table = Table()
    return [Rotary(table) for _ in range(6)]


class NotesBuffers(Chain):
    def on_train_epoch_end(self) -> None:
        runtime = getattr(self.trainer.strategy, "runtime", None)
        owned = range(len(self.layers)) if runtime is None else runtime.chain.owned
        self.notes = {
            (index, name): buffer.clone() for index in owned for name, buffer in self.layers[index].named_buffers()
        }


_ROTARY = Case(
    partial(NotesBuffers, rotary_layers), partial(regression, (8,) * 6), plain="microbatches", trainer={"max_epochs": 2}
)
ROW_22 = {
    "22 moves": replace(_ROTARY, ranks=3, moves=[(1, 1, 4), (4, 1, 1), (1, 4, 1), (2, 2, 2)]),
    "22 moves, zbvzerobubble": replace(
        _ROTARY, moves=[(1, 2, 1, 2), (3, 1, 1, 1), (1, 1, 1, 3)], strategy={"schedule": "zbvzerobubble"}
    ),
}

# Row 23: tied weights


class TiedGPT(TinyGPT):
    """Ties what it is told to tie."""

    def __init__(self, ties: str) -> None:
        super().__init__()
        if "head" in ties:
            self.head[1].weight = self.embedding.tokens.weight
        if "middle" in ties:
            self.blocks[3].out.weight = self.blocks[0].out.weight
            self.blocks[3].norm = self.blocks[0].norm
        if "three" in ties:
            for block in (self.blocks[2], self.blocks[4]):
                block.mlp[1].weight = self.blocks[0].mlp[1].weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def tokens() -> list[Any]:
    return list(token_loader(48, 8))


_TIED = Case(partial(TiedGPT, "head"), tokens, trainer={"gradient_clip_val": 0.5})
_TOGETHER = {2: [(6, 1), (1, 6)], 3: [(5, 1, 1), (1, 1, 5)], 4: [(1, 1, 1, 4), (4, 1, 1, 1), (2, 2, 2, 1)]}
ROW_23 = {
    **{f"23 head on {ranks}": replace(_TIED, ranks=ranks) for ranks in (2, 3, 4)},
    "23 head, moves": replace(_TIED, ranks=3, moves=_TOGETHER[3], trainer={"accumulate_grad_batches": 2}),
    "23 middle, moves": replace(_TIED, module=partial(TiedGPT, "middle"), ranks=4, moves=_TOGETHER[4]),
    "23 three, moves": replace(_TIED, module=partial(TiedGPT, "three head"), moves=_TOGETHER[2]),
    **{
        f"23 {schedule}": replace(_TIED, module=partial(TiedGPT, "head middle three"), strategy={"schedule": schedule})
        for schedule in SPLIT
    },
    "23 replicas": replace(
        _TIED,
        module=partial(TiedGPT, "head middle"),
        ranks=4,
        strategy={"data_parallel_size": 2},
        moves=_TOGETHER[2],
    ),
    "23 clipped by value": replace(
        _TIED, ranks=3, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "23 twin": replace(_TIED, module=partial(TiedGPT, ""), plain="none"),
}


# Row 25: resident memory

_WIDE = 256


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDE, _WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def wide_layers() -> list[nn.Module]:
    return [Wide() for _ in range(8)]


class Weighs(Callback):
    """Notes the bytes of all different storages of the module, its gradients and its optimizer."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        gradients = [parameter.grad for parameter in module.parameters()]
        tensors = [*module.parameters(), *gradients, *(value for value in states if isinstance(value, Tensor))]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
        runtime = getattr(trainer.strategy, "runtime", None)
        owned = 8 if runtime is None else len(runtime.chain.owned)
        module.notes.append((owned, sum(storages.values())))


def weighs() -> list[Callback]:
    return [Weighs()]


_WEIGHED = Case(partial(Chain, wide_layers, 0.01), partial(regression, (8,) * 4, width=_WIDE), callbacks=weighs)
ROW_25 = {
    "25 uniform": replace(_WEIGHED, ranks=4),
    "25 moves": replace(_WEIGHED, ranks=3, moves=[(1, 1, 6), (6, 1, 1), (2, 4, 2)]),
    "25 zbvzerobubble": replace(_WEIGHED, strategy={"schedule": "zbvzerobubble"}),
}

CASES = {**ROW_20, **ROW_21, **ROW_22, **ROW_23, **ROW_25}


def of_row(row: int) -> list[str]:
    return [name for name, case in CASES.items() if name.startswith(f"{row} ") and case.plain != "none"]


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", of_row(20))
def test_row_20_side_inputs_reach_every_stage(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


@pytest.mark.parametrize("name", of_row(21))
def test_row_21_long_skips_encoder_and_decoder(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name])


def test_row_21_the_plan_counts_the_bytes_of_skips(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_dynmo import DynMoStrategy
    from lightning_dynmo.cli.plan import plan

    module = Chain(hourglass)
    module.train_dataloader = lambda: DataLoader(regression((8,)), batch_size=None)  # type: ignore[method-assign]
    strategy = DynMoStrategy(num_microbatches=4, balance=[2, 2, 4])
    plan(Trainer(devices=3, strategy=strategy, **QUIET), module, None)
    tensor = 2 * WIDTH * 4  # bytes of one activation of a microbatch
    sent = f"stage 0 to 1 {3 * tensor} B, stage 1 to 2 {5 * tensor} B"
    assert f"Sent forward per microbatch: {sent}" in capsys.readouterr().out


@pytest.mark.parametrize("name", of_row(22))
def test_row_22_all_buffers_move(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], exact=True)
    expected = found[name].plain.notes
    seen = set()
    for outcome in found[name].ranks:
        for key, value in outcome.notes.items():
            assert torch.equal(value, expected[key]), key
        seen |= outcome.notes.keys()
    assert seen == expected.keys()
    assert {key[1] for key in seen} == {"own", "running", "shared.cos", "shared.sin"}


@pytest.mark.parametrize("name", of_row(23))
def test_row_23_tied_weights(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])


def test_row_23_weights_that_are_not_tied_would_be_noticed(found: dict[str, Comparison]) -> None:
    assert weights_differ(found["23 twin"].ranks[0], found["23 head on 2"].plain, ignore=["calls"])


@pytest.mark.parametrize("name", of_row(25))
def test_row_25_resident_bytes_follow_the_own_layers(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name])
    layer = 3 * 4 * (_WIDE + 1) * _WIDE  # weight, gradient, momentum
    assert found[name].plain.notes[-1] == (8, 8 * layer)
    for outcome in found[name].ranks:
        for owned, size in outcome.notes:
            assert owned * layer <= size <= owned * layer + 4096, (owned, size / layer)
