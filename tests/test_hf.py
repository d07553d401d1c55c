"""Models of Hugging Face train as pipelines with the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, differences, fit_as_pipeline, fit_on_one_device, load
from tests.helpers.language_models import CONFIGS, LM, LMWithLossOfStep, model_of, padded_batches

pytestmark = pytest.mark.distributed

STEPS = 8
OPTIONS = {"max_steps": STEPS, "gradient_clip_val": 0.5, "limit_val_batches": 0}
KINDS = list(CONFIGS)
# One of them has layers that move, another computes the loss in its step, from logits.
MOVES = {"qwen2": {2: [(3, 2), (1, 4), (4, 1)], 3: [(2, 2, 1), (1, 1, 3), (3, 1, 1)]}}
NUMBERS = ("state_dict", "optimizer_states", "global_step")


def module(kind: str) -> LM:
    return LMWithLossOfStep(kind) if kind == "llama" else LM(kind)


class Make:
    """Makes the module of one kind; can be sent to another process."""

    def __init__(self, kind: str, wrong: bool = False) -> None:
        self.kind = kind
        self.wrong = wrong

    def __call__(self) -> LM:
        made = module(self.kind)
        if self.wrong:  # as if padding did not reach the layers behind the first
            from lightning_dynmo.hf import HFLayer

            forward = HFLayer.forward
            HFLayer.forward = lambda self, hidden_states, *, attention_mask=None: forward(self, hidden_states)
        return made


def data(num_microbatches: int) -> Any:
    return padded_batches(STEPS * NUM_MICROBATCHES * 2, 2 * num_microbatches)


def all_on_one_device(rank: int, folder: str) -> dict[str, list[float]]:
    return {
        kind: fit_on_one_device(rank, Make(kind), data, f"{folder}/one-{kind}.ckpt", OPTIONS).losses for kind in KINDS
    }


def all_as_pipelines(rank: int, folder: str, world_size: int) -> dict[str, tuple[list[float], int]]:
    results = {}
    for kind in KINDS:
        balances = MOVES.get(kind, {}).get(world_size, ())
        path = f"{folder}/{world_size}-{kind}.ckpt"
        made, moves = fit_as_pipeline(rank, Make(kind), data, path, OPTIONS, balances)
        results[kind] = (made.losses, 0 if moves is None else moves.moved_bytes)
    return results


def without_padding_in_layers(rank: int, folder: str) -> list[float]:
    made, _ = fit_as_pipeline(rank, Make("llama", wrong=True), data, f"{folder}/wrong.ckpt", OPTIONS)
    return made.losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, list[float]]:
    return run_distributed(all_on_one_device, 1, str(folder), init_process_group=False, timeout_s=240)[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_train_as_on_one_device(world_size: int, reference: dict[str, list[float]], folder: Path) -> None:
    ranks = run_distributed(all_as_pipelines, world_size, str(folder), world_size, timeout_s=300)
    for kind in KINDS:
        losses, moved_bytes = ranks[-1][kind]
        one, many = load(folder / f"one-{kind}.ckpt"), load(folder / f"{world_size}-{kind}.ckpt")
        assert losses == reference[kind], kind
        assert [entry for key in NUMBERS for entry in differences(many[key], one[key], key)] == [], kind
        assert list(many["state_dict"]) == [f"model.{name}" for name in model_of(kind).state_dict()]
        assert (moved_bytes > 0) == (kind in MOVES)


def test_padding_that_does_not_reach_the_layers_would_show(reference: dict[str, list[float]], folder: Path) -> None:
    assert run_distributed(without_padding_in_layers, 2, str(folder), timeout_s=120)[-1] != reference["llama"]
    for losses in reference.values():
        assert sum(losses[-4:]) <= 0.9 * sum(losses[:4]), "the reference learns"


def plan_of_a_model(rank: int, missing: bool) -> str:
    """Has `lightning-dynmo plan` compare the chain with the module's forward."""
    import contextlib
    import io

    from lightning.pytorch import LightningDataModule, Trainer

    from lightning_dynmo import DynMoStrategy
    from lightning_dynmo.cli.plan import plan
    from tests.helpers.fitting import QUIET

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return padded_batches(8, 8)

    made = Make("mixtral", wrong=missing)()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        plan(Trainer(devices=2, strategy=DynMoStrategy(), **QUIET), made, Data())
    return text.getvalue()


def test_plan_finds_the_chain_equal_to_the_forward() -> None:
    (text,) = run_distributed(plan_of_a_model, 1, False, init_process_group=False)
    assert "Chain equals forward: yes" in text
    assert "HFEmbedding" in text
    with pytest.raises(RankError, match="The pipeline runs the chain, so it would train another model"):
        run_distributed(plan_of_a_model, 1, True, init_process_group=False)
