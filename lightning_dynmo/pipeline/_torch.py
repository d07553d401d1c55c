"""Every private name of torch that the package depends on, in one place.

Importing this module is the check: where a torch release has moved a name, the import fails here and says what is
missing, rather than in the middle of a training run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch._C import _disabled_torch_function_impl as disabled_torch_function
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import profiler
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store
from torch.distributed.pipelining import PipelineStage

__all__ = [
    "FakeTensorMode",
    "PipelineStage",
    "PrefixStore",
    "Store",
    "TCPStore",
    "abort_process_groups",
    "default_store",
    "disabled_torch_function",
    "make_wrapper_subclass",
    "named_range",
]

_STAGE_METHODS = (
    "_prepare_backward_infra",
    "_prepare_forward_infra",
    "backward_one_chunk",
    "clear_runtime_states",
    "forward_one_chunk",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
)

for _name in _STAGE_METHODS:
    if not hasattr(PipelineStage, _name):
        raise ImportError(
            f"torch.distributed.pipelining.PipelineStage has no {_name}; lightning_dynmo works with torch>=2.11,<2.14. "
            "Install a torch release in that range."
        )


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


def default_store() -> Store:
    """Returns the key-value store through which the default process group was set up."""
    return _get_default_store()


def abort_process_groups() -> None:
    """Aborts what the process groups have in flight where the backend can (NCCL); gloo ignores it."""
    _abort_process_group()
