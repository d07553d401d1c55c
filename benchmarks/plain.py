"""A module as its user writes it, and its training by plain Lightning: the reference that pipelines are held against.

Nothing here imports the library. `configure_pipeline` is the module's only concession to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

SEED = 7
VOCABULARY, CONTEXT, HIDDEN, NUM_BLOCKS = 32, 8, 32, 8
NUM_LAYERS = NUM_BLOCKS + 2
STEPS, NUM_MICROBATCHES, MICROBATCH_SIZE = 20, 8, 2
FROZEN = {5: 3, 10: 7, 15: 0}
"""How many of the first layers are frozen from which step on."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how.

    Attributes:
        switches: Some of ``"accumulation"``, ``"clipping"``, ``"dropout"``, ``"tied"`` and ``"frozen"``.
        precision: The Trainer's.
        replicas: Replicas that share each step's microbatches; in one process, their samples come in their order.
    """

    switches: frozenset[str]
    precision: str = "32-true"
    replicas: int = 1

    @property
    def batches_per_step(self) -> int:
        """Batches of `NUM_MICROBATCHES` microbatches, those of all replicas together, per optimizer step."""
        return 2 if "accumulation" in self.switches else 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a training.

    Attributes:
        initial: The weights before, as one vector per layer.
        final: The weights after.
        losses: One per microbatch, in order.
    """

    initial: list[Tensor]
    final: list[Tensor]
    losses: Tensor


class Embedding(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(CONTEXT, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) + self.positions.weight)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)  # a key's bias has no gradient but rounding
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True)))
        return x + self.dropout(self.mlp(x))


class PlainGPT(LightningModule):
    """A small GPT.

    Args:
        dropout: Probability of dropping a value.
        tied: Whether the head's matrix is the embedding's.
    """

    def __init__(self, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = Embedding(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False))
        if tied:
            self.head[1].weight = self.embedding.tokens.weight
        self.losses: list[float] = []

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.configure_pipeline():
            tokens = layer(tokens)
        return tokens

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class Freezing(Callback):
    """Freezes the first layers, more and more of them, and in the end has them train again."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0 and trainer.global_step in FROZEN:
            for index, layer in enumerate(pl_module.configure_pipeline()):
                layer.requires_grad_(index >= FROZEN[trainer.global_step])


def train(training: Training, *, microbatches_per_batch: int = 1, **options: Any) -> Outcome:
    """Trains the module by a Trainer of this process.

    Args:
        training: What to train.
        microbatches_per_batch: Microbatches that the data loader gives at a time to this process.
        **options: Further arguments of the Trainer, such as a strategy; none for plain Lightning.
    """
    seed_everything(SEED, verbose=False)
    model = PlainGPT(dropout=0.1 if "dropout" in training.switches else 0.0, tied="tied" in training.switches)
    initial = weights(model)
    freezing = [Freezing()] if "frozen" in training.switches else []
    num_processes = int(os.environ["WORLD_SIZE"])
    batches = NUM_MICROBATCHES // microbatches_per_batch // (training.replicas if num_processes > 1 else 1)
    trainer = Trainer(
        accelerator="cpu",
        devices=num_processes,
        max_epochs=1,
        precision=training.precision,
        accumulate_grad_batches=training.batches_per_step * batches,
        gradient_clip_val=0.5 if "clipping" in training.switches else None,
        callbacks=[*freezing, *options.pop("callbacks", ())],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    samples = dataset(STEPS * training.batches_per_step * NUM_MICROBATCHES * MICROBATCH_SIZE)
    if num_processes == 1:
        samples = Subset(samples, list(order_of_replicas(samples, training.replicas)))
    trainer.fit(model, DataLoader(samples, batch_size=microbatches_per_batch * MICROBATCH_SIZE))
    assert trainer.global_step == STEPS
    return Outcome(initial, weights(model), torch.tensor(model.losses, dtype=torch.float64))


def weights(model: PlainGPT) -> list[Tensor]:
    return [parameters_to_vector(layer.parameters()).detach() for layer in model.configure_pipeline()]


def dataset(num_samples: int) -> TensorDataset:
    """Returns sequences that can be learned: each token is its predecessor plus a step that is fixed per sample."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    step = torch.randint(1, 4, (num_samples, 1), generator=generator)
    sequence = (start + step * torch.arange(CONTEXT + 1)) % VOCABULARY
    return TensorDataset(sequence[:, :-1], sequence[:, 1:])


def order_of_replicas(samples: TensorDataset, replicas: int) -> Iterator[int]:
    """Yields samples as replicas read them: of each batch, those of the first replica, of the second, and so on.

    Lightning shuffles training data for replicas, by a sampler that deals samples out to them in turn.
    """
    order = list(DistributedSampler(samples, num_replicas=1, rank=0, shuffle=replicas > 1, seed=SEED))
    size = NUM_MICROBATCHES * MICROBATCH_SIZE
    for begin in range(0, len(order), size):
        for replica in range(replicas):
            yield from order[begin + replica : begin + size : replicas]
