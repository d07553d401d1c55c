"""Gradual pruning: the smallest weights of the whole model go, a share at a time (paper section 2.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from typing_extensions import override

from lightning_dynmo.callbacks.base import DynamismCallback, layers_of, runtime_of
from lightning_dynmo.nn import SparseLinear, use_dense_states
from lightning_dynmo.ownership import enumerate_names
from lightning_dynmo.pipeline import GlobalPruning, SparseExecution, check_execution
from lightning_dynmo.planning import CubicSparsity, num_kept

DEFAULT_EXCLUDE = ("*router*", "*predictor*", "*.gate.weight")


class GradualPruningCallback(DynamismCallback):
    """Removes the smallest weights of the whole model for good, more of them at each step of a cubic schedule.

    The threshold is one for all layers, so layers whose weights are small lose more: that is what makes a pipeline
    uneven. Each rank finds it without seeing the weights of others; ties go by the order of the model.

    A pruned matrix runs as a dense one with zeros until it has so few entries that compressed rows are faster. Then
    values, gradients and optimizer state of the others are gone from memory as well, and less of it moves between
    ranks. Checkpoints have dense matrices with zeros all the same, as a run on one device would save them. A matrix
    whose ``nn.Linear`` is never called, since a layer reads its weight itself, stays dense. Optimizers that keep
    something of another shape than the weight's, such as Adafactor, begin anew with it after each pruning.

    Args:
        start_step: Optimizer step after which the schedule begins. With `initial_sparsity` 0, nothing is pruned then.
        end_step: Optimizer step after which weights are pruned for the last time.
        every_n_steps: Optimizer steps from one pruning to the next.
        initial_sparsity: Share of the weights that are gone after `start_step`, in ``[0, 1)``.
        final_sparsity: Share that is gone after `end_step`, in ``[0, 1)``.
        include: Patterns of the names of weights to prune, such as ``"*.mlp.*"``, where ``*`` stands for anything.
            They must be weights of an ``nn.Linear``. By default all of these in the layers of the kinds that the chain
            has several of, but in no ``nn.Linear`` at either end: in blocks, and neither in embedding nor head.
        exclude: Patterns of the names of weights not to prune.
        execution: How pruned matrices run. ``"auto"`` times both ways on this machine at each pruning; ``"dense"``
            keeps zeros; ``"csr"`` stores all of them in compressed rows from the first pruning on.
        rebalance_every_n_steps: Rebalance also at every so many optimizer steps; by default after pruning only.

    Raises:
        ValueError: If an argument is out of range, or steps do not fit the interval.
    """

    def __init__(
        self,
        start_step: int = 3000,
        end_step: int = 7000,
        every_n_steps: int = 1000,
        initial_sparsity: float = 0.0,
        final_sparsity: float = 0.9,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = DEFAULT_EXCLUDE,
        execution: SparseExecution = "auto",
        rebalance_every_n_steps: int | None = None,
    ) -> None:
        super().__init__(rebalance_every_n_steps)
        check_execution(execution)
        self.schedule = CubicSparsity(start_step, end_step, every_n_steps, initial_sparsity, final_sparsity)
        self.include = [include] if isinstance(include, str) else include
        self.exclude = [exclude] if isinstance(exclude, str) else exclude
        self.execution = execution
        self._pruning = GlobalPruning({})
        self._sparsity = 0.0
        self._compact: frozenset[str] = frozenset()

    @property
    def sparsity(self) -> float:
        """Share of the weights that the schedule has pruned so far, in ``[0, 1)``."""
        return self._sparsity

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        runtime = runtime_of(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):
                raise ValueError(
                    f"{type(callback).__name__} and {type(self).__name__} do not go together: the average of a weight "
                    "goes on when the weight is pruned, so it would not be sparse. Leave one of them out."
                )
        execution = self._possible_execution(trainer)
        found = prunable_weights(pl_module, layers_of(trainer, pl_module), self.include, self.exclude)
        weights = {name: (index, _as_sparse(linear)) for name, (index, linear) in found.items()}
        chain, groups = (None, None) if runtime is None else (runtime.chain, runtime.groups)
        read = _read_by_others(pl_module)
        matrices = [name for name, (_, linear) in weights.items() if linear in read]
        self._pruning = GlobalPruning(weights, chain, groups, execution, matrices)

    def _possible_execution(self, trainer: Trainer) -> SparseExecution:
        """Returns how pruned weights run, which is dense where something else relies on matrices."""
        relies = ""
        if runtime_of(trainer) is None and trainer.world_size > 1:
            relies = type(trainer.strategy).__name__
        elif any(isinstance(optimizer, torch.optim.Muon) for optimizer in trainer.optimizers):
            relies = "Muon"
        if relies and self.execution == "csr":
            raise ValueError(
                f"Expected an execution that keeps weights as matrices, which {relies} relies on, got 'csr'. Use "
                "execution='auto'."
            )
        return "dense" if relies else self.execution

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        for optimizer in trainer.optimizers:
            use_dense_states(optimizer, pl_module)
        if self._sparsity:
            self._pruning.restore(self._compact, trainer.optimizers)

    @override
    def apply(self, trainer: Trainer, pl_module: LightningModule, step: int) -> bool:
        self._pruning.hold()
        sparsity = self.schedule.sparsity(step)
        if sparsity <= self._sparsity:  # else it is time, or was when nobody could, as before a resumed run began
            return False
        total = self._pruning.num_weights
        kept = num_kept(total, sparsity)
        matrices = self._pruning.prune(kept, trainer.optimizers)
        self._sparsity = sparsity
        self._compact = frozenset(name for name, matrix in matrices.items() if matrix.is_compact)
        densities = [matrix.density for matrix in matrices.values()]
        pl_module.print(
            f"[dynmo] step {step}: {total - kept:,} of {total:,} weights are pruned ({sparsity:.1%}); matrices "
            f"keep {min(densities):.1%} to {max(densities):.1%}; {len(self._compact)} of {len(matrices)} run sparse"
        )
        pl_module.log("dynmo/pruning/sparsity", 1 - kept / total)
        pl_module.log("dynmo/pruning/num_sparse_matrices", float(len(self._compact)))
        return True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pruning.expand(trainer.optimizers)  # not where the model is too large for one rank

    @override
    def steps_until_change(self, step: int) -> float | None:
        return self.schedule.steps_until_pruning(step)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"sparsity": self._sparsity, "compact": sorted(self._compact)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sparsity = state_dict["sparsity"]
        self._compact = frozenset(state_dict["compact"])


def prunable_weights(
    module: nn.Module,
    layers: Sequence[nn.Module],
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
) -> dict[str, tuple[int, nn.Linear]]:
    """Returns the weights that can be pruned, in the order of the model: by name, the layer's index and the module.

    Args:
        module: The model.
        layers: Its chain of layers.
        include: As for `GradualPruningCallback`.
        exclude: As for `GradualPruningCallback`.

    Raises:
        ValueError: If there is none, or a pattern that is no default fits no weight of an ``nn.Linear``.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    holders = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    kinds = [_kind(layer) for layer in layers]
    repeated = {kind for kind, count in Counter(kinds).items() if count > 1} or set(kinds)
    found: dict[str, tuple[int, nn.Linear]] = {}
    users = Counter(id(part) for layer in layers for part in layer.modules())
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        is_end = kind is nn.Linear and index in (0, len(layers) - 1)
        if include is None and (is_end or kind not in repeated):
            continue
        for part in layer.modules():
            if not isinstance(part, nn.Linear) or type(part) not in (nn.Linear, SparseLinear):
                continue
            if "weight" not in part._parameters:  # computed from others, as by weight_norm
                continue
            if holders[id(part.weight)] == users[id(part)] == 1:
                found[names[id(part.weight)]] = (index, part)
    for pattern in [*(include or ()), *(pattern for pattern in exclude if pattern not in DEFAULT_EXCLUDE)]:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(
                f"The pattern {pattern!r} fits no weight of an nn.Linear that one layer alone uses. Those are: "
                f"{enumerate_names(list(found)) or 'none'}."
            )
    chosen = {
        name: entry
        for name, entry in found.items()
        if (include is None or any(fnmatchcase(name, pattern) for pattern in include))
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    if not chosen:
        raise ValueError(
            f"{type(module).__name__} has no weight to prune. Those of nn.Linear modules in its layers can be: "
            f"{enumerate_names(list(found)) or 'none'}, less exclude={list(exclude)}. Name some in include, or use "
            "nn.Linear in place of other modules that hold matrices."
        )
    return chosen


def _read_by_others(module: nn.Module) -> set[nn.Module]:
    """Returns the linear modules whose weights torch's own layers read themselves, in evaluation."""
    encoders = [part for part in module.modules() if isinstance(part, nn.TransformerEncoderLayer)]
    return {linear for encoder in encoders for linear in (encoder.linear1, encoder.linear2)}


def _kind(layer: nn.Module) -> type[nn.Module]:
    layer = getattr(layer, "_orig_mod", layer)  # torch.compile's wrapper
    return nn.Linear if isinstance(layer, SparseLinear) else type(layer)


def _as_sparse(linear: nn.Linear) -> SparseLinear:
    return linear if isinstance(linear, SparseLinear) else SparseLinear.from_linear(linear)
