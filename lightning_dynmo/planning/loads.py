"""What a layer costs, and how evenly the stages share that cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

LoadMetric = Literal["time", "parameters", "tokens"]


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The measured cost of one layer.

    Args:
        forward_s: Seconds in forward per step, over all microbatches.
        backward_s: Seconds in backward per step, over all microbatches.
        num_parameters: Parameters that still cost work.
        state_bytes: Bytes that travel when the layer moves: parameters, buffers, optimizer and scheme state.
        num_tokens: Tokens that the layer works on per step, over all microbatches.
        layer_bytes: Bytes that the layer takes while it trains: as `state_bytes`, and gradients.
        activation_bytes: Bytes that it keeps of one microbatch from its forward to its backward.
    """

    forward_s: float
    backward_s: float
    num_parameters: int
    state_bytes: int
    num_tokens: int = 0
    layer_bytes: int = 0
    activation_bytes: int = 0

    @property
    def time_s(self) -> float:
        """Seconds per step, forward and backward."""
        return self.forward_s + self.backward_s


def check_load_metric(metric: str) -> None:
    """Checks that there is a load metric of this name.

    Raises:
        ValueError: If not; lists the choices.
    """
    if metric not in get_args(LoadMetric):
        choices = ", ".join(repr(choice) for choice in get_args(LoadMetric))
        raise ValueError(f"Unknown load metric {metric!r}. Use one of {choices}, for example load='time'.")


def load_values(loads: Sequence[LayerLoad], metric: LoadMetric) -> tuple[float, ...]:
    """Reads one number per layer, ``[L]``: seconds for ``"time"``, a count for ``"parameters"`` and ``"tokens"``.

    Raises:
        ValueError: If ``metric`` is unknown, or a value is negative or not finite.
    """
    check_load_metric(metric)
    if metric == "time":
        return non_negative([load.time_s for load in loads], "the time of layer")
    if metric == "tokens":
        return non_negative([load.num_tokens for load in loads], "the tokens of layer")
    return non_negative([load.num_parameters for load in loads], "the parameters of layer")


def imbalance(stage_loads: Sequence[float]) -> float:
    """Returns (max - min) / mean of the stage loads (paper, equation 2); 0 where no stage has any load.

    Args:
        stage_loads: One load per stage, ``[S]``, any unit.

    Raises:
        ValueError: If there are no stages, or a load is negative or not finite.
    """
    loads = non_negative(stage_loads, "the load of stage")
    mean = math.fsum(loads) / len(loads)
    return (max(loads) - min(loads)) / mean if mean > 0 else 0.0


def bubble_ratio(busy_s: Sequence[float], step_s: float) -> float:
    """Returns the measured share of a step in which ranks idle, in ``[0, 1]``.

    Args:
        busy_s: Seconds of work of each rank within the step.
        step_s: Seconds from the step's first to its last moment, over all ranks.

    Raises:
        ValueError: If there are no ranks, a time is negative or not finite, or ``step_s`` is 0.
    """
    busy = non_negative(busy_s, "the busy time of rank")
    if not (math.isfinite(step_s) and step_s > 0):
        raise ValueError(f"Expected a positive, finite step time, got step_s={step_s}. Pass seconds, for example 0.1.")
    # The clocks of busy_s and step_s are read apart, so a full pipeline can seem to work a little longer than the step.
    return min(max(1.0 - math.fsum(busy) / (len(busy) * step_s), 0.0), 1.0)


def idle_share(stage_loads: Sequence[float], balanced: float) -> float:
    """Returns the share of a step in which ranks idle while all wait for the largest stage, in ``[0, 1]``.

    This is 1 - (1 - b0) mean / max, with which the paper's numbers agree. Stages without any load count as balanced.

    Args:
        stage_loads: One load per stage, ``[S]``, any unit.
        balanced: The share b0 in which ranks idle when all stages have the same load, in ``[0, 1]``.

    Raises:
        ValueError: If there are no stages, or a load is negative or not finite.
    """
    loads = non_negative(stage_loads, "the load of stage")
    largest = max(loads)
    evenness = math.fsum(loads) / len(loads) / largest if largest > 0 else 1.0
    return 1.0 - (1.0 - balanced) * evenness


def speedup(idle_before: float, idle_after: float) -> float:
    """Returns how many times faster the same work is done when ranks idle less: (1 - after) / (1 - before).

    Args:
        idle_before: Share of a step in which ranks idle, in ``[0, 1)``.
        idle_after: The same afterwards.
    """
    return (1 - idle_after) / (1 - idle_before)


def speedup_bound(balance: Sequence[int]) -> int:
    """Returns what no move of whole layers can exceed, whatever they cost: the largest stage's number of layers q.

    That stage takes at most q times as long as the costliest layer, and wherever this layer goes, its stage takes at
    least as long as it does.

    Args:
        balance: Layers per stage of the split that is to be improved, ``[S]``.
    """
    return max(balance)


def expected_bubble_ratio(stage_loads: Sequence[float], num_microbatches: int) -> float:
    """Predicts the bubble ratio of a GPipe or 1F1B pipeline, in ``[0, 1)``.

    A balanced pipeline of S stages and M microbatches idles for b0 = (S - 1) / (M + S - 1) of a step; `idle_share` says
    what uneven stages make of it.

    Args:
        stage_loads: One load per stage, ``[S]``, any unit.
        num_microbatches: Microbatches per step, M >= 1.

    Raises:
        ValueError: If there are no stages or microbatches, or a load is negative or not finite.
    """
    loads = non_negative(stage_loads, "the load of stage")
    if num_microbatches < 1:
        raise ValueError(f"Expected at least 1 microbatch, got num_microbatches={num_microbatches}. Use 1 or more.")
    num_stages = len(loads)
    return idle_share(loads, (num_stages - 1) / (num_microbatches + num_stages - 1))


def non_negative(values: Sequence[float], what: str) -> tuple[float, ...]:
    """Returns the values as floats once all of them are known to be finite and not negative.

    Args:
        values: At least one number.
        what: What value i is, up to its index, as in ``"the load of stage"``.

    Raises:
        ValueError: If there are no values, or one is negative, infinite or NaN; the message names its index.
    """
    if len(values) == 0:
        raise ValueError(f"Expected {what} 0 and so on, got no values. Pass at least one.")
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"Expected {what} {index} to be finite and not negative, got {value}. Measure it again, or pass 0."
            )
    return tuple(float(value) for value in values)
