"""Every private name of Lightning that the package depends on, in one place; importing it is the check."""

import os
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available, _sync_ddp_if_available
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, WeightAveraging
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary.model_summary import _format_summary_table as format_summary_table
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

__all__ = [
    "ScriptLauncher",
    "WrappingCheckpointIO",
    "collect_rng_states",
    "format_summary_table",
    "gather_over",
    "init_dist_connection",
    "set_rng_states",
    "signal_connector_of",
    "sync_over",
]

_METHODS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (ModelSummary, ("_summary",)),
    (Precision, ("_after_closure",)),
    (Summary, ("_get_summary_data",)),
    (_SignalConnector, ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")),
    (_TrainingEpochLoop, ("_broadcast_sigterm_tensor",)),
    (WeightAveraging, ("_copy_average_to_current", "_swap_models")),
)

for _class, _names in _METHODS:
    for _name in _names:
        if not hasattr(_class, _name):
            raise ImportError(
                f"{_class.__module__}.{_class.__name__} has no {_name}, which lightning_dynmo depends on. Install "
                "lightning 2.6."
            )


def sync_over(group: ProcessGroup, tensor: Tensor, reduce_op: Any) -> Tensor:
    """Reduces a tensor over the ranks of a group."""
    return _sync_ddp_if_available(tensor, group, reduce_op)


def gather_over(group: ProcessGroup, tensor: Tensor, sync_grads: bool) -> Tensor:
    """Gathers a tensor from the ranks of a group, in a new first dim."""
    return _all_gather_ddp_if_available(tensor, group, sync_grads)


def signal_connector_of(trainer: Trainer) -> Any:
    """Returns the part of a Trainer that handles signals."""
    return trainer._signal_connector


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device, whose observer lets ranks say why a peer died."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            _PatientObserver(child_processes=self.procs, main_pid=os.getpid()).start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class _PatientObserver(_ChildProcessObserver):
    """Kills all processes some seconds after it has found one that failed, rather than at once."""

    @override
    def _terminate_all(self) -> None:
        time.sleep(5.0)
        super()._terminate_all()
