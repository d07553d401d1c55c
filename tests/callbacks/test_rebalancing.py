"""When callbacks have the pipeline measured and rebalanced, alone and together, and what users read of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_dynmo.callbacks import DynamismCallback, LayerFreezingCallback, RebalanceCallback
from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET

SIZE = 4


class Sleeper(nn.Module):
    """Sleeps for a time that may change, in the forward."""

    def __init__(self, seconds: float, num_parameters: int) -> None:
        super().__init__()
        self.seconds = seconds  # the same on every rank, wherever the layer is
        self.weight = nn.Parameter(torch.zeros(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x + self.weight.sum()


class Model(LightningModule):
    def __init__(self, seconds: Sequence[float], num_parameters: Sequence[int] | None = None) -> None:
        super().__init__()
        sizes = num_parameters or [1] * len(seconds)
        self.layers = nn.ModuleList(Sleeper(*pair) for pair in zip(seconds, sizes, strict=True))
        self.lines: list[str] = []

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def print(self, *values: Any) -> None:
        self.lines += [line for line in map(str, values) if "[dynmo] step" in line or "loads per batch" in line]


class Measured(Callback):
    """Notes the optimizer steps that were measured, and the split that each step ran."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.balances: list[list[int]] = []
        self._last: Any = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.balances.append(list(trainer.strategy.runtime.assignment.balance))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        profile = trainer.strategy.runtime.profile
        if profile is not self._last:
            self.steps.append(trainer.global_step)
            self._last = profile


class SlowsDown(DynamismCallback):
    """Makes the first layers slow after a step."""

    def __init__(self, at: int, known: bool) -> None:
        super().__init__()
        self.at = at
        self.known = known

    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        if step == self.at:
            for layer, seconds in zip(pl_module.layers, UNEVEN, strict=True):
                layer.seconds = 2 * seconds
        return step == self.at

    def steps_until_change(self, step: int) -> float | None:
        if not self.known:
            return None
        return self.at - step if step <= self.at else math.inf


def fit(rank: int, seconds: Sequence[float], steps: int, callbacks: Sequence[Any], options: dict[str, Any]) -> Any:
    from lightning_dynmo import DynMoStrategy

    sizes = options.pop("num_parameters", None)
    accumulate = options.pop("accumulate_grad_batches", 1)
    model, measured = Model(seconds, sizes), Measured()
    trainer = Trainer(
        devices=2,
        strategy=DynMoStrategy(num_microbatches=options.pop("num_microbatches", 2), **options),
        max_steps=steps,
        callbacks=[*callbacks, measured],
        accumulate_grad_batches=accumulate,
        log_every_n_steps=10_000,
        **QUIET,
    )
    data = torch.zeros(1000 * SIZE, 3)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=SIZE))
    return model.lines, measured.steps, measured.balances


def fits(seconds: Sequence[float], steps: int, callbacks: Sequence[Any], **options: Any) -> Any:
    first, second = run_distributed(fit, 2, seconds, steps, callbacks, options)
    assert first[1:] == second[1:], "all ranks measure and move the same"
    return first


UNEVEN = [0.01, 0.01, 0.015, 0.0, 0.0, 0.0]  # 35 and 0 ms; (2, 4) has 20 and 15


@pytest.mark.distributed
def test_a_black_box_moves_at_its_first_rebalance_and_is_verified() -> None:
    lines, measured, balances = fits(UNEVEN, 16, [RebalanceCallback(every_n_steps=10)])
    assert balances[:10] == [[3, 3]] * 10
    assert balances[10][0] == 2
    assert balances[11:] == [balances[10]] * 5
    assert measured == [2, 10, 12]
    assert "[dynmo] step 10: [3, 3] -> [2, 4], moved layer 2 from stage 0 to 1 (" in lines[0]
    assert "gains" in lines[0]
    assert "paid back after 1 step" in lines[0]
    assert "[dynmo] step 12: nothing moved, the last move gained" in lines[1]


@pytest.mark.distributed
@pytest.mark.parametrize("known", [True, False])
def test_a_change_is_answered_at_once_where_it_lasts_and_soon_where_that_is_unknown(known: bool) -> None:
    lines, measured, balances = fits([0.001] * 6, 14, [SlowsDown(5, known)])
    moved = next(step for step, balance in enumerate(balances) if balance != [3, 3])
    assert moved == (6 if known else 7)
    assert measured[:2] == [2, 6]
    assert "step 6: [3, 3] -> [2, 4]" in lines[0] if known else "step 6: nothing moved, [2, 4] would gain" in lines[0]
    assert balances[-1] == [2, 4]


@pytest.mark.distributed
def test_nothing_moves_where_the_next_change_is_too_near() -> None:
    lines, _, balances = fits(UNEVEN, 8, [SlowsDown(1000, True), EveryStep()])
    assert balances[-1] == [3, 3]
    told = [line for line in lines if "[dynmo]" in line]
    assert len(told) == 4
    assert all("but for 0 more steps only" in line for line in told)


