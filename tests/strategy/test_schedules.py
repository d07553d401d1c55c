"""Every schedule trains, validates, tests and predicts through the Trainer as one device does, while layers move."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, QUIET, ForcedMoves, SaveAtEnd, differences, load
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

STEPS = 10
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
ONE_STAGE = ("gpipe", "1f1b")


class Model(TinyGPT):
    """Trained by SGD, since Adam turns rounding of gradients near zero into steps of full size."""

    def __init__(self) -> None:
        super().__init__(num_blocks=6)
        self.seen: dict[str, Any] = {}

    def on_validation_epoch_end(self) -> None:
        self.seen.setdefault("val_loss", []).append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def run(path: str, microbatch: int, batch: int, options: dict[str, Any]) -> dict[str, Any]:
    seed_everything(3, verbose=False)
    model = Model()
    callbacks = [SaveAtEnd(path), *options.pop("callbacks", [])]
    trainer = Trainer(max_steps=STEPS, val_check_interval=0.5, callbacks=callbacks, **QUIET, **options)
    trainer.fit(model, token_loader(STEPS * 16, batch), token_loader(24, microbatch, seed=2))
    test = trainer.test(model, token_loader(24, microbatch, seed=3), verbose=False)
    predicted = trainer.predict(model, token_loader(10, microbatch, seed=4))
    prediction = torch.cat(predicted) if predicted and predicted[0] is not None else None
    return {"losses": model.losses, "seen": model.seen, "test": test, "prediction": prediction}


def on_one_device(rank: int, path: str) -> dict[str, Any]:
    return run(path, 8, 4, {"devices": 1, "accumulate_grad_batches": NUM_MICROBATCHES})


def as_pipelines(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    from lightning_dynmo import DynMoStrategy

    world_size, results = int(os.environ["WORLD_SIZE"]), {}
    for schedule in SCHEDULES:
        stages = world_size * (1 if schedule in ONE_STAGE else 2)
        balances = [tuple(8 - stages + 1 if stage == large else 1 for stage in range(stages)) for large in (0, 1, -1)]
        balances = [balance for balance in balances if sum(balance) == 8]
        results[schedule] = run(
            f"{folder}/{world_size}-{schedule}.ckpt",
            8,
            16,
            {
                "devices": world_size,
                "strategy": DynMoStrategy(num_microbatches=NUM_MICROBATCHES, schedule=schedule),
                "callbacks": [ForcedMoves(balances)],
            },
        )
    return results


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's weights; the counters of forwards see that validation batches are cut up, too."""
    return {name: value for name, value in load(path)["state_dict"].items() if "calls" not in name}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_schedule_equals_one_device(world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    (one,) = run_distributed(on_one_device, 1, str(path), init_process_group=False, timeout_s=120)
    ranks = run_distributed(as_pipelines, world_size, str(tmp_path), timeout_s=300)
    for schedule in SCHEDULES:
        if world_size == 1 and schedule in ONE_STAGE:
            continue
        results = [rank[schedule] for rank in ranks]
        exact = schedule != "loopedbfs" and schedule not in ("zbvzerobubble", "dualpipev")
        state, expected = map(weights, (tmp_path / f"{world_size}-{schedule}.ckpt", path))
        if exact:
            assert differences(state, expected) == [], schedule
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], rtol=1e-5, atol=1e-6, msg=f"{schedule} {name}")
        losses = next(result["losses"] for result in results if result["losses"])
        assert losses == pytest.approx(one["losses"], rel=1e-5)
        for result in results:
            assert result["seen"]["val_loss"] == pytest.approx(one["seen"]["val_loss"], rel=1e-5)
            assert result["test"][0] == pytest.approx(one["test"][0], rel=1e-5)
        assert torch.equal(results[0]["prediction"], one["prediction"])
