"""Gradients of layers that live on other ranks, as hooks of this rank see them: known by their norms alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dynmo._torch import disabled_torch_function, make_wrapper_subclass
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.groups import PipelineGroups

NORM_ORDERS = (1.0, 2.0, math.inf)


class RemoteGradient(Tensor):
    """Stands for a gradient that another rank holds: it has its shape, dtype, device and norms, but no elements.

    A hook that logs norms or clips by them gets on every rank what it would get on one device. What a hook does to a
    gradient in place, the owner of the layer does to the real one; here a factor scales the norms, and anything else
    makes them unknown. Other computations raise.

    Args:
        parameter: The shell that it is the gradient of.
        norms: Norms by order; empty where they are not known.
        label: What errors call it, such as ``"head.weight (pipeline rank 3)"``.
    """

    norms: Mapping[float, float]
    label: str

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: Tensor, norms: Mapping[float, float], label: str) -> RemoteGradient:
        """Makes a tensor without elements; torch calls this, not ``__init__``."""
        gradient: RemoteGradient = make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        gradient.norms, gradient.label = norms, label
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteGradient({self.label}, shape={list(self.shape)}, norms={dict(self.norms)})"

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_foreach_") and not any(isinstance(other, list | tuple) for other in args[1:]):
            method = name.removeprefix("_foreach_")
            return [getattr(entry, method)(*args[1:], **(kwargs or {})) for entry in args[0]]
        gradient = args[0]
        if not isinstance(gradient, RemoteGradient):
            remote = next(entry for entry in args if isinstance(entry, RemoteGradient))
            raise RuntimeError(remote._refusal(name))
        if name in ("alias", "clone", "detach"):
            return gradient._scaled(1.0)
        if name == "linalg_vector_norm":
            return gradient._norm(*args[1:], **(kwargs or {}))
        factor = _factor(name.removesuffix("_"), args[1:])
        if name.endswith("_"):
            gradient.norms = {} if factor is None else gradient._scaled(factor).norms
            return gradient
        if factor is None:
            raise RuntimeError(gradient._refusal(name))
        return gradient._scaled(factor)

    def _scaled(self, factor: float) -> RemoteGradient:
        return RemoteGradient(self, {order: norm * abs(factor) for order, norm in self.norms.items()}, self.label)

    def _norm(self, order: float = 2.0, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        known = self.dtype.to_real() if dtype is None else dtype
        if order not in self.norms or dim is not None or keepdim or known != self.dtype.to_real():
            raise RuntimeError(self._refusal(f"norm(p={order}, dim={dim}, dtype={dtype})", changed=not self.norms))
        return torch.tensor(self.norms[order], dtype=known, device=self.device)

    def _refusal(self, what: str, changed: bool = False) -> str:
        return (
            f"A hook called {what} on the gradient of {self.label}{' after changing its elements' if changed else ''}, "
            "but elements of a gradient are only where its layer lives. On other ranks .norm(p) works for p = 1, 2 and "
            "inf, over all elements and as long as nothing but a factor was applied. Compute from such norms what the "
            "hook needs."
        )


@contextmanager
def remote_gradients(chain: LayerChain, owners: Sequence[int], groups: PipelineGroups) -> Iterator[None]:
    """Gives shells a `RemoteGradient` while the body runs, where the owner of the layer has a gradient.

    Norms do not depend on where the model is cut, to the last bit: each is computed by one rank, and handed on.

    Args:
        chain: All layers.
        owners: The `pp_rank` that owns each layer.
        groups: Process groups of this rank.
    """
    named = list(chain.root.named_parameters())
    norms = torch.zeros(len(NORM_ORDERS) + 1, len(named), dtype=torch.float64, device=groups.device)
    for position, (_, parameter) in enumerate(named):
        if parameter.grad is not None:
            sparse = parameter.grad.is_sparse
            elements = parameter.grad.coalesce().values() if sparse else parameter.grad
            for row, order in enumerate(NORM_ORDERS):
                norms[row, position] = torch.linalg.vector_norm(elements, order) if elements.numel() else 0.0
            norms[-1, position] = 1
    with groups.guard("exchange of gradient norms"):
        dist.all_reduce(norms, group=groups.pipeline)
    holder = {id(parameter): owners[index] for index in range(len(chain)) for parameter in chain.parameters(index)}
    standing = []
    for (name, parameter), (*values, holders) in zip(named, norms.T.tolist(), strict=True):
        if holders and parameter.grad is None:
            # Several ranks may hold a parameter that layers share, with the same gradient.
            known = {order: value / holders for order, value in zip(NORM_ORDERS, values, strict=True)}
            parameter.grad = RemoteGradient(parameter, known, f"{name} (pipeline rank {holder.get(id(parameter))})")
            standing.append(parameter)
    try:
        yield
    finally:
        for parameter in standing:
            parameter.grad = None


def _factor(name: str, args: Sequence[Any]) -> float | None:
    """Returns the number by which an operation multiplies all elements; None if it does something else."""
    if name == "zero":
        return 0.0
    if name == "neg":
        return 1.0
    if name not in ("mul", "div") or len(args) != 1 or isinstance(args[0], RemoteGradient):
        return None
    other = args[0]
    if isinstance(other, Tensor):
        if other.numel() != 1:
            return None
        other = other.item()
    size = float(abs(other))
    return size if name == "mul" else 1.0 / size if size else math.inf
