"""The paper's decentralised balancer (section 3.3): stages know their neighbours' loads, and hand them layers."""

from __future__ import annotations

import math
from collections.abc import Callable
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
# The third phase makes no pair of stages slower.

# A layer is handed on if that brings the border nearer by more than rounding, as a share of the mean time of a stage.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Diffusion:
    """What came of a diffusion.

    Args:
        assignment: The split; the current one where no better one was found.
        diffusing_rounds: Rounds in which divisible load flowed.
        handing_rounds: Rounds in which layers were handed to neighbours, first by the flows and then by times.
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
    has one layer more than the next is stable. So load is diffused before layers move (Cybenko, "Dynamic load balancing
    for distributed memory multiprocessors", 1989; Hu and Blake, "An improved diffusion algorithm for dynamic load
    balancing", 1999):

    1. In each round, load flows from each stage to each less loaded neighbour, as if it were divisible: at most what
       would make those two equal, so that the potential (the sum of the gaps between neighbours' times) never rises. It
       ends when the potential is at most gamma times the mean time of a stage. What is to flow over each edge in all is
       remembered. As in the paper's Lemma 2 the number of rounds is at most `most_rounds`.
    2. In each round, each stage hands its outermost layers to its neighbours as long as that brings an edge nearer to
       what is to flow over it. A stage keeps its last layer, and refuses layers that do not fit into its rank's memory.
    3. Then neighbours hand over layers as long as that makes the slower of the two faster.

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
    costs = np.array(problem.fixed_costs, np.float64)
    speeds = np.array(problem.speeds, np.float64)[list(problem.ranks)]
    speeds /= speeds.max()
    largest = max(loads.max(), costs.max())
    if largest == 0:
        return Diffusion(problem.current, 0, 0, (0.0,))
    loads, costs = loads / largest, costs / largest
    mean = (loads.sum() + costs.sum()) / speeds.sum()
    shares, costs = (loads / mean).tolist(), costs / mean
    stage_loads = np.array(problem.current.stage_loads(shares))
    flows, potentials = _flows(stage_loads, costs, speeds, gamma)
    times = ((stage_loads + costs) / speeds).tolist()
    handing = _Handing(problem, shares, times, speeds.tolist(), flows)
    rounds = handing.follow_flows() + handing.exchange()
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
    """Layers go to neighbours, in whole, and counted in the unit of the mean time.

    Args:
        problem: What is to be balanced.
        loads: Loads of the layers.
        times: Time of each stage, ``[S]``.
        speeds: Speed of each stage, ``[S]``.
        flows: What is to go to the right over each edge, ``[S - 1]``.
    """

    def __init__(
        self,
        problem: BalancingProblem,
        loads: list[float],
        times: list[float],
        speeds: list[float],
        flows: list[float],
    ) -> None:
        self._problem = problem
        self._loads = loads
        self._times = times
        self._speeds = speeds
        self._flows = flows
        self._held = list(problem.rank_bytes(problem.current))
        self.borders = [0, *accumulate(problem.current.balance)]

    def follow_flows(self) -> int:
        """Hands layers over until no edge comes nearer to its flow; returns the rounds that took."""
        return self._rounds(self._follow_flow)

    def exchange(self) -> int:
        """Hands layers over until no two neighbours gain by it; returns the rounds that took."""
        return self._rounds(self._exchange)

    def _rounds(self, hand_one: Callable[[int], bool]) -> int:
        """In each round, each stage deals with one neighbour and then with the other."""
        rounds, handed = 0, True
        while handed:
            handed = False
            for edge in (*range(0, len(self._flows), 2), *range(1, len(self._flows), 2)):
                while hand_one(edge):
                    handed = True
            rounds += handed
        return rounds

    def _follow_flow(self, edge: int) -> bool:
        to_right = self._flows[edge] > 0
        load = self._loads[self._outermost(edge, to_right)]
        return load < 2 * abs(self._flows[edge]) - _ROUNDING and self._hand(edge, to_right)

    def _exchange(self, edge: int) -> bool:
        left, right = self._times[edge : edge + 2]
        to_right = left > right
        load = self._loads[self._outermost(edge, to_right)]
        taker = edge + to_right
        return self._times[taker] + load / self._speeds[taker] < max(left, right) - _ROUNDING and self._hand(
            edge, to_right
        )

    def _outermost(self, edge: int, to_right: bool) -> int:
        """Returns the layer that would go over an edge, between the stages ``edge`` and ``edge + 1``."""
        return self.borders[edge + 1] - to_right

    def _hand(self, edge: int, to_right: bool) -> bool:
        """Hands a layer over an edge, unless it is the giver's last or the taker refuses it; returns whether."""
        giver, taker = (edge, edge + 1) if to_right else (edge + 1, edge)
        layer = self._outermost(edge, to_right)
        if self.borders[giver + 1] - self.borders[giver] == 1 or not self._takes(giver, taker, layer):
            return False
        self._times[giver] -= self._loads[layer] / self._speeds[giver]
        self._times[taker] += self._loads[layer] / self._speeds[taker]
        self._flows[edge] -= self._loads[layer] if to_right else -self._loads[layer]
        self.borders[edge + 1] += -1 if to_right else 1
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
