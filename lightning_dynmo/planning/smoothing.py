"""Costs that vary from step to step, averaged."""

from collections.abc import Sequence


class SmoothedLoads:
    """The mean of the first measurements, and then an average in which older ones fade.

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

    @property
    def values(self) -> tuple[float, ...]:
        """The averages, one per layer; empty before the first measurement."""
        return self._values

    def restart(self) -> None:
        """Forgets all, since what was measured no longer holds."""
        self._count, self._values = 0, ()

    def add(self, measured: Sequence[float]) -> None:
        """Adds one measurement of every layer."""
        self._count += 1
        weight = max(self._weight, 1 / self._count)
        if self._count == 1:
            self._values = tuple(measured)
        else:
            pairs = zip(self._values, measured, strict=True)
            self._values = tuple(old + weight * (new - old) for old, new in pairs)
