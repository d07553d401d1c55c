"""Creates a model of which this process will hold only a part, with exactly the values of a process that holds it all.

[Note: how creation is deferred]
While a `DeferredInit` is active, every operation runs for real, so random generators advance, and code that looks at
values sees them. But the memory of a large tensor is given back as soon as others are worked on, and what made it is
kept instead: the operations, the random state before each, and the small tensors that went in. Where its values are
needed again, the operations are replayed. So the process never holds much more than the tensors of one operation.

A tensor whose values cannot be replayed, because they come from outside of torch, or because something outside of torch
looks at its memory, stays in memory: that costs memory, never correctness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_dynmo._torch import TorchDispatchMode, tree_flatten, tree_leaves
from lightning_dynmo.creation import Call, Content, Contents, GeneratorState, View, random_state, random_states
from lightning_dynmo.ownership import release_freed_memory, shell_like

_OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential", "log_normal")
)
_RESTRUCTURES = frozenset(["aten::set_", "aten::resize_", "aten::as_strided"])
_LOOKS_AT_MEMORY = frozenset(
    getattr(Tensor, name)
    for name in (
        "__array__",
        "__deepcopy__",
        "__dlpack__",
        "__reduce_ex__",
        "_typed_storage",
        "data_ptr",
        "numpy",
        "share_memory_",
        "storage",
        "tolist",
        "untyped_storage",
    )
)

_AT_HAND = 4
"""So many tensors are not given back, whatever their size: what initialises one tensor uses others on the way."""

_TRIM_BYTES = 1 << 25
"""So much is freed before the system is given it back."""


@dataclass(slots=True, eq=False)
class _Record:
    """A storage that is given back and made again.

    Attributes:
        storage: Without memory while it is given back.
        content: What it holds, or would hold.
    """

    storage: Any
    content: Content


@dataclass(slots=True)
class _Pending:
    """A parameter or buffer that is a shell until it is needed."""

    tensor: Tensor
    view: View


class DeferredInit:
    """A context in which a model is created without memory for all of it. See [Note: how creation is deferred].

    When it ends, the large tensors that the model has got are shells: one NaN, expanded to the full shape.
    `materialize` gives them their values. The context can be entered again, for example to convert the model.

    Args:
        root: The model, which is created inside the context or has been created in part.
        min_bytes: Smaller tensors are left alone.
        budget_bytes: Tensors of so many bytes in all are kept at hand, those used last, so that few are made again.
    """

    def __init__(self, root: nn.Module, min_bytes: int = 1 << 16, budget_bytes: int = 1 << 25) -> None:
        self._root = root
        self._min_bytes = min_bytes
        self._budget_bytes = budget_bytes
        self._existing = {id(tensor): tensor for tensor in _tensors(root)}
        self._records: dict[int, _Record] = {}
        self._at_hand: OrderedDict[int, _Record] = OrderedDict()
        self._pending: dict[int, _Pending] = {}
        self._stack = ExitStack()
        self._freed_bytes = 0

    def __enter__(self) -> DeferredInit:
        with torch.no_grad():
            self._attach()
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Looks(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        with torch.no_grad():
            self._detach()
        release_freed_memory()

    @property
    def has_created(self) -> bool:
        """Whether any of the model's parameters and buffers were created inside the context."""
        return not all(id(tensor) in self._existing for tensor in _tensors(self._root))

    def created(self, module: nn.Module) -> bool:
        """Returns whether a module's parameters and buffers were all created inside the context."""
        return not any(id(tensor) in self._existing for tensor in _tensors(module))

    def materialize(self, tensors: Iterable[Tensor]) -> None:
        """Gives tensors that are shells the values that they were created with; leaves others alone."""
        found = [self._pending[id(tensor)] for tensor in tensors if id(tensor) in self._pending]
        with torch.inference_mode(False), torch.no_grad(), random_states(()):
            storages: dict[int, Any] = {}  # of tensors that are views of one storage
            for pending in found:
                content = pending.view.content
                if id(content) not in storages:
                    storages[id(content)] = Contents({}).private(content)
                pending.tensor.data = pending.view.of(storages[id(content)])
                self._pending.pop(id(pending.tensor), None)

    # While it is active

    def record_of(self, tensor: Any) -> _Record | None:
        """Returns the record of a tensor's storage, if it has one."""
        return self._records.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None

    def keep(self, record: _Record) -> None:
        """Leaves a storage in memory from now on."""
        self.restore(record)
        self._records.pop(record.storage._cdata, None)
        self._at_hand.pop(record.storage._cdata, None)

    def restore(self, record: _Record) -> None:
        """Gives a storage its memory and values back."""
        if not self._is_at_hand(record):
            at_hand = {id(other.content): other.storage for other in self._at_hand.values()}
            with random_states(()):
                made = Contents(at_hand).private(record.content)
            self._hold(record)
            record.storage.copy_(made)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, and notes how what it makes or changes can be made again."""
        leaves, structure = tree_flatten((args, kwargs))
        records = {id(leaf): record for leaf in leaves if (record := self.record_of(leaf)) is not None}
        name = func._schema.name
        if name in _RESTRUCTURES:
            for record in records.values():
                self.keep(record)
            return func(*args, **kwargs)
        if func.is_view:
            with self._without_values(records.values()):
                return func(*args, **kwargs)
        changed = [leaf for leaf in _changed(func, args, kwargs) if id(leaf) in records]
        call, overwritten = None, None
        if self._is_replayable(leaves, records) and len({id(records[id(leaf)]) for leaf in changed}) <= 1:
            if changed and name in _OVERWRITES and _covers(changed[0], records[id(changed[0])], leaves, records):
                overwritten = records[id(changed[0])]
                self._allocate(overwritten)
            call = self._call_of(func, leaves, structure, records)
        for record in records.values():
            self.restore(record)
        states = _states_of(leaves)
        result = func(*args, **kwargs)
        drawn = tuple((device, state) for device, state in states if not torch.equal(state, random_state(device)))
        call = call and replace(call, random=drawn)
        self._note_changes([records[id(leaf)] for leaf in changed], call)
        self._note_results(result, call)
        self._make_room(list(records.values()))
        return result

    @contextmanager
    def _without_values(self, records: Iterable[_Record]) -> Iterator[None]:
        """Gives storages their size, which views are checked against, but does not touch the memory."""
        away = [record for record in records if not self._is_at_hand(record)]
        for record in away:
            record.storage.resize_(record.content.num_bytes)
        try:
            yield
        finally:
            for record in away:
                self._give_back(record)

    def _is_replayable(self, leaves: list[Any], records: Mapping[int, _Record]) -> bool:
        """Returns whether all that goes into an operation can be had again: records, and what is small."""
        return all(
            id(leaf) in records or (_is_plain(leaf) and leaf.untyped_storage().nbytes() <= self._min_bytes)
            for leaf in leaves
            if isinstance(leaf, Tensor)
        )

    def _call_of(self, func: Any, leaves: list[Any], structure: Any, records: Mapping[int, _Record]) -> Call:
        noted: list[Any] = []
        for leaf in leaves:
            if id(leaf) in records:
                noted.append(View.at(leaf, records[id(leaf)].content))
            elif isinstance(leaf, Tensor):
                noted.append(leaf.detach().clone())
            elif isinstance(leaf, torch.Generator):
                noted.append(GeneratorState(leaf.device, leaf.get_state()))
            else:
                noted.append(leaf)
        return Call(func, tuple(noted), structure, (), torch.get_default_dtype())

    def _allocate(self, record: _Record) -> None:
        """Gives a storage that is about to be overwritten its memory, without its values."""
        content = record.content
        record.content = Content(None, None, None, content.num_bytes, content.device)
        self._hold(record)

    def _note_changes(self, changed: list[_Record], call: Call | None) -> None:
        for record in changed:
            if call is None:
                self.keep(record)
            else:
                before = record.content
                record.content = Content(call, None, before, before.num_bytes, before.device)

    def _note_results(self, result: Any, call: Call | None) -> None:
        for position, tensor in enumerate(tree_leaves(result)):
            if call is None or not _is_plain(tensor) or tensor.untyped_storage()._cdata in self._records:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() > self._min_bytes:
                content = Content(call, position, None, storage.nbytes(), storage.device)
                record = _Record(storage, content)
                self._records[storage._cdata] = self._at_hand[storage._cdata] = record

    def _make_room(self, used: Iterable[_Record]) -> None:
        """Gives back what was used longest ago, until the rest is within the budget or only few tensors."""
        for record in used:
            if self._is_at_hand(record):
                self._at_hand.move_to_end(record.storage._cdata)
        for key in [key for key in self._at_hand if torch._C._storage_Use_Count(key) == 1]:
            self._freed_bytes += self._at_hand[key].content.num_bytes
            del self._at_hand[key], self._records[key]  # temporary tensors, of which only the record is left
        excess = sum(record.content.num_bytes for record in self._at_hand.values()) - self._budget_bytes
        for record in list(self._at_hand.values())[:-_AT_HAND]:
            if excess <= 0:
                break
            excess -= record.content.num_bytes
            self._freed_bytes += record.content.num_bytes
            self._give_back(record)
        if self._freed_bytes > max(self._budget_bytes, _TRIM_BYTES):
            self._freed_bytes = 0
            release_freed_memory()  # the allocator keeps what it cannot use again for tensors of other sizes

    def _hold(self, record: _Record) -> None:
        """Gives a storage its memory, without values."""
        if record.storage.nbytes() == 0:
            record.storage.resize_(record.content.num_bytes)
        self._at_hand[record.storage._cdata] = record

    def _give_back(self, record: _Record) -> None:
        record.storage.resize_(0)
        self._at_hand.pop(record.storage._cdata, None)

    def _is_at_hand(self, record: _Record) -> bool:
        return record.storage._cdata in self._at_hand

    # Between the model's tensors as shells and as they are inside the context

    def _attach(self) -> None:
        pending, self._pending = self._pending, {}
        records: dict[int, _Record] = {}
        for entry in pending.values():
            content = entry.view.content
            if id(content) not in records:
                storage = torch.UntypedStorage(content.num_bytes, device=content.device)
                records[id(content)] = _Record(storage, content)
                self._records[storage._cdata] = records[id(content)]
            entry.tensor.data = entry.view.of(records[id(content)].storage)
        for record in records.values():
            self._give_back(record)

    def _detach(self) -> None:
        """Turns the model's tensors into shells; what else is alive gets its values and stays."""
        users: dict[int, list[Tensor]] = {}
        for tensor in _tensors(self._root):
            record = self.record_of(tensor)
            if record is not None:
                users.setdefault(record.storage._cdata, []).append(tensor)
        for key, record in list(self._records.items()):
            tensors = users.get(key, [])
            if torch._C._storage_Use_Count(key) > len(tensors) + 1:  # tensors and the record
                self.keep(record)
                continue
            for tensor in tensors:
                self._pending[id(tensor)] = _Pending(tensor, View.at(tensor, record.content))
                tensor.data = shell_like(tensor, tensor.device)
        self._records.clear()
        self._at_hand.clear()


