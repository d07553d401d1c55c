"""A good split where ranks run several stages each, in any order: a search that shifts two borders at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_dynmo.planning.balancers._costs import Costs, Ints

_Number = TypeVar("_Number", np.int64, np.float64)
_Floats: TypeAlias = NDArray[np.float64]

# What an objective falls by less than this share is rounding.
_ROUNDING = 1e-12

# First a norm of the ranks' times is made small: of a power high enough to look at the slowest ranks, and low enough to
# go on where several are equally slow, so that no shift makes all of them faster. Their maximum comes second.
_POWER = 8

# Above every objective, times any number of bytes.
_FORBIDDEN = 1e30


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What comes of splits: times of ranks ``[..., R]``, bytes that the neediest lacks, and moved bytes, ``[...]``."""

    times: _Floats
    lacking: Ints
    moved: Ints


class Search:
    """Steepest descent over splits, by shifting one or two borders by one layer each.

    A layer more or less on a stage changes one rank's time, whatever else is shifted. So the outcomes of all pairs of
    shifts are sums, and the best pair is found at once. One border alone would often be stuck where a rank that gives
    a layer away on one stage must get a smaller one on another.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._stages = np.arange(costs.num_stages)
        self._on_rank = np.equal.outer(costs.ranks, np.arange(len(costs.speeds))).astype(np.int64)
        self._speeds = np.array(costs.relative_speeds)

    def faster(self, borders: Sequence[int]) -> list[int]:
        """Returns a split whose slowest rank is about as fast as shifts of two borders can make it, once all fit."""
        usual = float(self._outcome(borders).times.max()) or 1.0

        def norm(outcome: _Outcome) -> _Floats:
            norms: _Floats = np.sum((outcome.times / usual) ** _POWER, axis=-1)
            return norms + outcome.lacking * _FORBIDDEN

        def maximum(outcome: _Outcome) -> _Floats:
            slowest: _Floats = outcome.times.max(axis=-1) / usual
            return slowest + outcome.lacking * _FORBIDDEN

        return self._descend(self._descend(borders, norm), maximum)

    def fewer_moved_bytes(self, borders: Sequence[int], limit: Fraction) -> list[int]:
        """Returns a split that moves at most as many bytes, and is within the limit where the given one is."""
        within = float(min(limit * max(self._costs.speeds), Fraction(2**1000)))

        def moved(outcome: _Outcome) -> _Floats:
            forbidden = (outcome.times.max(axis=-1) > within) | (outcome.lacking > 0)
            bytes_or_forbidden: _Floats = outcome.moved + forbidden * _FORBIDDEN
            return bytes_or_forbidden

        return self._descend(borders, moved)

    def _descend(self, borders: Sequence[int], objective: Callable[[_Outcome], _Floats]) -> list[int]:
        best = np.array(borders)
        value = float(objective(self._outcome(best)))
        while True:
            shifts = self._shifts(best)
            values = objective(self._outcome_of_pairs(best, shifts))
            values[(_pairs(np.diff(shifts)) + np.diff(best) < 1).any(axis=-1)] = np.inf  # each stage needs a layer
            np.fill_diagonal(values, np.inf)  # behind a layer that is shifted lies another one
            first, second = np.unravel_index(np.argmin(values), values.shape)
            if not values[first, second] < value - _ROUNDING * abs(value):
                return [int(border) for border in best]
            value = float(values[first, second])
            best = best + shifts[first] + shifts[second]

    def _shifts(self, borders: Ints) -> Ints:
        """Returns what can be added to the borders, ``[N, S + 1]``: nothing, or one more or less at one of them."""
        one = np.eye(len(borders), dtype=np.int64)[1:-1]
        inner = borders[1:-1]
        return np.concatenate([np.zeros((1, len(borders)), np.int64), -one[inner > 1], one[inner < borders[-1] - 1]])

    def _outcome(self, borders: Sequence[int] | Ints) -> _Outcome:
        times, held, moved = self._parts(np.array(borders))
        return self._combine(times, held, moved)

    def _outcome_of_pairs(self, borders: Ints, shifts: Ints) -> _Outcome:
        times, held, moved = self._parts(borders)
        new_times, new_held, new_moved = self._parts(borders + shifts)
        return self._combine(
            _pairs(new_times - times) + times, _pairs(new_held - held) + held, _pairs(new_moved - moved) + moved
        )

    def _combine(self, times: _Floats, held: Ints, moved: Ints) -> _Outcome:
        lacking = np.maximum((held - np.array(self._costs.caps or [0], np.int64)).max(axis=-1), 0)
        return _Outcome(times, lacking, moved[..., 0])

    def _parts(self, borders: Ints) -> tuple[_Floats, Ints, Ints]:
        """Returns what can be added up: times and bytes of the ranks, ``[..., R]``, and moved bytes ``[..., 1]``."""
        costs = self._costs
        loads = np.diff(costs.load[borders]) + np.array(costs.fixed)
        times = loads.astype(np.float64) @ self._on_rank / self._speeds
        starts, ends = borders[..., :-1], borders[..., 1:]
        moved = (costs.moved[self._stages, ends] - costs.moved[self._stages, starts]).sum(axis=-1, keepdims=True)
        if costs.held is None:
            return times, np.zeros_like(moved), moved
        return times, (costs.held[self._stages, ends] - costs.held[self._stages, starts]) @ self._on_rank, moved


def _pairs(values: NDArray[_Number]) -> NDArray[_Number]:
    """Returns the sums of each two rows."""
    sums: NDArray[_Number] = values[:, None] + values[None, :]
    return sums
