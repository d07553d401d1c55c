"""Which rank holds which layer: the chain of layers, its sizes, and shells for the layers that live elsewhere.

[Note: shells]
Every rank keeps the whole module tree. A layer that another rank owns is a *shell*: each of its parameters and buffers
keeps its object, shape, dtype and device, but its data is one element expanded to the full shape. So optimizers,
schedulers, hooks and callbacks hold on to the right objects for ever, parameter indices are the same on every rank, and
a layer moves by giving its tensors storage on one rank and taking it away on another. The one element is NaN, so that a
computation that reads a shell by mistake shows.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dynmo._torch import replace_data
from lightning_dynmo.planning import LayerLoad


@dataclass(frozen=True, slots=True)
class LayerSize:
    """What one layer holds.

    Attributes:
        num_parameters: Number of parameter elements, trainable or not.
        state_bytes: Bytes of parameters and buffers.
    """

    num_parameters: int
    state_bytes: int


class LayerChain:
    """The model as a chain of layers, as one rank sees it.

    Args:
        root: The module that the layers belong to.
        layers: The chain: the output of layer i is the input of layer i + 1. References to submodules of `root`.

    Raises:
        TypeError: If an entry is not a module.
        ValueError: If the chain is empty, an entry is not part of `root`, or `root` has trainable parameters outside
            the chain.
    """

    def __init__(self, root: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.root = root
        self.layers = tuple(layers)
        _check_chain(root, self.layers)
        shared = {id(buffer) for _, buffer, _ in shared_buffers(root, self.layers)}
        self._users = _users_of_parameters(self.layers)
        self._stationary = [
            {name for name, buffer in layer.named_buffers() if id(buffer) in shared} for layer in self.layers
        ]
        self._sizes = tuple(self._measure(index) for index in range(len(self.layers)))
        self._foreign: dict[int, int] = {}
        self.followers: list[LayerChain] = []  # copies of the model, each layer of which lives where ours does

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def sizes(self) -> tuple[LayerSize, ...]:
        """Size of every layer, whether owned or not."""
        return self._sizes

    def owns(self, index: int) -> bool:
        """Returns whether this rank holds layer `index` with its data."""
        return index not in self._foreign

    @property
    def owned(self) -> tuple[int, ...]:
        """Indices of the layers that this rank holds, in order."""
        return tuple(index for index in range(len(self)) if self.owns(index))

    def name(self, index: int) -> str:
        """Returns how errors and tables call a layer, such as ``"layer 3 (Block)"``."""
        return f"layer {index} ({type(self.layers[index]).__name__})"

    def parameters(self, index: int) -> list[nn.Parameter]:
        """Returns the parameters of a layer in the order of ``named_parameters``."""
        return list(self.layers[index].parameters())

    def owner(self, index: int, own: int) -> int:
        """Returns the `pp_rank` that holds layer `index`.

        Args:
            index: Layer.
            own: `pp_rank` of this rank.
        """
        return self._foreign.get(index, own)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Returns whether this rank has a parameter's data: it owns one of the layers that use it."""
        return any(self.owns(index) for index in self._users.get(id(parameter), (-1,)))

    def owned_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the layers that this rank holds, in order, each once."""
        return list(dict.fromkeys(parameter for index in self.owned for parameter in self.parameters(index)))

    def tied(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Returns the parameters that several layers use, such as those of an embedding and a head, and the layers."""
        parameters = {id(parameter): parameter for layer in self.layers for parameter in layer.parameters()}
        return [(parameters[key], users) for key, users in self._users.items() if len(users) > 1]

    def tensors(self, index: int) -> list[tuple[str, Tensor]]:
        """Returns what a layer carries when it moves: parameters, then buffers that no other layer uses.

        A buffer that several layers use, such as a table of rotary angles, stays on every rank.
        """
        layer, stays = self.layers[index], self._stationary[index]
        buffers = [(name, buffer) for name, buffer in layer.named_buffers() if name not in stays]
        return [*layer.named_parameters(), *buffers]

    def buffers(self, index: int) -> dict[str, bool]:
        """Returns the buffers that a layer carries when it moves, by name: whether its ``state_dict`` has them."""
        layer, stays = self.layers[index], self._stationary[index]
        found = {}
        for name, _ in layer.named_buffers():
            if name not in stays:
                module, leaf = _holder(layer, name)
                found[name] = leaf not in module._non_persistent_buffers_set
        return found

    def match_buffers(self, index: int, buffers: Mapping[str, bool]) -> None:
        """Gives a shell the buffers that its owner has by now: a layer may make some as it runs, or drop them."""
        layer, present = self.layers[index], self.buffers(index)
        for name in present.keys() - buffers.keys():
            module, leaf = _holder(layer, name)
            module._buffers[leaf] = None
        for name, persistent in buffers.items():
            if name not in present:
                module, leaf = _holder(layer, name)
                module.register_buffer(leaf, torch.empty(0), persistent=persistent)

    def stationary(self) -> list[tuple[str, Tensor]]:
        """Returns what stays on every rank: tensors of the model outside the chain, and buffers that layers share."""
        inside = {id(tensor) for index in range(len(self)) for _, tensor in self.tensors(index)}
        named = [*self.root.named_parameters(), *self.root.named_buffers()]
        return [(name, tensor) for name, tensor in named if id(tensor) not in inside]

    def let_go(self, index: int, owner: int, device: torch.device | None = None) -> None:
        """Turns a layer into a shell, which frees its memory; a parameter that another own layer uses stays.

        Args:
            index: Layer.
            owner: The `pp_rank` that holds it now, for the error that its ``forward`` raises.
            device: Device that the shell claims to be on; by default the layer's own.
        """
        self._foreign[index] = owner
        with torch.inference_mode(False):  # else the parameter would never again require a gradient
            for _, tensor in self.tensors(index):
                if not (isinstance(tensor, nn.Parameter) and self.holds(tensor)):
                    tensor.grad = None
                    tensor.data = shell_like(tensor, device or tensor.device)
        self._mark_shells()
        for follower in self.followers:
            follower.let_go(index, owner)

    def take(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Gives a shell the data that another rank sent.

        Args:
            index: Layer.
            tensors: One tensor for each entry of `tensors(index)`, in that order, not shared with anything else.
        """
        for (_, target), source in zip(self.tensors(index), tensors, strict=True):
            target.grad = None
            replace_data(target, source)
        self._foreign.pop(index, None)
        self._mark_shells()

    def resident_bytes(self) -> int:
        """Returns the bytes of parameters, buffers and gradients that this rank really holds for the chain."""
        tensors = {id(tensor): tensor for index in range(len(self)) for _, tensor in self.tensors(index)}
        held = [part for tensor in tensors.values() for part in (tensor, tensor.grad) if part is not None]
        return sum(part.untyped_storage().nbytes() for part in held)

    def static_loads(self) -> tuple[LayerLoad, ...]:
        """Returns the layers' sizes as loads without times, for plans that are made before anything was measured."""
        return tuple(LayerLoad(0.0, 0.0, size.num_parameters, size.state_bytes) for size in self._sizes)

    def _mark_shells(self) -> None:
        """Makes the ``forward`` of every shell raise, unless an owned layer uses the same module, such as a ReLU."""
        used = {id(module) for index in self.owned for module in self.layers[index].modules()}
        for index, layer in enumerate(self.layers):
            restore_forward(layer)
            if index in self._foreign and id(layer) not in used:
                forward = vars(layer).get("forward")
                vars(layer)["forward"] = _ShellForward(self.name(index), self._foreign[index], forward)

    def _measure(self, index: int) -> LayerSize:
        tensors = [tensor for _, tensor in self.tensors(index)]
        return LayerSize(
            num_parameters=sum(parameter.numel() for parameter in self.layers[index].parameters()),
            state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        )


class _ShellForward:
    """The ``forward`` of a shell: says where the layer lives. A class, so that modules stay picklable."""

    def __init__(self, name: str, owner: int, original: Any) -> None:
        self.name = name
        self.owner = owner
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.name} lives on pipeline rank {self.owner}. Call self(...) in the step methods; it returns the "
            "output of the whole chain. A single layer can only be called on the rank that owns it."
        )


