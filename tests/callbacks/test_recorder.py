"""Recorded runs, made by real trainings: what is in the file, when it goes on, and who is told when it cannot."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from lightning_dynmo import DynMoStrategy, ProfileRecorderCallback, RebalanceCallback
from lightning_dynmo.callbacks.base import runtime_of
from lightning_dynmo.simulation import read_recording
from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET
from tests.helpers.models import TinyGPT, token_loader

OPTIONS = {**QUIET, "log_every_n_steps": 1000}


class Watch(ProfileRecorderCallback):
    """Remembers what was measured, beside what is written."""

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().on_train_start(trainer, *args)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        profile = runtime_of(trainer).profile
        if profile is not None and (not self.seen or profile is not self.seen[-1]["profile"]):
            self.seen.append({"step": trainer.global_step, "profile": profile})


def fit(
    rank: int, path: str, steps: int, ckpt_path: str | None, every: int, rebalance: int | None, sizes: Any = None
) -> Any:
    seed_everything(3, verbose=False)
    recorder = Watch(path, every_n_steps=every)
    callbacks = [recorder] if rebalance is None else [RebalanceCallback(rebalance), recorder]
    strategy = DynMoStrategy(num_microbatches=4, balance=[1, 6], **(sizes or {}))
    devices = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(devices=devices, strategy=strategy, callbacks=callbacks, max_steps=steps, **OPTIONS)
    trainer.fit(TinyGPT(), token_loader(16 * 20, 16), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{path}.ckpt")
    return [(entry["step"], entry["profile"]) for entry in recorder.seen]


@pytest.mark.distributed
def test_what_is_measured_is_recorded_with_the_split_that_ran_and_what_moved(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    seen, _ = run_distributed(fit, 2, str(path), 12, None, 1000, 5, {"move_when": "always"}, timeout_s=90)

    recording = read_recording(path)
    assert [step.step for step in recording.steps] == [step for step, _ in seen] == [2, 5, 10]
    for recorded, (_, profile) in zip(recording.steps, seen, strict=True):
        assert recorded.loads == profile.loads
        assert (recorded.step_s, recorded.busy_s) == (profile.step_s, profile.busy_s)
        assert (recorded.schedule, recorded.num_microbatches, recorded.placement) == ("1f1b", 4, (0, 1))
    first, second, third = recording.steps
    assert first.balance == second.balance == (1, 6)
    assert (first.moved_layers, second.moved_layers) == (0, 0)
    assert third.moved_layers == third.balance[0] - 1 > 0  # what was measured at step 5 moved layers after it
    assert 0 < first.overhead_s < second.overhead_s < third.overhead_s
    assert recording.settings["schedule"] == "1f1b"
    assert recording.settings["layers"] == ["Embedding", *["Block"] * 5, "Sequential"]


@pytest.mark.distributed
def test_asks_for_a_measurement_where_nobody_does_and_goes_on_in_the_file_when_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    run_distributed(fit, 2, str(path), 9, None, 4, None, timeout_s=90)
    assert [step.step for step in read_recording(path).steps] == [2, 6]
    with path.open("a") as file:
        file.write('{"step": 9, "balance"')  # a process that was killed while it wrote
    run_distributed(fit, 2, str(path), 16, f"{path}.ckpt", 4, None, timeout_s=90)

    recording = read_recording(path)
    assert [step.step for step in recording.steps] == [2, 6, 13]
    headers = [json.loads(line) for line in path.read_text().splitlines() if '"format"' in line]
    assert [header["first_step"] for header in headers] == [0, 9]


@pytest.mark.distributed
def test_replicas_record_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    sizes = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    run_distributed(fit, 4, str(path), 4, None, 2, None, sizes, timeout_s=90)

    recording = read_recording(path)
    assert [step.step for step in recording.steps] == [2, 4]
    assert len(recording.steps[0].busy_s) == 2
    assert recording.settings["data_parallel_size"] == 2


def fit_into_nowhere(rank: int, path: str) -> tuple[str, int]:
    model = TinyGPT()
    trainer = Trainer(
        devices=2, strategy=DynMoStrategy(), callbacks=[ProfileRecorderCallback(path)], max_steps=2, **OPTIONS
    )
    try:
        trainer.fit(model, token_loader(64, 8))
    except ValueError as error:
        return str(error), len(model.losses)
    return "nothing", len(model.losses)


@pytest.mark.distributed
def test_a_file_that_cannot_be_written_is_the_same_error_on_every_rank_before_training(tmp_path: Path) -> None:
    texts = run_distributed(fit_into_nowhere, 2, str(tmp_path / "none" / "run.jsonl"), timeout_s=60)

    assert texts[0] == texts[1]
    assert "run.jsonl: No such file or directory. Choose a file that can be written" in texts[0][0]
    assert texts[0][1] == 0
    fine = run_distributed(fit_into_nowhere, 2, str(tmp_path / "run.jsonl"), timeout_s=60)
    assert fine[0][0] == "nothing"


def test_without_a_pipeline_there_is_nothing_to_record(tmp_path: Path) -> None:
    trainer = Trainer(
        devices=1, max_steps=1, callbacks=[ProfileRecorderCallback(str(tmp_path / "run.jsonl"))], **OPTIONS
    )
    with pytest.raises(TypeError, match=r"but the strategy is SingleDeviceStrategy\. Use Trainer"):
        trainer.fit(TinyGPT(), token_loader(8, 4))


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"every_n_steps must be at least 1, got 0\. Use for example 50"):
        ProfileRecorderCallback(every_n_steps=0)
