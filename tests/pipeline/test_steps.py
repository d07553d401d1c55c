"""What happens around a step: evaluation, failures, memory, counts, and what a rebalance does."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import RankError, run_distributed
from tests.pipeline.chains import (
    Block,
    Microbatch,
    Plan,
    assert_same_as_loop,
    blocks,
    evaluate,
    model_of,
    one_microbatch,
    run_loop,
    square_loss,
    start,
    train,
    two_microbatches,
    wide_batch,
)
from tests.pipeline.layers import batch_norm_layers

pytestmark = pytest.mark.distributed


def _evaluate_before_between_after(rank: int) -> dict[str, Any]:
    plan, others = Plan(), [Plan(batch=one_microbatch), Plan(batch=larger_batch)]
    runtime = start(plan, (2, 2, 1))
    optimizer = plan.optimizer(list(runtime.chain.root.parameters()))
    outputs, losses = [], []
    for step in range(3):
        for number, other in enumerate(others):
            with torch.inference_mode() if (number + step) % 2 else torch.no_grad():
                outputs.extend(evaluate(runtime, other, step))
        optimizer.zero_grad()
        losses.append(train(runtime, plan, step))
        optimizer.step()
    return {"outputs": [output.clone() for output in outputs], "losses": losses}


def larger_batch(step: int) -> list[Microbatch]:
    return wide_batch(step, count=3, size=5)


def test_evaluation_of_other_sizes_before_and_between_training() -> None:
    """Also in turns of no_grad and inference_mode, whose tensors must not meet."""
    result = run_distributed(_evaluate_before_between_after, 3)[-1]
    plan = Plan()
    model, expected = model_of(plan), []
    optimizer = plan.optimizer(list(model.parameters()))
    for step in range(3):
        with torch.no_grad():
            expected += [model(*args) for batch in (one_microbatch(step), larger_batch(step)) for args, _ in batch]
        optimizer.zero_grad()
        for index, (args, _) in enumerate(wide_batch(step)):
            (square_loss(model(*args), index) / 4).backward()
        optimizer.step()
    assert result["losses"] == run_loop(plan).losses
    assert len(result["outputs"]) == 3 * (1 + 3)
    assert all(map(torch.equal, result["outputs"], expected))


class Remember(nn.Module):
    """Keeps what it saw, as observers and collectors of outputs do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return x.view(x.shape)


def remembering_layers() -> list[nn.Module]:
    return [*blocks(2), Remember()]


def _collect_over_batches(rank: int) -> list[Tensor]:
    plan = Plan(layers=remembering_layers)
    runtime = start(plan, (1, 1, 1))
    with torch.no_grad():
        outputs = [output for step in range(3) for output in evaluate(runtime, plan, step)]
    train(runtime, plan, 0)
    train(runtime, plan, 1)
    return [*outputs, *runtime.chain.layers[2].seen]


def test_activations_that_are_kept_do_not_change_later() -> None:
    *_, kept = run_distributed(_collect_over_batches, 3)
    plan = Plan(layers=remembering_layers)
    model = model_of(plan)
    with torch.no_grad():
        expected = [model(*args) for step in (0, 1, 2, 0, 1, 2, 0, 1) for args, _ in plan.batch(step)]
    assert len(kept) == len(expected) == 8 * 4
    assert all(map(torch.equal, kept, expected))


# Failures


class Moody(nn.Module):
    """Changes its output's shape when told so, which no inference of shapes can foresee."""

    rows = None

    def forward(self, x: Tensor) -> Tensor:
        return x[: self.rows]


def moody_layers() -> list[nn.Module]:
    return [Block(), Moody(), Block()]


def _shape_changes(rank: int) -> None:
    plan = Plan(layers=moody_layers)
    runtime = start(plan, (2, 1))
    train(runtime, plan, 0)
    runtime.chain.layers[1].rows = 2
    train(runtime, plan, 1)


def test_unforeseen_shape_is_an_error_before_it_is_sent() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed first") as info:
        run_distributed(_shape_changes, 2)
    assert "rank 0, stage 0, layers 0-1, " in info.value.text
    assert "layer 1 (Moody) returned float32[2, 6] with gradient" in info.value.text
    assert "but the next stage expects float32[3, 6] with gradient" in info.value.text


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.calls == 6:
            raise ArithmeticError("the sixth is bad luck")
        return super().forward(x)


def broken_layers() -> list[nn.Module]:
    return [Block(), Block(), Broken()]


def _layer_fails(rank: int) -> None:
    plan = Plan(layers=broken_layers)
    runtime = start(plan, (1, 2))
    train(runtime, plan, 0)
    train(runtime, plan, 1)


def test_failing_layer_is_named_with_rank_stage_and_microbatch() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed first") as info:
        run_distributed(_layer_fails, 2)
    where = "rank 1, stage 1, layer 2 (Broken), microbatch 2: ArithmeticError: the sixth is bad luck"
    assert where in info.value.text


