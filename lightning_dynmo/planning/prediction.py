"""What a proposed assignment is expected to gain."""

from dataclasses import dataclass

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.problem import BalancingProblem


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of the slowest rank, which sets the pace of the pipeline, before and after a rebalance.

    Args:
        bottleneck_before: Time of the slowest rank under the current assignment, in the unit of the loads.
        bottleneck_after: Time of the slowest rank under the proposed assignment, same unit.
    """

    bottleneck_before: float
    bottleneck_after: float

    @property
    def gain(self) -> float:
        """Share of the bottleneck that goes away, at most 1; negative where the proposal is worse."""
        if self.bottleneck_before == 0:
            return 0.0
        return 1.0 - self.bottleneck_after / self.bottleneck_before


def predict(problem: BalancingProblem, proposed: Assignment) -> Prediction:
    """Compares an assignment with the one that runs now.

    Args:
        problem: Costs of the layers, and the assignment that runs now.
        proposed: The assignment a balancer asks for.

    Raises:
        ValueError: If the assignment is for another number of layers.
    """
    return Prediction(problem.bottleneck(problem.current), problem.bottleneck(proposed))
