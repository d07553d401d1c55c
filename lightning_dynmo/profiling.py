"""Seconds, tokens and bytes per layer, measured only in the iterations that are asked for."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dynmo._torch import tree_leaves
from lightning_dynmo.activations import KeptActivations
from lightning_dynmo.tokens import noting_tokens, tokens_of

Stamp = float | torch.cuda.Event


class LayerTimer:
    """Times each layer of one rank over the microbatches of one iteration.

    On the CPU a moment is a clock reading. On CUDA it is an event, recorded in the stream and read after the step, so
    that nothing synchronises inside it. Frozen layers are timed as they run: without a backward they cost none.

    Args:
        device: Where the layers run.
        counts_activations: Whether to count also what layers keep until their backward, which takes time.
    """

    def __init__(self, device: torch.device, counts_activations: bool = True) -> None:
        self._counts_activations = counts_activations
        self._on_cuda = device.type == "cuda"
        self._forward: dict[int, dict[int, list[tuple[Stamp, Stamp]]]] = defaultdict(lambda: defaultdict(list))
        self._backward: dict[tuple[range, int], tuple[Stamp, Stamp]] = {}
        self._arrivals: dict[int, dict[int, Stamp]] = defaultdict(dict)
        self._busy: list[tuple[Stamp, Stamp]] = []
        self._step: list[tuple[Stamp, Stamp]] = []
        self._tokens: dict[tuple[int, int], int] = {}
        self._kept: dict[int, KeptActivations] = {}

    @contextmanager
    def forward(self, layer: int, microbatch: int) -> Iterator[None]:
        """Times the forward of a layer; a second call for the same layer and microbatch adds to the first."""
        begin = self._now()
        yield
        self._forward[layer][microbatch].append((begin, self._now()))

    @contextmanager
    def tokens(self, layer: int, microbatch: int, values: Sequence[Any]) -> Iterator[None]:
        """Counts the tokens that a layer works on: those of its input, unless it says otherwise.

        Args:
            layer: Layer.
            microbatch: Microbatch.
            values: The layer's input.
        """

        def note(num_tokens: int) -> None:
            self._tokens[layer, microbatch] = num_tokens

        note(tokens_of(values))
        with noting_tokens(note):
            yield

    def counts(self, microbatch: int) -> bool:
        """Whether it is counted what layers keep of a microbatch: of the first one, and where that is asked for."""
        return self._counts_activations and microbatch == 0 and torch.is_grad_enabled()

    def activations(self, module: nn.Module, layer: int, microbatch: int) -> AbstractContextManager[Any]:
        """Counts the bytes that autograd keeps of a layer's forward, where `counts` says so."""
        if not self.counts(microbatch):
            return nullcontext()
        return self._kept_by(module, layer).saving()

    def keeps(self, module: nn.Module, layer: int, microbatch: int, values: Sequence[Any]) -> None:
        """Counts tensors that are kept for a layer's backward by other means, where `counts` says so."""
        if self.counts(microbatch):
            self._kept_by(module, layer).add(values)

    def _kept_by(self, module: nn.Module, layer: int) -> KeptActivations:
        return self._kept.setdefault(layer, KeptActivations(module))

    def num_tokens(self, layer: int) -> int:
        """Returns the tokens that a layer worked on, over all microbatches."""
        return sum(count for (index, _), count in self._tokens.items() if index == layer)

    def activation_bytes(self, layer: int) -> int:
        """Returns the bytes that a layer keeps of one microbatch until its backward."""
        return self._kept[layer].num_bytes if layer in self._kept else 0

    def watch(self, output: Any, layer: int, microbatch: int, inputs: Sequence[Any] = ()) -> None:
        """Notes when the gradient of a layer's output arrives, which is when its backward begins.

        Args:
            output: What the layer returned: a tensor, or a structure of them, of which the last to arrive counts.
            layer: Layer.
            microbatch: Microbatch.
            inputs: What it was called with; a tensor that it only hands on says nothing about its own backward.
        """
        arrivals = self._arrivals[microbatch]
        handed_on = {id(value) for value in inputs}

        def arrived(_: Tensor) -> None:
            arrivals[layer] = self._now()

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in handed_on:
                leaf.register_hook(arrived)

    @contextmanager
    def backward(self, layers: range, microbatch: int) -> Iterator[None]:
        """Times the backward of the layers of one stage for one microbatch."""
        begin = self._now()
        yield
        self._backward[layers, microbatch] = (begin, self._now())

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts the body as time in which this rank works rather than waits."""
        begin = self._now()
        yield
        self._busy.append((begin, self._now()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times the whole iteration."""
        begin = self._now()
        yield
        self._step.append((begin, self._now()))

    def step_s(self) -> float:
        """Returns the seconds of the whole iteration."""
        return sum(self._seconds(begin, end) for begin, end in self._step)

    def busy_s(self) -> float:
        """Returns the seconds in which this rank worked."""
        return sum(self._seconds(begin, end) for begin, end in self._busy)

    def forward_s(self, layer: int) -> float:
        """Returns the seconds per iteration of a layer's forward, over all microbatches."""
        times = [sum(self._seconds(*span) for span in spans) for spans in self._forward[layer].values()]
        return self._total(times)

    def backward_s(self, layer: int) -> float:
        """Returns the seconds per iteration of a layer's backward, over all microbatches; 0 if none ran."""
        times = [self._backward_of(layer, *stage) for stage in self._backward if layer in stage[0]]
        return self._total(times)

    def _total(self, times: Sequence[float]) -> float:
        """Returns the sum over microbatches; on the CPU, their median times their number.

        Other processes of the machine take the core away in the middle of a layer, in some microbatches for many times
        what the layer takes.
        """
        if self._on_cuda or not times:
            return math.fsum(times)
        return median_low(times) * len(times)

    def _backward_of(self, layer: int, layers: range, microbatch: int) -> float:
        arrivals = {index: stamp for index, stamp in self._arrivals[microbatch].items() if index in layers}
        if layer not in arrivals:
            return 0.0
        begin, end = self._backward[layers, microbatch]
        # The topmost layer also answers for what comes before it: the backward of the loss.
        start = begin if layer == max(arrivals) else arrivals[layer]
        below = [index for index in arrivals if index < layer]
        return self._seconds(start, arrivals[max(below)] if below else end)

    def _now(self) -> Stamp:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Stamp, end: Stamp) -> float:
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert isinstance(begin, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
