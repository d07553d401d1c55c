"""Checkpoints of a pipeline, as Lightning saves and loads them: one file, or a folder to which every rank writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import CheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dynmo._lightning import WrappingCheckpointIO
from lightning_dynmo.atomic import discard
from lightning_dynmo.divided import DividedModel
from lightning_dynmo.ownership import enumerate_names
from lightning_dynmo.pipeline import (
    PipelineRuntime,
    StoredState,
    gather_optimizer_state,
    gather_state_dict,
    is_folder,
    load_folder,
    load_optimizer_state,
    load_state_dict,
    owned_optimizer_state,
    owned_state_dict,
    save_folder,
    with_keys_of,
    with_plain_keys,
)
from lightning_dynmo.processes import PipelineProcesses
from lightning_dynmo.saving import AtomicCheckpointIO, check_folder_path, local_path
from lightning_dynmo.steps import PipelineSteps

CHECKPOINT_KEY = "lightning_dynmo"


class PipelineCheckpoints(PipelineProcesses):
    """Saves and loads what one device would have, whichever ranks own the layers.

    Attributes:
        num_microbatches: The strategy's setting.
        save_distributed_checkpoint: Whether checkpoints are folders.
    """

    num_microbatches: int | Literal["auto"] = "auto"
    save_distributed_checkpoint: bool = False
    _runtime: PipelineRuntime | None = None
    _steps: PipelineSteps | None = None
    _microbatches: int | None = None
    _saved: Mapping[str, Any] = MappingProxyType({})
    _to_load: Sequence[tuple[Mapping[str, Any], bool]] = ()
    _division: DividedModel | None = None

    @property
    def division(self) -> DividedModel:
        """How the module comes to the ranks in this run."""
        if self._division is None:
            assert self.lightning_module is not None
            self._division = DividedModel(self.lightning_module)
        return self._division

    @property
    def runtime(self) -> PipelineRuntime:
        """The pipeline of this rank; callbacks profile and rebalance through it."""
        if self._runtime is None:
            raise RuntimeError("The pipeline exists only while the Trainer runs; use it in hooks after setup.")
        return self._runtime

    @property
    def steps(self) -> PipelineSteps:
        """Runs this rank's part of each step."""
        if self._steps is None:
            raise RuntimeError("Steps can run only while the Trainer runs.")
        return self._steps

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # keeps the one it has, if it has one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns on rank 0 the state of the whole model, elsewhere an empty one; for folders, that of this rank."""
        if self._runtime is None:
            whole = with_plain_keys(super().lightning_module_state_dict())
            return {} if self.save_distributed_checkpoint and not self.is_global_zero else whole
        with self._together("gathering of the model's state") as groups:
            if self.save_distributed_checkpoint:
                return owned_state_dict(self.runtime.chain, groups)
            if groups.dp_rank:  # the first replica has the same
                return {}
            return gather_state_dict(self.runtime.chain, self.runtime.owners, groups)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns on rank 0 the optimizer's state for the whole model, elsewhere an empty one; for folders, its own."""
        if self._runtime is None:
            return super().optimizer_state(optimizer)
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self.save_distributed_checkpoint:
            return owned_optimizer_state(self.runtime.chain, optimizer)
        with self._together("gathering of the optimizer's state") as groups:
            if groups.dp_rank:
                return {}
            return gather_optimizer_state(self.runtime.chain, self.runtime.owners, groups, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        checkpoint[CHECKPOINT_KEY] = self._plan()
        if not self.save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = check_folder_path(self.broadcast(filepath), storage_options)
        assert self.lightning_module is not None
        with self._together("saving of a checkpoint") as groups:
            if groups.dp_rank == 0:  # the other replicas have the same
                save_folder(checkpoint, path, self.lightning_module, self.optimizers, groups)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        path = local_path(filepath)
        if path is None or not path.is_dir():
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:  # a folder, of which a user's CheckpointIO knows nothing
            discard(path)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = local_path(checkpoint_path)
        if path is not None and is_folder(path):
            checkpoint = load_folder(path, weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved = checkpoint.get(CHECKPOINT_KEY, {})
        if self.num_microbatches == "auto":
            self._microbatches = self._saved.get("num_microbatches")
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = with_keys_of(self.lightning_module, checkpoint["state_dict"])
        if isinstance(checkpoint["state_dict"], StoredState) or self.division.is_divided:
            self.load_weights(state, strict)
        else:
            super().load_model_state_dict({**checkpoint, "state_dict": dict(state)}, strict)

    def load_weights(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Loads into each rank's layers their part of a whole model's state, when it is known who owns which layers.

        Args:
            state: Values by key; a mapping that reads them when they are asked for is asked for this rank's only.
            strict: Whether every key must be there, and no other. If not, rank 0 warns of those that differ.
        """
        self._to_load = [*self._to_load, (state, strict)]
        if self._steps is not None:
            self.load_owned_layers()

    def load_owned_layers(self) -> None:
        """Loads into this rank's layers what waits for them."""
        waiting, self._to_load = self._to_load, ()
        for state, strict in waiting:
            with self._together("loading of weights") as groups:
                missing, unexpected = load_state_dict(self.runtime.chain, state, groups, strict=strict)
            for kind, names in (("not loaded, since they were missing", missing), ("unexpected", unexpected)):
                if names:
                    rank_zero_warn(f"{len(names)} weights were {kind}: {enumerate_names(names, 10)}.")

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(self.runtime.chain, optimizer, state)

    def _plan(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the pipeline, in plain types."""
        if self._runtime is None or self._steps is None:
            return dict(self._saved)
        balance, num_microbatches = list(self._runtime.assignment.balance), self.steps.num_microbatches
        return {"balance": balance, "num_microbatches": num_microbatches, "seed": self._runtime.seed}
