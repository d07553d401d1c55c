"""One failure ends the run everywhere, with the text of the rank that failed.

[Note: how a failure travels]
A rank that fails writes its text into the key-value store of the process group, first writer wins, and then cuts its
connections; see `PipelineGroups.fail`. Peers that wait for it get a connection error within milliseconds, find the text
in the store, raise it as their own and cut their connections in turn. A thread on every rank watches for the text as
well, for ranks that wait for a healthy peer. A rank that was killed leaves no text: those that miss it call the roll,
and the ranks that do not answer are named.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from contextlib import suppress

import torch

from lightning_dynmo._torch import Store

_LOST_CONNECTION = ("gloo/", "nccl", "connection closed", "connection reset", "broken pipe", "socket")
_NO_MEMORY = re.compile(r"\[enforce fail[^\n]*can't allocate memory")
_POLL_S = 0.02


class PipelineError(RuntimeError):
    """Training failed on one rank of the pipeline; every rank raises this with the same text."""


class FailureBoard:
    """Where ranks publish why they failed, read why a peer did, and wait for each other before they leave.

    Nothing here raises: a store that cannot be reached is one more sign of the failure that is being told.

    Args:
        store: Key-value store that all ranks reach.
        rank: Global rank of this process.
        world_size: Number of processes.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size

    def publish(self, text: str, dead: Collection[int] = ()) -> str:
        """Publishes why the run fails and returns the text that counts: the first one published by any rank.

        Args:
            text: What every rank is to raise.
            dead: Ranks that nobody needs to wait for.
        """
        try:
            if dead:
                self._store.set("dead", ",".join(map(str, dead)))
            return str(self._store.compare_set("failure", "", text).decode()) or text
        except Exception:  # the store's host is gone: this rank's own text is all there is
            return text

    def read(self) -> str | None:
        """Returns the published text, or None where there is none."""
        with suppress(Exception):
            if self._store.check(["failure"]):
                return str(self._store.get("failure").decode())
        return None

    def meet(self, place: str, timeout_s: float) -> list[int]:
        """Waits until every rank that is not known to be dead has come to this place.

        Args:
            place: Any name.
            timeout_s: Longest wait.

        Returns:
            The ranks that did not come; all others where the store cannot be reached.
        """
        deadline = time.monotonic() + timeout_s
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        try:
            self._store.set(f"{place}/{self.rank}", "")
            dead = self._store.get("dead").decode().split(",") if self._store.check(["dead"]) else []
            absent = [rank for rank in others if str(rank) not in dead]
            while absent := [rank for rank in absent if not self._store.check([f"{place}/{rank}"])]:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
        except Exception:
            return others
        return absent

    def reachable(self) -> bool:
        """Returns whether the store can be reached."""
        try:
            self._store.check(["failure"])
        except Exception:
            return False
        return True


def find_pipeline_error(error: BaseException | None) -> PipelineError | None:
    """Returns the `PipelineError` in the chain of causes, for torch wraps what a stage's module raises."""
    while error is not None:
        if isinstance(error, PipelineError):
            return error
        error = error.__cause__
    return None


def is_lost_connection(error: BaseException) -> bool:
    """Returns whether this may be what a rank gets when the one that it talks to is gone."""
    error = _without_wrapping(error)
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_CONNECTION)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether this is what torch or Python raise where there is no memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.match(str(error)))


def describe(where: str, error: BaseException) -> str:
    """Returns the text of an exception: where it arose, its type, and what it says."""
    error = _without_wrapping(error)
    return f"{where}: {type(error).__name__}: {error}"


def _without_wrapping(error: BaseException) -> BaseException:
    """Returns what torch's schedules have wrapped in an error that prints all tensors of the stage."""
    while error.__cause__ is not None and "failed to run" in str(error).lower():
        error = error.__cause__
    return error
