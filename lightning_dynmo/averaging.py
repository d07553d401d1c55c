"""Lightning's `WeightAveraging` callbacks on a pipeline: ranks average their own layers, and averages move with these.

The averaged model is a copy of the user's, so it is a chain of the same layers: one that follows the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_dynmo.module import pipeline_layers
from lightning_dynmo.ownership import LayerChain, has_shells
from lightning_dynmo.pipeline import PipelineRuntime, gather_state_dict


class LayerwiseAverages:
    """The averaged models of one run.

    Args:
        trainer: Before its callbacks' models are used, after their `setup`.
        runtime: The pipeline, with all layers on every rank still.
    """

    def __init__(self, trainer: Trainer, runtime: PipelineRuntime) -> None:
        self._runtime = runtime
        self._callbacks: list[WeightAveraging] = []
        self._replaced: list[tuple[object, str]] = []
        self._followers: list[LayerChain] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging) and callback._average_model is not None:
                self._follow(callback, callback._average_model)
        runtime.chain.followers = self._followers

    def share_stationary(self) -> None:
        """Gives every rank the first one's values of what is in no layer."""
        for follower in self._followers:
            tensors = [tensor for _, tensor in follower.stationary()]
            values = self._runtime.groups.share_from(0, [tensor.detach().cpu() for tensor in tensors])
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data = value.to(tensor.device)

    def end(self) -> None:
        """Gives the callbacks their own methods back, and drops averages that a failed run has left incomplete."""
        for holder, name in self._replaced:
            vars(holder).pop(name, None)
        for callback in self._callbacks:
            if callback._average_model is not None and has_shells(callback._average_model):
                callback._average_model = None
        self._replaced, self._callbacks = [], []

    def _follow(self, callback: WeightAveraging, average: AveragedModel) -> None:
        model: Any = average.module
        follower = LayerChain(model, pipeline_layers(model))
        self._followers.append(follower)
        self._callbacks.append(callback)
        roots = (self._runtime.chain.root, average, model)

        def on_own_layers(method: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                with _without_shells((self._runtime.chain, follower), roots):
                    method(*args)

            return call

        def state_dict() -> dict[str, Any]:
            layers = gather_state_dict(follower, self._runtime.owners, self._runtime.groups)
            own = {name: value for name, value in average.named_buffers(recurse=False)}
            return {**own, **{f"module.{name}": value for name, value in layers.items()}}

        for holder, name in (
            (average, "update_parameters"),
            (callback, "_swap_models"),
            (callback, "_copy_average_to_current"),
        ):
            self._replace(holder, name, on_own_layers(getattr(holder, name)))
        self._replace(average, "state_dict", state_dict)

    def _replace(self, holder: object, name: str, function: Callable[..., Any]) -> None:
        vars(holder)[name] = function
        self._replaced.append((holder, name))


@contextmanager
def _without_shells(chains: tuple[LayerChain, ...], roots: tuple[nn.Module, ...]) -> Iterator[None]:
    """Has ``parameters()`` and ``buffers()`` of the roots leave out what shells hold, which nobody can write to."""
    shells = {
        id(tensor)
        for chain in chains
        for index in range(len(chain))
        if not chain.owns(index)
        for _, tensor in chain.tensors(index)
        if not (isinstance(tensor, nn.Parameter) and chain.holds(tensor))
    }

    def without(method: Callable[..., Iterator[torch.Tensor]]) -> Callable[..., Iterator[torch.Tensor]]:
        return lambda *args, **kwargs: (tensor for tensor in method(*args, **kwargs) if id(tensor) not in shells)

    for root in roots:
        vars(root).update(parameters=without(root.parameters), buffers=without(root.buffers))
    try:
        yield
    finally:
        for root in roots:
            del vars(root)["parameters"], vars(root)["buffers"]
