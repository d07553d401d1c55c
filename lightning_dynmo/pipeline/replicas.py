"""Replicas of a pipeline: the same values at the start, and gradients added up once per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.groups import PipelineGroups

BUCKET_BYTES = 25 * 2**20
"""Gradients that travel in one message, as in torch's DistributedDataParallel."""


def same_on_all_replicas(chain: LayerChain, groups: PipelineGroups) -> None:
    """Gives this rank's layers the values that they have in the first replica."""
    if groups.dp_size == 1:
        return
    named = [
        entry
        for part in (chain, *chain.followers)
        for entry in [*(entry for index in chain.owned for entry in part.tensors(index)), *part.stationary()]
    ]
    source = dist.get_global_rank(groups.replicas, 0)
    for tensor in {id(tensor): tensor for _, tensor in named}.values():
        dense = tensor.data.contiguous()
        dist.broadcast(dense.view(-1).view(torch.uint8), source, group=groups.replicas)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(dense)


class ReplicaSums:
    """Adds gradients up over the replicas, bucket by bucket, while the schedule goes on.

    Which gradients there are may differ between replicas, where a layer is skipped or an expert gets no token. So a
    bucket holds every trainable parameter, and a count of the replicas that have its gradient: one that none has stays
    without, as on one device.

    Args:
        groups: Process groups of this rank.
    """

    def __init__(self, groups: PipelineGroups) -> None:
        self._groups = groups
        self._pending: list[tuple[list[nn.Parameter], Tensor, Any]] = []

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begins to add up the gradients that these parameters have now; the same parameters on all replicas.

        Raises:
            ValueError: If a gradient is sparse.
        """
        if self._groups.dp_size == 1:
            return
        for bucket in _buckets(parameters):
            parts = [_flat(parameter, parameter.grad) for parameter in bucket]
            present = torch.tensor([float(parameter.grad is not None) for parameter in bucket]).to(parts[0])
            flat = torch.cat([*parts, present])
            self._pending.append((bucket, flat, dist.all_reduce(flat, group=self._groups.replicas, async_op=True)))

    def finish(self) -> None:
        """Waits for the sums and puts them in place of the gradients."""
        for bucket, flat, work in self._pending:
            work.wait()
            counts = flat[flat.numel() - len(bucket) :].tolist()
            offset = 0
            for parameter, count in zip(bucket, counts, strict=True):
                size = _as_real(parameter.detach()).numel()
                if count:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    target = _as_real(parameter.grad)
                    target.copy_(flat[offset : offset + size].view(target.shape))
                offset += size
        self._pending.clear()


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields parameters of one dtype together, in order, up to the size of a bucket."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def _flat(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    if gradient.layout != torch.strided:
        raise ValueError(
            f"A parameter of shape {list(parameter.shape)} has a sparse gradient, which replicas cannot add up. Build "
            "its embedding with sparse=False, or use data_parallel_size=1."
        )
    return _as_real(gradient.detach()).reshape(-1)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
