"""Chains of small layers, run as a pipeline on the ranks of a test and, for comparison, as a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed

WIDTH = 6

Microbatch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments of the first layer, and keyword arguments."""


class Model(nn.Module):
    """A model that is nothing but its chain; a keyword goes to the layers that list it in `takes`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Any, precision: Callable[[], Any] = nullcontext, **kwargs: Any) -> Any:
        for layer in self.layers:
            with precision():
                output = layer(*values, **{name: kwargs[name] for name in getattr(layer, "takes", ())})
            values = output if isinstance(output, tuple) else (output,)
        return output


class Block(nn.Module):
    """Norm, linear, activation, residual; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(self.norm(x)))


def blocks(count: int = 5) -> list[nn.Module]:
    return [Block() for _ in range(count)]


def wide_batch(step: int, count: int = 4, size: int = 3) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(step)
    return [((torch.randn(size, WIDTH, generator=generator),), {}) for _ in range(count)]


def two_microbatches(step: int) -> list[Microbatch]:
    return wide_batch(step, count=2)


def one_microbatch(step: int) -> list[Microbatch]:
    return wide_batch(step, count=1)


def square_loss(output: Any, index: int) -> Tensor:
    """A loss that differs between microbatches."""
    first = output[0] if isinstance(output, tuple) else output
    return (first.float() - index).square().mean()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


@dataclass
class Plan:
    """A training run, for a pipeline of any number of ranks and for a plain loop.

    Attributes:
        layers: Makes the chain.
        batch: Returns the microbatches of a step.
        schedule: Schedule of the pipeline.
        stages_per_rank: Stages on each rank; None for the schedule's own number.
        recompute: Whether activations are computed again in the backward.
        steps: Number of optimizer steps.
        moves: Assignment to take before a step.
        frozen: Layers to freeze from a step on; all others are trainable.
        optimizer: Made over all parameters.
        loss: Takes the chain's output and the microbatch's index.
        precision: Context around each layer and the loss.
    """

    layers: Callable[[], list[nn.Module]] = blocks
    batch: Callable[[int], list[Microbatch]] = wide_batch
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    recompute: bool = False
    steps: int = 3
    moves: dict[int, tuple[int, ...]] = field(default_factory=dict)
    frozen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    loss: Callable[[Any, int], Tensor] = square_loss
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Run:
    """What came of a plan: all that must be the same wherever it ran.

    Attributes:
        losses: Loss of every microbatch, step by step.
        gradients: Gradients of every step, by parameter.
        weights: The final ``state_dict``.
    """

    losses: list[list[float]]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def model_of(plan: Plan) -> Model:
    torch.manual_seed(0)
    return Model(plan.layers())


def run_loop(plan: Plan) -> Run:
    """Runs a plan as one would without pipelines."""
    model = model_of(plan)
    optimizer = plan.optimizer(list(model.parameters()))
    losses, gradients = [], []
    for step in range(plan.steps):
        _freeze(model, plan, step)
        optimizer.zero_grad()
        losses.append([])
        for index, (args, kwargs) in enumerate(batch := plan.batch(step)):
            output = model(*args, precision=plan.precision, **kwargs)
            with plan.precision():
                loss = plan.loss(output, index) / len(batch)
            loss.backward()
            losses[-1].append(loss.item())
        gradients.append(_gradients(model))
        optimizer.step()
    return Run(losses, gradients, dict(model.state_dict()))


def start(plan: Plan, balance: Sequence[int], groups: Any = None, **options: Any) -> Any:
    """Returns the runtime of this rank with a model of the plan, distributed over the ranks."""
    from lightning_dynmo.ownership import LayerChain
    from lightning_dynmo.pipeline import PipelineRuntime, create_groups
    from lightning_dynmo.planning import Assignment

    model = model_of(plan)
    runtime = PipelineRuntime(
        LayerChain(model, list(model.layers)),
        groups or create_groups(dist.get_world_size(), 1, torch.device("cpu")),
        Assignment(tuple(balance)),
        schedule=plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        recompute=plan.recompute,
        precision_context=plan.precision,
        **options,
    )
    runtime.distribute()
    return runtime


def run_pipelines(rank: int, runs: Sequence[tuple[Plan, Sequence[int]]]) -> list[Run]:
    """Runs plans one after the other; gradients are those of this rank, losses and weights as this rank has them."""
    results, groups = [], None
    for plan, balance in runs:
        runtime = start(plan, balance, groups)
        groups = runtime.groups
        results.append(run_pipeline(runtime, plan))
    return results


