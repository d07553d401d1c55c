"""One stage: consecutive layers of the chain, run forward and backward for one microbatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_dynmo._torch import OptimizedModule, tree_leaves
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.borders import Border, allows_hooks, as_arguments, call_layer, check_border
from lightning_dynmo.pipeline.failures import PipelineError, describe, find_pipeline_error, is_lost_connection
from lightning_dynmo.pipeline.microbatches import Inputs
from lightning_dynmo.pipeline.randomness import keyed_python_randomness, keyed_randomness
from lightning_dynmo.pipeline.splitting import SplitBackward, refuse_reentrant
from lightning_dynmo.profiling import LayerTimer

LastStep = Callable[[int, Any], Any]
"""Called on the last stage with a microbatch's index and the chain's output; returns its scaled loss in training."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """What the stages run on: one batch.

    Attributes:
        inputs: One entry per microbatch. Each rank of a pipeline reads the same batch, so no stage is sent its inputs.
        borders: For each microbatch, what crosses behind every layer but the last.
        last_step: Called on the last stage.
        key: Seed and step, to which layer and microbatch are added for each layer's random numbers.
        first_microbatch: Number of the first microbatch among those of all replicas.
        timer: Times this iteration; None where it is not measured.
    """

    inputs: Sequence[Inputs]
    borders: Sequence[Sequence[Border]]
    last_step: LastStep
    key: tuple[int, ...]
    first_microbatch: int = 0
    timer: LayerTimer | None = None


@dataclass(slots=True)
class _Saved:
    """What a microbatch's backward starts from, and the leaves where it ends."""

    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...] = ()
    split: SplitBackward | None = None


