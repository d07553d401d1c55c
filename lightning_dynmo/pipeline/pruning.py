"""Pruning by one threshold for the whole model, whichever ranks hold its layers (paper Algorithm 1, done right)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dynmo.nn import CSRPattern, SparseLinear, faster_execution, time_executions
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.selection import select_largest

SparseExecution = Literal["auto", "dense", "csr"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Matrix:
    """What became of one pruned weight.

    Attributes:
        density: Share of its entries that are kept, in ``[0, 1]``.
        is_compact: Whether it runs in compressed rows.
    """

    density: float
    is_compact: bool


class GlobalPruning:
    """Weights of a model that are pruned together.

    Args:
        weights: By name, in the order of the model: the index of the layer that has the weight, and its module. All
            ranks pass the same.
        chain: Says which of them this rank holds; None where it holds all, without a pipeline.
        groups: Process groups of this rank; None without a pipeline.
        execution: How pruned weights run: ``"dense"`` with zeros, ``"csr"`` in compressed rows, or ``"auto"`` in what
            is faster here, of which replicas decide together.
        matrices: Names of weights that keep their shape, since something else than their module reads them.

    Raises:
        ValueError: If there is no such execution.
    """

    def __init__(
        self,
        weights: Mapping[str, tuple[int, SparseLinear]],
        chain: LayerChain | None = None,
        groups: PipelineGroups | None = None,
        execution: SparseExecution = "auto",
        matrices: Collection[str] = (),
    ) -> None:
        check_execution(execution)
        self._weights = weights
        self._chain = chain
        self._groups = groups
        self._execution = execution
        self._matrices = frozenset(matrices)

    @property
    def num_weights(self) -> int:
        """Number of the weights' entries, pruned or not."""
        return sum(linear.in_features * linear.out_features for _, linear in self._weights.values())

    def prune(self, num_kept: int, optimizers: Sequence[Optimizer]) -> dict[str, Matrix]:
        """Keeps the entries with the largest magnitudes; every rank calls it, between optimizer steps.

        Args:
            num_kept: Entries that stay. Entries that are pruned already do not come back.
            optimizers: Those that may hold state of the weights.

        Returns:
            What became of each weight, by name, the same on every rank.

        Raises:
            ValueError: If a weight is NaN, on every rank.
        """
        owned = self._owned()
        candidates = {name: _survivors(linear) for name, linear in owned.items()}
        left = sum(self._gather(sum(survivors.numel() for survivors in candidates.values())))
        chosen = select_largest(candidates, list(self._weights), min(num_kept, left), self._groups)
        for name, linear in owned.items():
            linear.prune(_as_mask(linear, chosen[name]), optimizers)
        for name in self._to_compact(owned):
            owned[name].compact(optimizers)
        mine = {name: Matrix(linear.density, linear.is_compact) for name, linear in owned.items()}
        everywhere = {name: matrix for part in self._gather(mine) for name, matrix in part.items()}
        return {name: everywhere[name] for name in self._weights}

    def hold(self) -> None:
        """Sets pruned entries to zero again; after each optimizer step, since optimizers and hooks may change them."""
        for linear in self._owned().values():
            linear.hold()

    def restore(self, compact: Collection[str], optimizers: Sequence[Optimizer]) -> None:
        """Prunes again what was pruned in the run that a checkpoint is from, whose weights and optimizers are loaded.

        Args:
            compact: Names of the weights that ran in compressed rows; they do so again unless the execution is
                ``"dense"``. Which others can is known at the next pruning, when they have run.
            optimizers: Those that may hold state of the weights.
        """
        wanted = set() if self._execution == "dense" else set(compact) - self._matrices
        for name, linear in self._owned().items():
            linear.restore()
            if name in wanted:
                linear.compact(optimizers)

    def expand(self, optimizers: Sequence[Optimizer]) -> None:
        """Gives the weights their shape back, and what optimizers remember of them, where this rank holds them all."""
        if self._chain is None or len(self._chain.owned) == len(self._chain):
            for _, linear in self._weights.values():
                linear.expand(optimizers)

    def _owned(self) -> dict[str, SparseLinear]:
        """Returns the weights that this rank holds."""
        chain = self._chain
        return {name: linear for name, (index, linear) in self._weights.items() if chain is None or chain.owns(index)}

    def _to_compact(self, owned: Mapping[str, SparseLinear]) -> set[str]:
        # A layer that has just moved here has not run here yet, so ask all. What never runs is read by somebody else.
        tokens: Counter[str] = Counter()
        for part in self._gather({name: linear.num_tokens for name, (_, linear) in self._weights.items()}):
            tokens |= Counter(part)
        possible = {name: linear for name, linear in owned.items() if tokens[name] and name not in self._matrices}
        if self._execution == "csr":
            return set(possible)
        if self._execution == "dense":
            return set()
        times: dict[str, dict[str, float]] = {}
        for name, linear in possible.items():
            if not linear.is_compact and linear.mask is not None:
                pattern = CSRPattern.from_mask(linear.mask)
                times[name] = time_executions(pattern, pattern.gather(linear.weight.detach()), tokens[name])
        replicas = [times] if self._groups is None else self._groups.gather_replicas(times)
        total = {
            name: {kind: math.fsum(part[name][kind] for part in replicas) for kind in own}
            for name, own in times.items()
        }
        return {name for name, seconds in total.items() if faster_execution(seconds) == "csr"}

    def _gather(self, value: _T) -> list[_T]:
        return [value] if self._groups is None else self._groups.gather(value)


def check_execution(execution: str) -> None:
    """Checks that pruned weights can run in this way.

    Raises:
        ValueError: If not; lists the choices.
    """
    if execution not in get_args(SparseExecution):
        raise ValueError(f"Expected execution to be 'auto', 'dense' or 'csr', got {execution!r}. Use 'auto'.")


def _survivors(linear: SparseLinear) -> Tensor:
    """Returns the values that are not pruned yet, in the order of the dense matrix, ``[n]``."""
    weight = linear.weight.detach()
    return weight.flatten() if linear.mask is None else weight[linear.mask]


def _as_mask(linear: SparseLinear, chosen: Tensor) -> Tensor:
    """Returns for a choice among the survivors what `SparseLinear.prune` takes."""
    if linear.is_compact:
        return chosen
    if linear.mask is None:
        return chosen.view_as(linear.weight)
    return torch.zeros_like(linear.mask).masked_scatter(linear.mask, chosen)
