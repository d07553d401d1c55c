"""Models of Hugging Face whose head uses the embedding's weights train with the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, differences, fit_as_pipeline, fit_on_one_device, load
from tests.helpers.language_models import LM, padded_batches

pytestmark = pytest.mark.distributed

STEPS = 8
OPTIONS = {"max_steps": STEPS, "gradient_clip_val": 0.5, "limit_val_batches": 0}
MOVES = {"gpt2": {2: [(3, 2), (1, 4), (4, 1)], 3: [(2, 2, 1), (1, 1, 3), (3, 1, 1)]}}
KINDS = ("llama", "gpt2")
TIED = {"llama": ("model.model.embed_tokens.weight", "model.lm_head.weight")}
TIED["gpt2"] = ("model.transformer.wte.weight", "model.lm_head.weight")


class TiedLM(LM):
    """Trained by SGD: Adam makes steps of full size from biases whose gradient is nothing but rounding."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Make:
    """Makes the tied module of one kind; can be sent to another process."""

    def __init__(self, kind: str, tied: bool = True) -> None:
        self.kind = kind
        self.tied = tied

    def __call__(self) -> TiedLM:
        made = TiedLM(self.kind, tie_word_embeddings=self.tied)
        embedding, head = (made.get_parameter(name) for name in TIED[self.kind])
        assert (embedding is head) == self.tied
        return made


def data(num_microbatches: int) -> Any:
    return padded_batches(STEPS * NUM_MICROBATCHES * 2, 2 * num_microbatches)


def all_on_one_device(rank: int, folder: str) -> dict[str, list[float]]:
    results = {}
    for kind in KINDS:
        results[kind] = fit_on_one_device(rank, Make(kind), data, f"{folder}/one-{kind}.ckpt", OPTIONS).losses
    untied = fit_on_one_device(rank, Make("llama", tied=False), data, f"{folder}/untied.ckpt", OPTIONS)
    return {**results, "untied": untied.losses}


def all_as_pipelines(rank: int, folder: str, world_size: int) -> dict[str, list[float]]:
    results = {}
    for kind in KINDS:
        balances = MOVES.get(kind, {}).get(world_size, ())
        path = f"{folder}/{world_size}-{kind}.ckpt"
        made, _ = fit_as_pipeline(rank, Make(kind), data, path, OPTIONS, balances)
        results[kind] = made.losses
        embedding, head = (made.get_parameter(name) for name in TIED[kind])
        assert embedding is head
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tied")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, list[float]]:
    return run_distributed(all_on_one_device, 1, str(folder), init_process_group=False, timeout_s=240)[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_models_train_as_on_one_device(world_size: int, reference: dict[str, Any], folder: Path) -> None:
    ranks = run_distributed(all_as_pipelines, world_size, str(folder), world_size, timeout_s=300)
    for kind in KINDS:
        one, many = load(folder / f"one-{kind}.ckpt"), load(folder / f"{world_size}-{kind}.ckpt")
        # The two gradients of the shared weight are added in another order than on one device.
        losses = torch.tensor(ranks[-1][kind])
        torch.testing.assert_close(losses, torch.tensor(reference[kind]), rtol=1e-5, atol=0, msg=kind)
        assert list(many["state_dict"]) == list(one["state_dict"])
        for name, expected in one["state_dict"].items():
            torch.testing.assert_close(many["state_dict"][name], expected, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")
        embedding, head = (many["state_dict"][name] for name in TIED[kind])
        assert torch.equal(embedding, head)
        assert len(many["optimizer_states"][0]["state"]) == len(one["optimizer_states"][0]["state"])


def test_the_tolerance_sees_that_weights_are_not_tied(reference: dict[str, Any], folder: Path) -> None:
    tied, untied = (torch.tensor(reference[kind]) for kind in ("llama", "untied"))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(untied, tied, rtol=1e-5, atol=0)
    one, other = load(folder / "one-llama.ckpt"), load(folder / "untied.ckpt")
    name = TIED["llama"][0]
    assert differences(one["state_dict"][name], other["state_dict"][name]) != []
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other["state_dict"][name], one["state_dict"][name], rtol=1e-4, atol=1e-5)
