"""How the costs of layers drift under each scheme: one number per layer and step, relative to the dense layer.

The traces are closed forms with the schemes' published shapes, to ask what balancing would do before anything runs.
Random ones depend on seed and step alone, so that every process, in any order, sees the same costs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_dynmo.simulation.costs import LayerCost


class CostTrace(ABC):
    """Costs of layers over the steps of a training."""

    __slots__ = ()

    @abstractmethod
    def expected(self, num_layers: int, step: int) -> list[float]:
        """Returns the expectation of `costs` over all seeds, ``[L]``.

        Args:
            num_layers: Number of layers L.
            step: Training step, from 0.
        """

    def costs(self, num_layers: int, step: int, seed: int = 0) -> list[float]:
        """Returns the cost of each layer at a step, relative to the dense layer, ``[L]``.

        Args:
            num_layers: Number of layers L.
            step: Training step, from 0.
            seed: Chooses among the random courses that a training can take. Schemes without chance ignore it.
        """
        return self.expected(num_layers, step)

    def layer_costs(self, dense: LayerCost, num_layers: int, step: int, seed: int = 0) -> list[LayerCost]:
        """Returns the cost of each layer at a step in seconds, ``[L]``; bytes stay those of the dense layer.

        Args:
            dense: Cost of a dense layer.
            num_layers: Number of layers L.
            step: Training step, from 0.
            seed: As for `costs`.
        """
        return [
            replace(
                dense,
                forward_s=dense.forward_s * cost,
                input_gradient_s=dense.input_gradient_s * cost,
                weight_gradient_s=dense.weight_gradient_s * cost,
            )
            for cost in self.costs(num_layers, step, seed)
        ]


@dataclass(frozen=True, slots=True)
class MoETrace(CostTrace):
    """Mixture of experts: a layer takes as long as its fullest expert, and which one is fullest changes every step.

    With V = most tokens of an expert / mean - 1, a layer costs attention + (1 - attention) (1 + V). V is lognormal;
    its mean falls from `first_excess` to what the balancing loss reaches.

    Args:
        experts_exec: How experts run. ``"padded"``: all compute as many rows as the fullest. ``"ep"``: each on a device
            of its own, and all wait for the fullest, which costs the same. ``"grouped"``: as many rows whatever the
            routing, so that all layers cost alike.
        balancing: What keeps experts balanced: ``"aux"`` (a loss), ``"bias"`` (a bias per expert) or ``"sinkhorn"``.
        attention: Share of attention in a balanced layer.
        sigma: Spread of V: standard deviation of its logarithm.
        first_excess: Mean of V at the first step.
        settle_steps: Steps in which the mean's distance to its last value falls to 1 / e.
        layer_share: Share of the variance that belongs to the layers and stays, in ``[0, 1]``; the rest is new in
            every step.
        layer_seed: Chooses the layers' own part.
    """

    experts_exec: Literal["padded", "grouped", "ep"] = "padded"
    balancing: Literal["aux", "bias", "sinkhorn"] = "aux"
    attention: float = 0.35
    sigma: float = 0.65
    first_excess: float = 1.5
    settle_steps: float = 500.0
    layer_share: float = 0.0
    layer_seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("experts_exec", self.experts_exec, ("padded", "grouped", "ep"))
        _check_choice("balancing", self.balancing, tuple(_LAST_EXCESS))

    @override
    def expected(self, num_layers: int, step: int) -> list[float]:
        return self._costs(self._layer_factors(num_layers), step)

    @override
    def costs(self, num_layers: int, step: int, seed: int = 0) -> list[float]:
        own = _lognormal(_normals(num_layers, step, seed), self.sigma * math.sqrt(1 - self.layer_share))
        return self._costs(self._layer_factors(num_layers) * own, step)

    def _layer_factors(self, num_layers: int) -> NDArray[np.float64]:
        normals = _normals(num_layers, 0, self.layer_seed, purpose=2)
        return _lognormal(normals, self.sigma * math.sqrt(self.layer_share))

    def _costs(self, factors: NDArray[np.float64], step: int) -> list[float]:
        if self.experts_exec == "grouped":
            return [1.0] * len(factors)
        last = _LAST_EXCESS[self.balancing]
        excess = last + (self.first_excess - last) * math.exp(-step / self.settle_steps)
        costs: list[float] = (1 + (1 - self.attention) * excess * factors).tolist()
        return costs


_LAST_EXCESS = {"aux": 0.5, "bias": 0.08, "sinkhorn": 0.05}


@dataclass(frozen=True, slots=True)
class PruningTrace(CostTrace):
    """Gradual global magnitude pruning of Gaussian layers, under the cubic schedule of Zhu and Gupta.

    The weights of layer i have standard deviation 1 + spread (2 i / (L - 1) - 1). One threshold for all leaves the
    share 1 - S of all weights, and of each layer the density that follows. Below `sparse_below` a layer takes time in
    proportion to its density; above, dense kernels are faster, and it costs as before.

    Args:
        start_step: Step at which the schedule begins, still with all weights.
        every_n_steps: Steps from one pruning to the next.
        num_prunings: Number of prunings.
        final_sparsity: Share of weights that are gone after the last, in ``[0, 1)``.
        spread: How much the layers' standard deviations differ, in ``[0, 1)``.
        sparse_below: Density at which sparse kernels become as fast as dense ones.
    """

    start_step: int = 3000
    every_n_steps: int = 1000
    num_prunings: int = 4
    final_sparsity: float = 0.9
    spread: float = 0.4
    sparse_below: float = 0.25

    def sparsity(self, step: int) -> float:
        """Returns the share of weights that are gone at a step."""
        done = min(max((step - self.start_step) // self.every_n_steps, 0), self.num_prunings)
        return self.final_sparsity * (1 - (1 - done / self.num_prunings) ** 3)

    def densities(self, num_layers: int, step: int) -> list[float]:
        """Returns the share of each layer's weights that are left at a step, ``[L]``."""
        return list(_densities(num_layers, self.spread, self.sparsity(step)))

    @override
    def expected(self, num_layers: int, step: int) -> list[float]:
        return [min(1.0, density / self.sparse_below) for density in self.densities(num_layers, step)]


