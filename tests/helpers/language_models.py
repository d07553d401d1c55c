"""Tiny causal language models of Hugging Face in a LightningModule, as a user writes it; imports no package under test
until it is asked for a pipeline."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, CONTEXT = 40, 10
PAD = 0

_ALL = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_ALL,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "gpt2": {**_ALL, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, **_NO_DROPOUT},
    # Layers of two kinds, with a mask for each.
    "qwen2": {**_LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}


def model_of(kind: str, **options: Any) -> nn.Module:
    """Returns a model with random weights; options override the config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{"tie_word_embeddings": False, **CONFIGS[kind], **options})
    return AutoModelForCausalLM.from_config(config)


class LM(LightningModule):
    """A language model as on one device, with `configure_pipeline`.

    Args:
        kind: Key of `CONFIGS`.
        **options: Override the config.
    """

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = model_of(kind, **options)
        self.losses: list[float] = []

    def configure_pipeline(self) -> Sequence[nn.Module]:
        from lightning_dynmo import hf_layers

        return hf_layers(self.model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return self.model(input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(**batch).loss
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class LMWithLossOfStep(LM):
    """The same, but ``self(...)`` gives logits, and the step computes the model's loss from them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"], batch["attention_mask"]).logits
        loss = self.model.loss_function(logits, batch["labels"], vocab_size=VOCABULARY)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch["input_ids"], batch["attention_mask"]).logits
        self.log("val_loss", self.model.loss_function(logits, batch["labels"], vocab_size=VOCABULARY))


def padded_batches(num_samples: int, batch_size: int, *, padding: bool = True) -> DataLoader:
    """Returns a loader of `BatchEncoding`s of learnable sequences, with padding on the left of every second one."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(3, VOCABULARY, (num_samples, 1), generator=generator)
    input_ids = 3 + (start + 2 * torch.arange(CONTEXT)) % (VOCABULARY - 3)
    mask = torch.ones_like(input_ids)
    if padding:
        for sample in range(0, num_samples, 2):
            mask[sample, : 1 + sample % 5] = 0
    samples = [
        {
            "input_ids": ids.masked_fill(keep == 0, PAD),
            "attention_mask": keep,
            "labels": ids.masked_fill(keep == 0, -100),
        }
        for ids, keep in zip(input_ids, mask, strict=True)
    ]
    return DataLoader(samples, batch_size=batch_size, collate_fn=collate)


def collate(samples: Sequence[dict[str, Tensor]]) -> Any:
    """Stacks samples as a tokenizer of Hugging Face returns them."""
    from transformers import BatchEncoding

    return BatchEncoding({key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
