"""The best contiguous split, found exactly wherever that can be done fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
from typing_extensions import override

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.balancers._chain import Chain
from lightning_dynmo.planning.balancers._costs import SAME, Costs
from lightning_dynmo.planning.balancers._folded import Folded
from lightning_dynmo.planning.balancers._search import Search
from lightning_dynmo.planning.balancers.base import Balancer
from lightning_dynmo.planning.problem import BalancingProblem


class PartitionBalancer(Balancer):
    """Makes the time of the slowest rank as small as any contiguous split can, and moves as few bytes as that allows.

    First the smallest possible bottleneck is found, with speeds of ranks, fixed costs of stages and memory taken into
    account; then, among all splits whose bottleneck is at most (1 + tolerance) times that, the one that moves the
    fewest bytes between ranks. What is still tied goes to the split with the earlier borders, compared from the last
    border to the first. The unit of the loads does not matter, and times that differ by less than one part in 2**40
    count as equal.

    How the smallest bottleneck is found depends on where the stages are:

    * One stage per rank: exact. Ask whether the layers can be split within a limit, then try a smaller one, until the
      loads allow no value in between (the paper's partition balancer, made exact as in Pinar and Aykanat, "Fast optimal
      load balancing algorithms for 1D partitioning", 2004). 1,000 layers on 64 stages take some milliseconds.
    * Down the ranks and up again, two stages each (``"zbvzerobubble"``, ``"dualpipev"``): exact, by dynamic programming
      over how many layers are left in the middle. 64 layers on 8 ranks take some 20 ms, and up to a second where most
      layers cost next to nothing; the time grows with the square of the layers, and with that of the layers per stage.
    * Several stages per rank in any other order, such as loops: a search. From the current split, the uniform one and
      the best for stages that had a rank each, it goes on to the best of all splits that differ by one layer at one or
      two borders, until none is better. The result is never slower than the current split where that fits in memory;
      without limits of memory it is at most as many times slower than the optimum as a rank has stages, and
      `benchmarks/balancers.py` shows how much nearer it comes. 64 layers on 8 ranks with 4 stages each take some 20 ms,
      1,000 on 32 ranks with 2 stages each about 2 s.

    Args:
        tolerance: By how much of the optimum the bottleneck may be above it, where fewer bytes are moved in return. The
            default keeps layers where they are when loads differ by noise; 0 asks for the optimum.

    Raises:
        ValueError: If the tolerance is negative or not finite.
    """

    def __init__(self, tolerance: float = 0.01) -> None:
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(
                f"Expected tolerance to be a share of the bottleneck, 0 or more, got {tolerance}. "
                f"Use for example tolerance=0.01."
            )
        self.tolerance = tolerance

    @override
    def balance(self, problem: BalancingProblem) -> Assignment:
        """See :meth:`Balancer.balance`."""
        costs, ranks = Costs.of(problem), problem.ranks
        current = [0, *accumulate(problem.current.balance)]
        slack = SAME * (1 + Fraction(self.tolerance))
        if problem.num_ranks == problem.num_stages:
            borders = _on_own_ranks(costs, current, slack)
        elif ranks == (*range(problem.num_ranks), *reversed(range(problem.num_ranks))):
            borders = _folded(costs, slack)
        else:
            borders = _anywhere(costs, current, slack)
        return Assignment(tuple(end - start for start, end in pairwise(borders)))


def _on_own_ranks(costs: Costs, current: Sequence[int], slack: Fraction) -> list[int]:
    chain = Chain(costs)
    split = chain.any_split()
    if split is None:
        raise _does_not_fit(costs, chain.lacking_bytes(current))
    return chain.fewest_moved_bytes(chain.smallest_bottleneck(split) * slack)


def _folded(costs: Costs, slack: Fraction) -> list[int]:
    folded = Folded(costs)
    smallest = folded.smallest_bottleneck()
    if smallest is None:
        raise _does_not_fit(costs, folded.lacking_bytes())
    return folded.fewest_moved_bytes(float(Fraction(smallest) * slack))


def _anywhere(costs: Costs, current: list[int], slack: Fraction) -> list[int]:
    speeds = tuple(costs.speeds[rank] for rank in costs.ranks)
    by_stages = _on_own_ranks(
        replace(costs, ranks=tuple(range(costs.num_stages)), speeds=speeds, held=None), current, slack
    )
    uniform = [0, *accumulate(Assignment.uniform(costs.num_layers, costs.num_stages).balance)]
    first = (current, by_stages, uniform)
    search = Search(costs)
    fitting = [split for split in (current, *map(search.faster, first)) if costs.lacking_bytes(split) <= 0]
    if not fitting:
        raise _does_not_fit(costs, _enough_bytes(costs, first), "was found that keeps")
    limit = min(map(search.slowest, fitting)) * float(slack)
    within = [split for split in fitting if search.slowest(split) <= limit]
    return min((search.fewer_moved_bytes(split, limit) for split in within), key=costs.moved_bytes)


def _enough_bytes(costs: Costs, first: Sequence[Sequence[int]]) -> int:
    """Returns how many bytes more on each rank let the search find a split that fits."""
    more = lacking = 0
    while more == 0 or lacking > 0:
        more += lacking
        eased = replace(costs, caps=tuple(cap + more for cap in costs.caps))
        lacking = min(eased.lacking_bytes(Search(eased).faster(split)) for split in first)
    return more


def _does_not_fit(costs: Costs, lacking: int, found: str = "keeps") -> ValueError:
    assert costs.held is not None
    least, most = min(costs.caps), max(costs.caps)
    return ValueError(
        f"No split of {costs.num_layers} layers over {costs.num_stages} stages {found} every rank within its memory, "
        f"{least if least == most else f'{least} to {most}'} bytes: a rank lacks {lacking} bytes in the best one. "
        f"Give each rank {lacking} bytes more, up to memory_cap_bytes={most + lacking}, or use more ranks, smaller "
        f"layers (the largest takes {int(np.diff(costs.held).max())} bytes), or fewer microbatches in flight."
    )