@lru_cache(maxsize=64)
def _densities(num_layers: int, spread: float, sparsity: float) -> tuple[float, ...]:
    """Returns each layer's density under the one threshold that leaves 1 - sparsity of all weights."""
    scales = [1 + spread * (2 * layer / max(num_layers - 1, 1) - 1) for layer in range(num_layers)]
    if sparsity <= 0:
        return (1.0,) * num_layers
    low, high = 0.0, 40.0  # erfc of the upper one is 0 in floating point
    while low < (middle := (low + high) / 2) < high:
        densities = tuple(math.erfc(middle / (scale * math.sqrt(2))) for scale in scales)
        low, high = (middle, high) if math.fsum(densities) / num_layers > 1 - sparsity else (low, middle)
    return densities


@dataclass(frozen=True, slots=True)
class FreezingTrace(CostTrace):
    """Layers freeze from the front, at an even pace; a frozen one runs forward alone, or not at all.

    Args:
        first_step: Step at which freezing begins.
        freeze_steps: Steps until all are frozen that ever will be.
        frozen_share: Share of layers that are frozen in the end, in ``[0, 1]``.
        caches_forward: Whether the outputs of frozen layers are kept from an epoch to the next, so that these cost
            nothing. Otherwise each costs its forward, a third of a layer.
    """

    first_step: int = 1000
    freeze_steps: int = 5000
    frozen_share: float = 0.5
    caches_forward: bool = False

    def num_frozen(self, num_layers: int, step: int) -> int:
        """Returns how many layers are frozen at a step: those whose index is below their share of all layers."""
        progress = min(max((step - self.first_step) / self.freeze_steps, 0.0), 1.0)
        return math.ceil(self.frozen_share * progress * num_layers - 1e-9)  # .1 of 40 layers are 4, whatever rounding

    @override
    def expected(self, num_layers: int, step: int) -> list[float]:
        frozen = self.num_frozen(num_layers, step)
        return [0.0 if self.caches_forward else 1 / 3] * frozen + [1.0] * (num_layers - frozen)

    @override
    def layer_costs(self, dense: LayerCost, num_layers: int, step: int, seed: int = 0) -> list[LayerCost]:
        frozen = self.num_frozen(num_layers, step)
        forward_s = 0.0 if self.caches_forward else dense.forward_s
        return [replace(dense, forward_s=forward_s, trains=False)] * frozen + [dense] * (num_layers - frozen)


