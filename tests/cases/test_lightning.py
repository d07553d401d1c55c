"""What Lightning offers around training works on a pipeline with the numbers of one device, on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.cases.runs import batches, make_loader, make_trainer
from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import differences, load
from tests.helpers.models import TinyGPT

pytestmark = pytest.mark.distributed


class Plateau(TinyGPT):
    """Lowers its learning rate when the validation loss no longer falls by enough."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.02)
        self.rates: list[float] = []

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.35, threshold_mode="abs"
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


class Stream(IterableDataset[Any]):
    """Samples without a length, read by a worker process or by the rank itself."""

    def __init__(self, num_samples: int) -> None:
        self.samples = list(make_loader(True, num_samples).dataset)

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


class StopsByClock(Callback):
    """Makes the steps of the last rank slow, so that ranks disagree about the time."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            time.sleep(0.05)


def monitors(pipeline: bool, folder: str) -> dict[str, Any]:
    best = ModelCheckpoint(folder, "{step}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)
    within = ModelCheckpoint(folder, "within-{step}", every_n_train_steps=3, save_top_k=-1)
    stopping = EarlyStopping("val_loss", min_delta=0.2, patience=2)
    runner = make_trainer(
        pipeline,
        max_epochs=20,
        val_check_interval=batches(pipeline, 2),
        log_every_n_steps=1,
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="logs", version=0),
        callbacks=[best, within, stopping, LearningRateMonitor("step")],
    )
    model = TinyGPT(learning_rate=0.003)
    runner.fit(model, make_loader(pipeline), make_loader(pipeline, 32, seed=2))
    return {
        "step": runner.global_step,
        "stopped": (stopping.stopped_epoch, stopping.wait_count),
        "score": float(stopping.best_score),
        "best": (Path(best.best_model_path).name, float(best.best_model_score or 0)),
        "kept": sorted(Path(path).name for path in best.best_k_models),
        "files": sorted(path.name for path in Path(folder).glob("*.ckpt")),
        "weights": dict(model.state_dict()),
    }


def plateau(pipeline: bool) -> dict[str, Any]:
    model = Plateau()
    make_trainer(pipeline, max_epochs=6).fit(model, make_loader(pipeline), make_loader(pipeline, 32, seed=2))
    return {"rates": model.rates, "weights": dict(model.state_dict())}


def limits(pipeline: bool) -> dict[str, Any]:
    """Fits with every kind of limit; each entry is the number of steps and the weights or metrics."""
    found: dict[str, Any] = {}
    one, two, three = (batches(pipeline, count) for count in (1, 2, 3))
    options: dict[str, dict[str, Any]] = {
        "overfit": {"overfit_batches": two, "max_epochs": 2},
        "number": {"limit_train_batches": three, "limit_val_batches": one, "max_epochs": 1},
        "share": {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "max_epochs": 1},
        "fast": {"fast_dev_run": one},
        "steps": {"max_steps": 5},
    }
    for name, option in options.items():
        model, runner = TinyGPT(), make_trainer(pipeline, num_sanity_val_steps=0, **option)
        runner.fit(model, make_loader(pipeline), make_loader(pipeline, 32, seed=2))
        found[name] = {"step": runner.global_step, "weights": dict(model.state_dict())}
        found[f"{name} loss"] = runner.callback_metrics["val_loss"].item()
    runner = make_trainer(pipeline, limit_test_batches=1, limit_predict_batches=2)
    (metrics,) = runner.test(model, make_loader(True), verbose=False)
    found["test loss"] = metrics["test_loss"]
    predictions = runner.predict(model, make_loader(True))
    assert predictions is not None
    found["predictions"] = [entry for entry in predictions if entry is not None]
    return found


def streams(pipeline: bool) -> dict[str, Any]:
    found = {}
    for workers in (0, 1):
        model, runner = TinyGPT(), make_trainer(pipeline, max_epochs=2, limit_train_batches=batches(pipeline, 6))
        runner.fit(model, DataLoader(Stream(64), batch_size=16 if pipeline else 4, num_workers=workers))
        found[str(workers)] = {"step": runner.global_step, "weights": dict(model.state_dict())}
    return found


def two_fits(pipeline: bool) -> dict[str, Any]:
    """Fits two models with one Trainer, and the first of them twice."""
    runner, models = make_trainer(pipeline, max_epochs=1), [TinyGPT(), TinyGPT(num_blocks=3)]
    steps = []
    for model, epochs in ((models[0], 1), (models[0], 2), (models[1], 3)):
        runner.fit_loop.max_epochs = epochs
        runner.fit(model, make_loader(pipeline), make_loader(True, 32, seed=2))
        steps.append(runner.global_step)
    loss = runner.callback_metrics["val_loss"].item()
    return {"steps": steps, "weights": [dict(model.state_dict()) for model in models], "loss": loss}


def everything(rank: int, pipeline: bool, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in (("plateau", plateau), ("limits", limits), ("streams", streams), ("two_fits", two_fits)):
        seed_everything(3, verbose=False)
        found[name] = part(pipeline)
    seed_everything(3, verbose=False)
    found["monitors"] = monitors(pipeline, folder)
    return found


Runs = tuple[dict[str, Any], list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Returns what one device found, what each of two ranks found, and the folder of both."""
    folder = tmp_path_factory.mktemp("runs")
    (expected,) = run_distributed(everything, 1, False, str(folder / "one"), init_process_group=False, timeout_s=120)
    return expected, run_distributed(everything, 2, True, str(folder / "two"), timeout_s=120), folder


