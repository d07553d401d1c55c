"""Which stage runs which layers, and what changes between two such assignments."""

import math
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Assignment:
    """The paper's map A from layers to stages: contiguous, in layer order, at least one layer per stage.

    Args:
        balance: Layers per stage, first stage first; ``(3, 4, 3)`` puts layers 0-2 on stage 0, 3-6 on stage 1
            and 7-9 on stage 2.

    Raises:
        ValueError: If ``balance`` is empty or an entry is not an integer of at least 1.
    """

    balance: tuple[int, ...]

    def __post_init__(self) -> None:
        # Lists and numpy integers are welcome, but equality and hashing need one canonical form.
        object.__setattr__(self, "balance", _as_balance(self.balance))

    @classmethod
    def from_balance(cls, balance: Sequence[int], *, num_layers: int, num_stages: int) -> "Assignment":
        """Builds the assignment a user wrote down, for a model and a pipeline of known size.

        Raises:
            ValueError: If ``balance`` does not have ``num_stages`` entries that sum to ``num_layers``.
        """
        assignment = cls(tuple(balance))
        if (assignment.num_stages, assignment.num_layers) != (num_stages, num_layers):
            example = list(cls.uniform(num_layers, num_stages).balance)
            raise ValueError(
                f"balance={list(assignment.balance)} places {assignment.num_layers} layers on {assignment.num_stages} "
                f"stages, but the model has {num_layers} layers and the pipeline {num_stages} stages. "
                f"Use one entry per stage, with sum {num_layers}, for example balance={example}."
            )
        return assignment

    @classmethod
    def uniform(cls, num_layers: int, num_stages: int) -> "Assignment":
        """Spreads the layers evenly; the first ``num_layers % num_stages`` stages get one more.

        Raises:
            ValueError: If there are no stages, or more stages than layers.
        """
        if num_stages < 1:
            raise ValueError(f"Expected at least 1 stage, got num_stages={num_stages}. Use at least 1 device.")
        if num_stages > num_layers:
            raise ValueError(
                f"Every stage needs at least one layer, but there are {num_stages} stages for {num_layers} layers. "
                f"Use at most {num_layers} devices (fewer where each runs several stages), or split the model into "
                f"{num_stages} layers or more."
            )
        quotient, remainder = divmod(num_layers, num_stages)
        return cls(tuple(quotient + (stage < remainder) for stage in range(num_stages)))

    @property
    def num_layers(self) -> int:
        """Number of layers L."""
        return sum(self.balance)

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return len(self.balance)

    def stage_of(self, layer: int) -> int:
        """Returns the stage that runs ``layer``.

        Raises:
            ValueError: If ``layer`` is not in ``[0, num_layers)``.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"Expected a layer in [0, {self.num_layers}), got {layer}. The first layer has index 0.")
        return bisect_right(list(accumulate(self.balance)), layer)

    def layers_of(self, stage: int) -> range:
        """Returns the layers that ``stage`` runs.

        Raises:
            ValueError: If ``stage`` is not in ``[0, num_stages)``.
        """
        if not 0 <= stage < self.num_stages:
            raise ValueError(f"Expected a stage in [0, {self.num_stages}), got {stage}. The first stage has index 0.")
        first = sum(self.balance[:stage])
        return range(first, first + self.balance[stage])

    def stage_loads(self, loads: Sequence[float]) -> tuple[float, ...]:
        """Sums the loads of each stage's layers.

        Args:
            loads: One load per layer, ``[L]``, any unit.

        Returns:
            One load per stage, ``[S]``, same unit.

        Raises:
            ValueError: If there is not exactly one load per layer.
        """
        if len(loads) != self.num_layers:
            raise ValueError(
                f"Expected one load per layer, {self.num_layers} in all, got {len(loads)}. "
                f"Pass the loads of all layers of the model, not those of one stage."
            )
        ends = accumulate(self.balance)
        return tuple(math.fsum(loads[end - size : end]) for end, size in zip(ends, self.balance, strict=True))


@dataclass(frozen=True, slots=True)
class Move:
    """One layer that changes its stage."""

    layer: int
    source: int
    target: int


def moves_between(before: Assignment, after: Assignment) -> tuple[Move, ...]:
    """Lists the layers whose stage differs, in layer order. The number of stages may differ too.

    Raises:
        ValueError: If the assignments are for models with different numbers of layers.
    """
    if before.num_layers != after.num_layers:
        raise ValueError(
            f"Expected two assignments of the same model, got {before.num_layers} layers in {list(before.balance)} and "
            f"{after.num_layers} in {list(after.balance)}. Make both balances sum to {before.num_layers}."
        )
    stages = zip(_stages(before), _stages(after), strict=True)
    return tuple(Move(layer, source, target) for layer, (source, target) in enumerate(stages) if source != target)


def _stages(assignment: Assignment) -> list[int]:
    return [stage for stage, size in enumerate(assignment.balance) for _ in range(size)]


def _as_balance(balance: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in balance)
    except TypeError:
        raise ValueError(
            f"Expected the number of layers of each stage as integers, got balance={balance!r}. "
            f"Write for example balance=[3, 4, 3]."
        ) from None
    if not sizes:
        raise ValueError("Expected at least one stage, got an empty balance. Write for example balance=[3, 4, 3].")
    for stage, size in enumerate(sizes):
        if size < 1:
            raise ValueError(
                f"Every stage needs at least 1 layer, got {size} for stage {stage} in balance={list(sizes)}. "
                f"Give stage {stage} a layer of a neighbour, or leave it out and use one stage less."
            )
    return sizes
