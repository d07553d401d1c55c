"""All ranks of a pipeline must read the same batches: one state of random numbers at the start, and a check."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_dynmo._lightning import collect_rng_states, set_rng_states
from lightning_dynmo.pipeline import PipelineGroups


def share_random_state(groups: PipelineGroups) -> int:
    """Gives every rank the first rank's random states, from which samplers draw, and returns its seed.

    With ``seed_everything`` the states are equal already. Without, each process would shuffle in its own way.
    """
    states, seed = groups.share_from(0, (collect_rng_states(include_cuda=False), torch.initial_seed()))
    set_rng_states(states)
    return int(seed)


def check_same_batch(batch: Any, groups: PipelineGroups) -> None:
    """Checks that every rank of the pipeline has read the same batch.

    Raises:
        ValueError: If not, on every rank.
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.shape, leaf.dtype)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:  # other objects may differ in nothing but their address
            plain = isinstance(leaf, str | bytes | int | float | bool | None)
            digest.update(repr(leaf if plain else type(leaf)).encode())
    digests = groups.gather(digest.hexdigest())
    strange = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if strange:
        raise ValueError(
            f"The ranks of the pipeline read different batches (ranks {strange} differ from rank 0), but all stages of "
            "a pipeline must see the same samples. Remove rank-dependent samplers and shuffling, or draw random "
            "numbers for the data from a generator with a fixed seed."
        )


def check_same_random_state(groups: PipelineGroups) -> None:
    """Checks that every rank has drawn the same random numbers while it created the model.

    Raises:
        ValueError: If not, on every rank.
    """
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).hexdigest()
    digests = groups.gather(digest)
    strange = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if strange:
        raise ValueError(
            f"The ranks of the pipeline drew different random numbers in configure_model (ranks {strange} differ from "
            "rank 0), so their layers would not belong to one model. Create the same modules in the same order on "
            "every rank; each keeps its own layers only."
        )
