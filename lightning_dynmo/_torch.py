"""Every private name of torch that the package depends on, in one place.

Importing this module is the check: where a torch release has moved a name, the import fails here and says what is
missing, rather than in the middle of a training run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

try:
    from torch._C import _disabled_torch_function_impl as disabled_torch_function
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
    from torch._C._functorch import peek_interpreter_stack
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store
    from torch.distributed.pipelining.schedules import _Action as Action
    from torch.distributed.pipelining.schedules import _add_send_recv
    from torch.distributed.pipelining.schedules import _ComputationType as ActionType
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import (
        TreeSpec,
        keystr,
        tree_flatten,
        tree_flatten_with_path,
        tree_leaves,
        tree_map_only,
        tree_unflatten,
    )
except ImportError as error:
    raise ImportError(
        f"This release of torch lacks a name that lightning_dynmo builds on ({error}). Install torch>=2.11,<2.14."
    ) from error

__all__ = [
    "Action",
    "ActionType",
    "FakeTensor",
    "FakeTensorMode",
    "OptimizedModule",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "TreeSpec",
    "abort_process_groups",
    "add_messages",
    "compute_order",
    "default_store",
    "disabled_torch_function",
    "in_transform",
    "keystr",
    "make_wrapper_subclass",
    "named_range",
    "replace_data",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]


make_wrapper_subclass = Tensor._make_wrapper_subclass
if not hasattr(profiler, "_is_profiler_enabled"):
    raise ImportError(
        "torch.autograd.profiler has no _is_profiler_enabled; lightning_dynmo works with torch>=2.11,<2.14. Install a "
        "torch release in that range."
    )


def named_range(*words: object) -> AbstractContextManager[Any]:
    """Returns a context that shows in a profile under these words; one that does nothing where no profiler runs."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(" ".join(map(str, words)))


def in_transform() -> bool:
    """Returns whether a transform of ``torch.func`` runs what is called now."""
    return peek_interpreter_stack() is not None


def replace_data(tensor: Tensor, data: Tensor) -> None:
    """Gives a parameter or buffer other data, of any shape.

    A graph that somebody keeps alive, such as that of the last loss, keeps the node alive that accumulates the
    parameter's gradient, and that expects the old shape for ever. torch lets go of it where the dtype changes.
    """
    if tensor.requires_grad and tensor.shape != data.shape:
        tensor.data = torch.empty(0, dtype=torch.float16 if tensor.dtype != torch.float16 else torch.float32)
    tensor.data = data


def default_store() -> Store:
    """Returns the key-value store through which the default process group was set up."""
    return _get_default_store()


def abort_process_groups() -> None:
    """Aborts what the process groups have in flight where the backend can (NCCL); gloo ignores it."""
    _abort_process_group()


def compute_order(schedule: type[Any], num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Order:
    """Returns what each rank computes under one of torch's schedules, in order and without messages.

    torch works the order out when a schedule is made, for which the stages need to say no more than how many there are.

    Raises:
        ValueError: If the schedule cannot run so many microbatches.
    """
    stages = [
        SimpleNamespace(
            num_stages=num_ranks * stages_per_rank, stage_index=0, group_size=num_ranks, group_rank=0, submod=None
        )
        for _ in range(stages_per_rank)
    ]
    single = hasattr(schedule, "_get_pipeline_order")
    made: Any = schedule(stages[0] if single else stages, num_microbatches)
    return {
        rank: [part for action in actions if action is not None for part in action.sub_actions or (action,)]
        for rank, actions in made.pipeline_order.items()
    }


def add_messages(order: Order, placement: Sequence[int]) -> Order:
    """Adds to what ranks compute when they send and receive, so that no two ranks ever wait for each other.

    Args:
        order: What each rank computes.
        placement: The rank of each stage.
    """
    actions = {rank: list(entries) for rank, entries in order.items()}
    return dict(_add_send_recv(actions, stage_to_rank=lambda stage: placement[stage], num_stages=len(placement)))


Order = dict[int, list[Action]]