def run_pipeline(runtime: Any, plan: Plan) -> Run:
    from lightning_dynmo.pipeline import gather_state_dict
    from lightning_dynmo.planning import Assignment

    model = runtime.chain.root
    optimizer = plan.optimizer(list(model.parameters()))
    runtime.optimizers = [optimizer]
    losses, gradients = [], []
    for step in range(plan.steps):
        _freeze(model, plan, step)
        if step in plan.moves:
            runtime.move_to(Assignment(plan.moves[step]))
        optimizer.zero_grad()
        losses.append(train(runtime, plan, step))
        gradients.append(_gradients(model))
        optimizer.step()
    return Run(losses, gradients, gather_state_dict(runtime.chain, runtime.owners, runtime.groups))


def train(runtime: Any, plan: Plan, step: int) -> list[float]:
    """Runs forward and backward of one step, with sums over tied parameters; returns the losses, on the last rank."""
    batch, losses = inputs_of(plan, step), []

    def last_step(index: int, output: Any) -> Tensor:
        loss = plan.loss(output, index) / len(batch)
        losses.append(loss.item())
        return loss

    from lightning_dynmo.pipeline import GradientWindow

    window = GradientWindow(runtime.chain, runtime.groups)
    window.begin_batch(starts=True, ends=True)
    runtime.train(batch, last_step, step, lambda stage: window.have_arrived(stage.parameters))
    window.end_batch(None)
    window.place()
    return losses


def evaluate(runtime: Any, plan: Plan, step: int) -> list[Tensor]:
    """Runs the forward of one step; returns the outputs, on the last rank."""
    outputs = []

    def last_step(_: int, output: Any) -> Tensor:
        outputs.append(output)
        return torch.zeros(())

    runtime.evaluate(inputs_of(plan, step), last_step, step)
    return outputs


def inputs_of(plan: Plan, step: int) -> list[Any]:
    from lightning_dynmo.pipeline import Inputs

    return [Inputs(*microbatch) for microbatch in plan.batch(step)]


def together(ranks: Sequence[Run]) -> Run:
    """Puts what the ranks have of one run together."""
    gradients = [{} for _ in ranks[0].gradients]
    for run in ranks:
        for whole, part in zip(gradients, run.gradients, strict=True):
            same = [name for name in whole.keys() & part.keys() if not torch.equal(whole[name], part[name])]
            assert not same, f"two ranks have different gradients of {same}"
            whole.update(part)
    losses = next((run.losses for run in reversed(ranks) if any(run.losses)), [])
    return Run(losses, gradients, ranks[0].weights)


def difference(run: Run, expected: Run, tolerance: float = 0.0) -> str:
    """Returns where two runs first differ, by a bit or by a tolerance; an empty text if nowhere."""
    for step, (ours, theirs) in enumerate(zip(run.losses, expected.losses, strict=True)):
        if len(ours) != len(theirs) or not np.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
            return f"losses of step {step}: {ours} and {theirs}"
    for step, (left, right) in enumerate(zip(run.gradients, expected.gradients, strict=True)):
        if found := _difference(left, right, tolerance):
            return f"gradients of step {step}: {found}"
    if list(run.weights) != list(expected.weights):
        return f"keys {list(run.weights)} and {list(expected.weights)}"
    return _difference(run.weights, expected.weights, tolerance)


def assert_same_as_loop(
    runs: list[tuple[Plan, tuple[int, ...]]], num_ranks: int | None = None, tolerance: float = 0.0
) -> list[Run]:
    """Runs plans, all on the same number of ranks, and compares each with the plain loop."""
    ranks = run_distributed(run_pipelines, num_ranks or len(runs[0][1]), runs)
    whole = [together(parts) for parts in zip(*ranks, strict=True)]
    for (plan, balance), run in zip(runs, whole, strict=True):
        assert not (found := difference(run, run_loop(plan), tolerance)), f"{plan} on {balance}: {found}"
    return whole


def _difference(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> str:
    if left.keys() != right.keys():
        return f"only one has {sorted(left.keys() ^ right.keys())}"
    return next((name for name in left if not _close(left[name], right[name], tolerance)), "")


def _close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    same_form = left.dtype == right.dtype and left.shape == right.shape
    return same_form and torch.allclose(left, right, rtol=tolerance, atol=tolerance)


def _freeze(model: Model, plan: Plan, step: int) -> None:
    if step in plan.frozen:
        for index, layer in enumerate(model.layers):
            layer.requires_grad_(index not in plan.frozen[step])
            for parameter in layer.parameters():
                if not parameter.requires_grad:
                    parameter.grad = None


def _gradients(model: Model) -> dict[str, Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
