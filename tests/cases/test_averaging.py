"""Lightning's weight averaging callbacks: averages per layer, which move along, with the numbers of one device."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, QUIET, ForcedMoves, SaveAtEnd, differences, load
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

MOVES = [(3, 4), (5, 2), (1, 6)]


class SaveAfter(SaveAtEnd):
    """Saves a checkpoint in the middle of training."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 4 and not Path(self.path).exists():
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        pass


class EveryOther(WeightAveraging):
    """Plain means, as in stochastic weight averaging, of every other step; only the weights."""

    def __init__(self) -> None:
        super().__init__(use_buffers=False)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 1


def averaging(kind: str) -> WeightAveraging:
    return EveryOther() if kind == "mean" else EMAWeightAveraging(decay=0.8, update_starting_at_step=1)


def fit(rank: int, pipeline: bool, kind: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with averaging; returns weights, averages, and validation losses, which are those of the averages."""
    seed_everything(3, verbose=False)
    model, callback = TinyGPT(), averaging(kind)
    resume, balances = options.get("resume"), options.get("moves", ())
    saves = [SaveAtEnd(f"{folder}/end.ckpt"), SaveAfter(f"{folder}/middle.ckpt")]
    common: dict[str, Any] = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0}
    batches = token_loader(64, 16 if pipeline else 4)
    if pipeline:
        from lightning_dynmo import DynMoStrategy

        runner = Trainer(
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=DynMoStrategy(num_microbatches=NUM_MICROBATCHES),
            callbacks=[callback, *saves, *([ForcedMoves(balances)] if balances else [])],
            **common,
        )
    else:
        runner = Trainer(devices=1, accumulate_grad_batches=NUM_MICROBATCHES, callbacks=[callback, *saves], **common)
    runner.fit(model, batches, token_loader(12, 3, seed=2), ckpt_path=resume)
    if not pipeline:
        assert "lightning_dynmo" not in sys.modules
    assert callback._average_model is not None
    first = {"val_loss": runner.callback_metrics["val_loss"].item()}
    again = runner.validate(model, token_loader(12, 3, seed=2), verbose=False)[0]
    return {
        "weights": dict(model.state_dict()),
        "average": dict(callback._average_model.state_dict()),
        "losses": [first["val_loss"], again["val_loss"]],
    }


@pytest.fixture(scope="module", params=["ema", "mean"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp(f"reference-{kind}")
    (found,) = run_distributed(fit, 1, False, kind, str(folder), {}, init_process_group=False)
    return folder, found


@pytest.mark.parametrize("moves", [(), MOVES], ids=["still", "moving"])
def test_averages_are_those_of_one_device(
    moves: list[tuple[int, ...]], kind: str, reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected = reference
    ranks = run_distributed(fit, 2, True, kind, str(tmp_path), {"moves": moves})
    for found in ranks:
        assert differences(comparable(found["weights"]), comparable(expected["weights"])) == []
        assert differences(comparable(found["average"]), comparable(expected["average"])) == []
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    for name in ("middle.ckpt", "end.ckpt"):
        ours, theirs = load(tmp_path / name), load(folder / name)
        assert int(theirs["averaging_state"]["n_averaged"]) > 0
        for key in ("state_dict", "current_model_state", "averaging_state"):
            assert differences(comparable(ours[key]), comparable(theirs[key])) == [], (name, key)


def test_a_run_with_averages_goes_on_with_another_number_of_stages(
    kind: str, reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, expected = reference
    options = {"resume": str(folder / "middle.ckpt")}
    for found in run_distributed(fit, 3, True, kind, str(tmp_path), options):
        assert differences(comparable(found["average"]), comparable(expected["average"])) == []
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)


def test_the_average_is_not_the_model(reference: tuple[Path, dict[str, Any]]) -> None:
    saved = load(reference[0] / "end.ckpt")
    middle = load(reference[0] / "middle.ckpt")
    assert differences(comparable(middle["state_dict"]), comparable(middle["current_model_state"]))
    assert differences(comparable(saved["state_dict"]), comparable(middle["state_dict"]))


class Fails(ForcedMoves):
    """Notes how many bytes of averages this rank holds, then ends the run by a failure of one rank."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        (follower,) = trainer.strategy.runtime.chain.followers
        self.moved_bytes = follower.resident_bytes()
        if trainer.global_step == 2 and trainer.global_rank == 1:
            raise ValueError("this rank fails")


def refused_and_failed(rank: int) -> tuple[str, str, int, bool, list[str]]:
    from lightning_dynmo import DynMoStrategy

    def run(*callbacks: Any) -> str:
        runner = Trainer(devices=2, strategy=DynMoStrategy(num_microbatches=4), callbacks=[*callbacks], **QUIET)
        try:
            runner.fit(TinyGPT(), token_loader(64, 16), token_loader(16, 16))
        except Exception as error:
            return str(error)
        return "no error"

    refusal = run(StochasticWeightAveraging(0.1))
    callback, fails = EMAWeightAveraging(decay=0.5), Fails([])
    fails.on_train_start = lambda *args: None  # type: ignore[method-assign]
    failure = run(callback, fails)
    replaced = [name for name in ("_swap_models", "_copy_average_to_current") if name in vars(callback)]
    return refusal, failure, fails.moved_bytes, callback._average_model is None, replaced


def test_a_rank_holds_the_averages_of_its_own_layers_and_a_failed_run_leaves_none() -> None:
    whole = sum(tensor.numel() * tensor.element_size() for tensor in TinyGPT().state_dict().values())
    held = 0
    for refusal, failure, num_bytes, dropped, replaced in run_distributed(refused_and_failed, 2):
        assert refusal.startswith("StochasticWeightAveraging copies the whole model")
        assert "Use lightning.pytorch.callbacks.WeightAveraging instead" in refusal
        assert "this rank fails" in failure
        assert 0.2 * whole < num_bytes < 0.8 * whole
        assert dropped
        assert replaced == []
        held += num_bytes
    assert held == pytest.approx(whole, rel=0.02)  # shells hold one element for each tensor


def comparable(state: dict[str, Any]) -> dict[str, Tensor]:
    """Leaves out counts of calls: validation runs in microbatches of another number."""
    return {name: torch.as_tensor(value) for name, value in state.items() if not name.endswith("calls")}
