"""Pipeline parallelism on torch.distributed: takes a chain of modules and a callable, knows nothing of Lightning."""

from lightning_dynmo.pipeline.checkpoint import (
    RenamedState,
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    load_state_dict,
    owned_optimizer_state,
    owned_state_dict,
    with_keys_of,
    with_plain_keys,
)
from lightning_dynmo.pipeline.exchange import Profile
from lightning_dynmo.pipeline.failures import FailureBoard, PipelineError
from lightning_dynmo.pipeline.folders import StoredState, is_folder, load_folder, save_folder
from lightning_dynmo.pipeline.gradients import GradientWindow, clip_grad_norm, clip_grad_value
from lightning_dynmo.pipeline.groups import PipelineGroups, create_groups
from lightning_dynmo.pipeline.microbatches import (
    Inputs,
    batch_size_of,
    choose_num_microbatches,
    merge_outputs,
    split_batch,
)
from lightning_dynmo.pipeline.migration import Migration
from lightning_dynmo.pipeline.pruning import GlobalPruning, SparseExecution, check_execution
from lightning_dynmo.pipeline.rebalancing import Rebalance
from lightning_dynmo.pipeline.remote_gradients import remote_gradients
from lightning_dynmo.pipeline.rendezvous import store_of_this_attempt
from lightning_dynmo.pipeline.runtime import PipelineRuntime
from lightning_dynmo.pipeline.schedules import (
    SCHEDULES,
    check_num_microbatches,
    check_stages_per_rank,
    find_schedule,
    nearest_num_microbatches,
    simulated_order,
)
from lightning_dynmo.pipeline.selection import select_largest, select_largest_by_gathering

__all__ = [
    "SCHEDULES",
    "FailureBoard",
    "GlobalPruning",
    "GradientWindow",
    "Inputs",
    "Migration",
    "PipelineError",
    "PipelineGroups",
    "PipelineRuntime",
    "Profile",
    "Rebalance",
    "RenamedState",
    "SparseExecution",
    "StoredState",
    "batch_size_of",
    "check_execution",
    "check_num_microbatches",
    "check_stages_per_rank",
    "choose_num_microbatches",
    "clip_grad_norm",
    "clip_grad_value",
    "create_groups",
    "find_schedule",
    "gather_optimizer_state",
    "gather_state_dict",
    "is_folder",
    "load_folder",
    "load_optimizer_state",
    "load_state_dict",
    "merge_outputs",
    "nearest_num_microbatches",
    "owned_optimizer_state",
    "owned_state_dict",
    "remote_gradients",
    "save_folder",
    "select_largest",
    "select_largest_by_gathering",
    "simulated_order",
    "split_batch",
    "store_of_this_attempt",
    "with_keys_of",
    "with_plain_keys",
]
