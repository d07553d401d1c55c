"""Layers to build pipelines from. Needs torch only, so they can be used without Lightning."""

from lightning_dynmo.nn.csr import CSRPattern
from lightning_dynmo.nn.emulated import EmulatedLayer
from lightning_dynmo.nn.gpt import (
    MLP,
    AttentionBlock,
    Block,
    CausalSelfAttention,
    GPTConfig,
    Head,
    MLPBlock,
    Positions,
    TokenEmbedding,
    gpt_layers,
)

__all__ = [
    "MLP",
    "AttentionBlock",
    "Block",
    "CSRPattern",
    "CausalSelfAttention",
    "EmulatedLayer",
    "GPTConfig",
    "Head",
    "MLPBlock",
    "Positions",
    "TokenEmbedding",
    "gpt_layers",
]
