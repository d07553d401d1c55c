"""What step methods change beside what they return and log reaches every rank, or is refused by name."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.regression import MeanSquaredError

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed


class Meter:
    """A running mean as people write it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class ByHand(TinyGPT):
    """Collects by hand what hooks read, on every rank; has a centre as DINO has, and sets its own learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.total, self.meter, self.counts = torch.zeros(()), Meter(), {"batches": 0}
        self.register_buffer("centre", torch.zeros(32))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.centre.mul_(0.9).add_(0.1 * loss.detach())
        for group in self.optimizers().param_groups:
            group["lr"] = 0.02 / (1 + self.trainer.global_step)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.outputs.append(loss)
        self.total += loss
        self.meter.update(loss.item())
        self.counts["batches"] += 1
        local = MeanSquaredError()  # a metric for this step alone
        local.update(loss[None], torch.zeros(1))
        self.log("square", local.compute())
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("by_list", torch.stack(self.outputs).mean())
        self.log("by_total", self.total / self.counts["batches"])
        self.log("by_meter", self.meter.total / self.meter.count)
        self.outputs.clear()
        self.total, self.meter, self.counts["batches"] = torch.zeros(()), Meter(), 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LateMetrics(TinyGPT):
    """Makes a metric that nobody saw when training was set up."""

    def on_fit_start(self) -> None:
        self.late = MeanMetric()
        self.samples = MeanMetric()

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.late.update(self.loss(batch).detach())

    def on_validation_epoch_end(self) -> None:
        self.log("late", self.late.compute())
        self.log("late_weight", self.late.weight)
        self.late.reset()


def fit(rank: int, pipeline: bool, module: type[TinyGPT]) -> tuple[dict[str, float], dict[str, Tensor]]:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    model = module()
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, **QUIET}
    if pipeline:
        runner = Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=DynMoStrategy(num_microbatches=4), **options)
    else:
        runner = Trainer(devices=1, accumulate_grad_batches=4, **options)
    size = 16 if pipeline else 4
    runner.fit(model, token_loader(64, size), token_loader(32, size, seed=2))
    metrics = {key: value.item() for key, value in runner.callback_metrics.items() if "dynmo" not in key}
    return metrics, dict(model.state_dict())


@pytest.mark.parametrize("module", [ByHand, LateMetrics])
def test_what_steps_collect_by_hand_is_there_on_every_rank(module: type[TinyGPT]) -> None:
    ((expected, weights),) = run_distributed(fit, 1, False, module, init_process_group=False)
    for found, state in run_distributed(fit, 3, True, module):
        for key in expected.keys() - {"late_weight", "train_loss"}:
            assert found[key] == pytest.approx(expected[key], abs=1e-6), key
        if module is ByHand:
            counts = [key for key in weights if key.endswith("calls")]  # evaluation is cut up in another way
            assert differences(*({k: v for k, v in s.items() if k not in counts} for s in (state, weights))) == []
        else:
            assert found["late_weight"] == expected["late_weight"] == 8  # microbatches, and not once per rank


class Stops(TinyGPT):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stop(rank: int) -> int:
    from lightning_dynmo import DynMoStrategy

    runner = Trainer(devices=3, strategy=DynMoStrategy(num_microbatches=4), max_epochs=2, **QUIET)
    runner.fit(Stops(), token_loader(128, 16))
    return runner.global_step


def test_a_step_may_stop_the_training() -> None:
    assert run_distributed(stop, 3) == [3, 3, 3]


class Penalty(TinyGPT):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


class Twice(TinyGPT):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - self(batch[0])).square().mean() + self.loss(batch)


class Unsendable(TinyGPT):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.file = sys.stdout
        return self.loss(batch)


class Example(TinyGPT):
    """Not wrong: only the summary's dry run cannot work."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, 8, dtype=torch.int64)


def refused(rank: int, module: type[LightningModule]) -> str:
    from lightning_dynmo import DynMoStrategy

    options = {**QUIET, "enable_model_summary": True}
    runner = Trainer(devices=2, strategy=DynMoStrategy(num_microbatches=4), max_steps=2, **options)
    try:
        runner.fit(module(), token_loader(64, 16))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Penalty, "depends on parameters of layer 0 (Embedding) directly"),
        (Twice, "called self(...) twice"),
        (Unsendable, "changed self.file, a TextIOWrapper, which cannot be sent"),
        (Example, ""),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(module: type[LightningModule], text: str) -> None:
    first, second = run_distributed(refused, 2, module)
    assert first == second
    assert text in first
    assert bool(first) == bool(text)


class Mixing(TinyGPT):
    """Draws from numpy in its step, as mixup does."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.drawn = [*getattr(self, "drawn", []), float(np.random.beta(0.5, 0.5))]
        return self.loss(batch)


class Noisy(torch.utils.data.Dataset):
    """Draws from numpy in the main process, as augmentation does."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(np.random.randint(0, 32, 9))
        return tokens[:-1], tokens[1:]


def test_fingerprints_tell_changes() -> None:
    from lightning_dynmo.sideeffects import _fingerprint

    def changed(value: Any, change: Any) -> bool:
        before = _fingerprint(value)
        change(value)
        return _fingerprint(value) != before

    with torch.inference_mode():
        made_here = torch.zeros(3)
        assert changed(made_here, lambda value: value.add_(1))
        assert changed(torch.zeros(3), lambda value: value.add_(1))
    outside = torch.zeros(1000)
    with torch.inference_mode():
        assert changed(outside, lambda value: value.add_(1))
    assert changed([1], lambda value: value.append(2))
    assert changed({"a": {"b": [1]}}, lambda value: value["a"]["b"].append(2))
    assert changed(Meter(), lambda value: value.update(1.0))
    assert not changed({"a": [1], "b": Meter(), "c": outside}, lambda value: value)


def mix(rank: int) -> tuple[list[float], list[float]]:
    from lightning.pytorch import Callback

    from lightning_dynmo import DynMoStrategy

    seen: list[float] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0].sum().item())

    model = Mixing()
    runner = Trainer(devices=3, strategy=DynMoStrategy(num_microbatches=4), max_epochs=2, callbacks=[Look()], **QUIET)
    runner.fit(model, torch.utils.data.DataLoader(Noisy(), batch_size=16))
    return seen, model.drawn


def test_numbers_drawn_in_a_step_do_not_put_the_data_of_ranks_out_of_step() -> None:
    ranks = run_distributed(mix, 3)
    assert all(found == ranks[0] for found in ranks)
    assert len(set(ranks[0][1])) == 32  # each draw another number


def move_while_accumulating(rank: int) -> str:
    from lightning.pytorch import Callback

    from lightning_dynmo import Assignment, DynMoStrategy

    class Moves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.strategy.runtime.move_to(Assignment((1, 6)))

    runner = Trainer(
        devices=2, strategy=DynMoStrategy(), max_steps=2, accumulate_grad_batches=2, callbacks=[Moves()], **QUIET
    )
    try:
        runner.fit(TinyGPT(), token_loader(64, 16))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_move_in_the_middle_of_accumulation_is_refused() -> None:
    for text in run_distributed(move_while_accumulating, 2):
        assert "gradients are being accumulated" in text
