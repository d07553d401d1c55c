"""The user's side: what a LightningModule offers to be trained as a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_dynmo.ownership import LayerChain, accepted_keywords
from lightning_dynmo.pipeline.borders import as_arguments, call_layer
from lightning_dynmo.pipeline.microbatches import Inputs


class PipelineModule(LightningModule):
    """A LightningModule whose forward is a chain of layers: the short form for new code.

    Set `layers` in ``__init__`` and write the step methods as ever. Any other LightningModule becomes a pipeline by
    a ``configure_pipeline`` method of its own.
    """

    layers: nn.ModuleList

    def configure_pipeline(self) -> Sequence[nn.Module]:
        """Returns the chain: the output of layer i is the input of layer i + 1."""
        return list(self.layers)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the chain: positional arguments go to the first layer, keywords to every layer that names them."""
        values: tuple[Any, ...] = args
        for layer in self.layers:
            output = call_layer(layer, values, kwargs)
            values = as_arguments(output)
        return output


def pipeline_layers(module: LightningModule) -> Sequence[nn.Module]:
    """Returns the module's chain of layers.

    Raises:
        TypeError: If it has no ``configure_pipeline`` method, or that returns no sequence.
    """
    configure = getattr(module, "configure_pipeline", None)
    if not callable(configure):
        raise TypeError(
            f"{type(module).__name__} has no configure_pipeline() method, which DynMoStrategy needs. Add one that "
            "returns the layers that the forward runs one after the other, for example: "
            "def configure_pipeline(self): return [self.embedding, *self.blocks, self.head]"
        )
    layers = configure()
    if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential):
        raise TypeError(
            f"{type(module).__name__}.configure_pipeline() returned a {type(layers).__name__}, expected a list of "
            "modules. Return the layers that the forward runs one after the other."
        )
    return list(layers)


def pipeline_inputs(module: LightningModule, chain: LayerChain, batch: Any) -> Inputs:
    """Returns what a microbatch brings into the pipeline.

    That is what the module's own ``pipeline_inputs(batch) -> (args, kwargs)`` says. Without one: the first entry of a
    pair, the entries of a mapping that a layer's ``forward`` names and the module's own takes (such as labels only
    where ``self(...)`` takes labels), or the batch itself if it is a tensor.

    Raises:
        TypeError: If the batch is of another kind, or ``pipeline_inputs`` returns something else.
        ValueError: If no layer names a key of the mapping, or a keyword has no taker.
    """
    own = getattr(module, "pipeline_inputs", None)
    if callable(own):
        result = own(batch)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise TypeError(
                f"{type(module).__name__}.pipeline_inputs(batch) must return (args, kwargs), a tuple and a dict, got "
                f"{type(result).__name__}. For one tensor: return (batch['tokens'],), {{}}"
            )
        inputs = Inputs(tuple(result[0]), dict(result[1]))
        _check_keywords_have_takers(chain, inputs.kwargs, f"{type(module).__name__}.pipeline_inputs()")
        return inputs
    if isinstance(batch, tuple | list) and 1 <= len(batch) <= 2:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return Inputs((batch,), {})
    if isinstance(batch, Mapping):
        names = {name for layer in chain.layers for name in accepted_keywords(layer)}
        taken = _names_taken(module, chain)
        kwargs = {key: value for key, value in batch.items() if key in names and (taken is None or key in taken)}
        if kwargs:
            return Inputs((), kwargs)
        raise ValueError(
            f"No layer's forward has an argument named like a key of the batch ({', '.join(map(repr, batch))}). "
            f"Define {type(module).__name__}.pipeline_inputs(batch) and return what the step methods pass to "
            "self(...): a tuple of arguments and a dict of keyword arguments."
        )
    raise TypeError(
        f"It is unclear what a batch of type {type(batch).__name__} brings into the pipeline. Define "
        f"{type(module).__name__}.pipeline_inputs(batch) and return what the step methods pass to self(...): a tuple "
        "of arguments and a dict of keyword arguments."
    )


def check_call(chain: LayerChain, name: str, expected: Inputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks that a step method passes to ``self(...)`` what went into the pipeline before the step method ran.

    Args:
        chain: The layers.
        name: Name of the step method.
        expected: What went in.
        args: Positional arguments of ``self(...)``.
        kwargs: Keyword arguments of ``self(...)``.

    Raises:
        ValueError: If they differ; names the argument.
    """
    _check_keywords_have_takers(chain, kwargs, f"self(...) in {name}")
    given, used = _by_name(chain, args, kwargs), _by_name(chain, expected.args, expected.kwargs)
    cure = (
        "The layers have already run on what pipeline_inputs(batch) returned, so both must be the same. Define "
        "pipeline_inputs(self, batch) to return exactly what the step methods pass to self(...)."
    )
    for key in given.keys() | used.keys():
        if key not in used or key not in given:
            by = ("self(...)", "pipeline_inputs") if key in given else ("pipeline_inputs", "self(...)")
            raise ValueError(f"In {name}, {by[0]} has an argument {key!r} that {by[1]} has not. {cure}")
        if not _same(given[key], used[key]):
            raise ValueError(
                f"In {name}, the argument {key!r} of self(...) is {_describe(given[key])} and differs from what went "
                f"into the pipeline, {_describe(used[key])}. {cure}"
            )


def _names_taken(module: LightningModule, chain: LayerChain) -> set[str] | None:
    """Returns the names that ``self(...)`` can be given, by keyword or for the first layer; None for any."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters} | set(accepted_keywords(chain.layers[0]))


def _check_keywords_have_takers(chain: LayerChain, kwargs: Mapping[str, Any], source: str) -> None:
    names = {name for layer in chain.layers for name in accepted_keywords(layer)}
    for key, value in kwargs.items():
        if value is not None and key not in names:
            raise ValueError(
                f"{source} passes the keyword argument {key!r}, but no layer's forward has an argument of that name. "
                "Add it to the forward of the layers that need it, or leave it out."
            )


def _by_name(chain: LayerChain, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments by the names that the first layer gives them, without those that are None."""
    names = [*accepted_keywords(chain.layers[0]), *(f"*{position}" for position in range(len(args)))]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {key: value for key, value in named.items() if value is not None}


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left is right or (left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right))
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return not isinstance(left, Tensor) and not isinstance(right, Tensor) and bool(left == right)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return repr(value)
