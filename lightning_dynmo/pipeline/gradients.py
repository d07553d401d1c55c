"""Gradients of the whole model, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dynmo.pipeline.groups import PipelineGroups


def set_aside(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Takes the gradients off the parameters and returns them, each with its parameter."""
    taken = []
    for parameter in parameters:
        if parameter.grad is not None:
            taken.append((parameter, parameter.grad))
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
    dtypes = {parameter.grad.dtype for parameter in parameters if parameter.grad is not None}
    norms = torch.zeros(2, len(parameters), dtype=torch.float64, device=groups.device)
    for position, parameter in enumerate(parameters):
        if parameter.grad is not None:
            norms[0, position] = torch.linalg.vector_norm(parameter.grad)
            norms[1, position] = 1
    dist.all_reduce(norms, group=groups.pipeline)
    present = norms[0, norms[1] > 0]
    total: Tensor = torch.linalg.vector_norm(present.to(torch.float64 if torch.float64 in dtypes else torch.float32))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
