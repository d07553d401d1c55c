"""Layers to build pipelines from. Needs torch only, so they can be used without Lightning."""

from lightning_dynmo.nn.csr import CSRPattern
from lightning_dynmo.nn.csr_linear import faster_execution, time_executions
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
from lightning_dynmo.nn.sparse import SparseLinear, densify, sparse_weights, use_dense_states

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
    "SparseLinear",
    "TokenEmbedding",
    "densify",
    "faster_execution",
    "gpt_layers",
    "sparse_weights",
    "time_executions",
    "use_dense_states",
]