class EveryStep(DynamismCallback):
    """Says that layers cost something else at every step, as far as it knows."""

    def __init__(self) -> None:
        super().__init__(rebalance_every_n_steps=2)

    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        return False

    def steps_until_change(self, step: int) -> float | None:
        return 0


def resume(rank: int, path: str) -> Any:
    from lightning_dynmo import DynMoStrategy

    for steps, ckpt_path in ((3, None), (10, path)):
        model, measured = Model(UNEVEN), Measured()
        callbacks = [SlowsDown(3, True), measured]
        strategy = DynMoStrategy(num_microbatches=2)
        trainer = Trainer(devices=2, strategy=strategy, max_steps=steps, callbacks=callbacks, **QUIET)
        data = torch.utils.data.DataLoader(torch.zeros(100 * SIZE, 3), batch_size=SIZE)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(path)
    return measured.steps, measured.balances


@pytest.mark.distributed
def test_a_change_that_was_saved_but_not_answered_is_answered_by_the_resumed_run(tmp_path: Path) -> None:
    for measured, balances in run_distributed(resume, 2, str(tmp_path / "at_the_change.ckpt")):
        assert measured[0] == 5
        assert balances[:2] == [[3, 3]] * 2
        assert balances[2:] == [[2, 4]] * 5


@pytest.mark.distributed
def test_several_callbacks_share_a_measurement_and_a_decision() -> None:
    callbacks = [RebalanceCallback(every_n_steps=4), SlowsDown(3, True), RebalanceCallback(every_n_steps=2)]
    lines, measured, _ = fits(UNEVEN, 9, callbacks)
    assert sorted(set(measured)) == measured
    steps = [line.split(":")[0] for line in lines if "[dynmo]" in line]
    assert len(set(steps)) == len(steps)
    # Step 2 is due, step 3 because staying may have cost enough by then, and step 4 since the model has changed.
    assert steps[:3] == ["[dynmo] step 2", "[dynmo] step 3", "[dynmo] step 4"]
    assert "for 0 more steps only" in lines[1]


@pytest.mark.distributed
def test_a_plan_by_parameters_that_takes_longer_is_taken_back() -> None:
    lines, _, balances = fits(
        [0.02, 0.02, 0.02, 0.0], 20, [RebalanceCallback(2)], load="parameters", num_parameters=[1, 1, 1000, 3000]
    )
    runs = [balance for step, balance in enumerate(balances) if step == 0 or balance != balances[step - 1]]
    assert runs == [[2, 2], [3, 1], [2, 2]]
    assert sum("undone, [3, 1] -> [2, 2], moved layer 2 from stage 0 to 1" in line for line in lines) == 1
    assert "nothing moved, [3, 1] was undone before; largest stage load 4,000 parameters" in lines[-2]


@pytest.mark.distributed
def test_steps_of_several_batches_count_as_such() -> None:
    _, _, balances = fits(UNEVEN, 12, [RebalanceCallback(every_n_steps=4)], accumulate_grad_batches=2)
    assert balances[-1] == [2, 4]
    assert balances[:8] == [[3, 3]] * 8, "never in the middle of a step"
    assert balances[8] == [2, 4]


@pytest.mark.distributed
def test_with_several_stages_on_a_rank_ranks_share_the_load() -> None:
    lines, _, balances = fits(
        [0.02, 0.0, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0],
        6,
        [RebalanceCallback(2)],
        schedule="interleaved1f1b",
        num_microbatches=4,
    )
    assert len(balances[0]) == 4
    table = next(line for line in lines if "loads per batch" in line)
    assert "Rank loads per batch, by time" in table
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows if row and row[0] in "0123"] == ["0", "1"]
    assert next(row for row in rows if row and row[0] == "0")[:3] == ["0", "0-1,", "4-5"]
    assert any(row and row[0] == "bubble" for row in rows)
    moved = [line for line in lines if "moved layer" in line]
    assert all(" from rank " in line and "largest rank load" in line for line in moved)


def test_freezing_says_when_it_freezes_next() -> None:
    freezing = LayerFreezingCallback(start_step=10, every_n_steps=4)
    assert [freezing.steps_until_change(step) for step in (0, 9, 10, 11, 13, 14)] == [10, 1, 0, 3, 1, 0]
    freezing._num_frozen, freezing._num_layers = 4, 5
    assert freezing.steps_until_change(11) == math.inf


def test_a_black_box_knows_nothing() -> None:
    assert RebalanceCallback().steps_until_change(7) is None


class ChangesOnOneRank(DynamismCallback):
    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        return step == 3 and trainer.global_rank == 1


def fit_with_a_change_on_one_rank(rank: int) -> str:
    with pytest.raises(RuntimeError) as info:
        fit(rank, [0.0] * 4, 6, [ChangesOnOneRank()], {})
    return str(info.value)


@pytest.mark.distributed
def test_a_change_on_one_rank_only_is_an_error_on_all() -> None:
    for text in run_distributed(fit_with_a_change_on_one_rank, 2, timeout_s=60):
        assert "Only some ranks of the pipeline are to measure training_step of batch 3, [1]" in text
        assert "return from apply(), the same on every rank" in text
