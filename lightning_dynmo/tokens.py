"""How many tokens a layer works on, which is what it costs where it works on some of them only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from lightning_dynmo._torch import tree_leaves

_note: ContextVar[Callable[[int], None] | None] = ContextVar("note_tokens", default=None)


def count_tokens(num_tokens: int | Tensor) -> None:
    """Says how many tokens a layer works on; call it in the ``forward`` of a layer for which that is not all of them.

    ``DynMoStrategy(load="tokens")`` then evens out these numbers. Layers that do not call it count the tokens of their
    input: B * T for activations ``[B, T, D]`` and token ids ``[B, T]``, else the batch size. Of several calls in one
    forward the last one counts, so that a forward that is repeated to save memory counts once. Outside a measured step
    the call does nothing, and does not look at the number: where it depends on values, pass a tensor, such as
    ``mask.sum()``, whose value then need not be known in other steps.

    Args:
        num_tokens: Tokens of this microbatch that the layer works on.

    Raises:
        ValueError: If the number is negative.
    """
    note = _note.get()
    if note is None:
        return
    count = int(num_tokens)
    if count < 0:
        raise ValueError(f"Expected a number of tokens of at least 0, got {count}. Count those that are worked on.")
    note(count)


@contextmanager
def noting_tokens(note: Callable[[int], None]) -> Iterator[None]:
    """Has `note` called with what is counted in the body."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


def tokens_of(values: Sequence[Any]) -> int:
    """Returns the tokens of a layer's input, of which the first tensor counts."""
    first = next((leaf for leaf in tree_leaves(tuple(values)) if isinstance(leaf, Tensor) and leaf.ndim > 0), None)
    if first is None:
        return 0
    is_ids = first.ndim == 2 and not (first.is_floating_point() or first.is_complex())
    return first.shape[0] * first.shape[1] if first.ndim == 3 or is_ids else first.shape[0]
