"""CASES rows 32-34: splits, heavy ends, idle time."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from tests.cases.modules import WIDTH, Chain, Layer, regression
from tests.cases.running import Case, Comparison, assert_equal_to_one_device, assert_refused_alike, run_cases

pytestmark = pytest.mark.distributed

eights = partial(regression, (8,) * 6)


def seven_layers() -> list[nn.Module]:
    return [Layer() for _ in range(7)]


class NotesBalance(Chain):
    """Notes the split at the start and after each step."""

    def on_train_start(self) -> None:
        self._note()

    def on_train_batch_end(self, *args: Any) -> None:
        self._note()

    def _note(self) -> None:
        runtime = getattr(self.trainer.strategy, "runtime", None)
        self.notes.append(None if runtime is None else list(runtime.assignment.balance))


# Row 32: any number of layers on any number of stages

_SEVEN = Case(partial(NotesBalance, seven_layers), eights)
EXPECTED = {
    "32 uniform on 2": (replace(_SEVEN), [4, 3]),
    "32 uniform on 3": (replace(_SEVEN, ranks=3), [3, 2, 2]),
    "32 uniform on 4": (replace(_SEVEN, ranks=4, strategy={"balance": "uniform"}), [2, 2, 2, 1]),
    "32 own split": (replace(_SEVEN, ranks=3, strategy={"balance": [1, 5, 1]}), [1, 5, 1]),
    "32 own split, interleaved1f1b": (
        replace(_SEVEN, strategy={"balance": [1, 3, 1, 2], "schedule": "interleaved1f1b"}),
        [1, 3, 1, 2],
    ),
    "32 own split, zbvzerobubble": (
        replace(_SEVEN, strategy={"balance": [3, 1, 2, 1], "schedule": "zbvzerobubble"}),
        [3, 1, 2, 1],
    ),
    "32 parameters": (replace(_SEVEN, ranks=3, strategy={"balance": "parameters"}), [3, 2, 2]),
}
REFUSED = {
    "32 wrong sum": ({"balance": [2, 2, 2]}, "balance=[2, 2, 2] places 6 layers on 3 stages", "balance=[3, 2, 2]"),
    "32 wrong length": ({"balance": [4, 3]}, "on 2 stages, but", "the pipeline 3 stages", "balance=[3, 2, 2]"),
    "32 an empty stage": ({"balance": [7, 0, 0]}, "at least 1"),
    "32 unknown": ({"balance": "uniformly"}, "Did you mean balance='uniform'?"),
    "32 more stages than layers": ({"schedule": "interleaved1f1b", "stages_per_rank": 3}, "9 stages for 7 layers"),
}


class Slow(nn.Module):
    """Takes its time, as much as it is told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        import time

        time.sleep(self.seconds)
        return x + torch.tanh(self.linear(x))


def one_slow_layer() -> list[nn.Module]:
    return [Slow(0.02), *(Slow(0.002) for _ in range(6))]


def planned_twice(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> dict[str, Any]:
    """Balances by time, saves, and starts again from what was saved and from what was printed."""
    from lightning_dynmo import DynMoStrategy
    from tests.helpers.fitting import QUIET

    trainer.fit(module, train)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.strategy.barrier()
    found = {"balanced": list(module.notes)}
    saved = torch.load(folder / "end.ckpt", weights_only=True)["lightning_dynmo"]["balance"]
    for name, balance, path in (("from the checkpoint", "time", folder / "end.ckpt"), ("given", saved, None)):
        module.notes.clear()
        again = Trainer(
            devices=trainer.world_size,
            strategy=DynMoStrategy(num_microbatches=4, balance=balance),
            max_epochs=2,
            **QUIET,
        )
        again.fit(module, train, ckpt_path=path)
        found[name] = [saved, *module.notes]
    return found


BY_TIME = {
    "32 time": Case(
        partial(NotesBalance, one_slow_layer),
        eights,
        ranks=3,
        strategy={"balance": "time"},
        trainer={"accumulate_grad_batches": 2},
    ),
    "32 planned twice": Case(
        partial(NotesBalance, one_slow_layer),
        eights,
        strategy={"balance": "time"},
        drive=planned_twice,
        plain="none",
    ),
}

# Rows 33 and 34: heavy ends, idle time


class Tokens(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0] * 10).long() % 64) + x