@dataclass(frozen=True, slots=True)
class SparseAttentionTrace(CostTrace):
    """Dynamic sparse flash attention: early layers visit few tiles, late ones all, and the hashes change every step.

    A layer at depth x = l / (L - 1) comes to visit the share s = least (most / least)^(x^3) of the tiles, and costs
    (1 - attention) + attention s.

    Args:
        attention: Share of attention in a dense layer; 0.8 is that of unfused attention.
        least: Share of tiles that the first layer visits in the end.
        most: Share of tiles that the last layer visits.
        sparsify_steps: Steps in which the shares fall evenly from 1 to these.
        sigma: How much the shares fluctuate from step to step: standard deviation of their logarithms.
    """

    attention: float = 0.8
    least: float = 0.06
    most: float = 1.0
    sparsify_steps: int = 1000
    sigma: float = 0.15

    @override
    def expected(self, num_layers: int, step: int) -> list[float]:
        return self._costs(np.ones(num_layers), step)

    @override
    def costs(self, num_layers: int, step: int, seed: int = 0) -> list[float]:
        return self._costs(_lognormal(_normals(num_layers, step, seed), self.sigma), step)

    def _costs(self, factors: NDArray[np.float64], step: int) -> list[float]:
        depths = np.arange(len(factors)) / max(len(factors) - 1, 1)
        shares = self.least * (self.most / self.least) ** (depths**3) * factors
        progress = min(step / self.sparsify_steps, 1.0)
        costs: list[float] = (1 - self.attention * progress * (1 - shares)).tolist()
        return costs


@dataclass(frozen=True, slots=True)
class EarlyExitTrace(CostTrace):
    """Early exit: the deeper a layer, the fewer tokens reach it; those that have left still need keys and values.

    With u = 1 - exp(-step / settle_steps), no token leaves before depth X = 1 - (1 - first_exit) u, and the share
    s = exp(-rate u (x - X)) reaches depth x = (l + 1/2) / L. A layer costs s + propagation (1 - s).

    Args:
        first_exit: Depth of the first exit in the end, in ``[0, 1]``.
        rate: How fast tokens leave behind it, per depth.
        settle_steps: Steps in which the distance to the end falls to 1 / e.
        propagation: Cost of a token that has left, relative to one that has not: its keys and values. A sixth is their
            share of a layer's matrix products.
    """

    first_exit: float = 0.08
    rate: float = 6.0
    settle_steps: float = 1500.0
    propagation: float = 1 / 6

    def survival(self, num_layers: int, step: int) -> list[float]:
        """Returns the share of tokens that each layer still computes at a step, ``[L]``."""
        trained = 1 - math.exp(-step / self.settle_steps)
        first = 1 - (1 - self.first_exit) * trained
        depths = [(layer + 0.5) / num_layers for layer in range(num_layers)]
        return [min(1.0, math.exp(-self.rate * trained * (depth - first))) for depth in depths]

    @override
    def expected(self, num_layers: int, step: int) -> list[float]:
        return [share + self.propagation * (1 - share) for share in self.survival(num_layers, step)]


