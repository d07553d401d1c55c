"""The best contiguous split, found exactly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.balancers.base import Balancer
from lightning_dynmo.planning.problem import BalancingProblem

_Ints: TypeAlias = NDArray[np.int64]

# Loads whose sum is beyond this many bits would overflow the 64-bit prefix sums.
_LOAD_BITS = 61

# Two stage loads that differ by less than one part in 2**40 are the same: no clock is that good, and 0.1 + 0.2 should
# not move a layer away from 0.3.
_SAME = 1 + Fraction(1, 2**40)

# Above every sum of bytes (at most 2**60), even after a sum of bytes is added or taken away.
_UNREACHABLE = 2**62


class PartitionBalancer(Balancer):
    """Makes the largest stage load as small as any contiguous split can, and moves as few bytes as that allows.

    First the smallest possible bottleneck is found: ask whether the layers can be split within a limit, then try a
    smaller one, until the loads allow no value in between (the paper's partition balancer, made exact as in Pinar and
    Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004). Then a dynamic programme picks, among
    the splits within that bottleneck, the one that moves the fewest bytes from the current assignment. What is still
    tied goes to the split with the earlier stage borders, compared from the last border to the first.

    The unit of the loads does not matter. Stage loads that differ by less than one part in 2**40 count as equal.
    """

    @override
    def balance(self, problem: BalancingProblem) -> Assignment:
        """See :meth:`Balancer.balance`."""
        loads, current = problem.loads, problem.current
        speeds = _relative_speeds(problem.rank_speeds, current.num_stages)
        fits_from = np.zeros(current.num_layers + 1, np.int64)
        if problem.memory is not None:
            fits_from = _fits_in_memory_from(
                problem.memory.layer_bytes, problem.memory.cap_bytes[0], current.num_stages
            )
        splitter = _Splitter(_prefix_sums(_in_units(loads)), speeds, fits_from)

        starts = splitter.starts(splitter.smallest_bottleneck() * _SAME)
        sizes = np.array(problem.state_bytes or [1] * current.num_layers, np.int64)
        borders = _fewest_moved_bytes(starts, _bytes_from_elsewhere(sizes, current))
        return Assignment(tuple(end - start for start, end in pairwise(borders)))


@dataclass(frozen=True, slots=True, eq=False)
class _Splitter:
    """Answers which splits keep every stage within a limit.

    A split is written as its borders ``[S + 1]``: stage s runs layers ``borders[s]`` to ``borders[s + 1] - 1``. What
    fits on a stage still fits when its first layers are taken away, so the stages that may end before layer j are
    those that start at ``starts[s][j]`` or later.

    Args:
        prefix: Summed loads of the layers before each border, ``[L + 1]``, in units.
        speeds: Speed of each stage, ``[S]``, the fastest is 1.
        fits_from: First layer of the longest stage that ends before layer j and fits in memory, ``[L + 1]``.
    """

    prefix: _Ints
    speeds: tuple[Fraction, ...]
    fits_from: _Ints

    def smallest_bottleneck(self) -> Fraction:
        """Returns the smallest largest load / speed of all splits that fit in memory, of which there must be one."""
        total, largest = int(self.prefix[-1]), int(np.diff(self.prefix).max())
        lower = max(Fraction(total) / sum(self.speeds), Fraction(largest))
        split = self.split(self.starts(total / min(self.speeds)))
        assert split is not None
        upper = self._bottleneck(split)
        # A split with exactly `upper` exists and none is below `lower`. Each step moves one of them to a value that
        # some run of layers has. There are finitely many of those, so the two meet without a tolerance.
        while lower < upper:
            limit = (lower + upper) / 2
            starts = self.starts(limit)
            split = self.split(starts)
            if split is None:
                lower = self._next_above(limit, starts)
            else:
                upper = self._bottleneck(split)
        return upper

    def starts(self, limit: Fraction) -> list[_Ints]:
        """Returns, per stage, the first layer of the longest stage within the limit that ends before layer j."""
        by_speed = {}
        for speed in set(self.speeds):
            within = np.searchsorted(self.prefix, self.prefix - self._capacity(limit, speed))
            by_speed[speed] = np.maximum(within, self.fits_from)
        return [by_speed[speed] for speed in self.speeds]

    def split(self, starts: Sequence[_Ints]) -> list[int] | None:
        """Returns the borders of one split within the limit, or None where there is none.

        Filling each stage as far as it goes is not enough once ranks differ in speed: a slow rank may then be left
        with a layer that is too large for it. So all borders that can be reached are followed.
        """
        num_borders = len(self.prefix)
        reached = np.zeros((len(starts) + 1, num_borders), np.bool_)
        reached[0, 0] = True
        before = np.zeros(num_borders, np.int64)
        for stage, start in enumerate(starts):
            # before[j]: borders below j where this stage may start.
            np.cumsum(reached[stage, :-1], out=before[1:])
            np.greater(before, before[start], out=reached[stage + 1])
        if not reached[-1, -1]:
            return None
        borders: list[int] = [num_borders - 1]
        for stage in reversed(range(len(starts))):
            first = int(starts[stage][borders[-1]])
            borders.append(first + int(np.argmax(reached[stage, first : borders[-1]])))
        return borders[::-1]

    def _bottleneck(self, borders: Sequence[int]) -> Fraction:
        loads: list[int] = np.diff(self.prefix[borders]).tolist()
        return max(load / speed for load, speed in zip(loads, self.speeds, strict=True))

    def _next_above(self, limit: Fraction, starts: Sequence[_Ints]) -> Fraction:
        """Returns a larger limit below which nothing more fits than within this one, whose ``starts`` are given."""
        candidates = []
        for speed, start in dict(zip(self.speeds, starts, strict=True)).items():
            # One layer more at the front, wherever it is the load and not the memory that leaves it out.
            longer = (self.prefix - self.prefix[start - 1])[start > 0]
            longer = longer[longer > self._capacity(limit, speed)]
            if len(longer):
                candidates.append(int(longer.min()) / speed)
        return min(candidates)

    def _capacity(self, limit: Fraction, speed: Fraction) -> int:
        return min(math.floor(limit * speed), int(self.prefix[-1]))


def _in_units(loads: Sequence[float]) -> _Ints:
    """Counts the loads, ``[L]``, in units of a power of two so small that the sum of all just fits in 61 bits.

    Sums of integers are exact in any order, so equal runs of layers stay equal and every rank gets the same result.
    Integers, such as parameter counts, are converted without loss.
    """
    values = np.array(loads, np.float64)
    values = np.ldexp(values, -math.frexp(values.max())[1])
    exponent = math.frexp(math.fsum(values.tolist()))[1]
    units: _Ints = np.rint(np.ldexp(values, _LOAD_BITS - exponent)).astype(np.int64)
    return units


def _prefix_sums(values: _Ints) -> _Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])


def _relative_speeds(rank_speeds: Sequence[float] | None, num_stages: int) -> tuple[Fraction, ...]:
    if rank_speeds is None:
        return (Fraction(1),) * num_stages
    speeds = [Fraction(float(speed)) for speed in rank_speeds]
    fastest = max(speeds)
    return tuple(speed / fastest for speed in speeds)


def _fits_in_memory_from(memory_bytes: Sequence[int], cap_bytes: int, num_stages: int) -> _Ints:
    """Returns ``[L + 1]``: the first layer of the longest stage that ends before layer j and takes at most the cap.

    Raises:
        ValueError: If no split of the layers over the stages stays within the cap.
    """
    prefix = _prefix_sums(np.array(memory_bytes, np.int64))
    speeds = (Fraction(1),) * num_stages
    memory = _Splitter(prefix, speeds, np.zeros_like(prefix))
    fits_from = memory.starts(Fraction(cap_bytes))[0]
    if memory.split([fits_from] * num_stages) is None:
        needed = int(memory.smallest_bottleneck())
        raise ValueError(
            f"No split of {len(memory_bytes)} layers over {num_stages} stages keeps every stage within "
            f"memory_cap_bytes={cap_bytes}: the best one needs {needed} bytes on a stage, {needed - cap_bytes} more. "
            f"Set memory_cap_bytes={needed} or higher, or use more stages or smaller layers (the largest takes "
            f"{max(memory_bytes)} bytes)."
        )
    return fits_from


def _bytes_from_elsewhere(state_bytes: _Ints, current: Assignment) -> _Ints:
    """Returns ``[S, L + 1]``: bytes of the layers before each border that stage s does not hold now.

    A stage that runs layers i to j - 1 thus receives ``result[s, j] - result[s, i]`` bytes.
    """
    prefix = _prefix_sums(state_bytes)
    held = [current.layers_of(stage) for stage in range(current.num_stages)]
    borders = np.arange(len(prefix))
    return np.stack([prefix - prefix[np.clip(borders, own.start, own.stop)] + prefix[own.start] for own in held])


def _fewest_moved_bytes(starts: Sequence[_Ints], elsewhere: _Ints) -> list[int]:
    """Returns the borders ``[S + 1]`` of the split that moves the fewest bytes, among those that ``starts`` allows."""
    num_borders = elsewhere.shape[1]
    moved = np.full(num_borders, _UNREACHABLE, np.int64)
    moved[0] = 0
    offsets = []
    for start, incoming in zip(starts, elsewhere, strict=True):
        # moved[j] = min over i of moved[i] + incoming[j] - incoming[i], for all i from start[j] to j - 1.
        offsets.append(moved - incoming)
        best = _window_minima(offsets[-1], start)
        moved = np.where(best < _UNREACHABLE // 2, best + incoming, _UNREACHABLE)
    borders = [num_borders - 1]
    for start, offset in zip(reversed(starts), reversed(offsets), strict=True):
        first = int(start[borders[-1]])
        borders.append(first + int(np.argmin(offset[first : borders[-1]])))
    return borders[::-1]


def _window_minima(values: _Ints, start: _Ints) -> _Ints:
    """Returns, for each j, the minimum of ``values[start[j]:j]``; unreachable where that is empty."""
    ends = np.arange(len(values))
    level = np.frexp(ends - start)[1].astype(np.int64) - 1
    # minima[k, i] is the minimum of the 2**k values from i on; two such runs cover each window.
    minima = np.empty((max(int(level.max()), 0) + 1, len(values)), np.int64)
    minima[0] = values
    for k in range(1, len(minima)):
        half = 2 ** (k - 1)
        minima[k] = minima[k - 1]
        np.minimum(minima[k - 1, :-half], minima[k - 1, half:], out=minima[k, :-half])
    level = np.maximum(level, 0)
    both = np.minimum(minima[level, np.minimum(start, ends)], minima[level, np.maximum(ends - 2**level, 0)])
    return np.where(start < ends, both, _UNREACHABLE)
