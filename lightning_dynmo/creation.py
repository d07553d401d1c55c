"""What tensors held, written down as the operations that made it, which can be replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dynmo._torch import tree_leaves, tree_unflatten


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operation with all that its result depends on."""

    func: Any
    leaves: tuple[Any, ...]
    structure: Any
    random: tuple[tuple[Any, Tensor], ...]
    default_dtype: torch.dtype

    def arguments(self, contents: Contents, changed: Mapping[int, Content]) -> tuple[Any, Any, dict[int, Any]]:
        """Returns arguments with their values, and the storages of those that the operation is to change."""
        storages: dict[int, Any] = {}
        leaves = list(self.leaves)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, View):
                if id(leaf.content) in changed:
                    if id(leaf.content) not in storages:
                        storages[id(leaf.content)] = contents.private(leaf.content)
                    leaves[position] = leaf.of(storages[id(leaf.content)])
                else:
                    leaves[position] = leaf.of(contents.shared(leaf.content))
            elif isinstance(leaf, GeneratorState):
                leaves[position] = leaf.restore()
        args, kwargs = tree_unflatten(leaves, self.structure)
        return args, kwargs, storages


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a storage held at some moment, as the operation that made it.

    Attributes:
        call: The operation; None for memory that nothing was written to.
        output: Which of its results is in the storage, or None where the operation changed the storage.
        before: What it changed.
        num_bytes: Size of the storage.
        device: Where the storage is.
    """

    call: Call | None
    output: int | None
    before: Content | None
    num_bytes: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of what its storage held when it was used."""

    content: Content
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def at(cls, tensor: Tensor, content: Content) -> View:
        """Returns a tensor as a view of what its storage holds now."""
        return cls(content, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def of(self, storage: Any) -> Tensor:
        """Returns the same view of a storage."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A random generator of the user's, as it was before an operation."""

    device: torch.device
    state: Tensor

    def restore(self) -> torch.Generator:
        """Returns a generator in that state."""
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


class Contents:
    """Replays operations; what several others read is made once. One such object lives for one tensor that is needed.

    Args:
        resident: Storages that hold a content now.
    """

    def __init__(self, resident: Mapping[int, Any]) -> None:
        self._resident = resident
        self._made: dict[int, Any] = {}

    def shared(self, content: Content) -> Any:
        """Returns a storage with this content, to be read only."""
        if id(content) in self._resident:
            return self._resident[id(content)]
        if id(content) not in self._made:
            self._made[id(content)] = self._make(content)
        return self._made[id(content)]

    def private(self, content: Content) -> Any:
        """Returns a storage with this content that nothing else uses."""
        if id(content) in self._resident or id(content) in self._made:
            return self.shared(content).clone()
        return self._make(content)

    def _make(self, content: Content) -> Any:
        if content.call is None:
            return torch.UntypedStorage(content.num_bytes, device=content.device)
        call, before = content.call, content.before
        changed = {} if before is None else {id(before): before}
        args, kwargs, storages = call.arguments(self, changed)
        with random_states(call.random), _default_dtype(call.default_dtype):
            result = call.func(*args, **kwargs)
        if before is not None:
            return storages[id(before)]
        assert content.output is not None
        return tree_leaves(result)[content.output].untyped_storage()


def random_state(device: torch.device) -> Tensor:
    """Returns the state of a device's default random generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


@contextmanager
def random_states(states: Iterable[tuple[torch.device, Tensor]]) -> Iterator[None]:
    """Sets random states, and puts those back afterwards that were there before."""
    drawn = list(states)
    before = {device: random_state(device) for device in {torch.device("cpu"), *(device for device, _ in drawn)}}
    for device, state in drawn:
        _set_random_state(device, state)
    try:
        yield
    finally:
        for device, state in before.items():
            _set_random_state(device, state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
