"""Trains a model of Hugging Face as a pipeline, with its own loss and padded batches.

The LightningModule is what it would be on one device; `configure_pipeline` is all that is new. The model is a small
Llama with random weights, so nothing is downloaded; `AutoModelForCausalLM.from_pretrained` works the same way.

    pip install "lightning-dynmo[hf]" && python examples/hugging_face.py
"""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BatchEncoding, LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_dynmo import DynMoStrategy, hf_layers

VOCABULARY, PAD, LONGEST = 64, 0, 32


class LanguageModel(LightningModule):
    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            pad_token_id=PAD,
            tie_word_embeddings=False,
        )
        self.model = AutoModelForCausalLM.from_config(config)

    # This method is all that the pipeline needs. Everything else is the module as it was.
    def configure_pipeline(self) -> Sequence[nn.Module]:
        return hf_layers(self.model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> CausalLMOutputWithPast:
        return self.model(input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> Tensor:
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def counting_sequences(count: int) -> list[Tensor]:
    """Returns sequences of random length in which each token is its predecessor plus a fixed step."""
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(count):
        start, step, length = (int(torch.randint(1, 20, (), generator=generator)) for _ in range(3))
        sequences.append(1 + (start + step * torch.arange(length + LONGEST - 20)) % (VOCABULARY - 1))
    return sequences


def collate(sequences: Sequence[Tensor]) -> BatchEncoding:
    """Pads to one length, as `DataCollatorForLanguageModeling` of a tokenizer does."""
    tokens = torch.full((len(sequences), LONGEST), PAD)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    mask = (tokens != PAD).long()
    return BatchEncoding({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})


def main() -> None:
    # One seed for all processes: every rank of a pipeline has to read the same batches.
    seed_everything(0, workers=True)
    loader = DataLoader(counting_sequences(2048), batch_size=32, collate_fn=collate, shuffle=True)
    trainer = Trainer(accelerator="auto", devices=2, max_epochs=2, strategy=DynMoStrategy())
    trainer.fit(LanguageModel(), loader)


if __name__ == "__main__":
    main()
