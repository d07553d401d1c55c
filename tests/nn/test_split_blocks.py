"""A GPT whose blocks are cut in two: the same model in twice as many layers, which balance more finely."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dynmo import GPT, DynMoStrategy
from lightning_dynmo.nn import AttentionBlock, Block, GPTConfig, Head, MLPBlock, TokenEmbedding, gpt_layers
from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, QUIET, ForcedMoves

SIZES: dict[str, Any] = {"vocab_size": 17, "context_length": 12, "num_blocks": 3, "hidden_size": 16, "num_heads": 2}
STEPS = 6


def layers_of(split_blocks: bool, seed: int = 3, **sizes: Any) -> nn.ModuleList:
    torch.manual_seed(seed)
    return gpt_layers(GPTConfig(**{**SIZES, **sizes}, split_blocks=split_blocks))


def same_numbers(left: nn.Module, right: nn.Module) -> bool:
    """Whether two models have the same parameters in the same order, to the last bit."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def output(layers: nn.ModuleList, tokens: Tensor) -> Tensor:
    value = tokens
    for layer in layers:
        value = layer(value)
    return value


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_is_the_same_model_in_twice_as_many_layers(positions: str) -> None:
    whole, split = layers_of(False, positions=positions), layers_of(True, positions=positions)
    tokens = torch.randint(17, (2, 12))

    assert [type(layer) for layer in whole] == [TokenEmbedding, Block, Block, Block, Head]
    assert [type(layer) for layer in split] == [TokenEmbedding, *[AttentionBlock, MLPBlock] * 3, Head]
    assert same_numbers(whole, split)
    assert torch.equal(output(whole, tokens), output(split, tokens))


def test_the_comparison_notices_another_seed_and_halves_in_another_order() -> None:
    whole, split = layers_of(False), layers_of(True)
    swapped = nn.ModuleList([split[0], split[2], split[1], *split[3:]])
    tokens = torch.randint(17, (2, 12))

    assert not same_numbers(whole, layers_of(True, seed=4))
    assert not torch.equal(output(whole, tokens), output(swapped, tokens))


def test_dropout_acts_on_both_halves() -> None:
    hidden = torch.randn(2, 12, 16)
    for layer in layers_of(True, dropout=0.5)[1:3]:
        assert not torch.equal(layer(hidden), layer(hidden))
        layer.eval()
        assert torch.equal(layer(hidden), layer(hidden))


class RecordingGPT(GPT):
    """Keeps the loss of each call of the step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def fit(rank: int, split_blocks: bool, seed: int, balances: tuple[tuple[int, ...], ...] | None) -> dict[str, Any]:
    """Trains on one device as plain Lightning does where no balances are given, else as a pipeline that moves."""
    seed_everything(seed, verbose=False)
    model = RecordingGPT(**SIZES, split_blocks=split_blocks, max_steps=STEPS, warmup_steps=1, learning_rate=1e-2)
    numbers = torch.randint(17, (STEPS * NUM_MICROBATCHES * 2, 13), generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(numbers[:, :-1], numbers[:, 1:])
    moves = None if balances is None else ForcedMoves(balances)
    if moves is None:
        trainer = Trainer(devices=1, accumulate_grad_batches=NUM_MICROBATCHES, max_steps=STEPS, **QUIET)
        trainer.fit(model, DataLoader(samples, batch_size=2))
    else:
        strategy = DynMoStrategy(num_microbatches=NUM_MICROBATCHES)
        devices = int(os.environ["WORLD_SIZE"])
        trainer = Trainer(devices=devices, strategy=strategy, callbacks=[moves], max_steps=STEPS, **QUIET)
        trainer.fit(model, DataLoader(samples, batch_size=2 * NUM_MICROBATCHES))
    return {
        "losses": getattr(model, "losses", []),
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "num_layers": len(model.layers),
        "owners": [] if moves is None else moves.owners,
    }


@pytest.mark.distributed
def test_a_pipeline_of_halves_trains_with_the_losses_of_the_whole_model_on_one_device() -> None:
    (whole,) = run_distributed(fit, 1, False, 3, None, init_process_group=False)
    ranks = run_distributed(fit, 3, True, 3, ((2, 3, 3), (3, 2, 3), (4, 3, 1)), timeout_s=90)
    (other_seed,) = run_distributed(fit, 1, False, 4, None, init_process_group=False)

    assert len(whole["losses"]) == STEPS * NUM_MICROBATCHES
    assert ranks[-1]["losses"] == whole["losses"] != other_seed["losses"]
    for found in ranks:
        assert found["num_layers"] == 2 * SIZES["num_blocks"] + 2
        assert all(map(torch.equal, found["weights"], whole["weights"]))
        # Attention and MLP of a block are apart at some time: layers 3 and 4 are one block's.
        assert any(owners[3] != owners[4] for owners in found["owners"])