@dataclass(frozen=True, slots=True)
class MoDTrace(CostTrace):
    """Mixture of depths: every other layer, from the second on, computes only the tokens that are routed to it.

    A layer with the share r of the tokens costs 0.857 r + 0.143 r^2: attention is among these tokens alone.

    Args:
        routing: ``"topk"``: exactly the capacity in every step. ``"predictor"``: as many tokens as the predictor says,
            lognormal around the capacity.
        capacity: Share of tokens for which there is room, in ``(0, 1]``.
        sigma: Spread of the predictor's share at the first step: standard deviation of its logarithm.
        last_sigma: What the spread falls to; 0.25 lets it settle.
        settle_steps: Steps in which the spread's distance to its last value falls to 1 / e.
    """

    routing: Literal["predictor", "topk"] = "predictor"
    capacity: float = 0.125
    sigma: float = 0.65
    last_sigma: float = 0.65
    settle_steps: float = 2000.0

    def __post_init__(self) -> None:
        _check_choice("routing", self.routing, ("predictor", "topk"))

    @override
    def expected(self, num_layers: int, step: int) -> list[float]:
        sigma = self._sigma(step)
        bounds = (_LEAST_ROUTED / self.capacity, 1 / self.capacity)
        first, second = (self.capacity**power * _clipped_moment(power, sigma, *bounds) for power in (1, 2))
        routed = _TOKEN_COST * first + (1 - _TOKEN_COST) * second
        return [routed if layer % 2 else 1.0 for layer in range(num_layers)]

    @override
    def costs(self, num_layers: int, step: int, seed: int = 0) -> list[float]:
        shares = self.capacity * _lognormal(_normals(num_layers, step, seed), self._sigma(step))
        shares = np.clip(shares, _LEAST_ROUTED, 1.0)
        costs: list[float] = (_TOKEN_COST * shares + (1 - _TOKEN_COST) * shares**2).tolist()
        return [cost if layer % 2 else 1.0 for layer, cost in enumerate(costs)]

    def _sigma(self, step: int) -> float:
        if self.routing == "topk":
            return 0.0
        return self.last_sigma + (self.sigma - self.last_sigma) * math.exp(-step / self.settle_steps)


_TOKEN_COST = 0.857
"""Share of a dense layer's time that grows with the number of tokens; the rest grows with its square."""
_LEAST_ROUTED = 0.01


def _normals(num_layers: int, step: int, seed: int, purpose: int = 1) -> NDArray[np.float64]:
    # The purpose comes last: numpy takes a seed with zeros at its end for the same seed without them.
    return np.random.default_rng((seed, step, purpose)).standard_normal(num_layers)


def _lognormal(normals: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """Returns lognormal numbers of mean 1."""
    return np.exp(sigma * normals - sigma**2 / 2)


def _clipped_moment(power: int, sigma: float, low: float, high: float) -> float:
    """Returns the mean of clip(X, low, high)^power for a lognormal X of mean 1."""
    if sigma == 0:
        return min(max(1.0, low), high) ** power
    # Where the normal variable behind X lies when X is at the bounds; exp(power sigma z) shifts its mean.
    begin, end = ((math.log(bound) + sigma**2 / 2) / sigma for bound in (low, high))
    shift = power * sigma
    inside = math.exp((shift**2 - power * sigma**2) / 2) * (_below(end - shift) - _below(begin - shift))
    return low**power * _below(begin) + inside + high**power * _below(-end)


def _below(z: float) -> float:
    """Returns the share of a standard normal variable below z."""
    return math.erfc(-z / math.sqrt(2)) / 2


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Unknown {name} {value!r}. Use one of {', '.join(map(repr, choices))}.")


TRACES: dict[str, CostTrace] = {
    "moe": MoETrace(),
    "pruning": PruningTrace(),
    "freezing": FreezingTrace(),
    "sparse_attention": SparseAttentionTrace(),
    "early_exit": EarlyExitTrace(),
    "mod": MoDTrace(),
}
"""The traces of all schemes, with their default parameters."""
