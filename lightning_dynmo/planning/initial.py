"""The assignment a run starts from, before anything has been measured."""

import difflib
import re
from collections.abc import Sequence

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.balancers.partition import PartitionBalancer
from lightning_dynmo.planning.problem import BalancingProblem

_CHOICES = ("uniform", "parameters", "time")
_TYPE = "type:"


def initial_assignment(
    balance: Sequence[int] | str, num_parameters: Sequence[int], class_names: Sequence[str], num_stages: int
) -> Assignment:
    """Turns what the user asked for into an assignment.

    Args:
        balance: ``"uniform"`` for equally many layers per stage, ``"parameters"`` for the smallest possible largest
            number of parameters per stage, ``"type:regex"`` for the same with the number of layers whose class name
            matches, ``"time"`` for the parameters until there is a measurement to plan from, or layers per stage such
            as ``[3, 4, 3]``.
        num_parameters: Parameters of each layer, ``[L]``; layers without any are fine.
        class_names: Name of each layer's class, ``[L]``.
        num_stages: Stages of the pipeline, S.

    Raises:
        ValueError: If ``balance`` is an unknown name, no class matches, or it does not fit L layers on S stages; or if
            S exceeds L.
    """
    num_layers = len(num_parameters)
    if not isinstance(balance, str):
        return Assignment.from_balance(balance, num_layers=num_layers, num_stages=num_stages)
    if balance.startswith(_TYPE):
        counts: Sequence[int] = _matches(balance.removeprefix(_TYPE), class_names)
    elif balance in _CHOICES:
        counts = num_parameters
    else:
        near = difflib.get_close_matches(balance.lower(), _CHOICES, n=1)
        hint = f"Did you mean balance={near[0]!r}?" if near else "Use for example balance='uniform'."
        choices = ", ".join(repr(choice) for choice in (*_CHOICES, "type:regex"))
        raise ValueError(f"Expected balance to be {choices} or a list such as [3, 4, 3], got {balance!r}. {hint}")
    uniform = Assignment.uniform(num_layers, num_stages)
    if balance == "uniform":
        return uniform
    return PartitionBalancer(tolerance=0.0).balance(BalancingProblem(counts, uniform))


def _matches(regex: str, class_names: Sequence[str]) -> list[int]:
    """Returns 1 for each class name in which the expression is found, whatever the case, and 0 for the others."""
    names = ", ".join(sorted(set(class_names)))
    try:
        expression = re.compile(regex, re.IGNORECASE)
    except re.error as error:
        raise ValueError(
            f"Expected a regular expression after 'type:' in balance, got {regex!r}: {error}. Use for example "
            f"balance='type:{re.escape(class_names[0])}'. The layers are of the classes {names}."
        ) from None
    found = [int(expression.search(name) is not None) for name in class_names]
    if not any(found):
        raise ValueError(
            f"Expected balance={_TYPE + regex!r} to match the class name of a layer, but the classes are {names}. "
            f"Use for example balance='type:{re.escape(class_names[0])}'."
        )
    return found
