"""One stage: the layers that a rank owns, run as one `PipelineStage` of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline._torch import PipelineStage, named_range
from lightning_dynmo.pipeline.borders import Border, as_border, call_layer, check_border
from lightning_dynmo.pipeline.failures import PipelineError, describe, find_pipeline_error, is_lost_connection
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.microbatches import Inputs
from lightning_dynmo.pipeline.randomness import keyed_randomness
from lightning_dynmo.profiling import LayerTimer

LastStep = Callable[[int, Any], Tensor]
"""Called on the last stage with a microbatch's index and the chain's output; returns its scaled loss."""


class StageModule(nn.Module):
    """Runs one stage's layers for the microbatch whose index it is given.

    torch passes the index along as a tensor and knows nothing of batches: each rank of a pipeline reads the same batch,
    so the stage looks up what its layers need. The output of the last layer stays here until `last_step` takes it.

    Args:
        chain: All layers.
        layers: Indices of this stage's layers.
        output: What the next stage expects; None for the last stage.
        where: How errors call this stage, such as ``"rank 2, stage 2"``.
        device: Where the layers live.
        precision_context: Entered around each layer and around the last step.
    """

    def __init__(
        self,
        chain: LayerChain,
        layers: range,
        output: Border | None,
        where: str,
        device: torch.device,
        precision_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.chain = chain
        self.indices = layers
        self.layers = nn.ModuleList(chain.layers[index] for index in layers)
        self._output = output
        self._where = where
        self._device = device
        self._precision_context = precision_context
        self._results: dict[int, Any] = {}
        self._inputs: Sequence[Inputs] = ()
        self._last_step: LastStep | None = None
        self._key: tuple[int, ...] = ()
        self.timer: LayerTimer | None = None

    def prepare(
        self, inputs: Sequence[Inputs], last_step: LastStep, key: tuple[int, ...], timer: LayerTimer | None
    ) -> None:
        """Sets what the next iteration runs on.

        Args:
            inputs: One entry per microbatch.
            last_step: Called on the last stage.
            key: Seed and step, to which layer and microbatch are added for each layer's random numbers.
            timer: Times this iteration; None where it is not measured.
        """
        self._inputs, self._last_step, self._key, self.timer = inputs, last_step, key, timer
        self._results.clear()

    def finish(self) -> None:
        """Lets go of the batch."""
        self._inputs, self._last_step, self.timer = (), None, None
        self._results.clear()

    @override
    def forward(self, *activations: Tensor, microbatch: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Runs the stage's layers on the activations received, or on the batch's own inputs in the first stage."""
        index = int(microbatch)
        inputs = self._inputs[index]
        values: tuple[Any, ...] = inputs.args
        if self.indices.start:
            values = tuple(map(_received, activations))
        for layer_index, layer in zip(self.indices, self.layers, strict=True):
            output = self._run(layer_index, layer, values, inputs.kwargs, index)
            values = output if isinstance(output, tuple) else (output,)
        if self._output is None:
            self._results[index] = output
            return torch.empty(0, device=self._device)
        name = self.chain.name(self.indices[-1])
        border = tuple(_plain(value) for value in as_border(output, name))
        check_border(border, self._output, name)
        return border

    def loss(self, _: Any, microbatch: Tensor) -> Tensor:
        """Runs the last step on a microbatch's output; torch calls this where it computes the loss."""
        index = int(microbatch)
        assert self._last_step is not None
        last = self.indices[-1]
        busy = nullcontext() if self.timer is None else self.timer.busy()
        with (
            busy,
            _NamedFailure(f"{self._where}, step method, microbatch {index}"),
            self._timed(last, index),
            self._random(len(self.chain), index),
            self._precision_context(),
        ):
            return self._last_step(index, self._results.pop(index))

    def named_failure(self, doing: str) -> AbstractContextManager[None]:
        """Returns a context that adds rank, stage, layers and `doing` to exceptions that do not name these yet."""
        first, last = self.indices[0], self.indices[-1]
        layers = self.chain.name(first) if first == last else f"layers {first}-{last}"
        return _NamedFailure(f"{self._where}, {layers}, {doing}")

    def _run(self, index: int, layer: nn.Module, values: tuple[Any, ...], kwargs: dict[str, Any], mb: int) -> Any:
        with (
            _NamedFailure(f"{self._where}, {self.chain.name(index)}, microbatch {mb}"),
            self._timed(index, mb),
            self._random(index, mb),
            self._precision_context(),
        ):
            output = call_layer(layer, values, kwargs)
        if self.timer is not None and torch.is_grad_enabled():
            self.timer.watch(output, index, mb, inputs=values)
        return output

    def _timed(self, layer: int, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self.timer is None else self.timer.forward(layer, microbatch)

    def _random(self, layer: int, microbatch: int) -> AbstractContextManager[None]:
        return keyed_randomness(self._device, *self._key, layer, microbatch)


class _NamedFailure(AbstractContextManager[None]):
    """Adds to an exception where it arose: rank, stage, layer and microbatch."""

    def __init__(self, where: str) -> None:
        self._where = where

    @override
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and find_pipeline_error(error) is None and not is_lost_connection(error):
            raise PipelineError(describe(self._where, error)) from error


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


class Stage(PipelineStage):
    """torch's `PipelineStage` with full static metadata and no messages or backward where no gradient flows.

    What is received gets memory of its own each time, as any activation does: torch's fixed buffers would change under
    the hands of whoever keeps a tensor for longer than a step, and hold memory for all microbatches.

    Args:
        module: The stage's layers.
        index: Stage, which is also the `pp_rank`.
        borders: Output of each layer of the chain but the last.
        groups: Process groups of this rank.
    """

    def __init__(self, module: StageModule, index: int, borders: Sequence[Border], groups: PipelineGroups) -> None:
        first, last = module.indices.start, module.indices[-1]
        self._received: Border = borders[first - 1] if first else ()
        self._sent: Border = borders[last] if last < len(borders) else (torch.empty(0, device="meta"),)
        super().__init__(
            module,
            index,
            groups.pp_size,
            groups.device,
            input_args=self._received,
            output_args=self._sent,
            group=groups.pipeline,
        )
        self.module = module
        self._groups = groups

    @override
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # torch 2.11 would ask a gradient of everything it receives, whole numbers included.
        has_backward, self.has_backward = self.has_backward, False
        result = super()._prepare_forward_infra(*args, **kwargs)
        self.has_backward = has_backward
        for chunk in self.args_recv_info:
            self._drop_buffers(self.args_recv_info[chunk])
        return result

    @override
    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        for chunk in self.grad_recv_info:
            self._drop_buffers(self.grad_recv_info[chunk])
        return result

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        # A buffer needs a gradient where its sender does.
        for info, border in zip(self.args_recv_info[fwd_chunk_id], self._received, strict=True):
            info.buffer = self._new_buffer(border).requires_grad_(border.requires_grad and self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with (
            self._busy(),
            named_range("dynmo: forward of stage", self.stage_index, "microbatch", fwd_chunk_id),
            self.module.named_failure(f"forward of microbatch {fwd_chunk_id}"),
        ):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._drop_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        timer = self.module.timer
        with (
            self._busy(),
            nullcontext() if timer is None else timer.backward(bwd_chunk_id),
            named_range("dynmo: backward of stage", self.stage_index, "microbatch", bwd_chunk_id),
            self.module.named_failure(f"backward of microbatch {bwd_chunk_id}"),
        ):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._drop_buffers(self.grad_recv_info.get(bwd_chunk_id, ()))

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        peer = self._groups.peer(self.stage_index + 1)
        operations = []
        for info, border in zip(self.grad_recv_info[bwd_chunk_id], self._sent, strict=True):
            if border.requires_grad:
                info.buffer = self._new_buffer(border)
                operations.append(dist.P2POp(dist.irecv, info.buffer, peer, self.group))
        return operations

    @override
    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        peer = self._groups.peer(self.stage_index - 1)
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        operations = []
        for gradient, border in zip(gradients, self._received, strict=False):
            if border.requires_grad:
                if gradient is None:  # the layers did not use this tensor
                    gradient = torch.zeros(border.shape, dtype=border.dtype, device=self.device)
                operations.append(dist.P2POp(dist.isend, _plain(gradient), peer, self.group))
        return operations

    def _new_buffer(self, border: Tensor) -> Tensor:
        return torch.empty(border.shape, dtype=border.dtype, device=self.device)

    def _drop_buffers(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty(0, device=self.device)

    def _busy(self) -> AbstractContextManager[None]:
        return nullcontext() if self.module.timer is None else self.module.timer.busy()