class Stage:
    """Runs consecutive layers; what it takes and returns is sent and received elsewhere.

    Args:
        chain: All layers.
        index: Stage.
        layers: Indices of this stage's layers.
        where: How errors call this stage, such as ``"rank 2, stage 2"``.
        device: Where the layers live.
        precision_context: Entered around each layer and around the last step.
        recompute: Whether activations inside layers are dropped and computed again in the backward.
        splits: Whether the schedule runs the backward in two parts.
    """

    def __init__(
        self,
        chain: LayerChain,
        index: int,
        layers: range,
        where: str,
        device: torch.device,
        precision_context: Callable[[], AbstractContextManager[Any]],
        recompute: bool = False,
        splits: bool = False,
    ) -> None:
        self.chain = chain
        self.index = index
        self.layers = layers
        self._where = where
        self._device = device
        self._precision_context = precision_context
        self._recompute = recompute
        self._saved: dict[int, _Saved] = {}
        self._iteration: Iteration | None = None
        modules = [module for layer in layers for module in chain.layers[layer].modules()]
        # Compiled layers cannot be run backward in parts, and recomputation would be done once for each part.
        self._can_split = not recompute and not any(map(_is_compiled, modules))
        self._allowing: dict[tuple[Any, ...], bool] = {}
        self._unchecked = set(layers) if splits and self._can_split else set()

    @property
    def is_first(self) -> bool:
        """Whether this stage runs the first layer."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage runs the last layer, and the step method after it."""
        return self.layers.stop == len(self.chain)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this stage's layers, in order, each once."""
        found = [parameter for layer in self.layers for parameter in self.chain.parameters(layer)]
        return list(dict.fromkeys(found))

    def begin(self, iteration: Iteration) -> None:
        """Sets what the stage runs on from now on."""
        self._iteration = iteration
        self._saved.clear()

    def end(self) -> None:
        """Lets go of the batch."""
        self._iteration = None
        self._saved.clear()

    def received(self, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the form of what a microbatch brings from the stage before; empty for the first stage."""
        return () if self.is_first else self._border(microbatch, self.layers.start - 1).tensors

    def sent(self, microbatch: int) -> tuple[Tensor, ...]:
        """Returns the form of what a microbatch brings to the next stage; empty for the last stage."""
        return () if self.is_last else self._border(microbatch, self.layers[-1]).tensors

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs the layers and returns what the next stage is to have; the last stage runs the step method instead.

        Args:
            microbatch: Microbatch.
            received: What came from the stage before: leaves, which require a gradient where the border says so.
        """
        iteration = self._now
        with self._named_failure(f"forward of microbatch {microbatch}"):
            values: tuple[Any, ...]
            if self.is_first:
                values = iteration.inputs[microbatch].args
            else:
                border = self._border(microbatch, self.layers.start - 1)
                values = border.values([_received(value) for value in received])
            for layer in self.layers:
                output = self._run(layer, values, microbatch)
                values = as_arguments(output)
            if self.is_last:
                loss = self._last_step(microbatch, output)
                outputs: tuple[Tensor, ...] = (loss,) if torch.is_grad_enabled() else ()
            else:
                outputs = self._outgoing(microbatch, output)
        if torch.is_grad_enabled():
            self._saved[microbatch] = _Saved(received, outputs)
        return () if self.is_last else tuple(value.detach() for value in outputs)

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Runs the whole backward.

        Args:
            microbatch: Microbatch.
            gradients: Those of what `forward` returned, None where none flows; empty for the last stage.

        Returns:
            Gradients of what `forward` was given, None where none flows.
        """
        saved = self._saved.pop(microbatch)
        outputs, values = _with_gradients(saved.outputs, gradients)
        with self._timed_backward(microbatch), self._named_failure(f"backward of microbatch {microbatch}"):
            if outputs:
                torch.autograd.backward(outputs, values)
        return tuple(_take_gradient(leaf) for leaf in saved.leaves)

    def backward_of_inputs(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Runs the part of the backward that the stage before waits for. Arguments and result as in `backward`.

        Where no input needs a gradient, as behind frozen layers, nobody waits, and all is left to
        `backward_of_weights`. Where the backward cannot be split, or is to be measured, it runs whole.
        """
        saved = self._saved[microbatch]
        leaves = [leaf for leaf in saved.leaves if leaf.requires_grad]
        saved.gradients = tuple(gradients)
        if not leaves:
            return (None,) * len(saved.leaves)
        if not self._can_split or self._now.timer is not None:
            return self.backward(microbatch, gradients)
        outputs, values = _with_gradients(saved.outputs, gradients)
        found: dict[int, Tensor | None] = {}
        with self._named_failure(f"backward of microbatch {microbatch}"):
            if outputs:
                saved.split = SplitBackward(outputs, values, leaves, self.parameters)
                found = {id(leaf): gradient for leaf, gradient in zip(leaves, saved.split.inputs, strict=True)}
        saved.outputs, saved.gradients = (), ()
        return tuple(_or_zeros(found.get(id(leaf)), leaf) for leaf in saved.leaves)

    def backward_of_weights(self, microbatch: int) -> None:
        """Runs the part of the backward that nobody waits for."""
        saved = self._saved.get(microbatch)
        if saved is None:  # it has run whole already
            return
        if saved.split is None:
            self.backward(microbatch, saved.gradients)
            return
        with self._named_failure(f"backward of weights, microbatch {microbatch}"):
            saved.split.weights()
        del self._saved[microbatch]

    @property
    def _now(self) -> Iteration:
        assert self._iteration is not None
        return self._iteration

    def _border(self, microbatch: int, layer: int) -> Border:
        return self._now.borders[microbatch][layer]

    def _run(self, index: int, values: tuple[Any, ...], microbatch: int) -> Any:
        timer = self._now.timer
        counts = timer is not None and timer.counts(microbatch) and self._allows_hooks(index, values)
        with (
            _NamedFailure(f"{self._where}, {self.chain.name(index)}, microbatch {microbatch}"),
            nullcontext() if timer is None else timer.forward(index, microbatch),
            self._random(index, microbatch),
            self._precision_context(),
        ):
            if timer is None:
                output = self._call(index, values, microbatch)
            else:
                output = self._measured_call(timer, index, values, microbatch, counts)
            if index in self._unchecked and torch.is_grad_enabled():
                refuse_reentrant(output, values, self.chain.name(index))
                self._unchecked.remove(index)
        if timer is not None and torch.is_grad_enabled():
            timer.watch(output, index, microbatch, inputs=values)
        return output

    def _call(self, index: int, values: tuple[Any, ...], microbatch: int) -> Any:
        layer, kwargs = self.chain.layers[index], self._now.inputs[microbatch].kwargs
        if self._recompute and torch.is_grad_enabled():
            contexts = partial(_recomputation_of, layer, values)
            return checkpoint(call_layer, layer, values, kwargs, use_reentrant=False, context_fn=contexts)
        return call_layer(layer, values, kwargs)

    def _allows_hooks(self, index: int, values: tuple[Any, ...]) -> bool:
        """Whether what the layer keeps can be counted; where hooks are forbidden, it would fail halfway through."""
        layer, kwargs = self.chain.layers[index], self._now.inputs[0].kwargs
        form = (index, layer.training, tuple(parameter.requires_grad for parameter in layer.parameters()))
        if form not in self._allowing:
            with keyed_python_randomness(0), self._random(index, 0), self._precision_context():
                self._allowing[form] = allows_hooks(layer, values, kwargs)
        return self._allowing[form]

    def _measured_call(
        self, timer: LayerTimer, index: int, values: tuple[Any, ...], microbatch: int, counts: bool
    ) -> Any:
        layer = self.chain.layers[index]
        counting = timer.activations(layer, index, microbatch) if counts else nullcontext()
        with timer.tokens(index, microbatch, values), counting:
            output = self._call(index, values, microbatch)
        if self._recompute or not counts:
            timer.keeps(layer, index, microbatch, values if counts else (values, output))
        return output

    def _last_step(self, microbatch: int, output: Any) -> Any:
        timer, last = self._now.timer, self.layers[-1]
        if timer is not None:
            # Hooks around a step that uses torch.func would break it. A loss keeps about as much as it is given.
            timer.keeps(self.chain.layers[last], last, microbatch, (output,))
        with (
            _NamedFailure(f"{self._where}, step method, microbatch {microbatch}"),
            nullcontext() if timer is None else timer.forward(last, microbatch),
            self._random(len(self.chain), microbatch),
            self._precision_context(),
        ):
            return self._now.last_step(microbatch, output)

    def _outgoing(self, microbatch: int, output: Any) -> tuple[Tensor, ...]:
        last = self.layers[-1]
        name = self.chain.name(last)
        border = Border.of(output, name)
        check_border(border, self._border(microbatch, last), name)
        return tuple(map(_plain, border.tensors))

    def _random(self, layer: int, microbatch: int) -> AbstractContextManager[None]:
        return keyed_randomness(self._device, *self._now.key, layer, self._now.first_microbatch + microbatch)

    def _timed_backward(self, microbatch: int) -> AbstractContextManager[None]:
        timer = self._now.timer
        return nullcontext() if timer is None else timer.backward(self.layers, microbatch)

    def _named_failure(self, doing: str) -> AbstractContextManager[None]:
        first, last = self.layers[0], self.layers[-1]
        layers = self.chain.name(first) if first == last else f"layers {first}-{last}"
        return _NamedFailure(f"{self._where}, {layers}, {doing}")


class _NamedFailure(AbstractContextManager[None]):
    """Adds to an exception where it arose: rank, stage, layer and microbatch."""

    def __init__(self, where: str) -> None:
        self._where = where

    @override
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and find_pipeline_error(error) is None and not is_lost_connection(error):
            raise PipelineError(describe(self._where, error)) from error


def _recomputation_of(
    layer: nn.Module, values: tuple[Any, ...]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns what is entered around a layer's forward, and around its repetition.

    The repetition sees buffers and inputs as the forward saw them, and what it does to them is undone: statistics and
    counters have seen the microbatch already.
    """
    before: list[tuple[Tensor, Tensor]] = []
    return _noting(layer, values, before), _with_values(before)


@contextmanager
def _noting(layer: nn.Module, values: tuple[Any, ...], before: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    named = [*layer.named_buffers(), *(("", value) for value in tree_leaves(values) if isinstance(value, Tensor))]
    found = [(name, tensor, tensor._version, tensor.detach().clone()) for name, tensor in named]
    yield
    for name, tensor, version, saved in found:
        # Kernels of batch normalisation change their statistics without counting it.
        if tensor._version != version or name.rpartition(".")[2] in ("running_mean", "running_var"):
            before.append((tensor, saved))


@contextmanager
def _with_values(before: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    now = [buffer.clone() for buffer, _ in before]
    for buffer, values in before:
        buffer.data.copy_(values)
    try:
        yield
    finally:
        for (buffer, _), values in zip(before, now, strict=True):
            buffer.data.copy_(values)


class _Received(torch.autograd.Function):
    """Makes what was received an ordinary activation: a layer may change it in place, which autograd forbids a leaf."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _received(value: Tensor) -> Any:
    return _Received.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]


def _plain(value: Tensor) -> Tensor:
    """Returns the tensor with its elements in memory as they are to be read: in order, conjugated, with their sign."""
    return value.resolve_conj().resolve_neg().contiguous()


def _with_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the outputs that have a graph, and their gradients; a loss comes without."""
    pairs = zip(outputs, gradients or (None,) * len(outputs), strict=True)
    kept = [(output, gradient) for output, gradient in pairs if output.requires_grad]
    return [output for output, _ in kept], [gradient for _, gradient in kept]


def _take_gradient(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return _or_zeros(gradient, leaf)


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Returns the gradient to send: none where none is expected, zeros where the layers did not use the tensor."""
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if gradient is None else _plain(gradient)


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
