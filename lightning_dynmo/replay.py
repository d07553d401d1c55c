"""Step methods run on the last stage only; what they return, log and count is repeated on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torchmetrics.metric
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_dynmo.module import check_call
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.pipeline.microbatches import Inputs, batch_size_of, merge_outputs, weighted_loss, weighted_mean
from lightning_dynmo.sideeffects import SideEffects, Watch, apply, without_graph


@dataclass(slots=True)
class LoggedValue:
    """What the microbatches logged under one name.

    Attributes:
        name: First argument of ``self.log``.
        values: One float per microbatch that logged it; empty for a metric.
        metric: Attribute of the module that holds the torchmetrics object that was logged, if one was.
        step_values: The metric's values for the microbatches alone, where it has computed them.
        batch_sizes: ``batch_size`` arguments, or where not given the samples of the microbatch, if known.
        options: The other arguments of ``self.log``.
    """

    name: str
    options: dict[str, Any]
    values: list[float] = field(default_factory=list)
    metric: str | None = None
    step_values: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)

    def followed_by(self, other: LoggedValue) -> LoggedValue:
        """Returns these values and those of another replica."""
        return replace(
            self,
            values=self.values + other.values,
            step_values=self.step_values + other.step_values,
            batch_sizes=self.batch_sizes + other.batch_sizes,
        )


@dataclass(frozen=True, slots=True)
class Shared:
    """What replicas tell each other of a batch.

    Attributes:
        weight: Sum of the weights that training steps returned; None where they returned none.
        logged: Logged values, in the order in which they were first logged.
        should_stop: Whether the Trainer is to stop.
    """

    weight: float | None
    logged: tuple[LoggedValue, ...]
    should_stop: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the last stage tells the other ranks about a batch.

    Attributes:
        output: Merged results of the step method, on the CPU; the loss of a training step is the batch's.
        shared: What is the same in all replicas.
        metrics: New state of the torchmetrics objects that were updated, by attribute.
        effects: What else the steps have changed.
    """

    output: Any
    shared: Shared
    metrics: dict[str, dict[str, Any]]
    effects: SideEffects


