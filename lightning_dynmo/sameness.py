"""All ranks of a pipeline must read the same batches: one state of random numbers at the start, and checks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dynmo._lightning import collect_rng_states, set_rng_states
from lightning_dynmo.ownership import LayerChain, shared_buffers
from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.pipeline.microbatches import leaves_of


def share_random_state(groups: PipelineGroups) -> int:
    """Gives every rank the random states of its pipeline's first rank, from which samplers draw.

    With ``seed_everything`` the states are equal already. Without, each process would shuffle in its own way.

    Returns:
        The seed of the first rank of all, the same everywhere.
    """
    states, seed = groups.share_from(0, (collect_rng_states(include_cuda=False), torch.initial_seed()))
    set_rng_states(states)
    return int(groups.gather_replicas(seed)[0])


def check_same_batch(batch: Any, groups: PipelineGroups) -> None:
    """Checks that every rank of the pipeline has read the same batch.

    Raises:
        ValueError: If not, on every rank.
    """
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.shape, leaf.dtype)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            digest.update(repr((leaf.shape, leaf.dtype)).encode() + leaf.tobytes())
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


def check_same_form(batch: Any, where: str, groups: PipelineGroups, measures: bool = False) -> None:
    """Checks that every rank of the pipeline is about to run a batch of the same form; cheap enough for every step.

    Ranks that disagree on shapes or on the number of microbatches misread each other's messages, or wait for ever.

    Args:
        batch: What this rank is about to run.
        where: What comes next, such as ``"training_step of batch 12"``.
        groups: Process groups of this rank.
        measures: Whether the batch is to be measured.

    Raises:
        ValueError: If the forms differ, on every rank.
        RuntimeError: If only some ranks are to measure the batch, on every rank.
    """
    form = form_of(batch)
    digest = int.from_bytes(hashlib.blake2b(form.encode(), digest_size=7).digest(), "big")
    extremes = torch.tensor([digest, -digest, measures, -measures])
    with groups.guard(where):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=groups.control)
    largest, least, any_measures, all_measure = (extremes * torch.tensor([1, -1, 1, -1])).tolist()
    if any_measures != all_measure:
        asked = [groups.peer(rank) for rank, other in enumerate(groups.gather(measures)) if other]
        raise RuntimeError(
            f"Only some ranks of the pipeline are to measure {where}, {asked}, so the others would wait for ever. Let "
            "callbacks ask for measurements, and return from apply(), the same on every rank."
        )
    if largest != least:
        told = "; ".join(f"rank {groups.peer(rank)}: {other}" for rank, other in enumerate(groups.gather(form)))
        raise ValueError(
            f"The ranks of the pipeline read batches of different form in {where} ({told}), but all stages of a "
            "pipeline must see the same samples. Remove rank-dependent samplers, collate functions and shuffling."
        )


def form_of(batch: Any) -> str:
    """Returns the shapes and types of a batch's tensors, and the types of what else is in it."""
    parts = []
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            parts.append(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}")
        else:
            parts.append(type(leaf).__name__)
    return ", ".join(parts)


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


class SharedBuffers:
    """Buffers that layers on several ranks share, as they are before a batch.

    Each rank has its own copy, which is right for tables, and wrong for what layers change.

    Args:
        chain: All layers.
        owners: The `pp_rank` that owns each layer.
    """

    def __init__(self, chain: LayerChain, owners: Sequence[int]) -> None:
        self._before = [
            (f"{name} of layers {', '.join(map(str, users))}", buffer, buffer.clone())
            for name, buffer, users in shared_buffers(chain.root, chain.layers)
            if len({owners[layer] for layer in users}) > 1
        ]

    def check(self, groups: PipelineGroups) -> None:
        """Checks that no layer has changed one.

        Raises:
            ValueError: If one has, on every rank.
        """
        if not self._before:
            return
        changed = [name for name, buffer, values in self._before if not torch.equal(buffer, values)]
        told = sorted({name for part in groups.gather(changed) for name in part})
        if told:
            raise ValueError(
                f"Layers change a buffer that they share with layers on other ranks, where nobody would see it: "
                f"{'; '.join(told)}. Give each layer a module of its own, such as its own BatchNorm."
            )
