"""Moving layers between ranks with everything that belongs to them.

A layer travels as one manifest, which says what it holds, and its tensors, packed into one flat buffer per pair of
ranks. The order is: receive, agree, then let go. Until every rank has what it was sent, every source still has its
layers whole, so a move that fails leaves the model as it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dynmo._torch import TreeSpec, tree_flatten, tree_unflatten
from lightning_dynmo.nn import sparse_weights
from lightning_dynmo.ownership import LayerChain, release_freed_memory
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.planning import Move


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Form of a tensor that travels, and whether it lives on the CPU whatever the layer's device is."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Returns the form of a tensor; strides are its own where its elements lie densely, such as channels last."""
        stride = torch.empty_like(tensor, device="meta").stride()
        return cls(tensor.shape, stride, tensor.dtype, tensor.device.type == "cpu")

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.shape.numel() * self.dtype.itemsize

    def allocate(self, device: torch.device) -> Tensor:
        """Returns a tensor of this form, without values."""
        place = torch.device("cpu") if self.on_cpu else device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)

    def as_bytes(self, tensor: Tensor) -> Tensor:
        """Returns the elements of a tensor of this form in their order in memory; a view if they lie densely."""
        if tensor.stride() != self.stride or tensor.is_conj() or tensor.is_neg():
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one layer holds besides the elements of its tensors.

    Attributes:
        tensors: Every tensor that travels: parameters and buffers, then optimizer state.
        names: Names of the parameters and buffers, which are the first tensors.
        buffers: Names of the buffers; whether they belong to the ``state_dict``.
        requires_grad: One flag per parameter.
        training: One flag per submodule, in order of ``modules()``.
        extra_state: ``get_extra_state()`` of the submodules that define it, by name.
        optimizer_states: For each optimizer and parameter, its state without tensors.
    """

    tensors: tuple[TensorSpec, ...]
    names: tuple[str, ...]
    buffers: dict[str, bool]
    requires_grad: tuple[bool, ...]
    training: tuple[bool, ...]
    extra_state: dict[str, Any]
    optimizer_states: tuple[tuple[_State, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that travel when the layer moves."""
        return sum(spec.num_bytes for spec in self.tensors)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor: its position in the manifest."""

    position: int


@dataclass(frozen=True, slots=True)
class _State:
    """An optimizer's state of one parameter: a dict that may hold lists and dicts in turn, as it is when flat."""

    leaves: tuple[Any, ...]
    structure: TreeSpec

    def restore(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        leaves = [tensors[leaf.position] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        state: dict[str, Any] = tree_unflatten(leaves, self.structure)
        return state


@dataclass(frozen=True, slots=True)
class Package:
    """One layer on its way: its manifest and its tensors in the manifest's order."""

    manifest: Manifest
    tensors: tuple[Tensor, ...] = field(repr=False)


def pack(
    chain: LayerChain,
    index: int,
    optimizers: Sequence[Optimizer],
    *,
    with_tensors: bool = True,
    as_saved: bool = False,
) -> Package:
    """Returns what layer `index` holds; the tensors are the layer's own, not copies.

    Args:
        chain: All layers; this rank must own the layer.
        index: Layer.
        optimizers: Optimizers whose state goes along.
        with_tensors: Whether parameters and buffers go along.
        as_saved: Whether compact weights, and their optimizer state, go along as the matrices that checkpoints hold.
    """
    layer = chain.layers[index]
    sparse = sparse_weights(layer) if as_saved else {}
    named = chain.tensors(index) if with_tensors else []
    tensors = [sparse[id(tensor)].dense_weight() if id(tensor) in sparse else tensor.detach() for _, tensor in named]
    states = []
    for optimizer in optimizers:
        per_parameter = []
        for parameter in chain.parameters(index):
            state = dict(optimizer.state.get(parameter, {}))
            if id(parameter) in sparse:
                state = sparse[id(parameter)].dense_state(state)
            leaves, structure = tree_flatten(state)
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    leaves[position] = _Slot(len(tensors))
                    tensors.append(leaf.detach())
            per_parameter.append(_State(tuple(leaves), structure))
        states.append(tuple(per_parameter))
    manifest = Manifest(
        tensors=tuple(map(TensorSpec.of, tensors)),
        names=tuple(name for name, _ in named),
        buffers=chain.buffers(index),
        requires_grad=tuple(parameter.requires_grad for parameter in layer.parameters()),
        training=tuple(module.training for module in layer.modules()),
        extra_state={
            name: module.get_extra_state()
            for name, module in layer.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        },
        optimizer_states=tuple(states),
    )
    return Package(manifest, tuple(tensors))


def unpack(chain: LayerChain, index: int, optimizers: Sequence[Optimizer], package: Package) -> None:
    """Makes layer `index` whole on this rank from what was sent; cannot fail, since it only swaps references."""
    manifest, tensors = package.manifest, package.tensors
    chain.match_buffers(index, manifest.buffers)
    by_name = dict(zip(manifest.names, tensors, strict=False))
    chain.take(index, [by_name[name] for name, _ in chain.tensors(index)])
    layer = chain.layers[index]
    for parameter, requires_grad in zip(layer.parameters(), manifest.requires_grad, strict=True):
        parameter.requires_grad_(requires_grad)
    for module, training in zip(layer.modules(), manifest.training, strict=True):
        module.training = training
    for name, state in manifest.extra_state.items():
        layer.get_submodule(name).set_extra_state(state)
    for optimizer, states in zip(optimizers, manifest.optimizer_states, strict=True):
        for parameter, state in zip(chain.parameters(index), states, strict=True):
            if state.leaves:
                optimizer.state[parameter] = state.restore(tensors)


def state_of(package: Package, optimizer: int) -> list[dict[str, Any]]:
    """Returns one optimizer's state of a package: one dict for each parameter of the layer, in order."""
    return [state.restore(package.tensors) for state in package.manifest.optimizer_states[optimizer]]


@dataclass(frozen=True, slots=True)
class Migration:
    """What a migration did.

    Attributes:
        moves: Layers and where they went.
        moved_bytes: Bytes of all tensors that travelled.
        duration_s: Seconds it took this rank.
    """

    moves: tuple[Move, ...]
    moved_bytes: int
    duration_s: float


def migrate(
    chain: LayerChain, moves: Iterable[Move], groups: PipelineGroups, optimizers: Sequence[Optimizer]
) -> Migration:
    """Moves layers between the ranks of a pipeline, and those of the chain's followers with them.

    Every rank calls this with the same moves.

    Args:
        chain: All layers.
        moves: Sources and targets are `pp_rank`s.
        groups: Process groups of this rank.
        optimizers: Optimizers whose state goes along.

    Raises:
        RuntimeError: If a rank cannot hold what it is sent; nothing has moved then, on any rank.
    """
    begin = time.perf_counter()
    moves = tuple(moves)
    with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode can never be trained
        moved_bytes = _migrate(chain, moves, groups, optimizers)
    release_freed_memory()
    return Migration(moves, moved_bytes, time.perf_counter() - begin)


def _migrate(chain: LayerChain, moves: Sequence[Move], groups: PipelineGroups, optimizers: Sequence[Optimizer]) -> int:
    arrived, moved_bytes = transfer(chain, moves, groups, optimizers)
    following = [(follower, *transfer(follower, moves, groups, ())) for follower in chain.followers]
    for move in moves:
        if move.source == groups.pp_rank:
            chain.let_go(move.layer, move.target)
            for optimizer in optimizers:
                for parameter in chain.parameters(move.layer):
                    if not chain.holds(parameter):
                        optimizer.state.pop(parameter, None)
    for index, package in arrived.items():
        unpack(chain, index, optimizers, package)
    for follower, packages, follower_bytes in following:
        moved_bytes += follower_bytes
        for index, package in packages.items():
            unpack(follower, index, (), package)
    for move in moves:
        if not chain.owns(move.layer):
            chain.let_go(move.layer, move.target)  # so that the shell's error names the new owner
    return moved_bytes


def transfer(
    chain: LayerChain,
    moves: Sequence[Move],
    groups: PipelineGroups,
    optimizers: Sequence[Optimizer],
    *,
    with_tensors: bool = True,
    as_saved: bool = False,
) -> tuple[dict[int, Package], int]:
    """Copies layers to other ranks and leaves them where they are; `with_tensors` and `as_saved` as for `pack`.

    Returns:
        The layers that arrived at this rank, by index, in tensors of their own; and the bytes that all ranks sent.

    Raises:
        RuntimeError: If a rank has no memory for what it is sent, raised on every rank.
    """
    me = groups.pp_rank
    outgoing = {
        move.layer: pack(chain, move.layer, optimizers, with_tensors=with_tensors, as_saved=as_saved)
        for move in moves
        if move.source == me
    }
    manifests: dict[int, Manifest] = {}
    for part in groups.gather({index: package.manifest for index, package in outgoing.items()}):
        manifests.update(part)

    pairs = sorted({(move.source, move.target) for move in moves if me in (move.source, move.target)})
    layers = {pair: [move.layer for move in moves if (move.source, move.target) == pair] for pair in pairs}
    error: Exception | None = None
    buffers: dict[tuple[tuple[int, int], bool], Tensor] = {}
    arrived: dict[int, Package] = {}
    try:
        for pair in pairs:
            for on_cpu in (True, False):
                buffers[pair, on_cpu] = _flat_buffer(pair, layers[pair], on_cpu, outgoing, manifests, groups)
            if pair[1] == me:
                for index in layers[pair]:
                    arrived[index] = _empty_package(manifests[index], groups.device)
    except (RuntimeError, MemoryError) as failure:  # out of memory
        error = failure
    here = ", ".join(str(index) for pair in pairs for index in layers[pair])
    where = f"rank {groups.global_rank}, layers {here}"
    problems = [problem for problem in groups.gather(None if error is None else f"{where}: {error}") if problem]
    if problems:
        raise RuntimeError(
            "Layers could not be moved, so everything stays where it was. No memory for what was to move: "
            f"{'; '.join(problems)}. Move fewer layers at a time, or leave more memory free on that rank."
        ) from error

    _exchange(buffers, groups)
    for pair in pairs:
        if pair[1] == me:
            _unflatten([arrived[index] for index in layers[pair]], buffers[pair, True], buffers[pair, False])
    groups.all_agree(True)
    return arrived, sum(manifest.num_bytes for manifest in manifests.values())


def make_whole(chain: LayerChain, owners: Sequence[int], groups: PipelineGroups) -> None:
    """Gives every rank of the pipeline every layer, on the CPU, as before training; optimizer state stays away.

    Args:
        chain: All layers.
        owners: The `pp_rank` that owns each layer.
        groups: Process groups of this rank.
    """
    with torch.inference_mode(False), torch.no_grad():
        for each in (chain, *chain.followers):
            _make_whole(each, owners, groups)


def _make_whole(chain: LayerChain, owners: Sequence[int], groups: PipelineGroups) -> None:
    manifests: dict[int, Manifest] = {}
    for part in groups.gather({index: pack(chain, index, ()).manifest for index in chain.owned}):
        manifests.update(part)
    for index, owner in enumerate(owners):
        mine = owner == groups.pp_rank
        package = pack(chain, index, ()) if mine else _empty_package(manifests[index], groups.device)
        for tensor, spec in zip(package.tensors, package.manifest.tensors, strict=True):
            group = groups.control if spec.on_cpu else groups.pipeline
            dist.broadcast(spec.as_bytes(tensor), src=groups.peer(owner), group=group)
        if not mine:
            unpack(chain, index, (), Package(package.manifest, tuple(tensor.cpu() for tensor in package.tensors)))


def _flat_buffer(
    pair: tuple[int, int],
    layers: Sequence[int],
    on_cpu: bool,
    outgoing: dict[int, Package],
    manifests: dict[int, Manifest],
    groups: PipelineGroups,
) -> Tensor:
    """Returns the bytes that one rank sends another, filled at the source."""
    device = torch.device("cpu") if on_cpu else groups.device
    if pair[0] == groups.pp_rank:
        parts = [
            spec.as_bytes(tensor)
            for index in layers
            for tensor, spec in zip(outgoing[index].tensors, manifests[index].tensors, strict=True)
            if spec.on_cpu == on_cpu
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
    size = sum(spec.num_bytes for index in layers for spec in manifests[index].tensors if spec.on_cpu == on_cpu)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _exchange(buffers: dict[tuple[tuple[int, int], bool], Tensor], groups: PipelineGroups) -> None:
    """Sends and receives all buffers at once, so that the order in which ranks come to it does not matter."""
    for on_cpu, group in ((True, groups.control), (False, groups.pipeline)):
        operations = []
        for ((source, target), kind), buffer in buffers.items():
            if kind == on_cpu and buffer.numel():
                if source == groups.pp_rank:
                    operations.append(dist.P2POp(dist.isend, buffer, groups.peer(target), group))
                else:
                    operations.append(dist.P2POp(dist.irecv, buffer, groups.peer(source), group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


def _empty_package(manifest: Manifest, device: torch.device) -> Package:
    return Package(manifest, tuple(spec.allocate(device) for spec in manifest.tensors))


def _unflatten(packages: Sequence[Package], on_cpu: Tensor, on_device: Tensor) -> None:
    """Copies flat bytes into the packages' own tensors, so that no layer keeps a whole buffer alive."""
    offsets = {True: 0, False: 0}
    for package in packages:
        for tensor, spec in zip(package.tensors, package.manifest.tensors, strict=True):
            flat, offset = on_cpu if spec.on_cpu else on_device, offsets[spec.on_cpu]
            spec.as_bytes(tensor).copy_(flat[offset : offset + spec.num_bytes])
            offsets[spec.on_cpu] = offset + spec.num_bytes
