"""The assignment a run starts from, before anything has been measured."""

import difflib
from collections.abc import Sequence

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.balancers.partition import PartitionBalancer
from lightning_dynmo.planning.problem import BalancingProblem

_CHOICES = ("uniform", "parameters", "time")


def initial_assignment(balance: Sequence[int] | str, num_parameters: Sequence[int], num_stages: int) -> Assignment:
    """Turns what the user asked for into an assignment.

    Args:
        balance: ``"uniform"`` for equally many layers per stage, ``"parameters"`` for the smallest possible largest
            number of parameters per stage, ``"time"`` for the same until there is a measurement to plan from, or layers
            per stage such as ``[3, 4, 3]``.
        num_parameters: Parameters of each layer, ``[L]``; layers without any are fine.
        num_stages: Stages of the pipeline, S.

    Raises:
        ValueError: If ``balance`` is an unknown name or does not fit L layers on S stages, or S exceeds L.
    """
    num_layers = len(num_parameters)
    if not isinstance(balance, str):
        return Assignment.from_balance(balance, num_layers=num_layers, num_stages=num_stages)
    if balance not in _CHOICES:
        near = difflib.get_close_matches(balance.lower(), _CHOICES, n=1)
        hint = f"Did you mean balance={near[0]!r}?" if near else "Use for example balance='uniform'."
        choices = ", ".join(repr(choice) for choice in _CHOICES)
        raise ValueError(f"Expected balance to be {choices} or a list such as [3, 4, 3], got {balance!r}. {hint}")
    uniform = Assignment.uniform(num_layers, num_stages)
    return uniform if balance == "uniform" else PartitionBalancer().balance(BalancingProblem(num_parameters, uniform))
