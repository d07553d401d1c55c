"""The weights with the largest magnitudes in the whole model, of which each rank holds a part."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dynmo.pipeline.groups import PipelineGroups

_PIECE = 1 << 18
"""Entries that are looked at together, so that what is computed from them fits a cache, and no memory grows."""

_DIGIT = 16
"""Bits of a magnitude that one pass over the weights counts."""


def select_largest(
    candidates: Mapping[str, Tensor], order: Sequence[str], num_kept: int, groups: PipelineGroups | None
) -> dict[str, Tensor]:
    """Returns which entries are among the `num_kept` largest magnitudes of all ranks' candidates.

    The answer is exact and does not depend on how the candidates are spread over the ranks: of entries with the same
    magnitude, those of earlier weights are kept, and in a weight those that come first. All ranks call this; all
    replicas get the masks of the first, since their weights may differ in the last bit.

    Every entry counts, zeros too, so what is pruned already is left out, and never comes back: to prune further where
    ``mask`` is true, pass ``weight[mask]``, and ``mask.masked_scatter(mask, kept)`` is the new mask.

    [Note: exact selection by counting]
    As integers, the bits of non-negative floating point numbers are in the order of the numbers. So the threshold is
    found from its highest bits down: all ranks add up how many magnitudes there are with each value of the next 8 bits,
    2 KB, and go on where the `num_kept`-th lies. A pass over the weights counts 16 bits, two such steps, of those
    magnitudes that agree with the threshold so far. No rank sees another's weights.

    Args:
        candidates: This rank's weights by name, of any shape and floating point dtype; may be empty.
        order: Names of all ranks' candidates in model order, the same on every rank.
        num_kept: How many entries to keep, the same on every rank.
        groups: Process groups of this rank; None where it has all weights, without a pipeline.

    Returns:
        For each of this rank's candidates a bool tensor of its shape, true for what is kept.

    Raises:
        ValueError: On every rank, if a weight has NaN, is not of floating point, or is not on one rank of the pipeline;
            if ranks disagree; or if there are fewer entries than are to be kept.
    """
    return _select(candidates, order, operator.index(num_kept), groups, _search)


def select_largest_by_gathering(
    candidates: Mapping[str, Tensor], order: Sequence[str], num_kept: int, groups: PipelineGroups
) -> dict[str, Tensor]:
    """Returns the same as `select_largest`, found as in Algorithm 1 of the paper; slow, and for comparison only.

    Each rank sends its largest magnitudes, up to `num_kept` of them, to the first, which finds the threshold. The paper
    prints ``k = num_params * (1 - sparsity)``. That has to be the k of the whole model: with each rank's own, all ranks
    keep the same share, and nothing is global.

    Args:
        candidates: As for `select_largest`.
        order: As for `select_largest`.
        num_kept: As for `select_largest`.
        groups: Process groups of this rank.

    Raises:
        ValueError: As for `select_largest`.
    """
    return _select(candidates, order, operator.index(num_kept), groups, _search_by_gathering)


@dataclass(frozen=True, slots=True)
class _Threshold:
    """Where the kept magnitudes end.

    Attributes:
        key: The least of them, as an integer.
        rank: The threshold is the rank-th of the magnitudes equal to it.
        tied: How many magnitudes are equal to it.
    """

    key: int
    rank: int
    tied: int


_Search = Callable[[Sequence[Tensor], int, int, PipelineGroups | None], _Threshold]
"""Finds the n-th largest magnitude of all ranks' weights, from weights, n and the bits of a key."""


def _select(
    candidates: Mapping[str, Tensor],
    order: Sequence[str],
    num_kept: int,
    groups: PipelineGroups | None,
    search: _Search,
) -> dict[str, Tensor]:
    guard = nullcontext() if groups is None else groups.guard("selection of the largest weights")
    with torch.no_grad(), guard:
        num_bits = _check(candidates, order, num_kept, groups)
        weights = {name: candidates[name] for name in order if name in candidates}
        masks = {
            name: torch.zeros(weight.shape, dtype=torch.bool, device=weight.device) for name, weight in weights.items()
        }
        total = _check_held_once(weights, order, num_kept, groups)
        if total and (groups is None or groups.dp_rank == 0):
            place = max(num_kept, 1)  # where none is kept, none of those at the largest magnitude is
            threshold = search(list(weights.values()), place, num_bits, groups)
            _keep(masks, weights, threshold, num_bits)
            kept_ties = threshold.rank - (place - num_kept)
            if kept_ties < threshold.tied:
                _drop_ties(masks, weights, order, threshold.key, kept_ties, num_bits, groups)
        if groups is not None and groups.dp_size > 1:
            _share_with_replicas(masks, groups)
    return masks


