"""Checkpoints are plain Lightning checkpoints, and training goes on from them on any number of stages."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences, load
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed


def train(rank: int, directory: str, max_steps: int, resume: str | None, freeze: bool, balance: Any) -> dict[str, Any]:
    """Trains to `max_steps`; an epoch has 10 batches, which are 5 steps, and each step is saved."""
    from lightning_dynmo import DynMoStrategy, LayerFreezingCallback

    seed_everything(3, verbose=False)
    model = TinyGPT(dropout=0.1)
    callbacks: list[Any] = [ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")]
    if freeze:
        callbacks.append(LayerFreezingCallback(start_step=3, every_n_steps=4))
    runner = Trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DynMoStrategy(num_microbatches="auto" if resume else 4, balance=balance),
        max_steps=max_steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        **{**QUIET, "enable_checkpointing": True},
    )
    runner.fit(model, token_loader(80, 8), ckpt_path=resume)
    strategy = runner.strategy
    return {
        "weights": dict(model.state_dict()),
        "num_microbatches": strategy._microbatches,
        "frozen": [not parameter.requires_grad for parameter in model.parameters()],
    }


@pytest.fixture(scope="module", params=[False, True], ids=["training", "freezing"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path, Any]:
    directory = tmp_path_factory.mktemp("undisturbed")
    ranks = run_distributed(train, 3, str(directory), 10, None, request.param, [3, 3, 1])
    return request.param, directory, ranks[0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_goes_on_from_a_checkpoint_on_any_number_of_stages(
    world_size: int, undisturbed: tuple[bool, Path, Any], tmp_path: Path
) -> None:
    freeze, directory, expected = undisturbed
    args = (str(tmp_path), 10, str(directory / "step=5.ckpt"), freeze, "uniform")
    for found in run_distributed(train, world_size, *args):
        assert differences(found["weights"], expected["weights"]) == []
        assert found["frozen"] == expected["frozen"]
        assert any(found["frozen"]) == freeze
        assert found["num_microbatches"] == 4  # kept, though 'auto' would choose otherwise
    before, after = load(directory / "step=10.ckpt"), load(tmp_path / "step=10.ckpt")
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert differences(after[key], before[key], key) == []


def test_training_goes_on_within_an_epoch_alike_on_any_number_of_stages(
    undisturbed: tuple[bool, Path, Any], tmp_path: Path
) -> None:
    freeze, directory, _ = undisturbed
    args = (str(tmp_path), 10, str(directory / "step=3.ckpt"), freeze, "uniform")
    (alone,) = run_distributed(train, 1, *args)
    for found in run_distributed(train, 4, *args):
        assert differences(found["weights"], alone["weights"]) == []


def save_afterwards(rank: int, directory: str) -> None:
    from lightning_dynmo import DynMoStrategy
    from tests.helpers.fitting import SaveAtEnd

    model = TinyGPT()
    runner = Trainer(
        devices=3, strategy=DynMoStrategy(), max_steps=4, callbacks=[SaveAtEnd(f"{directory}/end.ckpt")], **QUIET
    )
    runner.fit(model, token_loader(80, 8))
    runner.save_checkpoint(f"{directory}/after.ckpt")
    runner.validate(model, token_loader(8, 8), verbose=False)
    runner.save_checkpoint(f"{directory}/later.ckpt")


def test_a_checkpoint_can_be_saved_after_training(tmp_path: Path) -> None:
    run_distributed(save_afterwards, 3, str(tmp_path))
    end = load(tmp_path / "end.ckpt")
    assert len(end["optimizer_states"][0]["state"]) == len(list(TinyGPT().parameters()))
    for name in ("after.ckpt", "later.ckpt"):
        saved = load(tmp_path / name)
        for key in ("optimizer_states", "lr_schedulers", "global_step", "lightning_dynmo"):
            assert differences(saved[key], end[key], key) == []
    assert differences(load(tmp_path / "after.ckpt")["state_dict"], end["state_dict"]) == []


def test_a_lost_optimizer_state_is_noticed(undisturbed: tuple[bool, Path, Any], tmp_path: Path) -> None:
    freeze, directory, expected = undisturbed
    checkpoint = load(directory / "step=5.ckpt")
    del checkpoint["optimizer_states"][0]["state"][max(checkpoint["optimizer_states"][0]["state"])]
    torch.save(checkpoint, tmp_path / "broken.ckpt")
    found = run_distributed(train, 2, str(tmp_path), 10, str(tmp_path / "broken.ckpt"), freeze, "uniform")[0]
    assert differences(found["weights"], expected["weights"]) != []


def test_a_checkpoint_is_plain_and_loads_in_one_process(undisturbed: tuple[bool, Path, Any]) -> None:
    _, directory, expected = undisturbed
    checkpoint = load(directory / "step=10.ckpt")  # tensors and plain types only
    saved = checkpoint["lightning_dynmo"]
    assert saved.keys() == {"balance", "num_microbatches", "seed"}
    assert (sum(saved["balance"]), len(saved["balance"]), saved["num_microbatches"]) == (7, 3, 4)
    model = TinyGPT.load_from_checkpoint(directory / "step=10.ckpt")
    assert differences(dict(model.state_dict()), expected["weights"]) == []
    assert torch.isfinite(model(torch.arange(8)[None])).all()


def go_on_alone(rank: int, path: str) -> int:
    """Resumes a pipeline's checkpoint under plain Lightning."""
    model = TinyGPT(dropout=0.1)
    runner = Trainer(devices=1, max_steps=7, accumulate_grad_batches=2, **QUIET)
    runner.fit(model, token_loader(80, 8), ckpt_path=path)
    return runner.global_step


def test_plain_lightning_goes_on_from_a_checkpoint(undisturbed: tuple[bool, Path, Any]) -> None:
    _, directory, _ = undisturbed
    path = str(directory / "step=5.ckpt")
    assert run_distributed(go_on_alone, 1, path, init_process_group=False) == [7]


def saved_balance(rank: int, path: str, balance: Any) -> list[int]:
    from lightning_dynmo import DynMoStrategy

    model = TinyGPT(dropout=0.1)
    strategy = DynMoStrategy(balance=balance)
    found: list[int] = []

    class Look(ModelCheckpoint):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            found.extend(trainer.strategy.runtime.assignment.balance)

    runner = Trainer(
        devices=3,
        strategy=strategy,
        max_steps=6,
        accumulate_grad_batches=2,
        callbacks=[Look(save_top_k=0)],
        **{**QUIET, "enable_checkpointing": True},
    )
    runner.fit(model, token_loader(80, 8), ckpt_path=path)
    return found


@pytest.mark.parametrize("balance", ["uniform", [1, 2, 4]])
def test_the_saved_split_is_used_unless_the_user_gives_one(balance: Any, undisturbed: tuple[bool, Path, Any]) -> None:
    path = undisturbed[1] / "step=5.ckpt"
    expected = load(path)["lightning_dynmo"]["balance"] if balance == "uniform" else balance
    assert run_distributed(saved_balance, 3, str(path), balance) == [expected] * 3
