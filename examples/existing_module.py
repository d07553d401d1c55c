"""Runs a vision transformer that was not written for pipelines as one.

The difference to the module as it was is one method, `configure_pipeline`. Steps, metrics, optimizer and the keys of
the checkpoints stay as they are, and so does training the module on one device.

    python examples/existing_module.py
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_dynmo import DynMoStrategy

SHAPES = ("square", "ring", "plus", "cross")


class PatchEmbedding(nn.Module):
    """Cuts images into patches, and puts a class token in front: `[B, 1, 16, 16] -> [B, T, D]`."""

    def __init__(self, image_size: int, patch_size: int, hidden_size: int) -> None:
        super().__init__()
        num_tokens = (image_size // patch_size) ** 2 + 1
        self.patches = nn.Conv2d(1, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.positions = nn.Parameter(0.02 * torch.randn(1, num_tokens, hidden_size))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(len(images), -1, -1)
        return torch.cat([class_token, patches], dim=1) + self.positions


class EncoderBlock(nn.Module):
    """Self-attention and MLP with residual connections: `[B, T, D] -> [B, T, D]`."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden

    def attention(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        hidden = self.attention_output(mixed.transpose(1, 2).flatten(2))
        return hidden


class ClassificationHead(nn.Module):
    """Reads the class off the class token: `[B, T, D] -> [B, num_classes]`."""

    def __init__(self, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.output = nn.Linear(hidden_size, num_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(hidden[:, 0]))
        return logits


class ShapesViT(LightningModule):
    """A vision transformer that names the shape in a small grey image.

    Args:
        image_size: Pixels along one side of the images.
        patch_size: Pixels along one side of a patch; must divide `image_size`.
        num_blocks: Number of encoder blocks.
        hidden_size: Width of the tokens.
        num_heads: Attention heads per block; must divide `hidden_size`.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(
        self,
        image_size: int = 16,
        patch_size: int = 4,
        num_blocks: int = 4,
        hidden_size: int = 64,
        num_heads: int = 4,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.embedding = PatchEmbedding(image_size, patch_size, hidden_size)
        self.blocks = nn.ModuleList([EncoderBlock(hidden_size, num_heads) for _ in range(num_blocks)])
        self.head = ClassificationHead(hidden_size, len(SHAPES))
        self.train_accuracy = MulticlassAccuracy(num_classes=len(SHAPES), average="micro")
        self.val_accuracy = MulticlassAccuracy(num_classes=len(SHAPES), average="micro")

    # This method is all that the pipeline needs. Everything else is the module as it was.
    def configure_pipeline(self) -> Sequence[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.embedding(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class ShapesDataModule(LightningDataModule):
    """Noisy grey images of one shape each, drawn on the fly.

    A batch is `(images, labels)`: float32 `[B, 1, 16, 16]` and int64 `[B]`, indices into `SHAPES`.

    Args:
        batch_size: Images per batch.
        num_train: Images for training.
        num_val: Images for validation.
        image_size: Pixels along one side.
        noise: Standard deviation of the noise; the shapes have brightness 1.
        seed: Decides the images.
    """

    def __init__(
        self,
        batch_size: int = 32,
        num_train: int = 2048,
        num_val: int = 512,
        image_size: int = 16,
        noise: float = 0.3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_train = num_train
        self.num_val = num_val
        self.image_size = image_size
        self.noise = noise
        self.seed = seed

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.train_set = TensorDataset(*draw_shapes(self.num_train, self.image_size, self.noise, generator))
        self.val_set = TensorDataset(*draw_shapes(self.num_val, self.image_size, self.noise, generator))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, batch_size=self.batch_size, drop_last=True)


def draw_shapes(num_images: int, image_size: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws shapes of random kind, place and size.

    Args:
        num_images: How many, N.
        image_size: Pixels along one side, P.
        noise: Standard deviation of the noise that is added.
        generator: Source of all random numbers.

    Returns:
        Images, float32 `[N, 1, P, P]`, and labels, int64 `[N]`.
    """
    labels = torch.randint(len(SHAPES), (num_images,), generator=generator)
    radius = image_size * (0.2 + 0.1 * torch.rand(num_images, 1, 1, generator=generator))
    center = image_size * (0.35 + 0.3 * torch.rand(2, num_images, 1, 1, generator=generator))
    pixels = torch.arange(image_size) + 0.5
    dx = pixels.view(1, 1, -1) - center[0]  # [N, 1, P]
    dy = pixels.view(1, -1, 1) - center[1]  # [N, P, 1]

    in_square = torch.maximum(dx.abs(), dy.abs()) <= radius
    on_circle = (torch.hypot(dx, dy) - radius).abs() <= 0.8
    on_axis = torch.minimum(dx.abs(), dy.abs()) <= 0.8
    on_diagonal = (dx.abs() - dy.abs()).abs() <= 1.1
    every_shape = torch.stack([in_square, on_circle, in_square & on_axis, in_square & on_diagonal])  # [4, N, P, P]

    images = every_shape[labels, torch.arange(num_images)].float()
    images = images + noise * torch.randn(images.shape, generator=generator)
    return images.unsqueeze(1), labels


def main() -> None:
    # One seed for all processes: every rank of a pipeline has to read the same batches.
    seed_everything(0, workers=True)
    trainer = Trainer(accelerator="auto", devices=2, max_epochs=4, strategy=DynMoStrategy())
    trainer.fit(ShapesViT(), datamodule=ShapesDataModule())


if __name__ == "__main__":
    main()
