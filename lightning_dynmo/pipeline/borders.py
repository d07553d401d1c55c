"""What crosses each border between layers: shapes, dtypes and whether a gradient comes back.

[Note: static metadata]
Left alone, torch learns what stages exchange by running the user's layers once more, on uninitialised memory:
BatchNorm statistics become NaN and counters count a batch that never was. So the borders are computed here instead, on
copies of the layers whose tensors are fake and whose hooks are gone. The layers themselves run exactly once per
microbatch.
"""

from __future__ import annotations

import copy
import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_dynmo._torch import (
    FakeTensorMode,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)
from lightning_dynmo.ownership import LayerChain, accepted_keywords, restore_forward
from lightning_dynmo.pipeline.microbatches import Inputs

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class Border:
    """Output of a layer: tensors, which travel, in a structure that every rank knows already.

    Attributes:
        tensors: Meta tensors; ``requires_grad`` tells whether the gradient comes back.
        constants: The structure's leaves in order, None in place of tensors: numbers, names, nothing.
        is_tensor: For each leaf, whether it is a tensor.
        structure: Tuples, lists and dicts around the leaves.
    """

    tensors: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, output: Any, name: str) -> Border:
        """Takes a layer's output apart.

        Args:
            output: A tensor, or tuples, lists and dicts of tensors and constants such as None.
            name: The layer, for errors.

        Raises:
            ValueError: If a part is something else; says which layer and position.
        """
        leaves, structure = tree_flatten(output)
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, (Tensor, *_CONSTANTS)):
                path = keystr(tree_flatten_with_path(output)[0][position][0])
                where = f" at position {path}" if path else ""
                raise ValueError(
                    f"{name} returns a {type(leaf).__name__}{where}; only the last layer may. Return tensors and plain "
                    "constants, or tuples, lists and dicts of them."
                )
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(tuple(leaf for leaf in leaves if isinstance(leaf, Tensor)), constants, is_tensor, structure)

    def without_data(self) -> Border:
        """Returns the same border with meta tensors."""
        return Border(tuple(map(_as_meta, self.tensors)), self.constants, self.is_tensor, self.structure)

    def values(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Puts tensors into the structure and returns it as positional arguments of the next layer."""
        rest = iter(tensors)
        leaves = [
            next(rest) if here else constant for here, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        return as_arguments(tree_unflatten(leaves, self.structure))


def condition_of(chain: LayerChain) -> tuple[Any, ...]:
    """Returns a hashable key of what borders depend on besides the inputs: what is trainable, modes, and autocast."""
    trainable = tuple(parameter.requires_grad for index in range(len(chain)) for parameter in chain.parameters(index))
    autocast = tuple(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda")
    )
    return (trainable, tuple(layer.training for layer in chain.layers), torch.is_grad_enabled(), autocast)


def form_of(inputs: Inputs) -> tuple[Any, ...]:
    """Returns a hashable key of what borders depend on in the inputs: structure, and shapes and dtypes of tensors."""
    leaves, structure = tree_flatten((inputs.args, inputs.kwargs))
    shapes = tuple(
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )
    return (shapes, str(structure))


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
        ValueError: If a layer cannot run without data, or returns something that cannot travel.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = Inputs(*tree_map_only(Tensor, _without_data, (inputs.args, inputs.kwargs)))
    gradients = torch.is_grad_enabled()
    values: tuple[Any, ...] = inputs.args
    borders = []
    for index in range(len(chain) - 1):
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(gradients), _quiet():
                layer = _fake_copy(chain.layers[index], mode)
                with mode, precision_context():
                    output = call_layer(layer, values, inputs.kwargs)
        except Exception as error:
            raise ValueError(
                f"{chain.name(index)} could not be run on tensors without data, which is how the shapes between stages "
                f"are found: {type(error).__name__}: {error}. Let it take what "
                f"{'the layer before it returns' if index else 'pipeline_inputs(batch) gives it'}, and make its output "
                "shape depend on input shapes only."
            ) from error
        values = as_arguments(output)
        borders.append(Border.of(output, chain.name(index)).without_data())
    return borders


def allows_hooks(layer: nn.Module, values: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a layer runs under hooks on what autograd saves, which transforms of ``torch.func`` forbid.

    Tried on a copy without data, so that the layer itself sees nothing of it; False also where that is not possible.

    Args:
        layer: The layer.
        values: Its positional arguments; only shapes and dtypes of their tensors are used.
        kwargs: Keyword arguments, of which it takes those that its ``forward`` names.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.inference_mode(False), torch.enable_grad(), _quiet():
            with mode:
                values, kwargs = tree_map_only(Tensor, _without_data, (values, kwargs))
            replica = _fake_copy(layer, mode)
            with mode, saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
                call_layer(replica, values, kwargs)
    except Exception:  # whatever its forward may raise
        return False
    return True


def call_layer(layer: nn.Module, values: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a layer with what its predecessor returned and the keyword arguments that its ``forward`` names."""
    if not kwargs:
        return layer(*values)
    free = accepted_keywords(layer, len(values))
    return layer(*values, **{name: kwargs[name] for name in free if name in kwargs})


def as_arguments(output: Any) -> tuple[Any, ...]:
    """Returns a layer's output as positional arguments of the next: the entries of a tuple, else the one value."""
    return output if isinstance(output, tuple) else (output,)


def check_border(actual: Border, expected: Border, name: str) -> None:
    """Checks a layer's output before it is sent, since a short message is accepted in silence and a long one kills.

    Raises:
        ValueError: If number, shape, dtype or a constant differ from what the receiving stage expects.
    """
    if (
        len(actual.tensors) == len(expected.tensors)
        and actual.structure == expected.structure
        and repr(actual.constants) == repr(expected.constants)
        and all(
            value.shape == border.shape and value.dtype == border.dtype and value.requires_grad <= border.requires_grad
            for value, border in zip(actual.tensors, expected.tensors, strict=True)
        )
    ):
        return
    raise ValueError(
        f"{name} returned {_describe(actual)}, but the next stage expects {_describe(expected)}, as computed from the "
        "shapes of the inputs. Make the layer's output shape, dtype and need of a gradient depend on its input shapes "
        "and on requires_grad of its parameters only."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from printing what goes wrong on fake tensors: it is raised, with the layer's name."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


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


def _describe(border: Border) -> str:
    rest = iter(border.tensors)
    parts = [
        _describe_tensor(next(rest)) if here else repr(constant)
        for here, constant in zip(border.is_tensor, border.constants, strict=True)
    ]
    return ", ".join(parts) or "nothing"


def _describe_tensor(value: Tensor) -> str:
    gradient = " with gradient" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{gradient}"
