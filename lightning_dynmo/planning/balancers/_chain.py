"""The best split of a row of layers over a row of stages, each on a rank of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from lightning_dynmo.planning.balancers._costs import UNREACHABLE, Costs, Ints

# Above every sum of loads, and still a 64-bit integer.
_NO_LIMIT = 2**62


class Chain:
    """Splits where each stage has a rank of its own, found exactly.

    A split is written as its borders ``[S + 1]``: stage s runs layers ``borders[s]`` to ``borders[s + 1] - 1``. What
    fits on a stage still fits when its first layers are taken away, so the stages that may end before layer j are
    those that start at some first layer or later.

    Args:
        costs: What layers cost where.
        more_bytes: Added to the memory of each rank.
    """

    def __init__(self, costs: Costs, more_bytes: int = 0) -> None:
        self._costs = costs
        self._speeds = [costs.speeds[rank] for rank in costs.ranks]
        self._sums: list[int] = costs.load.tolist()
        self._largest = int(np.diff(costs.load).max())
        # The first layer of the longest stage that fits in memory and ends before layer j, for each stage.
        self._fits_from: Ints | None = None
        self._each_fits = True
        if costs.held is not None:
            caps = [costs.caps[rank] + more_bytes for rank in costs.ranks]
            self._fits_from = np.stack([_first_within(sums, cap) for sums, cap in zip(costs.held, caps, strict=True)])
            self._each_fits = bool((self._fits_from[:, 1:] < np.arange(1, len(self._sums))).all())

    def any_split(self) -> list[int] | None:
        """Returns the borders of a split that fits in memory, or None where there is none."""
        return self._split([self._sums[-1]] * len(self._speeds))[0]

    def lacking_bytes(self, split: Sequence[int]) -> int:
        """Returns how many bytes the rank lacks that lacks most, in the split where that is least.

        Args:
            split: Borders of any split.
        """
        lacking, enough = 0, self._costs.lacking_bytes(split)
        while enough - lacking > 1:
            middle = (lacking + enough) // 2
            lacking, enough = (middle, enough) if Chain(self._costs, middle).any_split() is None else (lacking, middle)
        return enough

    def smallest_bottleneck(self, split: Sequence[int]) -> Fraction:
        """Returns the smallest largest time of a stage over all splits that fit in memory.

        Args:
            split: Borders of one that does.
        """
        lower = Fraction(self._sums[-1] + sum(self._costs.fixed), sum(self._speeds))
        upper = self._costs.bottleneck(split)
        # A split with exactly `upper` exists and none is below `lower`. Each step moves one of them to a value that
        # some run of layers has. There are finitely many of those, so the two meet without a tolerance.
        while lower < upper:
            found, above = self._split(self._capacities((lower + upper) / 2))
            if found is None:
                assert above is not None
                lower = above
            else:
                upper = self._costs.bottleneck(found)
        return upper

    def fewest_moved_bytes(self, limit: Fraction) -> list[int]:
        """Returns the borders of the split that moves the fewest bytes within the limit, of which there must be one."""
        starts = self._starts(self._capacities(limit))
        lowest, highest = self._ranges(starts)
        reached, offsets = np.zeros(1, np.int64), []
        for stage, new in enumerate(self._costs.moved):
            # reached[j] = min over i of reached[i] + new[j] - new[i], for all i from starts[j] to j - 1.
            before = slice(lowest[stage], highest[stage] + 1)
            after = slice(lowest[stage + 1], highest[stage + 1] + 1)
            offsets.append(reached - new[before])
            ends = np.minimum(np.arange(after.start, after.stop), before.stop) - before.start
            best = _window_minima(offsets[-1], np.maximum(starts[stage][after] - before.start, 0), ends)
            reached = np.where(best < UNREACHABLE // 2, best + new[after], UNREACHABLE)
        assert reached[-1] < UNREACHABLE
        borders = [lowest[-1]]
        for first, start, offset in zip(reversed(lowest[:-1]), reversed(starts), reversed(offsets), strict=True):
            begin = max(int(start[borders[-1]]), first)
            borders.append(begin + int(np.argmin(offset[begin - first : borders[-1] - first])))
        return borders[::-1]

    def _ranges(self, starts: Sequence[Ints]) -> tuple[list[int], list[int]]:
        """Returns the lowest and the highest place that each border can have, where there is a split at all."""
        lowest, highest = [len(self._costs.load) - 1], [0]
        for stage in reversed(range(len(starts))):
            lowest.append(max(int(starts[stage][lowest[-1]]), stage))
        for start in starts:
            highest.append(int(np.searchsorted(start, highest[-1], side="right")) - 1)
        return lowest[::-1], highest

    def _split(self, capacities: Sequence[int]) -> tuple[list[int] | None, Fraction | None]:
        """Looks for a split whose stages have loads within the capacities.

        Returns:
            Its borders, or None where there is none; and then a larger limit below which there is none either, unless
            it is the memory that forbids all.
        """
        if self._each_fits and min(capacities) >= self._largest:
            return self._fill(capacities)
        return self._follow(capacities)

    def _fill(self, capacities: Sequence[int]) -> tuple[list[int] | None, Fraction | None]:
        """Fills one stage after the other from the last, as in Pinar and Aykanat; right where each layer fits on each.

        Then the borders that can be reached have no gaps, and reaching furthest is best.
        """
        borders = [len(self._sums) - 1]
        longer = []
        for stage in reversed(range(len(capacities))):
            end = borders[-1]
            first = bisect_left(self._sums, self._sums[end] - capacities[stage], 0, end)
            start = max(first, stage)  # each stage before needs a layer
            if self._fits_from is not None:
                start = max(start, int(self._fits_from[stage, end]))
            if 0 < first == start:
                longer.append((self._sums[end] - self._sums[first - 1] + self._costs.fixed[stage], self._speeds[stage]))
            borders.append(start)
        return (borders[::-1], None) if borders[-1] == 0 else (None, _shortest(longer))

    def _follow(self, capacities: Sequence[int]) -> tuple[list[int] | None, Fraction | None]:
        """Follows all borders that can be reached.

        Filling each stage as far as it goes is not enough where a layer may not fit on a stage: a slow rank may then be
        left with one that is too large for it.
        """
        starts = self._starts(capacities)
        num_borders = len(self._costs.load)
        reached = np.zeros((len(starts) + 1, num_borders), np.bool_)
        reached[0, 0] = True
        before = np.zeros(num_borders + 1, np.int64)
        for stage, start in enumerate(starts):
            # before[j]: borders below j where this stage may start.
            np.cumsum(reached[stage], out=before[1:])
            np.greater(before[:-1], before[start], out=reached[stage + 1])
        if not reached[-1, -1]:
            return None, self._next_above(capacities)
        borders: list[int] = [num_borders - 1]
        for stage in reversed(range(len(starts))):
            first = int(starts[stage][borders[-1]])
            borders.append(first + int(np.argmax(reached[stage, first : borders[-1]])))
        return borders[::-1], None

    def _next_above(self, capacities: Sequence[int]) -> Fraction | None:
        """Returns the shortest time of a run of layers that is above the limit, on any stage."""
        candidates = []
        for capacity, fixed, speed in set(zip(capacities, self._costs.fixed, self._speeds, strict=True)):
            # One layer more at the front than the longest run within the limit.
            start = _first_within(self._costs.load, capacity)
            longer = (self._costs.load - self._costs.load[start - 1])[start > 0]
            if len(longer):
                candidates.append((int(longer.min()) + fixed, speed))
        return _shortest(candidates)

    def _starts(self, capacities: Sequence[int]) -> list[Ints]:
        """Returns, per stage, the first layer of the longest stage within its capacity that ends before layer j.

        Where not even one layer fits that is j, or later.
        """
        of_capacity = {capacity: _first_within(self._costs.load, capacity) for capacity in set(capacities)}
        starts = [of_capacity[capacity] for capacity in capacities]
        if self._fits_from is None:
            return starts
        return [np.maximum(start, fits) for start, fits in zip(starts, self._fits_from, strict=True)]

    def _capacities(self, limit: Fraction) -> list[int]:
        """Returns the largest load that each stage may have; below 0 where its fixed cost alone is above the limit."""
        above, below = limit.numerator, limit.denominator
        within = [min(above * speed // below, _NO_LIMIT) for speed in self._speeds]
        return [capacity - fixed for capacity, fixed in zip(within, self._costs.fixed, strict=True)]


def _shortest(times: Sequence[tuple[int, int]]) -> Fraction | None:
    return min((Fraction(load, speed) for load, speed in times), default=None)


def _first_within(sums: Ints, capacity: int) -> Ints:
    """Returns, for each border j, the first i <= j such that the layers i to j - 1 sum to at most the capacity."""
    if capacity < 0:
        return np.arange(len(sums))
    first: Ints = np.searchsorted(sums, sums - capacity)
    return first


def _window_minima(values: Ints, starts: Ints, ends: Ints) -> Ints:
    """Returns the minimum of each ``values[start:end]``; unreachable where that is empty."""
    windows = np.stack([np.minimum(starts, ends), ends], axis=1).ravel()
    minima = np.minimum.reduceat(np.append(values, UNREACHABLE), windows)[::2]
    return np.where(starts < ends, minima, UNREACHABLE)
