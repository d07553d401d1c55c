"""A layer arrives with everything, frees what it held, and a move that fails leaves the model whole."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed
from tests.pipeline.chains import (
    WIDTH,
    Block,
    Microbatch,
    Plan,
    blocks,
    difference,
    evaluate,
    model_of,
    run_loop,
    run_pipelines,
    start,
    together,
    train,
    wide_batch,
)

pytestmark = pytest.mark.distributed


class Rich(nn.Module):
    """Holds one of everything that may have to travel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.transposed = nn.Parameter(torch.randn(WIDTH, 3).t())
        self.low = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.register_buffer("angles", torch.randn(4), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("image", torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last))
        self.register_buffer("cache", None)
        self.extra: Any = {"version": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        if self.cache is None:
            self.cache = torch.full((x.shape[0],), 0.5)
        more = self.transposed.sum() + self.low.float().sum() + self.angles.sum() + self.empty.sum() + self.image.sum()
        return self.dropout(self.frozen(self.linear(x))) * self.mask + more + self.wave.abs().sum() + self.cache.sum()

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def rich_layers() -> list[nn.Module]:
    return [Rich() for _ in range(7)]


def contents(layer: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns all that a layer is, with strides, so that two of them can be compared."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    result: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors}
    result |= {f"stride of {name}": tensor.stride() for name, tensor in tensors if tensor.numel()}
    result["requires_grad"] = [parameter.requires_grad for parameter in layer.parameters()]
    result["training"] = [module.training for module in layer.modules()]
    result["extra"] = layer.get_extra_state()
    result["keys"] = list(layer.state_dict())
    for name, parameter in layer.named_parameters():
        result |= {f"{key} of {name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return result


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    names = [name for name in left if name not in right or not _equal(left[name], right[name])]
    return sorted({*names, *(right.keys() - left.keys())})


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.device == right.device and torch.equal(left, right)
    if isinstance(left, list) and left and isinstance(left[0], Tensor):
        return all(map(_equal, left, right))
    return type(left) is type(right) and left == right


class Nested(torch.optim.Optimizer):
    """An optimizer whose state holds lists and dicts of tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state.setdefault("history", []).append(parameter.grad.clone())
                state["numbers"] = {"count": len(state["history"]), "sum": parameter.grad.sum()}
                parameter.data.sub_(parameter.grad, alpha=0.1)


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
    "nested": Nested,
}


def _move_in_all_directions(rank: int) -> list[tuple[str, list[str], int]]:
    """Moves layers about and compares what each is before and after, on whichever rank has it."""
    from lightning_dynmo.planning import Assignment

    results, groups = [], None
    for kind, make in OPTIMIZERS.items():
        plan = Plan(layers=rich_layers, optimizer=make)
        runtime = start(plan, (1, 4, 1, 1), groups)
        groups = runtime.groups
        optimizer = make(list(runtime.chain.root.parameters()))
        runtime.optimizers = [optimizer]
        train(runtime, plan, 0)
        optimizer.step()
        for index in runtime.chain.owned:
            layer = runtime.chain.layers[index]
            layer.extra = {"version": index}
            layer.linear.bias.requires_grad_(index % 2 == 0)
            layer.dropout.train(index % 2 == 1)
        for balance in [(2, 2, 2, 1), (1, 1, 1, 4), (4, 1, 1, 1), (1, 4, 1, 1)]:
            before = {i: contents(runtime.chain.layers[i], optimizer) for i in runtime.chain.owned}
            everywhere = {index: content for part in groups.gather(before) for index, content in part.items()}
            with torch.inference_mode(balance[0] == 2):
                migration = runtime.move_to(Assignment(balance))
            for index in runtime.chain.owned:
                found = differing(contents(runtime.chain.layers[index], optimizer), everywhere[index])
                results.append((f"{kind} {balance} {index}", found, migration.moved_bytes))
        assert set(optimizer.state) <= {p for i in runtime.chain.owned for p in runtime.chain.parameters(i)}
        runtime.chain.root.zero_grad()
        train(runtime, plan, 1)  # what arrived in inference mode can still be trained
    return results


def test_layers_arrive_with_everything_from_all_directions_at_once() -> None:
    results = [entry for rank in run_distributed(_move_in_all_directions, 4) for entry in rank]
    assert len(results) == 4 * 4 * 7
    assert [entry for entry in results if entry[1]] == []
    assert all(moved_bytes > 0 for *_, moved_bytes in results)


def test_comparison_of_contents_sees_every_loss() -> None:
    layer = Rich()
    layer(torch.ones(2, WIDTH))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    before = contents(layer, optimizer)
    assert differing(contents(layer, optimizer), before) == []
    layer.angles = layer.angles + 1
    layer.dropout.eval()
    layer.extra = {"version": 1}
    layer.image = layer.image.contiguous()
    layer.linear.weight.requires_grad_(False)
    optimizer.state.pop(layer.low)
    expected = ["angles", "exp_avg of low", "exp_avg_sq of low", "extra", "requires_grad", "step of low"]
    assert differing(contents(layer, optimizer), before) == sorted([*expected, "stride of image", "training"])


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


def test_training_goes_on_as_if_nothing_had_moved() -> None:
    moves = {1: (2, 1, 2), 2: (1, 3, 1), 3: (1, 1, 3)}
    runs = [(Plan(steps=5, moves=moves, optimizer=make), (3, 1, 1)) for make in (momentum, adagrad)]
    ranks = run_distributed(run_pipelines, 3, runs)
    for (plan, _), parts in zip(runs, zip(*ranks, strict=True), strict=True):
        assert not (found := difference(together(parts), run_loop(plan))), found


def _train_with_forgetting(rank: int, forget: bool) -> list[float]:
    from lightning_dynmo.planning import Assignment

    plan = Plan()
    runtime = start(plan, (3, 2))
    optimizer = plan.optimizer(list(runtime.chain.root.parameters()))
    runtime.optimizers = [optimizer]
    losses: list[float] = []
    for step in range(4):
        if step == 2:
            runtime.move_to(Assignment((2, 3)))
            if forget:
                for parameter in runtime.chain.parameters(2):
                    optimizer.state.pop(parameter, None)
        optimizer.zero_grad()
        losses += train(runtime, plan, step)
        optimizer.step()
    return losses


def test_forgotten_optimizer_state_of_a_moved_layer_shows_in_the_losses() -> None:
    expected = [loss for losses in run_loop(Plan(steps=4)).losses for loss in losses]
    assert run_distributed(_train_with_forgetting, 2, False)[1] == expected
    forgotten = run_distributed(_train_with_forgetting, 2, True)[1]
    assert forgotten[:12] == expected[:12]
    assert forgotten[12:] != expected[12:]


def _forward_around_a_move(rank: int) -> list[list[Tensor]]:
    from lightning_dynmo.planning import Assignment

    plan = Plan()
    runtime = start(plan, (1, 2, 2))
    outputs = []
    for balance in [(1, 2, 2), (3, 1, 1), (1, 1, 3)]:
        runtime.move_to(Assignment(balance))
        with torch.no_grad():
            outputs.append(evaluate(runtime, plan, 0))
    runtime.make_whole()
    assert runtime.chain.owned == tuple(range(5))
    with torch.no_grad():
        outputs.append([runtime.chain.root(*args) for args, _ in plan.batch(0)])
    return outputs


def test_forward_after_a_move_equals_that_before_also_once_every_rank_is_whole() -> None:
    ranks = run_distributed(_forward_around_a_move, 3)
    model = model_of(Plan())
    expected = [model(*args) for args, _ in wide_batch(0)]
    for outputs in ranks[2]:
        assert all(map(torch.equal, outputs, expected))
    for outputs in ranks:
        assert all(map(torch.equal, outputs[-1], expected))


# Memory


class Heavy(Block):
    """16 MB, and three times that with the state of AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 * 2**20))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.weight.mean()


def heavy_layers() -> list[nn.Module]:
    return [Heavy() for _ in range(4)]


def one_small_batch(step: int) -> list[Microbatch]:
    return wide_batch(step, count=2)


def _move_heavy_layers(rank: int) -> list[tuple[int, int]]:
    import psutil

    from lightning_dynmo.ownership import release_freed_memory
    from lightning_dynmo.planning import Assignment

    plan = Plan(layers=heavy_layers, batch=one_small_batch)
    runtime = start(plan, (2, 2))
    optimizer = plan.optimizer(list(runtime.chain.root.parameters()))
    runtime.optimizers = [optimizer]
    measured = []
    for step, balance in enumerate([(2, 2), (1, 3), (3, 1), (2, 2)]):
        runtime.move_to(Assignment(balance))
        train(runtime, plan, step)
        optimizer.step()
        optimizer.zero_grad()
        release_freed_memory()
        measured.append((runtime.chain.resident_bytes(), psutil.Process().memory_info().rss))
    return measured


def test_source_frees_what_the_target_takes() -> None:
    ranks = run_distributed(_move_heavy_layers, 2)
    layer_bytes = 16 * 2**20
    for owned, measured in zip(([2, 1, 3, 2], [2, 3, 1, 2]), ranks, strict=True):
        for count, (resident, rss) in zip(owned, measured, strict=True):
            assert resident == pytest.approx(count * layer_bytes, abs=10_000)
            expected = (count - owned[0]) * 3 * layer_bytes
            assert rss - measured[0][1] == pytest.approx(expected, abs=layer_bytes), "parameters and optimizer state"


# Failures


def _target_has_no_memory(rank: int, where: str) -> dict[str, Any]:
    from lightning_dynmo.planning import Assignment

    plan = Plan()
    runtime = start(plan, (1, 2, 2))
    optimizer = plan.optimizer(list(runtime.chain.root.parameters()))
    runtime.optimizers = [optimizer]
    losses = [train(runtime, plan, 0)]
    optimizer.step()
    allocate = getattr(torch, where)

    def fails(*args: Any, **kwargs: Any) -> Tensor:
        if sys._getframe(1).f_globals["__name__"].endswith("migration"):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate(*args, **kwargs)

    if rank == 0:
        setattr(torch, where, fails)
    try:
        with pytest.raises(RuntimeError, match="everything stays where it was") as info:
            runtime.move_to(Assignment((3, 1, 1)))
    finally:
        setattr(torch, where, allocate)
    owned, balance = runtime.chain.owned, runtime.assignment.balance
    optimizer.zero_grad()
    losses.append(train(runtime, plan, 1))
    optimizer.step()
    runtime.move_to(Assignment((3, 1, 1)))
    optimizer.zero_grad()
    losses.append(train(runtime, plan, 2))
    return {"text": str(info.value), "owned": owned, "balance": balance, "losses": losses}


@pytest.mark.parametrize("where", ["empty", "empty_strided"])
def test_move_that_fails_leaves_the_model_whole_and_is_raised_everywhere(where: str) -> None:
    results = run_distributed(_target_has_no_memory, 3, where)
    assert len({result["text"] for result in results}) == 1
    assert "rank 0, layers 1, 2: DefaultCPUAllocator: can't allocate memory" in results[0]["text"]
    assert [result["owned"] for result in results] == [(0,), (1, 2), (3, 4)]
    assert {result["balance"] for result in results} == {(1, 2, 2)}
    assert results[2]["losses"] == run_loop(Plan()).losses


def _distribute(rank: int) -> tuple[list[int], Tensor, float]:
    """Every rank begins with other weights; the first rank's count."""
    from lightning_dynmo.ownership import LayerChain
    from lightning_dynmo.pipeline import PipelineRuntime, create_groups
    from lightning_dynmo.planning import Assignment
    from tests.pipeline.chains import Model

    torch.manual_seed(rank)
    model = Model(blocks())
    model.register_buffer("outside", torch.full((2,), float(rank)))
    chain = LayerChain(model, list(model.layers))
    runtime = PipelineRuntime(chain, create_groups(2, 1, torch.device("cpu")), Assignment((2, 3)))
    with torch.inference_mode():
        runtime.distribute()
    weight = chain.layers[rank * 4].linear.weight
    (weight * 2).sum().backward()
    return list(chain.owned), weight.detach(), float(model.outside[0])


def test_distribution_gives_every_rank_the_first_ranks_values() -> None:
    ranks = run_distributed(_distribute, 2)
    torch.manual_seed(0)
    layers = blocks()
    assert [owned for owned, *_ in ranks] == [[0, 1], [2, 3, 4]]
    assert torch.equal(ranks[0][1], layers[0].linear.weight)
    assert torch.equal(ranks[1][1], layers[4].linear.weight)
    assert [outside for *_, outside in ranks] == [0, 0]
