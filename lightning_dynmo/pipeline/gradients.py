"""Gradients of the whole model, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.remote_gradients import RemoteGradient


class GradientWindow:
    """Gradients of one optimizer step, which may take several batches.

    [Note: gradients aside]
    A schedule runs forward and backward in one go, inside the training step, but gradients are cleared between training
    step and backward. So the first batch's gradients are set aside until `place` puts them back, at the time of the
    backward; later batches add to them in place, microbatch by microbatch, which is the order of one device.
    """

    def __init__(self) -> None:
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._parameters: Sequence[nn.Parameter] = ()
        self._starts = True
        self._weight = 0.0

    def begin_batch(self, parameters: Sequence[nn.Parameter], *, starts: bool) -> None:
        """Prepares for a batch; old gradients go where it is the first of the window."""
        self._parameters, self._starts = parameters, starts
        if starts:
            self._take()
            self._aside, self._weight = [], 0.0

    def end_batch(self, weight: float | None) -> None:
        """Sets fresh gradients aside and counts the batch's weight, if its losses had one."""
        if self._starts:
            self._aside = self._take()
        if weight is not None:
            self._weight += weight

    def place(self, *, last: bool) -> None:
        """Puts gradients in place; those of weighted losses are divided by the window's weight after the last batch."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        if last and self._weight:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self._weight)

    def _take(self) -> list[tuple[nn.Parameter, Tensor]]:
        taken = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return taken


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float, groups: PipelineGroups) -> Tensor:
    """Clips gradients by their 2-norm over the whole model and returns that norm.

    The norms of single parameters are put in the order of `parameters`, which is the same on every rank, before they
    are added up. So the result does not depend on where the model is cut, to the last bit. A rank without gradients
    joins in.

    Args:
        parameters: All parameters of the model, shells included.
        max_norm: Largest norm that is left as it is.
        groups: Process groups of this rank.
    """
    norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=groups.device)
    for position, parameter in enumerate(parameters):
        if parameter.grad is not None and not isinstance(parameter.grad, RemoteGradient):
            norms[0, position] = torch.linalg.vector_norm(parameter.grad)
            norms[1, position] = 1
    dist.all_reduce(norms, group=groups.pipeline)
    present = norms[1] > 0
    # As on one device, norms are added up in the widest dtype among the gradients, whichever rank holds them.
    dtypes = [parameter.dtype for parameter, there in zip(parameters, present.tolist(), strict=True) if there]
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    total: Tensor = torch.linalg.vector_norm(norms[0, present].to(dtype))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
