"""Pipeline parallelism on torch.distributed: takes a chain of modules and a callable, knows nothing of Lightning."""

from lightning_dynmo.pipeline.checkpoint import (
    gather_optimizer_state,
    gather_state_dict,
    load_optimizer_state,
    with_keys_of,
    with_plain_keys,
)
from lightning_dynmo.pipeline.exchange import Profile
from lightning_dynmo.pipeline.failures import FailureBoard, PipelineError
from lightning_dynmo.pipeline.gradients import GradientWindow, clip_grad_norm
from lightning_dynmo.pipeline.groups import PipelineGroups, create_groups
from lightning_dynmo.pipeline.microbatches import (
    Inputs,
    batch_size_of,
    choose_num_microbatches,
    merge_outputs,
    split_batch,
)
from lightning_dynmo.pipeline.migration import Migration
from lightning_dynmo.pipeline.runtime import PipelineRuntime, Rebalance
from lightning_dynmo.pipeline.schedules import (
    SCHEDULES,
    check_num_microbatches,
    check_stages_per_rank,
    find_schedule,
    nearest_num_microbatches,
)

__all__ = [
    "SCHEDULES",
    "FailureBoard",
    "GradientWindow",
    "Inputs",
    "Migration",
    "PipelineError",
    "PipelineGroups",
    "PipelineRuntime",
    "Profile",
    "Rebalance",
    "batch_size_of",
    "check_num_microbatches",
    "check_stages_per_rank",
    "choose_num_microbatches",
    "clip_grad_norm",
    "create_groups",
    "find_schedule",
    "gather_optimizer_state",
    "gather_state_dict",
    "load_optimizer_state",
    "merge_outputs",
    "nearest_num_microbatches",
    "split_batch",
    "with_keys_of",
    "with_plain_keys",
]