def _check(candidates: Mapping[str, Tensor], order: Sequence[str], num_kept: int, groups: PipelineGroups | None) -> int:
    """Checks what each rank passes, on all ranks together, and returns the bits of a key: 64 if any weight has them."""
    problem = _problem_of(candidates, order, num_kept)
    is_wide = any(weight.dtype == torch.float64 for weight in candidates.values())
    if groups is None:
        if problem:
            raise ValueError(f"Cannot select the largest weights: {problem}.")
        return 64 if is_wide else 32
    asked = _digest_of([num_kept, *order])
    layout = _digest_of([(name, list(candidates[name].shape), candidates[name].dtype) for name in sorted(candidates)])
    if groups.dp_size > 1:
        extremes = torch.tensor([layout, -layout])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=groups.counterparts)
        if extremes.sum():
            problem = problem or (
                f"the weights that rank {groups.global_rank} passed differ in name, shape or dtype from those of its "
                "replicas; move layers and prune on all replicas at the same steps"
            )
    facts = torch.tensor([asked, -asked, bool(problem), is_wide])
    dist.all_reduce(facts, dist.ReduceOp.MAX, group=groups.world)
    largest, least, any_problem, any_wide = (facts * torch.tensor([1, -1, 1, 1])).tolist()
    if any_problem or largest != least:
        told: list[Any] = [None] * dist.get_world_size(groups.world)
        dist.all_gather_object(told, (problem, num_kept, list(order)), group=groups.world)
        raise ValueError(f"Cannot select the largest weights: {_text_of(told)}.")
    return 64 if any_wide else 32


def _problem_of(candidates: Mapping[str, Tensor], order: Sequence[str], num_kept: int) -> str:
    """Returns what is wrong with this rank's arguments; empty if nothing is."""
    if num_kept < 0:
        return f"expected num_kept of at least 0, got {num_kept}; use num_kept=0 to keep nothing"
    known = set(order)
    if len(known) < len(order):
        twice = next(name for name in order if order.count(name) > 1)
        return (
            f"weight '{twice}' is in the order more than once; name each weight once, such as by dict.fromkeys(names)"
        )
    for name, weight in candidates.items():
        if name not in known:
            return f"weight '{name}' is not in the order, which names {len(order)} weights; add it on every rank"
        if not weight.is_floating_point() or weight.layout != torch.strided:
            return (
                f"expected dense floating point numbers in weight '{name}', got {weight.dtype} in layout "
                f"{weight.layout}; leave it out, or pass its values"
            )
        if weight.numel() and any(extreme.isnan() for extreme in torch.aminmax(weight)):
            return (
                f"weight '{name}' has NaN among its entries, which have no order; resume from a checkpoint before the "
                "loss became NaN, with a lower learning rate or gradient_clip_val=1.0"
            )
    return ""


