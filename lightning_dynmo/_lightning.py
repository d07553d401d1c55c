"""Every private name of Lightning that the package depends on, in one place; importing it is the check."""

from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher

__all__ = [
    "ScriptLauncher",
    "collect_rng_states",
    "init_dist_connection",
    "optimizers_to_device",
    "set_rng_states",
]
