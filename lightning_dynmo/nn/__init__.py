"""Layers to build pipelines from. Needs torch only, so they can be used without Lightning."""

from lightning_dynmo.nn.emulated import EmulatedLayer
from lightning_dynmo.nn.gpt import (
    MLP,
    Block,
    CausalSelfAttention,
    GPTConfig,
    Head,
    Positions,
    TokenEmbedding,
    gpt_layers,
)

__all__ = [
    "MLP",
    "Block",
    "CausalSelfAttention",
    "EmulatedLayer",
    "GPTConfig",
    "Head",
    "Positions",
    "TokenEmbedding",
    "gpt_layers",
]