class StepMethod:
    """Runs a step method of the user's module on the output of the chain, microbatch by microbatch.

    Inside it, ``self(...)`` returns the output that the pipeline has computed, and ``self.log`` takes notes.

    Args:
        module: The user's module.
        name: ``"training_step"`` and the like.
        chain: The layers.
        microbatches: What the step method gets, one by one.
        arguments: Its other arguments, such as ``batch_idx``.
        inputs: What went into the pipeline.
        num_batches: Batches per optimizer step, over all replicas, whose losses are averaged.
        check_inputs: Whether arguments of ``self(...)`` are compared with `inputs`.
    """

    def __init__(
        self,
        module: LightningModule,
        name: str,
        chain: LayerChain,
        microbatches: Sequence[Any],
        arguments: tuple[Any, ...],
        inputs: Sequence[Inputs],
        *,
        num_batches: int = 1,
        check_inputs: bool = False,
    ) -> None:
        self._module = module
        self._name = name
        self._chain = chain
        self._microbatches = microbatches
        self._arguments = arguments
        self._inputs = inputs
        self._num_batches = num_batches
        self._sizes = _sizes_of(microbatches)
        self._index = 0
        self._check_inputs = check_inputs
        self._outputs: list[Any] = []
        self._weights: list[float] = []
        self._logged: dict[str, LoggedValue] = {}
        self._metrics = _metrics_of(module, chain)
        self._before = {name: _snapshot(metric) for name, metric in self._metrics.items()}
        self._watch: Watch | None = None

    def __call__(self, index: int, output: Any) -> Any:
        """Runs the step method on microbatch `index`; returns the loss to run backward from, in training."""
        if self._watch is None:  # on the last stage, where steps run
            self._watch = Watch(self._module, self._chain)
        self._index = index
        called = False

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            if called and self._name == "training_step":
                raise ValueError(
                    "training_step called self(...) twice, but the pipeline runs once per microbatch, so both calls "
                    "would return the same. Put what is to run twice into one batch, and call self(...) once."
                )
            called = True
            if self._check_inputs:
                check_call(self._chain, self._name, self._inputs[index], args, kwargs)
            return output

        attributes = vars(self._module)
        own: dict[str, Any] = {key: attributes[key] for key in ("forward", "log") if key in attributes}
        attributes.update(forward=forward, log=self._log)
        try:
            result = getattr(self._module, self._name)(self._microbatches[index], *self._arguments)
        finally:
            del attributes["forward"], attributes["log"]
            attributes.update(own)
        if self._name == "training_step":
            if not called:
                raise ValueError(
                    "training_step did not call self(...), so it does not use what the pipeline has computed. Call "
                    "self(...) in it instead of single layers."
                )
            return self._scaled_loss(result, output)
        self._outputs.append(without_graph(result))
        return output

    def result(self) -> StepResult:
        """Returns what all microbatches made, once all have run."""
        assert self._watch is not None
        self._check_shells()
        shared = Shared(
            weight=sum(self._weights) if self._weights else None,
            logged=tuple(self._logged.values()),
            should_stop=bool(self._module.trainer.should_stop),
        )
        return StepResult(
            output=merge_outputs(self._outputs, self._weights or _unless_equal(self._sizes)),
            shared=shared,
            metrics={
                name: _changes(metric, self._before[name])
                for name, metric in self._metrics.items()
                if metric.update_count != self._before[name]["_update_count"]
            },
            effects=self._watch.changes(),
        )

    def _check_shells(self) -> None:
        for index in range(len(self._chain)):
            parameters = [parameter for parameter in self._chain.parameters(index) if not self._chain.holds(parameter)]
            if any(parameter.grad is not None for parameter in parameters):
                raise ValueError(
                    f"The loss that {self._name} returned depends on parameters of {self._chain.name(index)} directly, "
                    "not through self(...), but that layer lives on another rank. Compute the loss from the output "
                    "alone; for an L2 term, set the optimizer's weight_decay."
                )

    def _scaled_loss(self, result: Any, output: Any) -> Tensor:
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return the loss, or a dict with 'loss' (and optionally 'weight'), got "
                f"{type(result).__name__ if loss is None else type(loss).__name__}. A step cannot be skipped in a "
                "pipeline, since the other stages have run it already."
            )
        if not loss.requires_grad:
            raise ValueError(
                "The loss that training_step returned has no gradient. Compute it from the output of self(...) "
                "without detach() or torch.no_grad()."
            )
        weight = result.get("weight") if isinstance(result, Mapping) else None
        if (weight is not None) != (len(self._weights) == len(self._outputs)) and self._outputs:
            raise ValueError("training_step returned a 'weight' for some microbatches only; return it for all or none.")
        self._outputs.append(without_graph(result))
        if weight is not None:  # the sum over the optimizer step is divided by the sum of weights, once it is known
            self._weights.append(float(weight))
            return weighted_loss(loss, self._weights[-1], output)
        if (sizes := _unless_equal(self._sizes)) is None:
            return loss / (len(self._microbatches) * self._num_batches)
        return loss * (sizes[self._index] / sum(sizes) / self._num_batches)

    def _log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        options = {**dict(zip(names, args, strict=False)), **options}
        options.pop("metric_attribute", None)
        entry = self._logged.setdefault(name, LoggedValue(name, options))
        if batch_size is None and self._sizes is not None:
            batch_size = self._sizes[self._index]
        if batch_size is not None:
            entry.batch_sizes.append(batch_size)
        if isinstance(value, Metric):
            entry.metric = _attribute_of(self._module, value, name)
            cache: Any = value._forward_cache
            if isinstance(cache, Tensor) and cache.numel() == 1:
                entry.step_values.append(cache.item())
        elif isinstance(value, Tensor | float | int):
            entry.values.append(float(value.detach() if isinstance(value, Tensor) else value))
        else:
            raise TypeError(
                f"self.log({name!r}, ...) got a {type(value).__name__}; inside the step methods of a pipeline, log a "
                "number, a tensor with one element or a torchmetrics Metric."
            )


def merge_replicas(result: StepResult, parts: Sequence[Shared]) -> StepResult:
    """Returns a replica's result with what all replicas share put together.

    Args:
        result: This replica's.
        parts: What each replica shares, this one among them.
    """
    if len(parts) == 1:
        return result
    logged: dict[str, LoggedValue] = {}
    for entry in (entry for part in parts for entry in part.logged):
        known = logged.get(entry.name)
        logged[entry.name] = entry if known is None else known.followed_by(entry)
    weights = [part.weight for part in parts if part.weight is not None]
    shared = Shared(sum(weights) if weights else None, tuple(logged.values()), any(part.should_stop for part in parts))
    return replace(result, shared=shared)


def replay(module: LightningModule, chain: LayerChain, result: StepResult) -> None:
    """Repeats on this rank what a step did on the last stage.

    Args:
        module: The user's module, inside the Lightning hook whose step ran.
        chain: The layers.
        result: What the last stage told.
    """
    metrics = _metrics_of(module, chain)
    for name, state in result.metrics.items():
        _apply(metrics[name], state)
    if not chain.owns(len(chain) - 1):
        apply(module, chain, result.effects)
    if result.shared.should_stop:  # a rank that wishes to stop by itself goes on wishing
        module.trainer.should_stop = True
    for entry in result.shared.logged:
        options = {
            **entry.options,
            "batch_size": sum(entry.batch_sizes) if entry.batch_sizes else None,
            "sync_dist": False,
        }
        if entry.metric is not None:
            metric = module.get_submodule(entry.metric)
            assert isinstance(metric, Metric)
            if entry.step_values:
                vars(metric)["_forward_cache"] = _mean(entry.step_values, None).to(module.device)
            module.log(entry.name, metric, **options)
            continue
        weights = entry.batch_sizes if len(entry.batch_sizes) == len(entry.values) else None
        value = _reduced(entry.values, _unless_equal(weights), entry.options.get("reduce_fx", "mean"))
        module.log(entry.name, value.to(module.device), **options)


