"""LightningModules that are ready to train, for examples, configs and tests."""

import math

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from typing_extensions import override

from lightning_dynmo.module import PipelineModule
from lightning_dynmo.nn import GPTConfig, Positions, gpt_layers

# The cosine ends here, as a factor of the learning rate: a run that goes on longer than planned still learns.
FINAL_LEARNING_RATE_FACTOR = 0.1


class GPT(PipelineModule):
    """A GPT that learns to predict the next token.

    A batch is `(inputs, targets)`, both int64 `[B, T]`. Logs `train_loss` and `val_loss`: the mean cross entropy per
    token, in nats.

    Args:
        vocab_size: Number of distinct tokens; 256 for bytes.
        context_length: Longest sequence the model accepts, in tokens.
        num_blocks: Number of transformer blocks. The pipeline has two layers more: the embedding and the head.
        hidden_size: Width of the tensor passed from layer to layer.
        num_heads: Attention heads per block; must divide `hidden_size`.
        dropout: Probability of dropping a value, in `[0, 1)`.
        positions: `"learned"` or `"rotary"`.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW. Applies to matrices; biases and norms are not decayed.
        warmup_steps: Optimizer steps in which the learning rate rises linearly to its peak.
        max_steps: Optimizer steps after which the learning rate has fallen to a tenth of its peak, along a cosine.
            Default: the length of the run, from the trainer.
        split_blocks: Whether attention and MLP of each block are layers of their own: `2 num_blocks + 2` in all. Use it
            where stages would have fewer than 3 layers. The weights are the same numbers under other keys.

    Raises:
        ValueError: If the sizes do not fit together; see `GPTConfig`.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context_length: int = 128,
        num_blocks: int = 8,
        hidden_size: int = 128,
        num_heads: int = 4,
        dropout: float = 0.0,
        positions: Positions = "learned",
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        max_steps: int | None = None,
        split_blocks: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.layers = gpt_layers(
            GPTConfig(
                vocab_size=vocab_size,
                context_length=context_length,
                num_blocks=num_blocks,
                hidden_size=hidden_size,
                num_heads=num_heads,
                dropout=dropout,
                positions=positions,
                split_blocks=split_blocks,
            )
        )

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the most likely next token at every position, ``[B, T]``."""
        logits: Tensor = self(batch[0])
        return logits.argmax(dim=-1)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Sets up AdamW with a linear warm-up and a cosine decay.

        Raises:
            ValueError: If neither the trainer nor `max_steps` says how long the run is.
        """
        matrices = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.learning_rate,
            betas=(0.9, 0.95),
        )
        num_steps = self.trainer.estimated_stepping_batches if self.max_steps is None else self.max_steps
        if math.isinf(num_steps):
            raise ValueError(
                "The learning rate follows a cosine over the run, but the trainer has no end; give it one, for example "
                "Trainer(max_steps=1000), or say how long the cosine is with GPT(max_steps=1000)."
            )

        def factor(step: int) -> float:
            return learning_rate_factor(step, self.warmup_steps, int(num_steps))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits: Tensor = self(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate_factor(step: int, warmup_steps: int, num_steps: int) -> float:
    """Returns what to multiply the peak learning rate with: a linear warm-up, then a cosine.

    Args:
        step: Optimizer steps done so far.
        warmup_steps: Steps of the warm-up. The first step already has a learning rate above 0.
        num_steps: Steps of the run, warm-up included. Afterwards the factor stays at its end value.

    Returns:
        A factor in `(0, 1]`.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return FINAL_LEARNING_RATE_FACTOR + (1 - FINAL_LEARNING_RATE_FACTOR) * (1 + math.cos(math.pi * progress)) / 2