def restore_forward(layer: nn.Module) -> None:
    """Gives a shell, or a copy of one, back the ``forward`` that it had before; does nothing to other modules."""
    forward = vars(layer).get("forward")
    if isinstance(forward, _ShellForward):
        del vars(layer)["forward"]
        if forward.original is not None:
            vars(layer)["forward"] = forward.original


def has_shells(root: nn.Module) -> bool:
    """Returns whether some layers of a model are shells: a pipeline holds it now, or has failed and left it so."""
    return any(isinstance(vars(module).get("forward"), _ShellForward) for module in root.modules())


def accepted_keywords(layer: nn.Module, num_positional: int = 0) -> tuple[str, ...]:
    """Returns the names of the arguments of a layer's ``forward``, in order, without ``*args`` and ``**kwargs``.

    Looks at the class, since the instance of a shell carries another ``forward``.

    Args:
        layer: A layer or a shell.
        num_positional: How many arguments are passed by position; the names that these take are left out.
    """
    layer = getattr(layer, "_orig_mod", layer)  # torch.compile's wrapper takes anything, and shells stand before it
    forward = vars(layer).get("forward")
    if isinstance(forward, _ShellForward):
        forward = forward.original
    signature = inspect.signature(forward if forward is not None else type(layer).forward.__get__(layer))
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature.parameters.items()
    taken = [name for name, parameter in parameters if parameter.kind in by_position][:num_positional]
    return tuple(name for name, parameter in parameters if parameter.kind in by_name and name not in taken)


