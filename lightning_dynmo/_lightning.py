"""Every private name of Lightning that the package depends on, in one place; importing it is the check."""

import os
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

__all__ = [
    "ScriptLauncher",
    "WrappingCheckpointIO",
    "collect_rng_states",
    "init_dist_connection",
    "set_rng_states",
]


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
