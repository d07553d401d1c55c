"""What crosses each border between layers: shapes, dtypes and whether a gradient comes back.

[Note: static metadata]
Left alone, torch learns what stages exchange by running the user's layers once more, on uninitialised memory:
BatchNorm statistics become NaN and counters count a batch that never was. So the borders are computed here instead, on
copies of the layers whose tensors are fake and whose hooks are gone, and given to torch. The layers themselves run
exactly once per microbatch.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_dynmo.ownership import LayerChain, accepted_keywords, restore_forward
from lightning_dynmo.pipeline._torch import FakeTensorMode
from lightning_dynmo.pipeline.microbatches import Inputs

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Border = tuple[Tensor, ...]
"""Meta tensors, one for each tensor that crosses; ``requires_grad`` tells whether its gradient comes back."""


def signature_of(inputs: Inputs, chain: LayerChain) -> tuple[Any, ...]:
    """Returns a hashable key of what borders depend on: shapes and dtypes of inputs, what is trainable, and modes."""
    leaves, structure = tree_flatten((inputs.args, inputs.kwargs))
    shapes = tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )
    trainable = tuple(parameter.requires_grad for index in range(len(chain)) for parameter in chain.parameters(index))
    modes = tuple(layer.training for layer in chain.layers)
    return (shapes, str(structure), trainable, modes, torch.is_grad_enabled())


def infer_borders(
    chain: LayerChain, inputs: Inputs, precision_context: Callable[[], AbstractContextManager[Any]]
) -> list[Border]:
    """Computes the borders behind every layer but the last.

    Args:
        chain: The layers; shells and owned layers alike, since only shapes matter.
        inputs: A real microbatch; only shapes and dtypes of its tensors are used.
        precision_context: Entered around each layer, as in training.

    Returns:
        Border i is the output of layer i.

    Raises:
        ValueError: If a layer cannot run without data, or returns something other than tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = Inputs(*tree_map_only(Tensor, _without_data, (inputs.args, inputs.kwargs)))
    gradients = torch.is_grad_enabled()
    values: tuple[Any, ...] = inputs.args
    borders = []
    for index in range(len(chain) - 1):
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                layer = _fake_copy(chain.layers[index], mode)
                with mode, precision_context():
                    output = call_layer(layer, values, inputs.kwargs)
        except Exception as error:
            raise ValueError(
                f"{chain.name(index)} could not be run on tensors without data, which is how the shapes between stages "
                f"are found: {type(error).__name__}: {error}. Let it take what the layer before it returns, and "
                "make its output shape depend on input shapes only."
            ) from error
        values = as_border(output, chain.name(index))
        borders.append(tuple(_as_meta(value) for value in values))
    return borders


def call_layer(layer: nn.Module, values: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a layer with what its predecessor returned and the keyword arguments that its ``forward`` names."""
    if not kwargs:
        return layer(*values)
    free = accepted_keywords(layer, len(values))
    return layer(*values, **{name: kwargs[name] for name in free if name in kwargs})


def as_border(output: Any, name: str) -> tuple[Tensor, ...]:
    """Returns a layer's output as a tuple of tensors.

    Raises:
        ValueError: If it is neither a tensor nor a tuple of tensors; says which layer and position.
    """
    values = output if isinstance(output, tuple) else (output,)
    for position, value in enumerate(values):
        if not isinstance(value, Tensor):
            where = f" at position {position}" if isinstance(output, tuple) else ""
            raise ValueError(
                f"{name} returns a {type(value).__name__}{where}; only the last layer may. Return a tensor or a tuple "
                "of tensors, and pass settings by keyword arguments of self(...)."
            )
    return values


def check_border(actual: Sequence[Tensor], expected: Border, name: str) -> None:
    """Checks a layer's output before it is sent, since a short message is accepted in silence and a long one kills.

    Raises:
        ValueError: If number, shape or dtype differ from what the receiving stage expects.
    """
    if len(actual) == len(expected) and all(
        value.shape == border.shape and value.dtype == border.dtype and value.requires_grad <= border.requires_grad
        for value, border in zip(actual, expected, strict=True)
    ):
        return
    raise ValueError(
        f"{name} returned {_describe(actual)}, but the next stage expects {_describe(expected)}, as computed from the "
        "shapes of the inputs. Make the layer's output shape, dtype and need of a gradient depend on its input shapes "
        "and on requires_grad of its parameters only."
    )


def _fake_copy(layer: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copies a layer without its data and hooks: parameters and buffers become fake tensors of the same kind."""
    memo: dict[int, Any] = {}
    with mode:
        for parameter in layer.parameters():
            memo[id(parameter)] = nn.Parameter(_without_data(parameter), requires_grad=parameter.requires_grad)
        for buffer in layer.buffers():
            memo[id(buffer)] = _without_data(buffer)
    for module in layer.modules():
        for hooks in _HOOKS:
            # The copy gets none; copying one that is a method would copy the object that it belongs to.
            memo[id(getattr(module, hooks))] = OrderedDict()
        trainable = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # made by a hook from parameters, as in pruning
                with mode:
                    memo[id(value)] = _without_data(value).requires_grad_(trainable)
    replica = copy.deepcopy(layer, memo)
    restore_forward(replica)
    return replica


def _without_data(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same kind; called under a fake tensor mode, so that it has no memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _as_meta(value: Tensor) -> Tensor:
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return meta.requires_grad_() if value.requires_grad else meta


def _describe(values: Sequence[Tensor]) -> str:
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{' with gradient' if value.requires_grad else ''}"
        for value in values
    )