def outside_tensors(root: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yields the named parameters and buffers of `root` that belong to no layer of the chain."""
    inside = {id(tensor) for layer in layers for tensor in [*layer.parameters(), *layer.buffers()]}
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if id(tensor) not in inside:
            yield name, tensor


def shared_parameters(root: nn.Module, layers: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """Returns the parameters that more than one layer uses, by name in `root`, with the indices of those layers."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    users = _users_of_parameters(layers)
    return {names.get(key, "?"): indices for key, indices in users.items() if len(indices) > 1}


def shared_buffers(root: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[str, Tensor, tuple[int, ...]]]:
    """Returns the buffers that more than one layer uses: name in `root`, buffer, and indices of those layers."""
    users: dict[int, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        for buffer in layer.buffers():
            users[id(buffer)] = (*users.get(id(buffer), ()), index)
    named = {id(buffer): (name, buffer) for name, buffer in root.named_buffers()}
    return [(*named[key], indices) for key, indices in users.items() if len(indices) > 1 and key in named]


def release_freed_memory() -> None:
    """Gives memory that was freed back to the system; on the CPU, glibc keeps small blocks until it is asked."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def shell_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the same shape and dtype that holds one element only."""
    dtype = tensor.dtype
    value: float
    if dtype.is_floating_point or dtype.is_complex:
        value = float("nan")
    else:
        value = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device).expand(tensor.shape)


def _holder(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the submodule that holds the buffer `name`, and its name there."""
    path, _, leaf = name.rpartition(".")
    return layer.get_submodule(path), leaf


def _users_of_parameters(layers: Sequence[nn.Module]) -> dict[int, tuple[int, ...]]:
    users: dict[int, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            users[id(parameter)] = (*users.get(id(parameter), ()), index)
    return users


def _check_chain(root: nn.Module, layers: Sequence[nn.Module]) -> None:
    if not layers:
        raise ValueError(
            f"{type(root).__name__}.configure_pipeline() returned no layers. Return the chain of modules that the "
            "forward runs, such as [self.embedding, *self.blocks, self.head]."
        )
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"Entry {index} of {type(root).__name__}.configure_pipeline() is a {type(layer).__name__}, not an "
                "nn.Module. Wrap the function in a module whose forward calls it."
            )
    _check_layers_belong(root, layers)
    trainable = [
        name
        for name, tensor in outside_tensors(root, layers)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    ]
    if trainable:
        raise ValueError(
            f"{len(trainable)} trainable parameters are in no layer of {type(root).__name__}.configure_pipeline(): "
            f"{enumerate_names(trainable)}. Move them into one of the layers, or freeze them with "
            "requires_grad_(False)."
        )


def _check_layers_belong(root: nn.Module, layers: Sequence[nn.Module]) -> None:
    known = {id(tensor) for tensor in [*root.parameters(), *root.buffers()]}
    for index, layer in enumerate(layers):
        strange = [name for name, tensor in layer.named_parameters() if id(tensor) not in known]
        if strange:
            raise ValueError(
                f"Layer {index} ({type(layer).__name__}) of {type(root).__name__}.configure_pipeline() has parameters "
                f"that are not part of the model: {enumerate_names(strange)}. Create the layer in __init__ or "
                "configure_model, keep it as an attribute of the model, and return that attribute."
            )


def enumerate_names(names: Sequence[str], most: int = 5) -> str:
    """Returns names for a text, the first of them where there are many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
