"""The state of every optimizer of torch that takes dense gradients moves with the layers, bit by bit.

The classes are looked up in `torch.optim`, and their options in the signatures, so that a new one is tested as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, differences, fit_as_pipeline, fit_on_one_device, load

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WIDTH, STEPS = 6, 7
OPTIONS = {"max_steps": STEPS}
BALANCES = [(4, 3), (1, 6), (6, 1)]  # the first is where it begins; moves after 3 and 6 steps
NOT_FOR_PIPELINES = {"Optimizer", "LBFGS", "SparseAdam"}  # no optimizer; is refused; takes no dense gradients
# Is for GPUs; is for differentiating through steps; changes a sign and no state.
SKIPPED_SWITCHES = {"capturable", "differentiable", "maximize"}

# What defaults leave out.
MORE: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "foreach": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.01}],
    "ASGD": [{"t0": 2.0}],
    "AdamW": [{"lr": torch.tensor(0.001), "foreach": False}, {"amsgrad": True, "fused": True}],
}


@dataclass(frozen=True)
class Case:
    """One optimizer with some options, which also makes its module."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.options.items())})"

    def __call__(self) -> Regression:
        return Regression(self.name, self.options)


def optimizer_names() -> list[str]:
    found = vars(torch.optim).items()
    classes = [name for name, entry in found if inspect.isclass(entry) and issubclass(entry, Optimizer)]
    return sorted({*classes} - NOT_FOR_PIPELINES)


def cases() -> list[Case]:
    """Returns every optimizer as it is, with each of its switches on, and with what is in `MORE`."""
    result = []
    for name in optimizer_names():
        result.append(Case(name))
        parameters = inspect.signature(getattr(torch.optim, name)).parameters
        for switch, parameter in parameters.items():
            if switch in ("foreach", "fused") or isinstance(parameter.default, bool):
                values = {"foreach": [True, False]}.get(switch, [not parameter.default])
                needs = {"momentum": 0.9} if switch == "nesterov" and "momentum" in parameters else {}
                result += [Case(name, {switch: value, **needs}) for value in values if switch not in SKIPPED_SWITCHES]
        result += [Case(name, options) for options in MORE.get(name, [])]
    return result


class Scaled(nn.Module):
    """A layer with parameters of 2, 1 and 0 dims, or of 2 dims alone."""

    def __init__(self, matrices_only: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=not matrices_only)
        self.scale = None if matrices_only else nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x if self.scale is None else self.scale * x


class Regression(LightningModule):
    def __init__(self, optimizer: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.options = options
        self.layers = nn.ModuleList(Scaled(matrices_only=False) for _ in range(7))
        try:
            self.configure_optimizers()
        except ValueError:  # such as Muon, which is for matrices
            self.layers = nn.ModuleList(Scaled(matrices_only=True) for _ in range(7))

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        assert loss.isfinite(), "else nothing could be compared"
        return loss

    def configure_optimizers(self) -> Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), **self.options)


def data(num_microbatches: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, STEPS * NUM_MICROBATCHES * 2, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=2 * num_microbatches)


def all_on_one_device(rank: int, folder: str) -> None:
    for number, case in enumerate(cases()):
        fit_on_one_device(rank, case, data, f"{folder}/one-{number}.ckpt", OPTIONS)


def all_as_pipelines(rank: int, folder: str, forget: bool) -> list[int]:
    if forget:
        _lose_state_in_moves()
    moved = []
    for number, case in enumerate(cases()):
        if forget and not is_checked_twice(case):
            continue
        path = f"{folder}/{'forgetful' if forget else 'moved'}-{number}.ckpt"
        _, moves = fit_as_pipeline(rank, case, data, path, OPTIONS, BALANCES)
        assert moves is not None
        moved.append(moves.moved_bytes)
    return moved


def is_checked_twice(case: Case) -> bool:
    """Says whether a case has a negative twin: each optimizer in its default form, and SGD with momentum."""
    return not case.options or case.options == {"momentum": 0.9}


def _lose_state_in_moves() -> None:
    from lightning_dynmo.pipeline import migration, runtime

    migrate = migration.migrate

    def forgetful(chain: Any, moves: Any, groups: Any, optimizers: Any) -> Any:
        result = migrate(chain, moves, groups, optimizers)
        for move in result.moves:
            for optimizer in optimizers:
                for parameter in chain.parameters(move.layer):
                    optimizer.state.pop(parameter, None)
        return result

    runtime.migrate = forgetful  # type: ignore[assignment]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the checkpoints of all cases, trained on one device."""
    folder = tmp_path_factory.mktemp("optimizers")
    run_distributed(all_on_one_device, 1, str(folder), init_process_group=False, timeout_s=300)
    return folder


def found_differences(folder: Path, kind: str) -> dict[str, list[str]]:
    result = {}
    for number, case in enumerate(cases()):
        if kind == "forgetful" and not is_checked_twice(case):
            continue
        one, other = load(folder / f"one-{number}.ckpt"), load(folder / f"{kind}-{number}.ckpt")
        keys = ("state_dict", "optimizer_states", "global_step")
        result[str(case)] = [entry for key in keys for entry in differences(other[key], one[key], key)]
    return result


def test_weights_and_optimizer_state_are_those_of_one_device(folder: Path) -> None:
    assert {"AdamW", "SGD", "Adagrad", "Adafactor", "NAdam", "RAdam", "ASGD", "Rprop"} <= {*optimizer_names()}
    moved = run_distributed(all_as_pipelines, 2, str(folder), False, timeout_s=400)
    assert all(moved_bytes > 0 for rank in moved for moved_bytes in rank)
    assert {case: found for case, found in found_differences(folder, "moved").items() if found} == {}


def test_state_that_is_lost_in_a_move_shows_for_every_optimizer_that_has_any(folder: Path) -> None:
    run_distributed(all_as_pipelines, 2, str(folder), True, timeout_s=400)
    found = found_differences(folder, "forgetful")
    assert len(found) == len(optimizer_names()) + 1
    assert {case for case, entries in found.items() if not entries} == {"SGD()"}


def test_what_is_left_out_cannot_be_tested() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        torch.optim.SparseAdam([parameter]).step()