def prepare_metrics(module: LightningModule, chain: LayerChain, device: torch.device) -> None:
    """Moves the module's own torchmetrics objects to the device."""
    for metric in _metrics_of(module, chain).values():
        metric.to(device)


class LocalMetrics:
    """Has torchmetrics gather over replicas only: all ranks of a pipeline hold the same state already.

    Gathered over all ranks, it would count once per stage; and a metric that a step method makes for itself would wait
    for ranks that never come. That holds for every metric, wherever it is made, so the function that gathers is
    replaced for a while.
    """

    def __init__(self) -> None:
        self._gather: Any = None

    def begin(self, groups: PipelineGroups) -> None:
        """Replaces the function; does nothing if that is done already."""
        if self._gather is None:
            self._gather = original = vars(torchmetrics.metric)["gather_all_tensors"]
            alone = groups.dp_size == 1
            vars(torchmetrics.metric)["gather_all_tensors"] = lambda result, group=None: (
                [result] if alone else original(result, groups.replicas)
            )

    def end(self) -> None:
        """Puts the function back."""
        if self._gather is not None:
            vars(torchmetrics.metric)["gather_all_tensors"] = self._gather
            self._gather = None


def _reduced(values: Sequence[float], weights: Sequence[float] | None, reduce_fx: Any) -> Tensor:
    """Reduces the microbatches' values as ``self.log(reduce_fx=...)`` reduces those of steps."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    stacked = torch.tensor(values, dtype=torch.float64)
    if name in ("max", "min", "sum"):
        reduced: Tensor = getattr(torch, name)(stacked)
        return reduced.float()
    return _mean(values, weights)


def _mean(values: Sequence[float], weights: Sequence[float] | None) -> Tensor:
    return weighted_mean([torch.tensor(value, dtype=torch.float64) for value in values], weights).float()


def _sizes_of(microbatches: Sequence[Any]) -> list[int] | None:
    """Returns the number of samples of each microbatch; None where it is unclear, as may be if there is but one."""
    try:
        return [batch_size_of(microbatch) for microbatch in microbatches]
    except ValueError:
        if len(microbatches) > 1:
            raise
        return None


def _unless_equal(weights: Sequence[int] | None) -> Sequence[float] | None:
    """Returns weights for a mean, or None where they are equal and the plain mean will do."""
    return None if weights is None or len(set(weights)) == 1 else [float(weight) for weight in weights]


def _metrics_of(module: LightningModule, chain: LayerChain) -> dict[str, Metric]:
    inside = {id(part) for layer in chain.layers for part in layer.modules()}
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric) and id(part) not in inside}


def _attribute_of(module: LightningModule, metric: Metric, name: str) -> str:
    for attribute, part in module.named_modules():
        if part is metric:
            return str(attribute)
    raise ValueError(
        f"The metric logged as {name!r} is not an attribute of {type(module).__name__}, so the other ranks cannot find "
        "it. Create it in __init__ as self.<name> = ..."
    )


def _snapshot(metric: Metric) -> dict[str, Any]:
    """Returns what tells later which parts of a metric's state are new."""
    state = {key: len(value) for key, value in metric.metric_state.items() if isinstance(value, list)}
    return {"_update_count": metric.update_count, **state}


def _changes(metric: Metric, before: dict[str, Any]) -> dict[str, Any]:
    """Returns a metric's state; of states that are lists, only what was appended, with the length before."""
    changes: dict[str, Any] = {"_update_count": metric._update_count}
    for key, value in metric.metric_state.items():
        if isinstance(value, list):
            start = before[key] if len(value) >= before[key] else 0
            changes[key] = (start, [entry.detach().cpu() for entry in value[start:]])
        else:
            changes[key] = value.detach().cpu()
    return changes


def _apply(metric: Metric, changes: dict[str, Any]) -> None:
    """Gives a metric the state that it has on the last stage."""
    for key, value in changes.items():
        if isinstance(value, tuple):
            start, entries = value
            value = [*getattr(metric, key)[:start], *(entry.to(metric.device) for entry in entries)]
        elif isinstance(value, Tensor):
            value = value.to(metric.device)
        setattr(metric, key, value)
    metric._computed = None
