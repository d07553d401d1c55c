"""Gradual pruning: the same training as with masks written by hand, on one device and cut into stages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_dynmo import GradualPruningCallback
from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, ForcedMoves, SaveAtEnd, differences
from tests.helpers.models import TinyGPT, token_loader

START, END, EVERY, FINAL, STEPS, EPOCH = 4, 16, 4, 0.8, 21, 10
NUM_BLOCKS = 4
SPARSITIES = {8: 0.8 * (1 - (2 / 3) ** 3), 12: 0.8 * (1 - (1 / 3) ** 3), 16: 0.8}


class MasksByHand(Callback):
    """Prunes the smallest weights of all blocks by sorting them, and keeps them at zero."""

    def __init__(self, clears_state: bool = True) -> None:
        self.clears_state = clears_state
        self.masks: dict[nn.Parameter, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step not in SPARSITIES or (self.masks and self.step == step):
            return
        self.step = step
        weights = [part.weight for block in pl_module.blocks for part in block.modules() if type(part) is nn.Linear]
        flat = torch.cat([weight.detach().abs().flatten() for weight in weights])
        kept = torch.zeros(len(flat), dtype=torch.bool)
        kept[flat.argsort(descending=True, stable=True)[: round(len(flat) * (1 - SPARSITIES[step]))]] = True
        for weight, part in zip(weights, kept.split([weight.numel() for weight in weights]), strict=True):
            if weight not in self.masks:
                weight.register_hook(lambda gradient, weight=weight: gradient * self.masks[weight])
            self.masks[weight] = part.view_as(weight)
            weight.data *= self.masks[weight]
            if self.clears_state:
                for name in ("exp_avg", "exp_avg_sq"):
                    trainer.optimizers[0].state[weight][name] *= self.masks[weight]


class SaveAtStep(Callback):
    """Saves a checkpoint once a number of steps is done."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Density(Callback):
    """Notes after each batch which matrices are compact."""

    def __init__(self, pruning: GradualPruningCallback) -> None:
        self.pruning = pruning
        self.compact: list[list[str]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.compact.append(sorted(self.pruning.state_dict()["compact"]))


def by_hand(rank: int, path: str, clears_state: bool = True) -> dict[str, Any]:
    seed_everything(3, verbose=False)
    model = TinyGPT(num_blocks=NUM_BLOCKS)
    runner = Trainer(
        devices=1,
        accumulate_grad_batches=4,
        max_steps=STEPS,
        callbacks=[MasksByHand(clears_state), SaveAtEnd(path)],
        **QUIET,
    )
    runner.fit(model, token_loader(EPOCH * 16, 4))
    return {"losses": model.losses, "weights": dict(model.state_dict())}


def pruned_alone(rank: int, *args: Any) -> dict[str, Any]:
    return pruned(rank, *args, pipeline=False)


def pruned(
    rank: int,
    path: str,
    execution: str,
    balances: Sequence[tuple[int, ...]] = (),
    max_steps: int = STEPS,
    resume: str | None = None,
    strategy: dict[str, Any] | None = None,
    pipeline: bool = True,
) -> dict[str, Any]:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    model = TinyGPT(num_blocks=NUM_BLOCKS)
    pruning = GradualPruningCallback(START, END, EVERY, 0.0, FINAL, execution=execution)
    density = Density(pruning)
    callbacks = [pruning, density, SaveAtEnd(path), SaveAtStep(f"{path}.{EPOCH}", EPOCH)]
    if balances:
        callbacks.append(ForcedMoves(balances))
    if pipeline:
        options = {"num_microbatches": 4, "balance": "uniform", **(strategy or {})}
        kind: Any = DynMoStrategy(**options)
        runner = Trainer(
            devices=int(os.environ["WORLD_SIZE"]), strategy=kind, max_steps=max_steps, callbacks=callbacks, **QUIET
        )
    else:
        runner = Trainer(devices=1, accumulate_grad_batches=4, max_steps=max_steps, callbacks=callbacks, **QUIET)
    runner.fit(model, token_loader(EPOCH * 16, 16 if pipeline else 4), ckpt_path=resume)
    return {
        "losses": model.losses,
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "compact": density.compact,
        "sparsity": pruning.sparsity,
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("pruning") / "by_hand.ckpt"
    (found,) = run_distributed(by_hand, 1, str(path), init_process_group=False)
    return {**found, "checkpoint": torch.load(path, weights_only=False)}


def optimizer_differences(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    states = found["optimizer_states"][0]["state"], expected["optimizer_states"][0]["state"]
    assert states[0].keys() == states[1].keys()
    return [
        f"{position}.{name}"
        for position in states[0]
        for name, value in states[0][position].items()
        if not torch.allclose(value, states[1][position][name], rtol=0, atol=tolerance)
    ]


def assert_same(found: dict[str, Any], reference: dict[str, Any], path: Path, tolerance: float) -> None:
    """Asserts that a run ended like the reference, in its checkpoint too."""
    for name, value in reference["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=tolerance, msg=name)
        zeros = found["weights"][name] == 0, value == 0
        assert torch.equal(*zeros), name
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["state_dict"].keys() == reference["checkpoint"]["state_dict"].keys()
    for name, value in reference["checkpoint"]["state_dict"].items():
        torch.testing.assert_close(checkpoint["state_dict"][name], value, rtol=0, atol=tolerance, msg=name)
    assert optimizer_differences(checkpoint, reference["checkpoint"], tolerance) == []


@pytest.mark.distributed
def test_masked_training_on_one_device_equals_masks_by_hand(reference: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    (found,) = run_distributed(pruned_alone, 1, str(path), "dense", init_process_group=False)
    assert found["losses"] == reference["losses"]
    assert found["sparsity"] == pytest.approx(0.8, abs=1e-4)
    assert_same(found, reference, path, 0.0)


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_masked_training_in_a_pipeline_equals_masks_by_hand(
    reference: dict[str, Any], tmp_path: Path, num_ranks: int
) -> None:
    path = tmp_path / "pipeline.ckpt"
    balances = {2: [(3, 3), (1, 5), (4, 2)], 3: [(2, 2, 2), (1, 1, 4), (3, 2, 1)]}[num_ranks]
    ranks = run_distributed(pruned, num_ranks, str(path), "dense", balances, timeout_s=90)
    assert ranks[-1]["losses"] == reference["losses"]
    for found in ranks:
        assert_same(found, reference, path, 0.0)


@pytest.mark.distributed
@pytest.mark.parametrize("pipeline", [False, True])
def test_compressed_rows_train_as_masks_do(reference: dict[str, Any], tmp_path: Path, pipeline: bool) -> None:
    path = tmp_path / "csr.ckpt"
    num_ranks, balances = (2, [(3, 3), (1, 5), (4, 2)]) if pipeline else (1, ())
    options = {"timeout_s": 90} if pipeline else {"init_process_group": False}
    fit = pruned if pipeline else pruned_alone
    ranks = run_distributed(fit, num_ranks, str(path), "csr", balances, **options)
    after_steps = ranks[0]["compact"] if pipeline else ranks[0]["compact"][3::4]
    assert [len(names) for names in after_steps] == [0] * 7 + [16] * 14
    losses = torch.tensor(ranks[-1]["losses"]) - torch.tensor(reference["losses"])
    assert losses.abs().max() < 1e-4
    for found in ranks:
        assert_same(found, reference, path, 1e-4)


@pytest.mark.distributed
def test_pruned_weights_come_back_unless_the_optimizer_forgets_them(reference: dict[str, Any], tmp_path: Path) -> None:
    (found,) = run_distributed(by_hand, 1, str(tmp_path / "x.ckpt"), False, init_process_group=False)
    name = "blocks.0.mlp.1.weight"
    assert name in reference["weights"], list(reference["weights"])
    assert not torch.equal(found["weights"][name] == 0, reference["weights"][name] == 0)


@pytest.mark.distributed
@pytest.mark.parametrize(("execution", "folder"), [("dense", False), ("csr", False), ("csr", True)])
def test_resumed_between_prunings_on_other_stages(
    reference: dict[str, Any], tmp_path: Path, execution: str, folder: bool
) -> None:
    first, whole = tmp_path / "first.ckpt", tmp_path / "whole.ckpt"
    strategy = {"save_distributed_checkpoint": folder}
    run_distributed(pruned, 2, str(first), execution, [(1, 5), (4, 2)], EPOCH + 1, None, strategy, timeout_s=90)
    half = f"{first}.{EPOCH}"
    ranks = run_distributed(pruned, 3, str(whole), execution, (), STEPS, half, timeout_s=90)
    tolerance = 0.0 if execution == "dense" else 1e-4
    assert max(map(len, ranks[0]["compact"][:2])) == (16 if execution == "csr" else 0)  # at once, before any pruning
    for found in ranks:
        assert_same(found, reference, whole, tolerance)


@pytest.mark.distributed
def test_a_resumed_run_is_the_run_that_was_not_stopped_to_the_last_bit(tmp_path: Path) -> None:
    once, twice = (tmp_path / f"{name}.ckpt" for name in ("once", "twice"))
    whole = run_distributed(pruned, 2, str(once), "csr", timeout_s=90)
    resumed = run_distributed(pruned, 2, str(twice), "csr", (), STEPS, f"{once}.{EPOCH}", timeout_s=90)
    assert resumed[-1]["losses"] == whole[-1]["losses"][-len(resumed[-1]["losses"]) :]
    assert differences(resumed[0]["weights"], whole[0]["weights"]) == []
    checkpoints = [torch.load(path, weights_only=False) for path in (once, twice)]
    assert optimizer_differences(*checkpoints) == []


@pytest.mark.distributed
def test_a_checkpoint_of_a_sparse_run_loads_without_the_package(tmp_path: Path) -> None:
    path = tmp_path / "sparse.ckpt"
    ranks = run_distributed(pruned, 2, str(path), "csr", timeout_s=90)
    model = TinyGPT.load_from_checkpoint(path)
    assert all(type(part) is nn.Linear for part in model.modules() if isinstance(part, nn.Linear))
    assert differences(model.state_dict(), ranks[0]["weights"]) == []


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbvzerobubble"])
@pytest.mark.parametrize("execution", ["dense", "csr"])
def test_schedules_that_split_the_backward(
    reference: dict[str, Any], tmp_path: Path, schedule: str, execution: str
) -> None:
    path = tmp_path / "zero_bubble.ckpt"
    strategy = {"schedule": schedule, "stages_per_rank": 2}
    ranks = run_distributed(pruned, 2, str(path), execution, (), STEPS, None, strategy, timeout_s=90)
    for found in ranks:
        assert_same(found, reference, path, 1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("execution", ["dense", "auto"])
def test_replicas_prune_alike(reference: dict[str, Any], tmp_path: Path, execution: str) -> None:
    path = tmp_path / "replicas.ckpt"
    strategy = {"data_parallel_size": 2, "num_microbatches": 2}
    ranks = run_distributed(pruned, 4, str(path), execution, (), STEPS, None, strategy, timeout_s=120)
    for found in ranks:
        assert differences(found["weights"], ranks[0]["weights"]) == []
        assert found["compact"] == ranks[0]["compact"]
    pruned_weights = [ranks[0]["weights"][name] == 0 for name in reference["weights"] if name.startswith("blocks")]
    assert sum(int(zeros.sum()) for zeros in pruned_weights if zeros.dim() == 2) == round(0.8 * 12288)
