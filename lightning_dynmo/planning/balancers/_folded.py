"""The best split where the stages go down the ranks and up again, so that each rank runs two of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_dynmo.planning.balancers._costs import SAME, UNREACHABLE, Costs, Ints

_Numbers: TypeAlias = NDArray[Any]
_Block: TypeAlias = tuple[slice, slice]


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """What each rank r pays for its two stages, r and 2R - 1 - r.

    Args:
        front: Cost before each border on stage r, ``[R, L + 1]``.
        back: The same on stage 2R - 1 - r, ``[R, L + 1]``.
        fixed: What rank r pays in any case, ``[R]``.
        none: Above all costs.
    """

    front: _Numbers
    back: _Numbers
    fixed: _Numbers
    none: Any

    def of_sizes(
        self, rank: int, rows: slice, columns: slice, front_size: int, back_size: int
    ) -> tuple[_Numbers, _Numbers]:
        """Returns the cost of so many layers in front from each row on, and of so many behind up to each column."""
        front, back = self.front[rank], self.back[rank]
        before = front[rows.start + front_size : rows.stop + front_size] - front[rows]
        after = back[columns] - back[columns.start - back_size : columns.stop - back_size]
        return before, after + self.fixed[rank]

    def up_to(self, rank: int, row: int, column: int) -> _Numbers:
        """Returns what it costs to come to (row, column) from all (i, j) with i < row and j > column."""
        before = self.front[rank, row] - self.front[rank, :row]
        after = self.back[rank, column + 1 :] - self.back[rank, column]
        cost: _Numbers = np.add.outer(before, after + self.fixed[rank])
        return cost


class Folded:
    """Splits where rank r runs the stages r and 2R - 1 - r, found exactly by dynamic programming.

    Once the ranks 0 to r - 1 have their layers, the layers i to j - 1 in the middle are left, and what is best for the
    other ranks depends on (i, j) alone. So there is a table ``[L + 1, L + 1]`` per rank, with an entry for each such
    pair; from (i, j) rank r goes on to (i + m, j - n), by m layers in front and n behind. Keeping only the largest i
    for each j would be wrong: each stage needs a layer, and the next rank may want a small one that lies there.

    The cost is R * L**2 times the number of pairs (m, n) that a rank can take within the limit.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._num_ranks = len(costs.speeds)
        speeds = np.array(costs.relative_speeds)
        times = costs.load / speeds[:, None]
        fixed = [costs.fixed[rank] + costs.fixed[-1 - rank] for rank in range(self._num_ranks)]
        self._times = _Pairs(times, times, np.array(fixed) / speeds, np.inf)
        self._fairest = float(costs.load[-1] + sum(fixed)) / speeds.sum()
        self._bytes = None
        if costs.held is not None:
            backs = costs.held[: self._num_ranks - 1 : -1]
            self._bytes = _Pairs(costs.held[: self._num_ranks], backs, -np.array(costs.caps, np.int64), UNREACHABLE)

    def smallest_bottleneck(self) -> float | None:
        """Returns the smallest largest time of a rank, or None where no split fits in memory."""
        # A low limit leaves out most of the work. So it is raised until something is within.
        # The slowest rank with all layers takes the most; sums in another order may round to a little more.
        most = float((self._times.front[:, -1] + self._times.fixed).max()) * float(SAME)
        slack = 1 / 8
        while True:
            limit = min(self._fairest * (1 + slack), most)
            smallest = self._smallest(self._times, self._bytes, limit)
            if smallest is not None or limit == most:
                return None if smallest is None else float(smallest)
            slack *= 2

    def lacking_bytes(self) -> int:
        """Returns how many bytes the rank lacks that lacks most, in the split where that is least."""
        assert self._bytes is not None
        lacking = self._smallest(self._bytes, None, UNREACHABLE)
        assert lacking is not None
        return int(lacking)

    def fewest_moved_bytes(self, limit: float) -> list[int]:
        """Returns the borders of the split that moves the fewest bytes within the limit, of which there must be one."""
        tables = [self._start(UNREACHABLE, 0)]
        for rank in range(self._num_ranks):
            change = self._change(rank)
            offset, reached = tables[-1] - change, np.full_like(tables[-1], UNREACHABLE)
            for source, target, cost, lacking in self._steps(
                rank, tables[-1] < UNREACHABLE, self._times, self._bytes, limit
            ):
                moved = np.where(cost <= limit, offset[source], UNREACHABLE)
                if lacking is not None:
                    moved[lacking > 0] = UNREACHABLE
                np.minimum(reached[target], moved, out=reached[target])
            tables.append(np.where(reached < UNREACHABLE // 2, reached + change, UNREACHABLE))
        row = column = int(np.argmin(tables[-1].diagonal()))
        assert tables[-1][row, column] < UNREACHABLE
        borders = [row]
        for rank in reversed(range(self._num_ranks)):
            row, column = self._step_before(rank, tables[rank], row, column, limit)
            borders = [row, *borders, column]
        return borders

    def _smallest(self, pairs: _Pairs, within: _Pairs | None, limit: Any) -> Any | None:
        """Returns the smallest largest cost of a rank, of the splits in which all are within the limit."""
        reached = self._start(pairs.none, -pairs.none)
        for rank in range(self._num_ranks):
            following = np.full_like(reached, pairs.none)
            for source, target, cost, lacking in self._steps(rank, reached < pairs.none, pairs, within, limit):
                largest = np.maximum(reached[source], cost)
                if lacking is not None:
                    largest[lacking > 0] = pairs.none
                np.minimum(following[target], largest, out=following[target])
            reached = following
        smallest = reached.diagonal().min()
        return smallest if smallest <= limit else None

    def _steps(
        self, rank: int, reached: NDArray[np.bool_], pairs: _Pairs, within: _Pairs | None, limit: Any
    ) -> Iterator[tuple[_Block, _Block, _Numbers, _Numbers | None]]:
        """Yields, by the size of the two stages, a block (i, j), where it leads to, costs and bytes lacking, if any."""
        rows, columns = (_span(np.flatnonzero(reached.any(axis=axis))) for axis in (1, 0))
        for front_size, back_size in self._sizes(rank, pairs, limit):
            source = (
                slice(rows.start, min(rows.stop, len(reached) - front_size)),
                slice(max(columns.start, back_size), columns.stop),
            )
            if source[0].start >= source[0].stop or source[1].start >= source[1].stop:
                continue
            front, back = pairs.of_sizes(rank, *source, front_size, back_size)
            if front.min() + back.min() > limit:
                continue
            target = (
                slice(source[0].start + front_size, source[0].stop + front_size),
                slice(source[1].start - back_size, source[1].stop - back_size),
            )
            lacking = None
            if within is not None:
                lacking = np.add.outer(*within.of_sizes(rank, *source, front_size, back_size))
            yield source, target, np.add.outer(front, back), lacking

    def _sizes(self, rank: int, pairs: _Pairs, limit: Any) -> Iterator[tuple[int, int]]:
        """Yields how many layers the two stages of a rank can have, as far as the limit tells."""
        most = self._costs.num_layers - 2 * (self._num_ranks - 1)  # each stage of the other ranks needs a layer
        rest = limit - pairs.fixed[rank]
        fronts = _shortest_runs(pairs.front[rank], most, rest)
        backs = _shortest_runs(pairs.back[rank], most, rest)
        for front_size, front in enumerate(fronts, 1):
            for back_size, back in enumerate(backs, 1):
                if front_size + back_size > most or front + back > rest:
                    break
                yield front_size, back_size

    def _step_before(self, rank: int, table: Ints, row: int, column: int, limit: float) -> tuple[int, int]:
        """Returns where the split with the fewest moved bytes was before it came to (row, column)."""
        moved = table[:row, column + 1 :] - self._change(rank)[:row, column + 1 :]
        moved[self._times.up_to(rank, row, column) > limit] = UNREACHABLE
        if self._bytes is not None:
            moved[self._bytes.up_to(rank, row, column) > 0] = UNREACHABLE
        before, after = np.unravel_index(np.argmin(moved), moved.shape)
        return int(before), column + 1 + int(after)

    def _change(self, rank: int) -> Ints:
        """Returns ``[L + 1, L + 1]``: the difference of two entries is what moves to a rank between them."""
        change: Ints = np.subtract.outer(self._costs.moved[rank], self._costs.moved[rank])
        return change

    def _start(self, none: Any, first: Any) -> _Numbers:
        table = np.full((self._costs.num_layers + 1,) * 2, none)
        table[0, -1] = first
        return table


def _span(indices: NDArray[np.intp]) -> slice:
    """Returns the range from the first to the last; empty where there is none."""
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)


def _shortest_runs(sums: _Numbers, most: int, limit: Any) -> list[Any]:
    """Returns the least cost of 1, 2, ... layers in a row, as long as it is within the limit."""
    shortest: list[Any] = []
    for size in range(1, most):
        shortest.append((sums[size:] - sums[:-size]).min())
        if shortest[-1] > limit:
            return shortest[:-1]
    return shortest
