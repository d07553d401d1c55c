"""A balancing problem in whole numbers: sums are exact in any order, so every rank finds the same split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_dynmo.planning.problem import BalancingProblem

Ints: TypeAlias = NDArray[np.int64]

# Loads whose sum is beyond this many bits would overflow the 64-bit prefix sums.
_LOAD_BITS = 61

# Two times that differ by less than one part in 2**40 are the same: no clock is that good, and 0.1 + 0.2 should not
# move a layer away from 0.3.
SAME = 1 + Fraction(1, 2**40)

# Above every sum of bytes (at most 2**60), even after a sum of bytes is added or taken away.
UNREACHABLE = 2**62

# Times on slower ranks than that would not be finite.
_SLOWEST = 2.0**-900

# Caps and counts beyond all that a model can need (2**60 bytes) are no limits.
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """What runs of layers cost on each stage: a difference of two entries is the cost of the layers between.

    Args:
        ranks: Rank of each stage, ``[S]``.
        load: Summed loads of the layers before each border, ``[L + 1]``, in units.
        fixed: Fixed cost of each stage, ``[S]``, in the same units.
        speeds: Speed of each rank, ``[R]``, as whole numbers in proportion.
        moved: Bytes before each border that a stage's rank does not hold now, ``[S, L + 1]``.
        held: Bytes that the layers before each border would take on each stage, ``[S, L + 1]``, if there are limits.
        caps: Most bytes of each rank, ``[R]``.
    """

    ranks: tuple[int, ...]
    load: Ints
    fixed: tuple[int, ...]
    speeds: tuple[int, ...]
    moved: Ints
    held: Ints | None
    caps: tuple[int, ...]

    @classmethod
    def of(cls, problem: BalancingProblem) -> Costs:
        """Counts everything in whole numbers."""
        units = _in_units([*problem.loads, *problem.fixed_costs])
        memory = problem.memory
        held = None
        if memory is not None:
            activations = np.array(memory.activation_bytes, np.int64)
            in_flight = np.array([min(count, _NO_LIMIT) for count in memory.in_flight], np.int64)
            held = prefix_sums(np.array(memory.layer_bytes, np.int64) + np.outer(in_flight, activations))
        return cls(
            ranks=problem.ranks,
            load=prefix_sums(units[: problem.num_layers]),
            fixed=tuple(units[problem.num_layers :].tolist()),
            speeds=_whole(problem.speeds),
            moved=_moved(problem),
            held=held,
            caps=() if memory is None else tuple(min(cap, _NO_LIMIT) for cap in memory.cap_bytes),
        )

    @property
    def num_layers(self) -> int:
        """Number of layers L."""
        return len(self.load) - 1

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return len(self.ranks)

    @property
    def relative_speeds(self) -> tuple[float, ...]:
        """Speeds of the ranks as floats, of which the largest is 1."""
        fastest = max(self.speeds)
        return tuple(max(float(Fraction(speed, fastest)), _SLOWEST) for speed in self.speeds)

    def bottleneck(self, borders: Sequence[int]) -> Fraction:
        """Returns the time of the slowest rank for a split with these borders, ``[S + 1]``."""
        totals = [0] * len(self.speeds)
        for rank, load, fixed in zip(self.ranks, np.diff(self.load[list(borders)]).tolist(), self.fixed, strict=True):
            totals[rank] += load + fixed
        return longest(totals, self.speeds)

    def moved_bytes(self, borders: Sequence[int]) -> int:
        """Returns the bytes of all layers that would change their rank."""
        return sum(
            int(before[end] - before[start])
            for before, start, end in zip(self.moved, borders[:-1], borders[1:], strict=True)
        )

    def lacking_bytes(self, borders: Sequence[int]) -> int:
        """Returns how many bytes the rank lacks that lacks most; 0 or less where all have enough."""
        if self.held is None:
            return 0
        totals = [-cap for cap in self.caps]
        for rank, before, start, end in zip(self.ranks, self.held, borders[:-1], borders[1:], strict=True):
            totals[rank] += int(before[end] - before[start])
        return max(totals)


def longest(loads: Sequence[int], speeds: Sequence[int]) -> Fraction:
    """Returns the largest load / speed. Fractions are slow, so there is only one."""
    most, slowest = 0, 1
    for load, speed in zip(loads, speeds, strict=True):
        if load * slowest > most * speed:
            most, slowest = load, speed
    return Fraction(most, slowest)


def prefix_sums(values: Ints) -> Ints:
    """Returns the sums of the first 0, 1, 2, ... values along the last axis."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1), np.int64)
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _in_units(loads: Sequence[float]) -> Ints:
    """Counts loads in units of a power of two so small that the sum of all just fits in 61 bits.

    Sums of integers are exact in any order, so equal runs of layers stay equal and every rank gets the same result.
    Integers, such as parameter counts, are converted without loss.
    """
    values = np.array(loads, np.float64)
    values = np.ldexp(values, -math.frexp(values.max())[1])
    exponent = math.frexp(math.fsum(values.tolist()))[1]
    units: Ints = np.rint(np.ldexp(values, _LOAD_BITS - exponent)).astype(np.int64)
    return units


def _whole(speeds: Sequence[float]) -> tuple[int, ...]:
    """Returns whole numbers in the exact proportion of the speeds: floats are multiples of a power of two."""
    exact = [Fraction(float(speed)) for speed in speeds]
    below = max(speed.denominator for speed in exact)
    return tuple(int(speed * below) for speed in exact)


def _moved(problem: BalancingProblem) -> Ints:
    sizes = np.array(problem.sizes, np.int64)
    ranks = np.array(problem.ranks)
    holders = np.repeat(ranks, problem.current.balance)
    return prefix_sums(np.where(holders == ranks[:, None], 0, sizes))
