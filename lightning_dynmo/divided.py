"""Models of which no rank ever holds the whole: created in `configure_model`, and left divided after a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_dynmo.deferred import DeferredInit
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import PipelineGroups, PipelineRuntime
from lightning_dynmo.planning import Assignment
from lightning_dynmo.sameness import check_same_random_state, share_random_state

_KEY = "_lightning_dynmo_divided"


class DividedModel:
    """A module on its way from `configure_model` to the ranks that own its layers, and from one run to the next.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._deferred: DeferredInit | None = None
        self._left: tuple[LayerChain, Assignment] | None = vars(module).pop(_KEY, None)

    @property
    def left(self) -> tuple[LayerChain, Assignment] | None:
        """What an earlier run has left of the module, where its layers are still with their ranks."""
        return self._left

    @property
    def is_divided(self) -> bool:
        """Whether this rank does not have the whole module, and must not."""
        return self._left is not None or (self._deferred is not None and self._deferred.has_created)

    @contextmanager
    def creating(self, groups: PipelineGroups) -> Iterator[None]:
        """Gives the module's layers no lasting memory while `configure_model` creates them, alike on every rank."""
        share_random_state(groups)
        self._deferred = DeferredInit(self._module)
        with self._deferred:
            yield
        check_same_random_state(groups)

    def convert(self, precision: Precision) -> nn.Module:
        """Returns the module as the precision plugin wants it."""
        with self._deferred or nullcontext():
            return precision.convert_module(self._module)

    def distribute(self, runtime: PipelineRuntime) -> None:
        """Gives each rank its layers: made there, or sent by the first rank if made before `configure_model`.

        Raises:
            ValueError: If an earlier run has left the layers with other ranks than this one needs.
        """
        chain, first = runtime.chain, runtime.groups.is_first
        if self._left is not None:
            own = runtime.groups.pp_rank
            if len(runtime.placement) != runtime.assignment.num_stages or any(
                chain.owner(index, own) != owner for index, owner in enumerate(runtime.owners)
            ):
                raise ValueError(
                    f"The layers of {type(self._module).__name__} are still with the ranks where the run before left "
                    "them, which does not fit this run's schedule. Use the same schedule and stages_per_rank, or "
                    "create the module anew and go on from a checkpoint."
                )
            runtime.distribute(range(len(chain)))
            return
        deferred, in_place = self._deferred, set[int]()
        if deferred is not None:
            in_place = {index for index, layer in enumerate(chain.layers) if deferred.created(layer)}
            me = runtime.groups.pp_rank
            for index, owner in enumerate(runtime.owners):
                if owner == me or (first and index not in in_place):
                    deferred.materialize(tensor for _, tensor in chain.tensors(index))
            if first:  # which sends it to the others
                deferred.materialize(tensor for _, tensor in chain.stationary())
        runtime.distribute(in_place)

    def leave(self, runtime: PipelineRuntime) -> None:
        """Leaves the layers with their ranks, on the CPU, for the next run."""
        for index, owner in enumerate(runtime.owners):
            if not runtime.chain.owns(index):
                runtime.chain.let_go(index, owner, torch.device("cpu"))
        vars(self._module)[_KEY] = (runtime.chain, runtime.assignment)
