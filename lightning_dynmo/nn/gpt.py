"""A small GPT, written as the chain of layers a pipeline needs.

Every layer takes one tensor and returns one tensor, so that the output of each is the input of the next:

    tokens [B, T] -> TokenEmbedding -> [B, T, D] -> Block -> ... -> Block -> [B, T, D] -> Head -> logits [B, T, V]

A block can also be two layers, `AttentionBlock` and `MLPBlock`, which move apart.

Layers share nothing: no parameter and no buffer is used by two of them. That is why the head has its own matrix instead
of the embedding's, and why each block keeps its own rotary tables. Any layer can then live on any rank.

Shape letters: B batch, T tokens, D hidden size, H heads, V vocabulary size.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Positions = Literal["learned", "rotary"]

INIT_STD = 0.02
ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The sizes of a GPT.

    Args:
        vocab_size: Number of distinct tokens; 256 for bytes.
        context_length: Longest sequence the model accepts, in tokens.
        num_blocks: Number of transformer blocks. The chain has two layers more: the embedding and the head.
        hidden_size: Width D of the tensor passed from layer to layer.
        num_heads: Attention heads per block; must divide `hidden_size`.
        mlp_ratio: Width of the hidden layer of the MLPs, as a multiple of `hidden_size`.
        dropout: Probability of dropping a value after the embedding, in the attention weights and on both residual
            branches, in `[0, 1)`.
        positions: `"learned"` adds one trained vector per position to the token embedding; `"rotary"` rotates queries
            and keys inside the attention, so that scores depend on distances only.
        split_blocks: Whether attention and MLP of each block are layers of their own, so that the chain has
            `2 num_blocks + 2`. Use it where stages would have fewer than 3 layers: layers move whole, so that a
            pipeline of few layers per stage cannot be balanced well.

    Raises:
        ValueError: If a size is not positive, `num_heads` does not divide `hidden_size`, `dropout` is outside `[0, 1)`,
            `positions` is unknown, or rotary positions are asked for with an odd number of dims per head.
    """

    vocab_size: int = 256
    context_length: int = 128
    num_blocks: int = 8
    hidden_size: int = 128
    num_heads: int = 4
    mlp_ratio: int = 4
    dropout: float = 0.0
    positions: Positions = "learned"
    split_blocks: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "num_blocks", "hidden_size", "num_heads", "mlp_ratio"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if self.hidden_size % self.num_heads != 0:
            fitting_head_size = max(2, 2 * round(self.hidden_size / self.num_heads / 2))  # even, to suit rotary too
            raise ValueError(
                f"`num_heads` must divide `hidden_size`, got {self.num_heads} heads for a hidden size of "
                f"{self.hidden_size}; for example, use hidden_size={self.num_heads * fitting_head_size}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"`dropout` must be in [0, 1), got {self.dropout}.")
        if self.positions not in get_args(Positions):
            raise ValueError(f"`positions` must be one of {list(get_args(Positions))}, got {self.positions!r}.")
        if self.positions == "rotary" and self.head_size % 2 != 0:
            raise ValueError(
                f'positions="rotary" rotates pairs of dims, so hidden_size / num_heads must be even, got '
                f"{self.hidden_size} / {self.num_heads} = {self.head_size}; for example, use "
                f"hidden_size={self.num_heads * (self.head_size + 1)}."
            )

    @property
    def head_size(self) -> int:
        """Dims per attention head."""
        return self.hidden_size // self.num_heads

    @property
    def residual_std(self) -> float:
        """Standard deviation of the matrices that write to the residual stream.

        Each block writes to it twice. Dividing by the square root of the number of writes keeps the variance of the
        stream independent of the depth, as in GPT-2.
        """
        return INIT_STD / math.sqrt(2 * self.num_blocks)


class TokenEmbedding(nn.Module):
    """The first layer: turns tokens into vectors, and adds learned positions when the model has them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.tokens = _embedding(config.vocab_size, config.hidden_size)
        self.positions = (
            _embedding(config.context_length, config.hidden_size) if config.positions == "learned" else None
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeds tokens.

        Args:
            tokens: int64 `[B, T]`, values in `[0, vocab_size)`.

        Returns:
            `[B, T, D]`.

        Raises:
            ValueError: If T is larger than `context_length`.
        """
        num_tokens = tokens.shape[1]
        if num_tokens > self.context_length:
            raise ValueError(
                f"A sequence of {num_tokens} tokens does not fit the model's context_length={self.context_length}; "
                f"shorten the sequences or build the model with context_length={num_tokens}."
            )
        hidden: Tensor = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[:num_tokens]
        hidden = self.dropout(hidden)
        return hidden


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and the tokens before it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.rotary = config.positions == "rotary"
        self.qkv = _linear(config.hidden_size, 3 * config.hidden_size)
        self.output = _linear(config.hidden_size, config.hidden_size, std=config.residual_std)
        if self.rotary:
            # They follow from the config, so they stay out of checkpoints.
            cos, sin = rotary_tables(config.context_length, config.head_size)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mixes information between tokens: `[B, T, D] -> [B, T, D]`."""
        batch_size, num_tokens, hidden_size = hidden.shape
        qkv = self.qkv(hidden).view(batch_size, num_tokens, 3, self.num_heads, hidden_size // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, T, D / H]
        if self.rotary:
            query = apply_rotary(query, self.cos[:num_tokens], self.sin[:num_tokens])
            key = apply_rotary(key, self.cos[:num_tokens], self.sin[:num_tokens])
        dropout_p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)
        hidden = self.output(mixed.transpose(1, 2).reshape(batch_size, num_tokens, hidden_size))
        return hidden


class MLP(nn.Module):
    """Two linear layers around a GELU, applied to each token on its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = _linear(config.hidden_size, config.mlp_ratio * config.hidden_size)
        self.down = _linear(config.mlp_ratio * config.hidden_size, config.hidden_size, std=config.residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transforms each token: `[B, T, D] -> [B, T, D]`."""
        hidden = self.down(F.gelu(self.up(hidden)))
        return hidden


class Block(nn.Module):
    """A transformer block: attention, then MLP, each normalized before and added to the residual stream after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs the block: `[B, T, D] -> [B, T, D]`."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        hidden = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return hidden


class AttentionBlock(nn.Module):
    """The first half of a `Block` as a layer of its own; its parameters have the names that they have there."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalSelfAttention(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs the half: `[B, T, D] -> [B, T, D]`."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden


class MLPBlock(nn.Module):
    """The second half of a `Block` as a layer of its own; its parameters have the names that they have there."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs the half: `[B, T, D] -> [B, T, D]`."""
        hidden = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return hidden


class Head(nn.Module):
    """The last layer: scores every token of the vocabulary as the next one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.output = _linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes logits: `[B, T, D] -> [B, T, V]`."""
        logits: Tensor = self.output(self.norm(hidden))
        return logits


def gpt_layers(config: GPTConfig) -> nn.ModuleList:
    """Builds the chain of layers of a GPT.

    The layers are initialized as in GPT-2: normal with standard deviation 0.02, smaller for the matrices that write to
    the residual stream, biases zero. The numbers come from torch's global generator: `torch.manual_seed` decides them.

    Args:
        config: The sizes.

    Returns:
        `num_blocks + 2` layers: a `TokenEmbedding`, the `Block`s and a `Head`; with `split_blocks`,
        `2 num_blocks + 2`, an `AttentionBlock` and an `MLPBlock` in place of each `Block`, with the same numbers.
    """
    kinds = [AttentionBlock, MLPBlock] if config.split_blocks else [Block]
    blocks = [kind(config) for _ in range(config.num_blocks) for kind in kinds]
    return nn.ModuleList([TokenEmbedding(config), *blocks, Head(config)])


def rotary_tables(num_positions: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Computes the angles of rotary position embeddings (RoFormer, arXiv 2104.09864, eq. 15).

    Args:
        num_positions: Number of positions T.
        head_size: Dims per head, even. Pair i turns by `10000 ** (-2 i / head_size)` radians per position.

    Returns:
        Cosines and sines, each `[T, head_size / 2]`.
    """
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(num_positions), frequencies)
    return angles.cos(), angles.sin()


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of dims by an angle that grows with the position.

    Args:
        heads: Queries or keys, `[B, H, T, head_size]`. Dim i of the first half pairs with dim i of the second.
        cos: `[T, head_size / 2]`, from `rotary_tables`.
        sin: As `cos`.

    Returns:
        The rotated tensor, with the shape and dtype of `heads`.
    """
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    # Under autocast the tables stay float32 and promote the product; attention wants one dtype.
    return rotated.to(heads.dtype)


def _linear(in_features: int, out_features: int, *, std: float = INIT_STD, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=bias)
    nn.init.normal_(linear.weight, std=std)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def _embedding(num_embeddings: int, hidden_size: int) -> nn.Embedding:
    embedding = nn.Embedding(num_embeddings, hidden_size)
    nn.init.normal_(embedding.weight, std=INIT_STD)
    return embedding
