"""Every private name of torch that the package depends on, in one place.

Importing this module is the check: where a torch release has moved a name, the import fails here and says what is
missing, rather than in the middle of a training run.
"""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store
from torch.distributed.pipelining import PipelineStage

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "PipelineStage",
    "PrefixStore",
    "Store",
    "TCPStore",
    "abort_process_groups",
    "default_store",
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


def default_store() -> Store:
    """Returns the key-value store through which the default process group was set up."""
    return _get_default_store()


def abort_process_groups() -> None:
    """Aborts what the process groups have in flight where the backend can (NCCL); gloo ignores it."""
    _abort_process_group()
