"""What each rank of a pipeline does in one step, in order: the input of every simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Computation = Literal["forward", "backward", "input_backward", "weight_backward"]
MessageEnd = Literal["send_activations", "receive_activations", "send_gradients", "receive_gradients"]
ActionKind = Literal[Computation, MessageEnd]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does: a part of a stage, or its end of a message between stages.

    Args:
        kind: What is done. ``"backward"`` computes the gradients of inputs and weights, the two others one each.
        stage: The stage that computes, sends or receives.
        microbatch: The microbatch.
    """

    kind: ActionKind
    stage: int
    microbatch: int


Order: TypeAlias = Mapping[int, Sequence[Action]]
"""The actions of each rank."""