class Head(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def heavy_ends() -> list[nn.Module]:
    return [Tokens(256), *(Layer() for _ in range(5)), Head(128)]


class NotesLoads(Callback):
    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        runtime = getattr(trainer.strategy, "runtime", None)
        if runtime is not None:
            loads = [(load.time_s, load.num_parameters, load.state_bytes) for load in runtime.profile.loads]
            module.notes = {"loads": loads, "balance": list(runtime.assignment.balance), "busy": runtime.profile.busy_s}


def notes_loads() -> list[Callback]:
    return [NotesLoads()]


class LogsToFile(Chain):
    """Logs to a file, from which all that is shown can be read."""

    def __init__(self) -> None:
        super().__init__(one_slow_layer)


def logged(trainer: Trainer, module: Any, train: Any, val: Any, folder: Path) -> dict[str, Any]:
    """Trains with a logger; returns the last value of everything that was logged, and what the progress bar shows."""
    logger = CSVLogger(folder, name="", version="logs")
    trainer._logger_connector.configure_logger(logger)
    trainer.fit(module, train)
    logger.finalize("success")
    trainer.strategy.barrier()
    found: dict[str, float] = {}
    if trainer.is_global_zero:
        with (folder / "logs" / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                found |= {key: float(value) for key, value in row.items() if value}
    bar = {key: float(value) for key, value in trainer.progress_bar_metrics.items()}
    everywhere = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"file": found, "bar": bar, "everywhere": everywhere}


ROW_33_34 = {
    "33 parameters": Case(
        partial(Chain, heavy_ends),
        eights,
        ranks=3,
        strategy={"balance": "parameters", "load": "parameters"},
        callbacks=notes_loads,
    ),
    "33 time": Case(partial(Chain, one_slow_layer), eights, strategy={"balance": [4, 3]}, callbacks=notes_loads),
    "34 logged": Case(
        LogsToFile, eights, strategy={"balance": [4, 3]}, drive=logged, plain="none", trainer={"log_every_n_steps": 1}
    ),
}

CASES = {
    **{name: case for name, (case, _) in EXPECTED.items()},
    **{name: replace(_SEVEN, ranks=3, strategy=options[0], plain="none") for name, options in REFUSED.items()},
    **BY_TIME,
    **ROW_33_34,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    return run_cases(CASES)


@pytest.mark.parametrize("name", EXPECTED)
def test_row_32_any_number_of_layers_on_any_number_of_stages(name: str, found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found[name], ignore=["calls"])
    for outcome in found[name].ranks:
        assert outcome.notes[0] == EXPECTED[name][1]


@pytest.mark.parametrize("name", REFUSED)
def test_row_32_splits_that_cannot_be(name: str, found: dict[str, Comparison]) -> None:
    assert_refused_alike(found[name], "ValueError", *REFUSED[name][1:])


def test_row_32_balance_by_time_follows_the_first_measurement(found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found["32 time"], ignore=["calls"])
    for outcome in found["32 time"].ranks:
        balances = outcome.notes
        assert balances[:3] == [[3, 2, 2]] * 3  # as many parameters as can be, until the second batch is measured
        assert all(balance == balances[3] for balance in balances[3:])  # and then once and for all
        assert balances[3][0] == 1


def test_row_32_a_plan_is_saved_and_accepted_back(found: dict[str, Comparison]) -> None:
    for outcome in found["32 planned twice"].ranks:
        assert outcome.kind is None, outcome.text
        result = outcome.result
        assert result["balanced"][0] == [4, 3]
        assert result["balanced"][-1] == result["given"][0] == [1, 6]
        for name in ("from the checkpoint", "given"):
            assert all(balance == [1, 6] for balance in result[name])


def test_row_32_the_plan_is_printed_once(found: dict[str, Comparison], capfd: pytest.CaptureFixture[str]) -> None:
    again = run_cases({"32 own split": replace(EXPECTED["32 own split"][0], plain="none")})
    assert again["32 own split"].ranks[0].kind is None
    assert capfd.readouterr().out.count("[dynmo] 7 layers on 3 stages: balance=[1, 5, 1]") == 1


def test_row_33_the_ends_are_layers_with_cost_and_memory(found: dict[str, Comparison]) -> None:
    assert_equal_to_one_device(found["33 parameters"], ignore=["calls"])
    assert_equal_to_one_device(found["33 time"], ignore=["calls"])
    for outcome in found["33 parameters"].ranks:
        loads = outcome.notes["loads"]
        counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in heavy_ends()]
        assert [count for _, count, _ in loads] == counts
        assert all(size >= 4 * count for _, count, size in loads)
        assert outcome.notes["balance"][-1] == 1  # the head is the heaviest of all
    for outcome in found["33 time"].ranks:
        times = [seconds for seconds, _, _ in outcome.notes["loads"]]
        assert times[0] > 3 * max(times[1:])


def test_row_34_busy_and_idle_time_are_logged(found: dict[str, Comparison]) -> None:
    for outcome in found["34 logged"].ranks:
        assert outcome.kind is None, outcome.text
        everywhere = outcome.result["everywhere"]
        for key in ("dynmo/imbalance", "dynmo/bubble_ratio", "dynmo/step_time_s", "dynmo/load/stage_0"):
            assert key in everywhere
        assert everywhere == found["34 logged"].ranks[0].result["everywhere"]
        assert {"dynmo/imbalance", "dynmo/bubble_ratio"} <= outcome.result["bar"].keys()
    values = found["34 logged"].ranks[0].result["file"]
    assert values["dynmo/load/stage_0"] > 1.5 * values["dynmo/load/stage_1"]
    assert 0.1 < values["dynmo/bubble_ratio"] < 0.9  # the second stage waits for the slow layer of the first
    for stage in (0, 1):
        busy, waiting = values[f"dynmo/busy_s/stage_{stage}"], values[f"dynmo/wait_s/stage_{stage}"]
        assert busy + waiting == pytest.approx(values["dynmo/step_time_s"], rel=0.05)
    assert values["dynmo/wait_s/stage_1"] > values["dynmo/wait_s/stage_0"]
