"""Cutting a batch into microbatches and putting their results together again."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dynmo._torch import tree_leaves


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one microbatch brings into the pipeline.

    Attributes:
        args: Positional arguments of the first layer.
        kwargs: Keyword arguments, for every layer whose ``forward`` names them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def batch_size_of(batch: Any) -> int:
    """Returns the number of samples in a batch: dim 0 of its tensors, which must agree.

    Args:
        batch: A tensor ``[B, ...]``, or mappings, sequences and dataclasses of them; tensors without dims are settings
            rather than samples and do not count.

    Raises:
        ValueError: If the batch has no tensor with a dim, or its tensors disagree.
    """
    sizes: dict[int, str] = {}
    _collect_sizes(batch, "batch", sizes)
    if not sizes:
        raise ValueError(
            "The batch holds no tensor whose dim 0 counts samples, so it cannot be cut into microbatches. Return "
            "tensors of shape [B, ...] from the dataloader, or use num_microbatches=1."
        )
    if len(sizes) > 1:
        found = ", ".join(f"{path} has {size}" for size, path in sizes.items())
        raise ValueError(
            f"The tensors of the batch disagree on the number of samples in dim 0: {found}. Give every tensor of the "
            "batch one entry per sample, and keep tensors that all samples share in a buffer of the model."
        )
    return next(iter(sizes))


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cuts a batch into microbatches along dim 0, in order, without copying; sizes differ by one at most.

    Tensors, arrays and lists with one entry per sample are cut; everything else goes into every microbatch as it is.

    Args:
        batch: See `batch_size_of`.
        num_microbatches: How many; at most the batch size.

    Raises:
        ValueError: If there are fewer samples than microbatches, or the batch size is unclear.
    """
    if num_microbatches == 1:
        return [batch]
    batch_size = batch_size_of(batch)
    return [_cut(batch, batch_size, *bounds) for bounds in microbatch_bounds(batch_size, num_microbatches)]


def microbatch_bounds(batch_size: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Returns first sample and end of each microbatch.

    Raises:
        ValueError: If there are fewer samples than microbatches.
    """
    if batch_size < num_microbatches:
        raise ValueError(
            f"A batch of {batch_size} samples cannot be cut into {num_microbatches} microbatches. Use a batch size of "
            f"at least {num_microbatches}, or num_microbatches={max(batch_size, 1)}."
        )
    size, larger = divmod(batch_size, num_microbatches)
    starts = [index * size + min(index, larger) for index in range(num_microbatches + 1)]
    return list(itertools.pairwise(starts))


def choose_num_microbatches(batch_size: int, num_stages: int) -> int:
    """Returns a number up to 4 per stage, the paper's guidance for small bubbles, of equal parts where that can be."""
    most = min(batch_size, 4 * num_stages)
    return next((count for count in range(most, num_stages - 1, -1) if batch_size % count == 0), most)


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """Puts the results of the microbatches' steps together as one result for the batch.

    Tensors without dims are averaged, others are concatenated along dim 0, as are arrays; mappings, tuples and
    dataclasses are merged entry by entry; lists are joined; anything else must be the same in all microbatches, else a
    list of it is returned.

    Args:
        outputs: One result per microbatch, in order.
        weights: Weight of each microbatch in averages; equal where not given.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        if first.dim():
            return torch.cat(list(outputs))
        return weighted_mean(outputs, weights)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if isinstance(first, list):
        return [entry for output in outputs for entry in output]
    entries = _entries_of(first)
    if entries is not None:
        parts = [_entries_of(output) or {} for output in outputs]
        return _with_entries(first, {key: merge_outputs([part[key] for part in parts], weights) for key in entries})
    return first if all(output == first for output in outputs) else list(outputs)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Returns the mean of scalars, in float64 and then in their dtype, so that their order does not matter.

    What has no weight does not count, even if it is NaN, as the mean over no tokens is.
    """
    if weights is not None and any(weights):
        counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
        values, weights = [value for value, _ in counted], [weight for _, weight in counted]
    else:
        weights = None
    stacked = torch.stack([value.detach().double() for value in values])
    if weights is None:
        mean = stacked.mean()
    else:
        scale = torch.tensor(weights, dtype=torch.float64, device=stacked.device)
        mean = (stacked * scale).sum() / scale.sum()
    dtype = values[0].dtype
    return mean.to(dtype if dtype.is_floating_point else torch.get_default_dtype())


def weighted_loss(loss: Tensor, weight: float, output: Any) -> Tensor:
    """Returns a microbatch's loss times its weight, from which the backward runs.

    The mean over nothing is often NaN, so without weight it is zero times the chain's output, whatever the loss is.

    Raises:
        ValueError: If the weight is negative or not finite.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"training_step returned 'weight': {weight}; expected a number of at least 0, such as the number of tokens "
            "that the mean in 'loss' is taken over."
        )
    values = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.is_floating_point()]
    differentiable = [value for value in values if value.requires_grad]
    if weight or not differentiable:
        return loss * weight
    return torch.stack([(value * 0.0).sum() for value in differentiable]).sum()


def leaves_of(batch: Any) -> Iterator[Any]:
    """Yields what mappings, sequences and dataclasses of a batch hold, in order."""
    entries = dict(enumerate(batch)) if isinstance(batch, list) else _entries_of(batch)
    if entries is None:
        yield batch
    else:
        for entry in entries.values():
            yield from leaves_of(entry)


def _collect_sizes(value: Any, path: str, sizes: dict[int, str]) -> None:
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            sizes.setdefault(value.shape[0], path)
        return
    entries = dict(enumerate(value)) if isinstance(value, list) else _entries_of(value) or {}
    for key, entry in entries.items():
        by_item = isinstance(value, Mapping | tuple | list)
        _collect_sizes(entry, f"{path}[{key!r}]" if by_item else f"{path}.{key}", sizes)


def _cut(value: Any, batch_size: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[start:stop] if value.ndim else value
    if isinstance(value, list):
        if len(value) == batch_size and not any(isinstance(entry, Tensor | np.ndarray) for entry in value):
            return value[start:stop]
        return [_cut(entry, batch_size, start, stop) for entry in value]
    entries = _entries_of(value)
    if entries is None:
        return value
    return _with_entries(value, {key: _cut(entry, batch_size, start, stop) for key, entry in entries.items()})


def _entries_of(value: Any) -> dict[Any, Any] | None:
    """Returns the entries of a mapping, tuple or dataclass by key, position or field; None of anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return None


def _with_entries(value: Any, entries: dict[Any, Any]) -> Any:
    """Returns a mapping, tuple or dataclass like `value` with other entries."""
    if type(value) is dict:
        return entries
    if isinstance(value, tuple):
        return type(value)(*entries.values()) if hasattr(value, "_fields") else tuple(entries.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(entries)  # type: ignore[call-arg]
    result = copy.copy(value)  # keeps what is not an entry, such as a default factory or a tokenizer's encodings
    for key, entry in entries.items():
        if isinstance(result, MutableMapping):
            result[key] = entry
        else:
            object.__setattr__(result, key, entry)  # a frozen dataclass has no other way
    return result
