"""Gradients of the whole model, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.remote_gradients import RemoteGradient
from lightning_dynmo.pipeline.replicas import ReplicaSums


class GradientWindow:
    """Gradients of one optimizer step, which may take several batches.

    [Note: gradients aside]
    A schedule runs forward and backward in one go, inside the training step, but gradients are cleared between training
    step and backward. So the first batch's gradients are set aside until `place` puts them back, at the time of the
    backward; later batches add to them in place, microbatch by microbatch, which is the order of one device.

    Args:
        chain: All layers.
        groups: Process groups of this rank.
        watch_clearing: Whether it is checked that gradients are cleared between steps, since a user's code does it.
    """

    def __init__(self, chain: LayerChain, groups: PipelineGroups, *, watch_clearing: bool = False) -> None:
        self._watch_clearing = watch_clearing
        self._mark: nn.Parameter | None = None
        self._chain = chain
        self._groups = groups
        self._sums = ReplicaSums(groups)
        self._tied = chain.tied()
        self._trained: set[int] = set()
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._starts = self._ends = True
        self._weight = 0.0

    def begin_batch(self, *, starts: bool, ends: bool) -> None:
        """Prepares for a batch; old gradients go where it is the first of the window.

        Args:
            starts: Whether the batch is the first of the window.
            ends: Whether it is the last.
        """
        self._starts, self._ends = starts, ends
        if starts:
            self._take()
            self._aside, self._weight, self._trained = [], 0.0, set()
        # Also what is frozen within the window has gradients.
        parameters = self._chain.owned_parameters()
        self._trained |= {id(parameter) for parameter in parameters if parameter.requires_grad}

    def have_arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """Notes that the batch's gradients of these parameters are all there: replicas begin to add them up."""
        if self._ends:
            summed = self._trained - {id(parameter) for parameter, _ in self._tied}
            self._sums.start([parameter for parameter in parameters if id(parameter) in summed])

    def end_batch(self, weight: float | None) -> None:
        """Sets fresh gradients aside and counts the batch's weight, if its losses had one."""
        if self._starts:
            self._aside = self._take()
            if self._watch_clearing and self._aside:
                self._mark = min((parameter for parameter, _ in self._aside), key=nn.Parameter.numel)
                self._mark.grad = torch.full_like(self._mark, torch.nan)
        if weight is not None:
            self._weight += weight

    def place(self) -> None:
        """Puts gradients in place; after the last batch, sums over replicas and over the layers that share a parameter.

        Gradients of weighted losses are then divided by the window's weight. All ranks call this.

        Raises:
            ValueError: If gradients were to be cleared before this, and were not.
        """
        self._check_cleared()
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        if not self._ends:
            return
        with torch.no_grad():
            self._sums.start([parameter for parameter, _ in self._tied if id(parameter) in self._trained])
            self._sums.finish()
            for parameter, users in self._tied:
                if id(parameter) in self._trained:
                    _add_up_tied(parameter, users, self._chain, self._groups)
            if self._weight:
                for parameter in self._chain.owned_parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(self._weight)

    def _check_cleared(self) -> None:
        marked, self._mark = self._mark, None
        if marked is not None and marked.grad is not None and marked.grad.isnan().any():
            raise ValueError(
                "optimizer_zero_grad has left gradients in place, but those of earlier steps are gone in a pipeline. "
                "Let it clear them at every step, and use accumulate_grad_batches to add up those of several batches."
            )

    def _take(self) -> list[tuple[nn.Parameter, Tensor]]:
        parameters = self._chain.owned_parameters()
        taken = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return taken


def _add_up_tied(parameter: nn.Parameter, users: Sequence[int], chain: LayerChain, groups: PipelineGroups) -> None:
    """Gives a parameter that layers on several ranks use the sum of their gradients, the same to the last bit."""
    me = groups.pp_rank
    owners = sorted({chain.owner(layer, own=me) for layer in users})
    if len(owners) == 1 or me not in owners:
        return
    present = torch.full((1,), float(parameter.grad is not None), dtype=parameter.dtype, device=parameter.device)
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    mine = torch.cat([gradient.reshape(-1), present])
    first, others = groups.peer(owners[0]), [groups.peer(owner) for owner in owners[1:]]
    if me == owners[0]:
        part = torch.empty_like(mine)
        for other in others:
            dist.recv(part, other, group=groups.pipeline)
            mine += part
        for other in others:
            dist.send(mine, other, group=groups.pipeline)
    else:
        dist.send(mine, first, group=groups.pipeline)
        dist.recv(mine, first, group=groups.pipeline)
    if mine[-1]:
        parameter.grad = mine[:-1].view(parameter.shape).clone()


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float, groups: PipelineGroups) -> Tensor:
    """Clips gradients by their 2-norm over the whole model and returns that norm.

    The norms of single parameters are put in the order of `parameters`, which is the same on every rank, before they
    are added up. So the result does not depend on where the model is cut, to the last bit. A rank without gradients
    joins in; a parameter that several ranks hold counts once.

    Args:
        parameters: All parameters of the model, shells included.
        max_norm: Largest norm that is left as it is.
        groups: Process groups of this rank.
    """
    norms = torch.full((len(parameters),), -1.0, dtype=torch.float64, device=groups.device)
    for position, parameter in enumerate(parameters):
        if parameter.grad is not None and not isinstance(parameter.grad, RemoteGradient):
            norms[position] = torch.linalg.vector_norm(parameter.grad)
    known = torch.stack([norms.nan_to_num(0.0, torch.inf), norms.isnan()])  # a maximum may pass over a NaN
    dist.all_reduce(known, op=dist.ReduceOp.MAX, group=groups.pipeline)
    norms = known[0].masked_fill(known[1] > 0, torch.nan)
    present = (norms >= 0) | norms.isnan()
    # As on one device, norms are added up in the widest dtype among the gradients, whichever rank holds them.
    dtypes = [parameter.dtype for parameter, there in zip(parameters, present.tolist(), strict=True) if there]
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    total: Tensor = torch.linalg.vector_norm(norms[present].to(dtype))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def clip_grad_value(parameters: Sequence[nn.Parameter], clip_value: float) -> None:
    """Clips each entry of the gradients; torch's own function fails on a rank that has parameters but no gradients."""
    present = [parameter for parameter in parameters if parameter.grad is not None]
    if present:
        torch.nn.utils.clip_grad_value_(present, clip_value)
