"""The largest magnitudes of weights that are spread over ranks, against a sort of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dynmo.planning import CubicSparsity, num_kept
from tests.helpers.distributed import run_distributed

pytestmark = pytest.mark.distributed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1.1e-38, 6e-8, -1.0, 1.0, 1.0 + 2**-40, 3e38, math.inf, -math.inf)


@dataclass
class Case:
    """Weights in model order, where they are, and how many entries to keep."""

    weights: dict[str, Tensor]
    owners: Sequence[int]
    num_kept: int

    def of(self, pp_rank: int) -> dict[str, Tensor]:
        named = zip(self.weights.items(), self.owners, strict=True)
        return {name: weight for (name, weight), owner in named if owner == pp_rank}

    @property
    def size(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())


def by_sorting(case: Case, last_first: bool = False) -> dict[str, Tensor]:
    """Sorts all entries; of equal ones, the first are kept, or the last."""
    weights = list(case.weights.values())
    flat = torch.cat([torch.empty(0), *(weight.flatten().double().abs() for weight in weights)])
    if last_first:
        order = len(flat) - 1 - flat.flip(0).sort(stable=True, descending=True).indices
    else:
        order = flat.sort(stable=True, descending=True).indices
    kept = torch.zeros(len(flat), dtype=torch.bool)
    kept[order[: case.num_kept]] = True
    parts = kept.split([weight.numel() for weight in weights])
    return {name: part.view(case.weights[name].shape) for name, part in zip(case.weights, parts, strict=True)}


def random_case(seed: int, world_size: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most + 1, (), generator=generator))

    weights = {}
    for index in range(draw(6)):
        shape = [(), (0,), (17,), (5, 7), (2, 3, 4), (300,)][draw(5)]
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** -draw(3)
        if draw(1):
            values = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]
        weights[f"weight {index}"] = values.to(DTYPES[draw(3) if draw(1) else 0])
    owners = [draw(world_size - 1) for _ in weights]
    size = sum(weight.numel() for weight in weights.values())
    return Case(weights, owners, (0, size, draw(size))[draw(2)])


def hand_cases(world_size: int) -> dict[str, Case]:
    last = world_size - 1
    spread = [index % world_size for index in range(4)]
    generator = torch.Generator().manual_seed(0)
    normal = {f"n{index}": torch.randn(40, 30, generator=generator) * (index + 1) for index in range(4)}
    equal = {f"e{index}": torch.full((75,), (-1.0) ** index) for index in range(4)}
    mixed = {name: torch.cat([weight, torch.tensor([2.0, -3.0, 0.5])]) for name, weight in equal.items()}
    two = {"first": torch.tensor([0.1, -0.5, 0.3]), "second": torch.tensor([0.2, -0.9, 0.05])}
    fine = {"a": torch.tensor([1.0, 1 + 1e-12, -1 - 2e-12], dtype=torch.float64), "b": torch.tensor([1.0, -1.0])}
    return {
        "two ranks by hand": Case(two, [0, last], num_kept(6, 0.5)),
        "normal": Case(normal, spread, num_kept(4800, 0.9)),
        "all on the last rank": Case(normal, [last] * 4, 2400),
        "against the order of ranks": Case(normal, [last - rank for rank in spread], 1000),
        "none": Case(normal, spread, 0),
        "all": Case(normal, spread, 4800),
        "all but one": Case(normal, spread, 4799),
        "one": Case(normal, spread, 1),
        "300 equal ones, all but one rank's": Case(equal, spread, 75),
        "300 equal ones, cut in a weight": Case(equal, spread, 160),
        "ties among others": Case(mixed, spread, 110),
        "all zero": Case({name: 0 * weight for name, weight in mixed.items()}, spread, 100),
        "ties in bfloat16": Case({name: weight.bfloat16() for name, weight in normal.items()}, spread, 2001),
        "float64 tells more apart": Case(fine, [0, last], 2),
        "not contiguous": Case({"t": normal["n0"].t(), "s": normal["n1"][:, ::2]}, [0, last], 400),
        "no weights": Case({}, [], 0),
        "no entries": Case({"empty": torch.empty(0, 4)}, [0], 0),
        "long": Case({"x": torch.randn(600_000, generator=generator), "y": torch.ones(500_000)}, [0, last], 500_000),
    }


def _masks(rank: int, device: str, cases: dict[str, Case]) -> dict[str, list[dict[str, Tensor]]]:
    from lightning_dynmo.pipeline import create_groups, select_largest, select_largest_by_gathering

    groups = create_groups(torch.distributed.get_world_size(), 1, torch.device(device))
    found = {}
    for label, case in cases.items():
        mine = {name: weight.to(device) for name, weight in case.of(rank).items()}
        arguments = (mine, list(case.weights), case.num_kept, groups)
        both = select_largest(*arguments), select_largest_by_gathering(*arguments)
        assert {mask.device.type for masks in both for mask in masks.values()} <= {device}
        found[label] = [{name: mask.cpu() for name, mask in masks.items()} for masks in both]
    return found


def check_masks(world_size: int, device: str) -> None:
    cases = hand_cases(world_size) | {f"random {seed}": random_case(seed, world_size) for seed in range(80)}
    ranks = run_distributed(_masks, world_size, device, cases)
    for label, case in cases.items():
        expected = by_sorting(case)
        for search, name in enumerate(("counting", "gathering")):
            found = [part[label][search] for part in ranks]
            assert [set(part) for part in found] == [set(case.of(rank)) for rank in range(world_size)]
            masks = {name: mask for part in found for name, mask in part.items()}
            assert sum(int(mask.sum()) for mask in masks.values()) == case.num_kept, (label, name)
            for weight, mask in expected.items():
                assert mask.dtype == torch.bool
                assert torch.equal(masks[weight], mask), (label, name, weight)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_masks_are_those_of_a_sort_wherever_the_weights_are(world_size: int) -> None:
    check_masks(world_size, "cpu")


@pytest.mark.gpu
def test_masks_on_a_gpu() -> None:
    check_masks(1, "cuda")


def test_the_cases_have_ties_that_are_cut_and_values_that_float32_does_not_tell_apart() -> None:
    cases = hand_cases(2)
    for label in ("300 equal ones, cut in a weight", "ties among others", "ties in bfloat16", "all zero"):
        first, last = by_sorting(cases[label]), by_sorting(cases[label], last_first=True)
        assert any(not torch.equal(first[name], last[name]) for name in first), label
    fine = cases["float64 tells more apart"]
    rounded = Case({name: weight.float() for name, weight in fine.weights.items()}, fine.owners, fine.num_kept)
    assert not torch.equal(by_sorting(fine)["a"], by_sorting(rounded)["a"])


def test_by_hand() -> None:
    masks = by_sorting(hand_cases(2)["two ranks by hand"])
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "first": [False, True, True],
        "second": [False, True, False],
    }


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(allow_nan=False))
    parts = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(value, max_size=8)), max_size=5))
    weights = {
        f"weight {index}": torch.tensor(values, dtype=torch.float64).to(dtype)
        for index, (dtype, values) in enumerate(parts)
    }
    size = sum(weight.numel() for weight in weights.values())
    return Case(weights, [0] * len(weights), draw(st.integers(0, size)))


def _any_case(rank: int) -> int:
    from lightning_dynmo.pipeline import create_groups, select_largest

    groups = create_groups(1, 1, torch.device("cpu"))
    examples = []

    @settings(max_examples=150, deadline=None, database=None)
    @given(_cases())
    def check(case: Case) -> None:
        examples.append(case.num_kept)
        found = select_largest(case.weights, list(case.weights), case.num_kept, groups)
        for name, mask in by_sorting(case).items():
            assert torch.equal(found[name], mask), (name, case)

    check()
    return len(examples)


def test_any_values_of_any_dtype() -> None:
    assert run_distributed(_any_case, 1) >= [150]


def _prune(rank: int, shares: dict[str, int]) -> list[dict[str, Tensor]]:
    """Prunes at every step of the schedule while the weights that are left change."""
    from lightning_dynmo.pipeline import create_groups, select_largest

    groups = create_groups(torch.distributed.get_world_size(), 1, torch.device("cpu"))
    weights, masks, history = {}, {}, []
    for index, (name, owner) in enumerate(shares.items()):
        generator = torch.Generator().manual_seed(index)
        if owner == rank:
            weights[name] = torch.randn(50, 20, generator=generator) * (1 + index)
            masks[name] = torch.ones(50, 20, dtype=torch.bool)
    schedule = CubicSparsity()
    for step in filter(schedule.prunes_at, range(8000)):
        survivors = {name: weight[masks[name]] for name, weight in weights.items()}
        kept = select_largest(survivors, list(shares), num_kept(1000 * len(shares), schedule.sparsity(step)), groups)
        masks = {name: mask.masked_scatter(mask, kept[name]) for name, mask in masks.items()}
        history.append(masks)
        for index, name in enumerate(shares):
            if name in weights:  # what is pruned would be large again
                noise = torch.randn(50, 20, generator=torch.Generator().manual_seed(step + index))
                weights[name] = torch.where(masks[name], weights[name] + noise, 100.0)
    return history


@pytest.mark.parametrize("owners", [(0, 0, 0, 0), (0, 0, 1, 1), (3, 1, 1, 0)])
def test_masks_nest_over_four_prunings_and_keep_the_exact_count(owners: tuple[int, ...]) -> None:
    names = ["a", "b", "c", "d"]
    ranks = run_distributed(_prune, max(owners) + 1, dict(zip(names, owners, strict=True)))
    history = [{name: mask for part in parts for name, mask in part.items()} for parts in zip(*ranks, strict=True)]
    counts = [sum(int(mask.sum()) for mask in masks.values()) for masks in history]
    assert counts == [num_kept(4000, sparsity) for sparsity in (0.5203125, 0.7875, 0.8859375, 0.9)]
    assert counts[0] == 1919  # 1918.75
    for before, after in pairwise(history):
        for name in names:
            assert not (after[name] & ~before[name]).any()
    alone = run_distributed(_prune, 1, dict.fromkeys(names, 0))[0]
    for found, expected in zip(history, alone, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in names)


def _prune_replicas(rank: int) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    from lightning_dynmo.pipeline import create_groups, select_largest

    groups = create_groups(2, 2, torch.device("cpu"))
    weights = replica_weights(groups.dp_rank)
    mine = {name: weights[name] for name in (("a", "b"), ("c", "empty"))[groups.pp_rank]}
    return groups.dp_rank, mine, select_largest(mine, list(weights), 500, groups)


def replica_weights(dp_rank: int) -> dict[str, Tensor]:
    """Weights of which half are off by one in the last bit in the second replica."""
    generator = torch.Generator().manual_seed(0)
    coarse = {name: torch.randn(20, 21, generator=generator).bfloat16().float() for name in ("a", "b", "c")}
    moved = {
        name: torch.where(torch.rand(20, 21, generator=generator) < 0.5, weight, torch.nextafter(weight, 2 * weight))
        for name, weight in coarse.items()
    }
    return {**(moved if dp_rank else coarse), "empty": torch.empty(0)}


def test_replicas_take_the_masks_of_the_first() -> None:
    first, second = (by_sorting(Case(replica_weights(dp_rank), [0] * 4, 500)) for dp_rank in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first), "they would choose otherwise"
    ranks = run_distributed(_prune_replicas, 4)
    assert [dp_rank for dp_rank, _, _ in ranks] == [0, 1, 0, 1]
    for _, mine, masks in ranks:
        assert set(masks) == set(mine)
        for name, mask in masks.items():
            assert torch.equal(mask, first[name]), name


def _with_printed_k(rank: int, weights: list[Tensor], sparsity: float) -> float:
    """Runs Algorithm 1 as printed, in which num_params is that of the rank's own model; returns this rank's density."""
    from lightning_dynmo.pipeline import create_groups

    groups = create_groups(len(weights), 1, torch.device("cpu"))
    params = weights[rank].flatten()
    k = round(params.numel() * (1 - sparsity))
    top = params.abs().topk(k)
    sent = torch.cat(groups.gather(top.values))
    keep = torch.zeros(len(sent), dtype=torch.bool)
    keep[sent.topk(sum(groups.gather(k))).indices] = True  # the rank's own k would leave a 40th of the model
    mine = keep.split([k] * len(weights))[rank]
    return len(top.indices[mine]) / params.numel()


def test_algorithm_1_as_printed_prunes_every_rank_alike() -> None:
    scales = (1.0, 2.0, 0.2, 0.8)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(100, 100, generator=generator) * scale for scale in scales]
    assert run_distributed(_with_printed_k, 4, weights, 0.9) == [0.1] * 4
    case = Case({f"rank {rank}": weight for rank, weight in enumerate(weights)}, range(4), num_kept(40_000, 0.9))
    ranks = run_distributed(_masks, 4, "cpu", {"global": case})
    densities = [ranks[rank]["global"][0][f"rank {rank}"].float().mean().item() for rank in range(4)]
    assert sum(densities) == pytest.approx(0.4)
    assert densities[1] > 0.3 > 0.1 > densities[0] > densities[3] > densities[2] == 0


def broken(kind: str, groups: Any) -> tuple[dict[str, Tensor], list[str], int]:
    """Returns the arguments of one rank of 2 x 2, with a mistake on some rank."""
    rank, pp_rank = groups.global_rank, groups.pp_rank
    order, kept = ["a", "b"], 3
    mine = {order[pp_rank]: torch.arange(4.0)}
    if kind == "nan" and rank == 3:
        mine = {"b": torch.tensor([1.0, math.nan, 2.0, 3.0])}
    if kind == "nan in half" and pp_rank == 0:
        mine = {"a": torch.tensor([1.0, math.nan, 2.0, 3.0], dtype=torch.bfloat16)}
    if kind == "unknown" and rank == 2:
        mine["c"] = torch.ones(1)
    if kind == "integers" and pp_rank == 1:
        mine = {"b": torch.arange(4)}
    if kind == "sparse" and pp_rank == 1:
        mine = {"b": torch.eye(4).to_sparse()}
    if kind == "twice":
        mine = {"a": torch.ones(4), **mine}
    if kind == "nowhere":
        order = [*order, "c"]
    if kind == "other count" and rank == 1:
        kept = 4
    if kind == "other order" and rank == 2:
        order = ["b", "a"]
    if kind == "longer order" and rank == 3:
        order = [*order, "c"]
    if kind == "order twice":
        order = ["a", "b", "a"]
    if kind == "too many":
        kept = 9
    if kind == "negative":
        kept = -1
    if kind == "other replica" and rank == 3:
        mine = {"b": torch.arange(5.0)}
    return mine, order, kept


def _mistake(rank: int, kinds: list[str]) -> list[str]:
    from lightning_dynmo.pipeline import create_groups, select_largest

    groups = create_groups(2, 2, torch.device("cpu"))
    texts = []
    for kind in kinds:
        try:
            select_largest(*broken(kind, groups), groups)
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_mistakes_are_the_same_errors_on_every_rank() -> None:
    expected = {
        "none": "",
        "nan": "weight 'b' has NaN",
        "nan in half": "weight 'a' has NaN",
        "unknown": "weight 'c' is not in the order",
        "integers": "floating point numbers in weight 'b', got torch.int64",
        "sparse": "numbers in weight 'b', got torch.float32 in layout torch.sparse_coo",
        "twice": "expected weight 'a' on 1 rank of a pipeline, got it on 2",
        "nowhere": "expected weight 'c' on 1 rank of a pipeline, got it on 0",
        "other count": "num_kept=3 on rank 0 and num_kept=4 on rank 1",
        "other order": "number 0 in the order is 'a' on rank 0 and 'b' on rank 2",
        "longer order": "number 2 in the order is None on rank 0 and 'c' on rank 3",
        "order twice": "weight 'a' is in the order more than once",
        "too many": "at most the 8 entries that there are, got num_kept=9",
        "negative": "num_kept of at least 0, got -1",
        "other replica": "the weights that rank 2 passed differ in name, shape or dtype from those of its replicas",
    }
    ranks = run_distributed(_mistake, 4, [*expected, "none"])
    for place, (kind, text) in enumerate(expected.items()):
        (found,) = {texts[place] for texts in ranks}
        assert text in found, (kind, found)
        assert bool(text) == bool(found), kind
    assert [texts[-1] for texts in ranks] == [""] * 4, "after all these, ranks still understand each other"
