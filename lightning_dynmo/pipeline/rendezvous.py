"""A store of its own for each attempt of a run that torchrun restarts."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed.rendezvous import rendezvous

from lightning_dynmo._torch import PrefixStore, Store

_POLL_S = 0.02


def store_of_this_attempt(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """Returns a new store under torchrun, where torch would use one that is full of what died ranks have left.

    torchrun's agent keeps one store over all restarts: the addresses of processes that are gone, which gloo would try
    to reach, and the text of the failure that was the reason.

    Returns:
        None where another launcher has started the processes, since stores are new there anyway.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    return fresh_store(store, rank, world_size, timeout)


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Returns, on all ranks alike, a part of the store that no earlier processes have used.

    The first rank alone chooses its name, at random. What other ranks find in the store may be older than they, so each
    asks under a random name of its own, which only a living first rank can answer.

    Args:
        store: Shared by all ranks, and by processes of the same ranks that are gone.
        rank: This process.
        world_size: Number of processes.
        timeout: Longest wait for other ranks.

    Raises:
        RuntimeError: If not all ranks come.
    """
    store, mine = PrefixStore("lightning_dynmo/attempts", store), uuid.uuid4().hex
    if rank:
        store.set(f"asks/{rank}", mine)
        store.wait([f"answer/{mine}"], timeout)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"{name}/{rank}", "")
        return PrefixStore(name, store)
    deadline, absent = time.monotonic() + timeout.total_seconds(), list(range(1, world_size))
    while absent := [other for other in absent if not store.check([f"{mine}/{other}"])]:
        for other in absent:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", mine)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Ranks {absent} have not started within {timeout.total_seconds():.0f} s. Look for their errors, or "
                "give DynMoStrategy a longer timeout."
            )
        time.sleep(_POLL_S)
    return PrefixStore(mine, store)
