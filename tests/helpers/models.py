"""Small modules for tests, written as a user writes them: nothing here imports the package under test."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, CONTEXT, HIDDEN = 32, 8, 16


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(CONTEXT, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        query, key, value = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.dropout(self.mlp(x))


class TinyGPT(LightningModule):
    """A GPT whose only concession to pipelines is `configure_pipeline`."""

    def __init__(self, num_blocks: int = 5, dropout: float = 0.0, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY))
        self.losses: list[float] = []

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def token_loader(num_samples: int, batch_size: int, *, seed: int = 1, shuffle: bool = False) -> DataLoader:
    """Returns a loader of learnable sequences: each token is its predecessor plus a step that is fixed per sample."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (num_samples, 1), generator=generator)
    step = torch.randint(1, 4, (num_samples, 1), generator=generator)
    sequence = (start + step * torch.arange(CONTEXT + 1)) % VOCABULARY
    return DataLoader(TensorDataset(sequence[:, :-1], sequence[:, 1:]), batch_size=batch_size, shuffle=shuffle)