# Memory


def _rebuild_20_times(rank: int) -> tuple[list[int], list[int], list[int]]:
    import psutil

    from lightning_dynmo.ownership import release_freed_memory
    from lightning_dynmo.pipeline.stage import Stage
    from lightning_dynmo.planning import Assignment

    plan = Plan(batch=heavy_batch, schedule="gpipe")
    runtime = start(plan, (2, 3))
    process, memory, stages, kept = psutil.Process(), [], [], []
    for step in range(20):
        runtime.move_to(Assignment((2, 3) if step % 2 else (3, 2)))
        train(runtime, plan, step)
        with torch.no_grad():
            evaluate(runtime, plan, step)
        runtime.chain.root.zero_grad()
        release_freed_memory()
        memory.append(process.memory_info().rss)
        if step not in (10, 19):
            continue
        objects = gc.get_objects()
        stages.append(sum(type(value) is Stage for value in objects))
        tensors = [value for value in objects if type(value) in (Tensor, nn.Parameter)]
        kept.append(sum(value.numel() for value in tensors if value.numel() > 10_000 and not value.is_meta))
        del objects, tensors
    reference = weakref.ref(next(iter(runtime._stages.values())))
    runtime._stages.clear()
    assert reference() is None, "a stage is part of a reference cycle"
    return memory, stages, kept


def heavy_batch(step: int) -> list[Microbatch]:
    return wide_batch(step, count=2, size=20_000)


def test_memory_is_flat_over_20_rebuilds() -> None:
    for memory, stages, kept in run_distributed(_rebuild_20_times, 2):
        assert set(stages) == {1}
        assert max(kept) == 0  # neither activations nor buffers outlive their step
        assert min(memory[10:]) - min(memory[5:10]) < 20 * 2**20  # a step's activations take 5 MB or more


# Counts of forwards


def _count_forwards(rank: int) -> list[tuple[int, int, int]]:
    from lightning_dynmo.planning import Assignment

    plan = Plan(layers=batch_norm_layers)
    runtime = start(plan, (1, 2, 2))
    hooked: list[int] = []
    for layer in runtime.chain.layers:
        layer.register_forward_hook(lambda *_: hooked.append(1))
        layer.linear.register_forward_pre_hook(lambda *_: hooked.append(1))
    for step, balance in enumerate([(1, 2, 2), (2, 2, 1), (1, 1, 3)]):
        runtime.move_to(Assignment(balance))
        train(runtime, plan, step)
    counts = []
    for index in runtime.chain.owned:
        layer = runtime.chain.layers[index]
        assert layer.norm.running_mean.isfinite().all()
        assert layer.norm.running_var.isfinite().all()
        counts.append((index, int(layer.norm.num_batches_tracked), int(layer.tokens[0])))
    calls = sum(layer.calls for layer in runtime.chain.layers)
    return [*counts, (-1, calls, len(hooked))]


def test_layers_run_exactly_once_per_microbatch_before_and_after_moves() -> None:
    """Neither hooks nor counters nor BatchNorm see the computation of the borders (CASES 7)."""
    results = [entry for rank in run_distributed(_count_forwards, 3) for entry in rank]
    counts = sorted(entry for entry in results if entry[0] >= 0)
    assert counts == [(index, 3 * 4, 3 * 4 * 3) for index in range(5)]
    sums = [entry for entry in results if entry[0] < 0]
    assert sum(calls for _, calls, _ in sums) == 5 * 3 * 4
    assert sum(hooked for *_, hooked in sums) == 2 * 5 * 3 * 4


def test_batch_norm_statistics_equal_those_of_a_loop_after_moves() -> None:
    assert_same_as_loop([(Plan(layers=batch_norm_layers, moves={1: (2, 2, 1), 2: (1, 1, 3)}), (1, 2, 2))])


def _rebalance(rank: int) -> tuple[Any, Any]:
    plan = Plan(layers=sleeping_layers, batch=two_microbatches)
    runtime = start(plan, (3, 3))
    with pytest.raises(RuntimeError, match="no profile to plan from"):
        runtime.rebalance()
    runtime.request_profile()
    train(runtime, plan, 0)
    first = runtime.rebalance(horizon_steps=10)
    again = runtime.rebalance(horizon_steps=10)
    return first, again


class Sleeper(Block):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def sleeping_layers() -> list[nn.Module]:
    return [Sleeper(0.1), Sleeper(0.1), *(Sleeper(0.0) for _ in range(4))]


def test_rebalance_moves_layers_away_from_the_slow_stage_once() -> None:
    results = run_distributed(_rebalance, 2)
    for first, again in results:
        assert first.before.balance == (3, 3)
        assert first.decision.proposed.balance == (1, 5)
        assert [move.layer for move in first.migration.moves] == [1, 2]
        assert first.decision.prediction.gain > 0.3
        assert again.migration is None
