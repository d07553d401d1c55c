"""The paper's decentralised balancer (section 3.3): stages know their neighbours' loads, and hand them layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dynmo.planning.assignment import Assignment
from lightning_dynmo.planning.balancers.base import Balancer
from lightning_dynmo.planning.problem import BalancingProblem

# [Note: At most one layer above the optimum]
#
# Let stage s be meant to have the load x_s once load has been diffused, and let the border between s and s + 1 be meant
# to lie at B_s, the sum of x_0 to x_s. Handing a layer over an edge takes that border nearer to B_s and leaves others
# alone, so the second phase ends. Take a stage that has two layers or more then. It was free to give its first and its
# last layer away, and no edge wanted them: so its right border lies at most half a layer right of where it was meant
# to, its left border at most half a layer left of that, and its load is at most x_s plus one largest layer. A stage
# that has one layer has at most one largest layer. Times of any two stages differ by no more than the potential, so the
# time of x_s is at most the mean time plus gamma times that. No split is faster than the mean, or than a stage's fixed
# cost. So with equal speeds the slowest stage is at most one largest layer, and gamma times the mean, above the best.

# A layer is handed on if that brings the border nearer by more than rounding, as a share of the mean time of a stage.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Diffusion:
    """What came of a diffusion.

    Args:
        assignment: The split; the current one where no better one was found.
        diffusing_rounds: Rounds in which divisible load flowed.
        handing_rounds: Rounds in which layers were handed to neighbours.
        potentials: Sum of the gaps between neighbours' times, over the mean time, before each of the diffusing rounds
            and after the last.
    """

    assignment: Assignment
    diffusing_rounds: int
    handing_rounds: int
    potentials: tuple[float, ...]


class DiffusionBalancer(Balancer):
    """Evens out neighbouring stages, round after round, as stages could that know nothing but their neighbours' times.

    Handing layers to less loaded neighbours until nobody gains by it ends far from balance: a slope on which each stage
    has one layer more than the next is stable. So there are two phases, as is usual for diffusion (Cybenko, "Dynamic
    load balancing for distributed memory multiprocessors", 1989; Hu and Blake, "An improved diffusion algorithm for
    dynamic load balancing", 1999):

    1. In each round, load flows from each stage to each less loaded neighbour, as if it were divisible: at most what
       would make those two equal, so that the potential (the sum of the gaps between neighbours' times) never rises. It
       ends when the potential is at most gamma times the mean time of a stage. What is to flow over each edge in all is
       remembered. As in the paper's Lemma 2 the number of rounds is at most `most_rounds`.
    2. In each round, each stage hands its outermost layers to its neighbours as long as that brings an edge nearer to
       what is to flow over it. A stage keeps its last layer, and refuses layers that do not fit into its rank's memory.

    With equal speeds and enough memory, the slowest stage is at most one largest layer (and gamma times the mean) above
    the best split there is; in any case the result is not slower than the current split, and fits in memory if that
    does. It is not the best split, which :class:`PartitionBalancer` finds, and faster: this one shows what can be done
    where nobody knows all loads. Where ranks run several stages, it evens out the stages.

    Args:
        gamma: How even the load must be before layers are handed over, between 1e-9 and 1: the sum of gaps between
            neighbours, over the mean time.

    Raises:
        ValueError: If gamma is out of range.
    """

    def __init__(self, gamma: float = 1e-3) -> None:
        _check_gamma(gamma)
        self.gamma = gamma

    @override
    def balance(self, problem: BalancingProblem) -> Assignment:
        """See :meth:`Balancer.balance`. Raises nothing where no split fits: then it may return one that does not."""
        return diffuse(problem, self.gamma).assignment


def most_rounds(num_stages: int, gamma: float) -> int:
    """Returns the most rounds of diffusion: the bound of the paper's Lemma 2 for as many workers as stages, rounded up.

    With natural logarithms and the constant 1 it is above what stages of equal speed ever need. Where speeds differ so
    much that this is not enough, the diffusion ends all the same.
    """
    squared, logarithm = num_stages**2, math.log(num_stages)
    return math.ceil(min(squared * math.log(squared / gamma) * logarithm, squared * logarithm / gamma))


def diffuse(problem: BalancingProblem, gamma: float = 1e-3) -> Diffusion:
    """Balances by diffusion; see :class:`DiffusionBalancer`.

    Args:
        problem: What is to be balanced.
        gamma: As there.

    Raises:
        ValueError: If gamma is out of range.
    """
    _check_gamma(gamma)
    loads = np.array(problem.loads, np.float64)
    costs = np.array(problem.stage_costs or [0.0] * problem.num_stages, np.float64)
    speeds = np.array(problem.rank_speeds or [1.0] * problem.num_ranks, np.float64)[list(problem.ranks)]
    speeds /= speeds.max()
    largest = max(loads.max(), costs.max())
    if largest == 0:
        return Diffusion(problem.current, 0, 0, (0.0,))
    loads, costs = loads / largest, costs / largest
    mean = (loads.sum() + costs.sum()) / speeds.sum()
    shares = (loads / mean).tolist()
    flows, potentials = _flows(np.array(problem.current.stage_loads(shares)), costs / mean, speeds, gamma)
    handing = _Handing(problem, shares, flows)
    rounds = handing.run()
    found = Assignment(tuple(end - start for start, end in pairwise(handing.borders)))
    if _order(problem, found) >= _order(problem, problem.current):
        found = problem.current
    return Diffusion(found, len(potentials) - 1, rounds, tuple(potentials))


def _flows(
    loads: NDArray[np.float64], costs: NDArray[np.float64], speeds: NDArray[np.float64], gamma: float
) -> tuple[list[float], list[float]]:
    """Diffuses divisible load; returns what flows to the right over each edge, ``[S - 1]``, and the potentials.

    All is in units of the mean time. The factor of a flow is such that each new gap is a sum of old ones with factors
    of at least 0, which for each old gap sum to at most 1: so the sum of the gaps' absolute values cannot rise.
    """
    factors = np.minimum(speeds[:-1], speeds[1:]) / 2
    total, potentials = np.zeros(len(factors)), []
    rounds_left = most_rounds(len(loads), gamma)
    while True:
        times = (loads + costs) / speeds
        gaps = times[:-1] - times[1:]
        potentials.append(float(np.abs(gaps).sum()))
        if potentials[-1] <= gamma or rounds_left == 0:
            return total.tolist(), potentials
        flow = factors * gaps
        total += flow
        loads = loads + np.append(0.0, flow) - np.append(flow, 0.0)
        rounds_left -= 1


class _Handing:
    """The second phase: layers go over the edges, in whole.

    Args:
        problem: What is to be balanced.
        loads: Loads of the layers, in the unit of the flows.
        flows: What is still to go to the right over each edge, ``[S - 1]``.
    """

    def __init__(self, problem: BalancingProblem, loads: list[float], flows: list[float]) -> None:
        self._problem = problem
        self._loads = loads
        self._flows = flows
        self._held = list(problem.rank_bytes(problem.current))
        self.borders = [0, *accumulate(problem.current.balance)]

    def run(self) -> int:
        """Hands layers over until no edge wants or allows another; returns the rounds that took."""
        rounds = 0
        while sum([self._over(edge) for parity in (0, 1) for edge in range(parity, len(self._flows), 2)]):
            rounds += 1
        return rounds

    def _over(self, edge: int) -> int:
        """Hands layers over one edge, between the stages ``edge`` and ``edge + 1``; returns how many."""
        count = 0
        while self._hand_one(edge):
            count += 1
        return count

    def _hand_one(self, edge: int) -> bool:
        flow, border = self._flows[edge], self.borders[edge + 1]
        giver, taker = (edge, edge + 1) if flow > 0 else (edge + 1, edge)
        layer = border - 1 if flow > 0 else border
        if self.borders[giver + 1] - self.borders[giver] == 1 or self._loads[layer] >= 2 * abs(flow) - _ROUNDING:
            return False
        if not self._takes(giver, taker, layer):
            return False
        step = 1 if flow > 0 else -1
        self._flows[edge] -= step * self._loads[layer]
        self.borders[edge + 1] -= step
        return True

    def _takes(self, giver: int, taker: int, layer: int) -> bool:
        """Returns whether a layer fits into the memory of its new rank, and if so counts it there."""
        memory, ranks = self._problem.memory, self._problem.ranks
        if memory is None:
            return True
        less, more = (memory.stage_bytes(stage, range(layer, layer + 1)) for stage in (giver, taker))
        grows = more - less if ranks[giver] == ranks[taker] else more
        if grows > 0 and self._held[ranks[taker]] + grows > memory.cap_bytes[ranks[taker]]:
            return False
        self._held[ranks[giver]] -= less
        self._held[ranks[taker]] += more
        return True


def _order(problem: BalancingProblem, assignment: Assignment) -> tuple[bool, float]:
    return not problem.fits(assignment), problem.bottleneck(assignment)


def _check_gamma(gamma: float) -> None:
    if not 1e-9 <= gamma <= 1:
        raise ValueError(f"Expected gamma to be between 1e-9 and 1, got {gamma}. Use for example gamma=0.001.")
