"""What a proposed assignment is expected to gain."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.loads import non_negative


@dataclass(frozen=True, slots=True)
class Prediction:
    """The largest stage load, which sets the pace of the pipeline, before and after a rebalance.

    Args:
        bottleneck_before: Largest stage load of the current assignment, in the unit of the loads.
        bottleneck_after: Largest stage load of the proposed assignment, same unit.
    """

    bottleneck_before: float
    bottleneck_after: float

    @property
    def gain(self) -> float:
        """Share of the bottleneck that goes away, at most 1; negative where the proposal is worse."""
        if self.bottleneck_before == 0:
            return 0.0
        return 1.0 - self.bottleneck_after / self.bottleneck_before


def predict(loads: Sequence[float], current: Assignment, proposed: Assignment) -> Prediction:
    """Compares two assignments under the same loads.

    Args:
        loads: One load per layer, ``[L]``, any unit.
        current: The assignment that runs now.
        proposed: The assignment a balancer asks for; its number of stages may differ.

    Raises:
        ValueError: If an assignment has another number of layers, or a load is negative or not finite.
    """
    values = non_negative(loads, "the load of layer")
    return Prediction(max(current.stage_loads(values)), max(proposed.stage_loads(values)))
