"""The decentralised balancer: its potential, its rounds, and how far from the optimum it ends."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dynmo.planning import (
    Assignment,
    BalancingProblem,
    Diffusion,
    DiffusionBalancer,
    MemoryLimits,
    PartitionBalancer,
    diffuse,
)
from lightning_dynmo.planning.balancers import most_rounds
from tests.planning.instances import from_borders, problems

GAMMA = 1e-3


@dataclass(frozen=True)
class Instance:
    problem: BalancingProblem
    result: Diffusion
    gamma: float

    def potential_never_rises(self) -> bool:
        potentials = np.array(self.result.potentials)
        return bool((potentials[1:] <= potentials[:-1] * (1 + 1e-12) + 1e-14).all())

    def is_even_within_the_bound(self) -> bool:
        rounds, most = self.result.diffusing_rounds, most_rounds(self.problem.num_stages, self.gamma)
        rounds += self.result.handing_rounds
        return rounds <= most and self.result.potentials[-1] <= self.gamma

    def is_near_the_optimum(self) -> bool:
        problem = self.problem
        best = problem.bottleneck(PartitionBalancer(tolerance=0.0).balance(problem))
        mean = (math.fsum(problem.loads) + math.fsum(problem.stage_costs or [])) / problem.num_stages
        most = best + max(problem.loads) + self.gamma * mean
        return problem.bottleneck(self.result.assignment) <= most * (1 + 1e-9)

    def is_no_worse(self) -> bool:
        return self.problem.bottleneck(self.result.assignment) <= self.problem.bottleneck(self.problem.current)


def random_problems(count: int, seed: int = 0) -> Iterator[BalancingProblem]:
    draws = np.random.default_rng(seed)
    for _ in range(count):
        num_stages = int(draws.integers(1, 10))
        num_layers = int(draws.integers(num_stages, 40))
        inner = draws.choice(np.arange(1, max(num_layers, 2)), num_stages - 1, replace=False)
        loads = (
            draws.uniform(0.3, 3.0, num_layers),
            draws.lognormal(0.0, 1.5, num_layers),
            draws.integers(0, 5, num_layers).astype(float),
            np.ones(num_layers),
        )[draws.integers(4)]
        costs = draws.uniform(0.0, 5.0, num_stages).tolist() if draws.random() < 0.3 else None
        current = from_borders([0, *np.sort(inner).tolist(), num_layers])
        yield BalancingProblem(loads.tolist(), current, stage_costs=costs)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_instances(count: int) -> None:
    for problem in random_problems(count):
        instance = Instance(problem, diffuse(problem, GAMMA), GAMMA)
        assert instance.potential_never_rises()
        assert instance.is_even_within_the_bound()
        assert instance.is_near_the_optimum()
        assert instance.is_no_worse()


def test_the_checks_reject_what_is_wrong() -> None:
    problem = BalancingProblem([1.0] * 12, Assignment((9, 1, 1, 1)))
    good = Instance(problem, diffuse(problem, GAMMA), GAMMA)
    assert good.result.assignment == Assignment((3, 3, 3, 3))
    rising = replace(good.result, potentials=(*good.result.potentials, good.result.potentials[-1] * 1.001))
    assert not replace(good, result=rising).potential_never_rises()
    slow = replace(good.result, diffusing_rounds=most_rounds(4, GAMMA) + 1)
    assert not replace(good, result=slow).is_even_within_the_bound()
    uneven = replace(good.result, potentials=good.result.potentials[:-1])
    assert not replace(good, result=uneven).is_even_within_the_bound()
    off = replace(good.result, assignment=Assignment((3, 5, 2, 2)))
    assert not replace(good, result=off).is_near_the_optimum()
    assert replace(good, result=replace(off, assignment=Assignment((3, 4, 3, 2)))).is_near_the_optimum()
    even = replace(good, problem=replace(problem, current=Assignment((3, 3, 3, 3))))
    assert even.is_no_worse()
    assert not replace(even, result=off).is_no_worse()


@pytest.mark.parametrize("gamma", [1e-6, 1e-2, 0.3, 1.0])
def test_other_thresholds(gamma: float) -> None:
    for problem in random_problems(300, seed=1):
        instance = Instance(problem, diffuse(problem, gamma), gamma)
        assert instance.potential_never_rises()
        assert instance.is_even_within_the_bound()
        assert instance.is_near_the_optimum()
        assert instance.is_no_worse()


@pytest.mark.parametrize("num_stages", [2, 3, 8, 24, 64])
@pytest.mark.parametrize("gamma", [1e-6, 1e-3, 1.0])
def test_rounds_from_the_worst_start(num_stages: int, gamma: float) -> None:
    # All on one end has the longest way to go.
    problem = BalancingProblem([1.0] * (5 * num_stages), Assignment((4 * num_stages + 1, *[1] * (num_stages - 1))))
    instance = Instance(problem, diffuse(problem, gamma), gamma)
    assert instance.is_even_within_the_bound()
    assert instance.potential_never_rises()
    assert instance.result.handing_rounds <= num_stages + 1


def test_the_bound_of_lemma_2() -> None:
    for workers, gamma in ((4, 1e-3), (24, 1e-2), (64, 1.0)):
        first = workers**2 * math.log(workers * workers / gamma) * math.log(workers)
        second = workers * workers * math.log(workers) / gamma
        assert min(first, second) <= most_rounds(workers, gamma) < min(first, second) + 1
    assert most_rounds(1, 1e-3) == 0


def test_a_slope_of_single_layers_is_levelled() -> None:
    # No exchange between two neighbours lowers the larger of their times: a greedy one would leave all as it is.
    problem = BalancingProblem([1.0] * 36, Assignment((1, 2, 3, 4, 5, 6, 7, 8)))
    result = diffuse(problem, GAMMA)
    assert max(result.assignment.balance) <= 6
    assert result.assignment.num_layers == 36


def test_potentials_are_those_of_neighbours_over_the_mean() -> None:
    result = diffuse(BalancingProblem([1.0] * 6, Assignment((4, 1, 1))), GAMMA)
    assert result.potentials[0] == pytest.approx((3.0 + 0.0) / 2.0)
    # Round 1: 1.5 go from stage 0 to stage 1. Round 2: 0.75 go on to stage 2, nothing from 2.5 to 2.5.
    assert result.potentials[1:3] == pytest.approx(((0.0 + 1.5) / 2.0, (0.75 + 0.0) / 2.0))


@settings(max_examples=150, deadline=None)
@given(st.booleans().flatmap(lambda memory: problems(memory=memory, placements=[range(3), (0, 1, 1, 0), (0, 1, 0, 1)])))
def test_never_worse_and_fits_if_the_start_does(problem: BalancingProblem) -> None:
    found = DiffusionBalancer().balance(problem)
    if problem.fits(problem.current):
        assert problem.fits(found)
        assert problem.bottleneck(found) <= problem.bottleneck(problem.current)
    elif not problem.fits(found):
        assert problem.bottleneck(found) <= problem.bottleneck(problem.current)


def test_speeds_and_costs_count_in_the_time() -> None:
    problem = BalancingProblem([1.0] * 12, Assignment((4, 4, 4)))
    assert DiffusionBalancer().balance(problem) == problem.current
    assert DiffusionBalancer().balance(replace(problem, rank_speeds=[2.0, 1.0, 1.0])) == Assignment((6, 3, 3))
    assert DiffusionBalancer().balance(replace(problem, stage_costs=[0.0, 0.0, 3.0])) == Assignment((5, 5, 2))


def test_a_stage_that_costs_more_than_its_share_keeps_one_layer() -> None:
    problem = BalancingProblem([1.0] * 12, Assignment((4, 4, 4)), stage_costs=[0.0, 20.0, 0.0])
    assert DiffusionBalancer().balance(problem).balance[1] == 1


def test_layers_without_load_are_no_barrier() -> None:
    loads = [4.0, 4.0, 0.0, 0.0, 0.0, 0.0, 4.0, 0.0]
    assert DiffusionBalancer().balance(BalancingProblem(loads, Assignment((7, 1)))).stage_loads(loads) in (
        (8.0, 4.0),
        (4.0, 8.0),
    )


def test_a_full_rank_refuses_layers() -> None:
    memory = MemoryLimits([10] * 8, [5] * 8, [2, 1], [200, 31])
    problem = BalancingProblem([1.0] * 8, Assignment((7, 1)))
    assert DiffusionBalancer().balance(problem) == Assignment((4, 4))
    assert DiffusionBalancer().balance(replace(problem, memory=memory)) == Assignment((6, 2))


def test_all_zero_loads_stay_where_they_are() -> None:
    assert diffuse(BalancingProblem([0.0] * 5, Assignment((1, 3, 1)))) == Diffusion(Assignment((1, 3, 1)), 0, 0, (0.0,))


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1e9, 1e300])
def test_scale_free(scale: float) -> None:
    for problem in random_problems(100, seed=2):
        loads: Sequence[float] = [load * scale for load in problem.loads]
        other = replace(problem, loads=loads, stage_costs=None)
        assert diffuse(other).assignment == diffuse(replace(problem, stage_costs=None)).assignment


@pytest.mark.parametrize("gamma", [0.0, -1.0, 1.5, math.nan])
def test_checks_gamma(gamma: float) -> None:
    with pytest.raises(ValueError, match=f"gamma .*between 1e-9 and 1, got {gamma}. Use for example gamma=0.001"):
        DiffusionBalancer(gamma)
    with pytest.raises(ValueError, match="between 1e-9 and 1"):
        diffuse(BalancingProblem([1.0], Assignment((1,))), gamma)