def compare(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Returns where two results differ, without counts of calls: evaluation runs other microbatches."""
    return differences(_without_calls(found), _without_calls(expected))


def _without_calls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_calls(entry) for key, entry in value.items() if not str(key).endswith("calls")}
    return [_without_calls(entry) for entry in value] if isinstance(value, list) else value


def test_early_stopping_and_checkpoints_follow_the_monitor(runs: Runs) -> None:
    expected, ranks, folder = runs
    theirs = expected["monitors"]
    assert 4 < theirs["step"] < 80  # stopped by the monitor, not at once
    assert len(theirs["kept"]) == 2
    assert "last.ckpt" in theirs["files"]
    assert "within-step=3.ckpt" in theirs["files"]
    for found in (entry["monitors"] for entry in ranks):
        for key in ("step", "stopped", "kept", "files"):
            assert found[key] == theirs[key], key
        assert found["best"][0] == theirs["best"][0]
        assert found["best"][1] == pytest.approx(theirs["best"][1], abs=1e-6)
        assert found["score"] == pytest.approx(theirs["score"], abs=1e-6)
        assert compare(found["weights"], theirs["weights"]) == []
    for name in theirs["files"]:
        ours, plain = load(folder / "two" / name), load(folder / "one" / name)
        assert ours["global_step"] == plain["global_step"], name
        assert compare(ours["state_dict"], plain["state_dict"]) == [], name
        assert compare(ours["optimizer_states"][0]["state"], plain["optimizer_states"][0]["state"]) == [], name


def test_learning_rates_are_logged_as_on_one_device(runs: Runs) -> None:
    folder = runs[2]
    ours, theirs = (rates(folder / name / "logs" / "version_0" / "metrics.csv") for name in ("two", "one"))
    assert len(set(theirs.values())) > 4
    assert ours == theirs


def rates(path: Path) -> dict[str, str]:
    head, *rows = (line.split(",") for line in path.read_text().splitlines())
    step, rate = head.index("step"), head.index("lr-AdamW")
    return {row[step]: row[rate] for row in rows if row[rate]}


def test_the_plateau_schedule_sees_the_validation_loss(runs: Runs) -> None:
    expected, ranks, _ = runs
    assert len(set(expected["plateau"]["rates"])) > 1
    for found in ranks:
        assert found["plateau"]["rates"] == expected["plateau"]["rates"]
        assert compare(found["plateau"], expected["plateau"]) == []


def test_limits_mean_what_they_mean_on_one_device(runs: Runs) -> None:
    expected, ranks, _ = runs
    theirs = expected["limits"]
    assert [theirs[name]["step"] for name in ("overfit", "number", "share", "fast", "steps")] == [4, 3, 2, 1, 5]
    assert len({theirs[name]["weights"]["head.1.bias"][0].item() for name in ("overfit", "number", "share")}) == 3
    for rank, found in enumerate(entry["limits"] for entry in ranks):
        for key, value in theirs.items():
            if key.endswith("loss"):
                assert found[key] == pytest.approx(value, abs=1e-6), key
            elif key != "predictions":
                assert compare(found[key], value) == [], key
        assert len(theirs["predictions"]) == 2
        assert compare(found["predictions"], theirs["predictions"] if rank == 0 else []) == []


def test_a_stream_of_samples_trains_as_on_one_device(runs: Runs) -> None:
    expected, ranks, _ = runs
    assert [expected["streams"][workers]["step"] for workers in "01"] == [8, 8]
    for found in ranks:
        assert compare(found["streams"], expected["streams"]) == []


def test_one_trainer_fits_twice_and_another_model(runs: Runs) -> None:
    expected, ranks, _ = runs
    for found in ranks:
        assert found["two_fits"]["steps"] == expected["two_fits"]["steps"]
        assert compare(found["two_fits"]["weights"], expected["two_fits"]["weights"]) == []
        assert found["two_fits"]["loss"] == pytest.approx(expected["two_fits"]["loss"], abs=1e-6)


def stop_by_clock(rank: int) -> tuple[int, float, dict[str, Tensor]]:
    timer = Timer(timedelta(seconds=0.6), interval="step")
    runner = make_trainer(True, max_epochs=1000, callbacks=[StopsByClock(), timer])
    model = TinyGPT()
    runner.fit(model, make_loader(True))
    return runner.global_step, timer.time_elapsed("train"), dict(model.state_dict())


def test_a_timer_stops_all_ranks_at_the_same_step() -> None:
    first, second = run_distributed(stop_by_clock, 2)
    assert 1 <= first[0] < 100
    assert first[0] == second[0]
    assert min(first[1], second[1]) >= 0.6
    assert differences(first[2], second[2]) == []