def _text_of(told: Sequence[tuple[str, int, Sequence[str]]]) -> str:
    """Returns what is wrong from what all ranks have told: a problem, or how many to keep of which weights."""
    problem = next((problem for problem, _, _ in told if problem), "")
    if problem:
        return problem
    _, num_kept, order = told[0]
    rank, (_, other_kept, other_order) = next((rank, other) for rank, other in enumerate(told) if other != told[0])
    if num_kept != other_kept:
        differ = f"num_kept={num_kept} on rank 0 and num_kept={other_kept}"
    else:
        pairs = enumerate(zip_longest(order, other_order))
        place, (one, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        differ = f"number {place} in the order is {one!r} on rank 0 and {other!r}"
    return (
        f"{differ} on rank {rank}; derive both from the whole module tree, which every rank has, not from owned layers"
    )


def _digest_of(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _check_held_once(
    weights: Mapping[str, Tensor], order: Sequence[str], num_kept: int, groups: PipelineGroups | None
) -> int:
    """Checks that each weight is on one rank of the pipeline, and returns the number of entries of all."""
    facts = torch.tensor([*(name in weights for name in order), sum(weight.numel() for weight in weights.values())])
    *holders, total = _summed(facts.long(), groups).tolist()
    for name, count in zip(order, holders, strict=True):
        if count != 1:
            raise ValueError(
                f"Cannot select the largest weights: expected weight '{name}' on 1 rank of a pipeline, got it on "
                f"{count}. Pass it on the rank that owns its layer, and one that several layers use with the first."
            )
    if num_kept > total:
        raise ValueError(
            f"Cannot select the largest weights: expected to keep at most the {total} entries that there are, got "
            f"num_kept={num_kept}. Use num_kept={total} to keep them all."
        )
    return int(total)


def _search(weights: Sequence[Tensor], place: int, num_bits: int, groups: PipelineGroups | None) -> _Threshold:
    """Finds a threshold by counting; see [Note: exact selection by counting]."""
    key, rank, tied = 0, place, 0
    for shift in range(num_bits - _DIGIT, -1, -_DIGIT):
        counts = _count(weights, key, shift, num_bits).view(256, 256)
        high, rank, _ = _descend(_summed(counts.sum(1), groups), rank)
        low, rank, tied = _descend(_summed(counts[high].clone(), groups), rank)
        key = key << _DIGIT | high << 8 | low
    return _Threshold(key, rank, tied)


def _count(weights: Sequence[Tensor], prefix: int, shift: int, num_bits: int) -> Tensor:
    """Counts each value of 16 bits, from bit `shift` on, among the keys whose higher bits are `prefix`, ``[65536]``."""
    counts = torch.zeros(1 << _DIGIT, dtype=torch.int64)
    for weight in weights:
        own = torch.zeros_like(counts, device=weight.device)
        if shift == num_bits - _DIGIT:
            for _, keys in _keys(weight, num_bits):
                found = torch.bincount(keys >> shift)
                own[: len(found)] += found
        else:  # few have the prefix, so these are counted at once
            parts = [keys[keys >> shift + _DIGIT == prefix] for _, keys in _keys(weight, num_bits)]
            if parts:
                own += torch.bincount(torch.cat(parts) >> shift & (1 << _DIGIT) - 1, minlength=len(own))
        counts += own.cpu()
    return counts


def _descend(counts: Tensor, rank: int) -> tuple[int, int, int]:
    """Returns the bin that the rank-th largest is in, its rank among those in that bin, and how many these are."""
    down = counts.flip(0)
    reached = down.cumsum(0)
    place = int(torch.searchsorted(reached, rank))
    within = int(down[place])
    return len(counts) - 1 - place, rank - int(reached[place]) + within, within


def _search_by_gathering(
    weights: Sequence[Tensor], place: int, num_bits: int, groups: PipelineGroups | None
) -> _Threshold:
    """Finds a threshold on the first rank, to which the others send their largest magnitudes."""
    assert groups is not None
    dtype = torch.int32 if num_bits == 32 else torch.int64
    keys = torch.cat(
        [torch.empty(0, dtype=dtype), *(part.cpu() for each in weights for _, part in _keys(each, num_bits))]
    )
    largest = keys.topk(min(place, keys.numel()), sorted=False).values
    sizes = groups.gather(largest.numel())
    found = torch.zeros(2, dtype=torch.int64)
    if groups.is_first:
        gathered = torch.empty(sum(sizes), dtype=dtype)
        for other, part in enumerate(gathered.split(sizes)):
            if other == 0:
                part.copy_(largest)
            elif part.numel():
                dist.recv(part, groups.peer(other), group=groups.control)
        key = gathered.topk(place, sorted=False).values.min()
        found[0], found[1] = key, place - (gathered > key).sum()
    elif largest.numel():
        dist.send(largest, groups.peer(0), group=groups.control)
    dist.broadcast(found, groups.peer(0), group=groups.control)
    tied = _summed((keys == found[0]).sum(), groups)
    return _Threshold(int(found[0]), int(found[1]), int(tied))


def _keep(masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], threshold: _Threshold, num_bits: int) -> None:
    """Sets masks to true from the threshold on."""
    for name, weight in weights.items():
        mask = masks[name].view(-1)
        for start, keys in _keys(weight, num_bits):
            torch.ge(keys, threshold.key, out=mask[start : start + len(keys)])


def _drop_ties(
    masks: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    order: Sequence[str],
    key: int,
    num_kept: int,
    num_bits: int,
    groups: PipelineGroups | None,
) -> None:
    """Sets masks to false at the threshold, but for the first `num_kept` entries there, in order."""
    mine = {
        name: sum(int((keys == key).sum()) for _, keys in _keys(weight, num_bits)) for name, weight in weights.items()
    }
    counts = _summed(torch.tensor([mine.get(name, 0) for name in order]), groups)
    before = dict(zip(order, (counts.cumsum(0) - counts).tolist(), strict=True))
    for name, weight in weights.items():
        left = max(num_kept - before[name], 0)
        if left >= mine[name]:
            continue
        mask = masks[name].view(-1)
        for start, keys in _keys(weight, num_bits):
            tied = (keys == key).nonzero().view(-1)
            mask[start + tied[left:]] = False
            left = max(left - len(tied), 0)


def _share_with_replicas(masks: Mapping[str, Tensor], groups: PipelineGroups) -> None:
    """Gives all replicas the masks of the first, eight entries to a byte."""
    source = dist.get_global_rank(groups.counterparts, 0)
    for mask in masks.values():
        if mask.numel():
            packed = torch.from_numpy(np.packbits(mask.cpu().numpy()))
            dist.broadcast(packed, source, group=groups.counterparts)
            bits = np.unpackbits(packed.numpy(), count=mask.numel())
            mask.copy_(torch.from_numpy(bits).view(mask.shape))


def _keys(weight: Tensor, num_bits: int) -> Iterator[tuple[int, Tensor]]:
    """Yields magnitudes as integers in the same order, a piece of the weight at a time, and where each piece begins."""
    floating, integer = (torch.float32, torch.int32) if num_bits == 32 else (torch.float64, torch.int64)
    flat = weight.detach().reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE].to(floating)
        yield start, piece.view(integer) & ((1 << num_bits - 1) - 1)  # without the sign


def _summed(counts: Tensor, groups: PipelineGroups | None) -> Tensor:
    """Returns the sum over the ranks of the pipeline, in place."""
    if groups is not None:
        dist.all_reduce(counts, group=groups.control)
    return counts
