"""The contract of every balancer."""

from abc import ABC, abstractmethod

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.problem import BalancingProblem


class Balancer(ABC):
    """Decides which stage runs which layers.

    Every rank calls the balancer with the same gathered loads and compares the answer with its peers, so a balancer
    is pure and deterministic: no clocks, no random numbers, no state that one call leaves for the next.
    """

    @abstractmethod
    def balance(self, problem: BalancingProblem) -> Assignment:
        """Returns the assignment to use from now on, with as many stages as ``problem.current``.

        Raises:
            ValueError: If no assignment is found that fits into the memory of the ranks.
        """
