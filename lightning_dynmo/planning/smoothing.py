"""Costs that vary from step to step, averaged."""

import math
from collections.abc import Sequence

_DRIFT = 2.0
"""How many times as far from the average as from the last measurement is far."""


class SmoothedLoads:
    """The mean of the first measurements, and then an average in which older ones fade.

    A measurement that is far nearer to the last one than to the average says that costs have drifted away from it: the
    average starts anew with these two. Where costs are drawn anew each time, it is the average that is nearer.

    Args:
        weight: What a new measurement counts for once there are ``1 / weight`` of them, in ``(0, 1]``.

    Raises:
        ValueError: If the weight is out of range.
    """

    def __init__(self, weight: float) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"Expected the weight of a new measurement in (0, 1], got {weight}. Use for example 0.25.")
        self._weight = weight
        self._count = 0
        self._values: tuple[float, ...] = ()
        self._last: tuple[float, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """The averages, one per layer; empty before the first measurement."""
        return self._values

    def restart(self) -> None:
        """Forgets all, since what was measured no longer holds."""
        self._count, self._values = 0, ()

    def add(self, measured: Sequence[float]) -> None:
        """Adds one measurement of every layer."""
        last, self._last = self._last, tuple(measured)
        if self._count > 1 and _distance(measured, self._values) > _DRIFT * _distance(measured, last):
            self._count, self._values = 1, last
        self._count += 1
        weight = max(self._weight, 1 / self._count)
        if self._count == 1:
            self._values = tuple(measured)
        else:
            pairs = zip(self._values, measured, strict=True)
            self._values = tuple(old + weight * (new - old) for old, new in pairs)


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(abs(one - other) for one, other in zip(left, right, strict=True))
