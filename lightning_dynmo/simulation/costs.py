"""What layers and stages cost, and what messages do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dynmo.planning import Assignment
from lightning_dynmo.planning.loads import non_negative


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs for one microbatch.

    Args:
        forward_s: Seconds of the forward.
        input_gradient_s: Seconds for the gradient of its input, where one is asked for.
        weight_gradient_s: Seconds for the gradients of its parameters, where they train.
        trains: Whether its parameters train.
        activation_bytes: What it keeps from its forward to its backward.
        output_bytes: What it hands to the next layer; the gradient that comes back is as large.
        gradient_bytes: Its parameters' gradients, which replicas add up.
        update_s: Seconds of the optimizer, once per step, where its parameters train.
    """

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    trains: bool = True
    activation_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int = 0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs for one microbatch; as `LayerCost`, with what does not run left out.

    Args:
        forward_s: Seconds of the forward.
        input_gradient_s: Seconds for the gradients of activations; 0 where nothing before trains.
        weight_gradient_s: Seconds for the gradients of parameters; 0 where all are frozen.
        sends_gradient: Whether a gradient goes back to the stage before: whether a layer before trains.
        activation_bytes: What it keeps from a forward to its backward; 0 where it has none.
        output_bytes: What it sends to the next stage.
        input_bytes: What it receives from the stage before; the gradient that it sends back is as large.
        gradient_bytes: Gradients that replicas add up once per step.
        update_s: Seconds of the optimizer, once per step.
    """

    forward_s: float
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    sends_gradient: bool = True
    activation_bytes: int = 0
    output_bytes: int = 0
    input_bytes: int = 0
    gradient_bytes: int = 0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """How long messages take.

    Args:
        latency_s: Seconds from the send of a small message to its arrival, measured by a ping-pong.
        bytes_per_s: Bandwidth between neighbours in the pipeline.
        replica_bytes_per_s: Bandwidth between replicas of a stage, for the sums of gradients.

    Raises:
        ValueError: If the latency is negative or not finite, or a bandwidth not positive.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    replica_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        non_negative([self.latency_s], "latency_s, value")
        for name in ("bytes_per_s", "replica_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"Expected {name} to be positive, got {getattr(self, name)}. Use math.inf where messages cost no "
                    f"more for being long."
                )


AT_ONCE = Network()
"""Messages take no time."""


def stage_costs(layers: Sequence[LayerCost], assignment: Assignment) -> list[StageCost]:
    """Adds up the costs of layers to those of stages.

    A layer has a gradient of its input only where a layer before it trains, and one of its parameters only where it
    trains itself: so a frozen front has no backward, and a frozen layer in the middle half of one.

    Args:
        layers: Cost of each layer, ``[L]``.
        assignment: Which stage runs which.

    Raises:
        ValueError: If there is not one cost per layer.
    """
    if len(layers) != assignment.num_layers:
        raise ValueError(
            f"Expected one cost per layer, {assignment.num_layers} in all, got {len(layers)}. Pass those of all layers."
        )
    first_trained = next((index for index, layer in enumerate(layers) if layer.trains), len(layers))
    stages = []
    for stage in range(assignment.num_stages):
        indices = assignment.layers_of(stage)
        stages.append(
            StageCost(
                forward_s=sum(layers[index].forward_s for index in indices),
                input_gradient_s=sum(layers[index].input_gradient_s for index in indices if index > first_trained),
                weight_gradient_s=sum(layers[index].weight_gradient_s for index in indices if layers[index].trains),
                sends_gradient=indices[0] > first_trained,
                activation_bytes=sum(layers[index].activation_bytes for index in indices if index >= first_trained),
                output_bytes=layers[indices[-1]].output_bytes,
                input_bytes=layers[indices[0] - 1].output_bytes if stage else 0,
                gradient_bytes=sum(layers[index].gradient_bytes for index in indices if layers[index].trains),
                update_s=sum(layers[index].update_s for index in indices if layers[index].trains),
            )
        )
    return stages
