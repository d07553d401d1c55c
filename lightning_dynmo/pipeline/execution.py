"""Carries out a schedule on one rank: computations in order, and messages between the ranks of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dynmo._torch import Action, ActionType, named_range
from lightning_dynmo.pipeline.groups import PipelineGroups
from lightning_dynmo.pipeline.stage import Stage
from lightning_dynmo.profiling import LayerTimer

_NAMES = {
    ActionType.FORWARD: "forward",
    ActionType.FULL_BACKWARD: "backward",
    ActionType.BACKWARD_INPUT: "input backward",
    ActionType.BACKWARD_WEIGHT: "weight backward",
    ActionType.SEND_F: "sending activations",
    ActionType.RECV_F: "receiving activations",
    ActionType.SEND_B: "sending gradients",
    ActionType.RECV_B: "receiving gradients",
}
_LAST = (ActionType.FULL_BACKWARD, ActionType.BACKWARD_WEIGHT)

_MAX_SENDING = 8
"""Messages that are on their way at a time."""

Message = tuple[str, int, int]
"""What a tensor is for: ``"activations"`` or ``"gradients"``, the stage that takes it, and the microbatch."""


class ScheduleRun:
    """One iteration of a schedule.

    What is received gets memory of its own each time, as any activation does: fixed buffers would change under the
    hands of whoever keeps a tensor for longer than a step, and hold memory for all microbatches.

    Args:
        stages: This rank's stages, by index.
        placement: The `pp_rank` of each stage.
        groups: Process groups of this rank.
        timer: Times the iteration; None where it is not measured.
        on_gradients: Called with a stage once all its gradients are there.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placement: Sequence[int],
        groups: PipelineGroups,
        timer: LayerTimer | None = None,
        on_gradients: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        self._stages = stages
        self._placement = placement
        self._groups = groups
        self._timer = timer
        self._on_gradients = on_gradients
        self._arriving: dict[Message, tuple[list[Any], tuple[Tensor | None, ...]]] = {}
        self._made: dict[Message, Sequence[Tensor | None]] = {}
        self._sending: deque[tuple[list[Any], list[Tensor]]] = deque()

    def run(self, actions: Sequence[Action], num_microbatches: int) -> None:
        """Carries out this rank's actions."""
        missing = dict.fromkeys(self._stages, num_microbatches)
        for action in actions:
            kind, stage, microbatch = action.computation_type, action.stage_index, action.microbatch_index
            if kind not in _NAMES:  # marks for other ways of sharding, which torch puts in
                continue
            with named_range(f"dynmo: {_NAMES[kind]} of stage", stage, "microbatch", microbatch):
                self._perform(kind, self._stages[stage], microbatch or 0)
            if kind in _LAST:
                missing[stage] -= 1
                if not missing[stage]:
                    self._on_gradients(self._stages[stage])
        self._wait_for_sends(0)

    def _perform(self, kind: ActionType, stage: Stage, microbatch: int) -> None:
        index = stage.index
        if kind == ActionType.SEND_F:
            self._send(("activations", index + 1, microbatch))
        elif kind == ActionType.SEND_B:
            self._send(("gradients", index - 1, microbatch))
        elif kind == ActionType.RECV_F:
            self._receive(("activations", index, microbatch), index - 1, stage.received(microbatch))
        elif kind == ActionType.RECV_B:
            forms = [form if form.requires_grad else None for form in stage.sent(microbatch)]
            self._receive(("gradients", index, microbatch), index + 1, forms)
        else:
            self._compute(kind, stage, microbatch)

    def _compute(self, kind: ActionType, stage: Stage, microbatch: int) -> None:
        """Runs a part of a stage on what has arrived; what comes of it waits to be sent, or to be used here."""
        index, busy = stage.index, nullcontext() if self._timer is None else self._timer.busy()
        if kind == ActionType.FORWARD:
            received = () if stage.is_first else self._take(("activations", index, microbatch))
            leaves = self._as_leaves(received, stage.received(microbatch))
            with busy:
                outputs = stage.forward(microbatch, leaves)
            if not stage.is_last:
                here = index + 1 in self._stages  # the next stage may change its input in place
                self._made["activations", index + 1, microbatch] = [t.clone() for t in outputs] if here else outputs
            return
        if kind == ActionType.BACKWARD_WEIGHT:
            with busy:
                stage.backward_of_weights(microbatch)
            return
        gradients = () if stage.is_last else self._take(("gradients", index, microbatch))
        with busy:
            if kind == ActionType.FULL_BACKWARD:
                found = stage.backward(microbatch, gradients)
            else:
                found = stage.backward_of_inputs(microbatch, gradients)
        if not stage.is_first:
            self._made["gradients", index - 1, microbatch] = found

    def _as_leaves(self, values: Sequence[Tensor | None], forms: Sequence[Tensor]) -> tuple[Tensor, ...]:
        gradients = torch.is_grad_enabled()
        pairs = zip(values, forms, strict=True)
        return tuple(
            value.requires_grad_(form.requires_grad and gradients) for value, form in pairs if value is not None
        )

    def _take(self, message: Message) -> Sequence[Tensor | None]:
        """Returns what a stage waits for: from another rank, or from a neighbour on this one."""
        if message in self._made:
            return self._made.pop(message)
        works, buffers = self._arriving.pop(message)
        for work in works:
            work.wait()
        return buffers

    def _send(self, message: Message) -> None:
        peer = self._groups.peer(self._placement[message[1]])
        tensors = [tensor for tensor in self._made.pop(message) if tensor is not None and tensor.numel()]
        operations = [dist.P2POp(dist.isend, tensor, peer, self._groups.pipeline) for tensor in tensors]
        if operations:
            self._sending.append((dist.batch_isend_irecv(operations), tensors))
            self._wait_for_sends(_MAX_SENDING)

    def _wait_for_sends(self, most: int) -> None:
        """Waits until so many messages at most are on their way, whose memory is kept.

        The order of a schedule puts each receive before anything that needs a later message of the sender's, so that
        waiting for a send cannot block.
        """
        while len(self._sending) > most:
            works, _ = self._sending.popleft()
            for work in works:
                work.wait()

    def _receive(self, message: Message, source: int, forms: Sequence[Tensor | None]) -> None:
        peer, device = self._groups.peer(self._placement[source]), self._groups.device
        buffers = tuple(
            None if form is None else torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms
        )
        operations = [
            dist.P2POp(dist.irecv, buffer, peer, self._groups.pipeline)
            for buffer in buffers
            if buffer is not None and buffer.numel()
        ]
        self._arriving[message] = (dist.batch_isend_irecv(operations) if operations else [], buffers)