class _Operations(TorchDispatchMode):
    def __init__(self, deferred: DeferredInit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred = deferred

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._deferred.run(func, args, kwargs or {})


class _Looks(TorchFunctionMode):
    """Leaves in memory what is looked at without an operation."""

    def __init__(self, deferred: DeferredInit) -> None:
        super().__init__()
        self._deferred = deferred

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS_AT_MEMORY:
            for leaf in tree_leaves((args, kwargs)):
                record = self._deferred.record_of(leaf)
                if record is not None:
                    self._deferred.keep(record)
        return func(*args, **(kwargs or {}))


def _tensors(root: nn.Module) -> list[Tensor]:
    return [*root.parameters(), *root.buffers()]


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a tensor whose memory is one storage that is its own."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter, nn.Buffer)
        and value.layout == torch.strided
        and value.device.type in ("cpu", "cuda")
        and not value.is_quantized
    )


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the arguments that an operation writes to."""
    changed = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            changed += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return changed


def _covers(tensor: Tensor, record: _Record, leaves: list[Any], records: Mapping[int, _Record]) -> bool:
    """Returns whether a tensor is all of its storage, and no other argument is part of it."""
    alone = sum(records.get(id(leaf)) is record for leaf in leaves) == 1
    whole = tensor.numel() * tensor.element_size() == record.content.num_bytes
    return alone and whole and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _states_of(leaves: Iterable[Any]) -> list[tuple[Any, Tensor]]:
    """Returns the states of all generators that an operation may draw from by default, by device."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    devices |= {leaf for leaf in leaves if isinstance(leaf, torch.device) and leaf.type == "cuda"}
    return [(device, random_state(device)) for device in [torch.device("cpu"), *devices]]
