"""One failure ends the run everywhere, with the text of the rank that failed.

A rank that fails writes its text into the key-value store of the process group, first writer wins, and cuts its
connections. Peers that wait for it get a connection error within milliseconds, find the text in the store, raise it as
their own and cut their connections in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from lightning_dynmo.pipeline._torch import Store

_LOST_CONNECTION = ("connection", "socket", "gloo", "nccl", "broken pipe", "timed out")


class PipelineError(RuntimeError):
    """Training failed on one rank of the pipeline; every rank raises this with the same text."""


class FailureBoard:
    """Where ranks publish why they failed and read why a peer did.

    Args:
        store: Key-value store that all ranks reach.
        rank: Global rank of this process.
        world_size: Number of processes.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turns any exception of the body into a `PipelineError` that carries the first failing rank's text.

        Args:
            doing: What the body does, for the text, such as ``"training step 12"``.

        Raises:
            PipelineError: Whatever the body raised; the exception itself is its ``__cause__``.
        """
        try:
            yield
        except Exception as error:
            failure = _find_pipeline_error(error)
            if failure is not None:
                text = str(failure)
            elif _is_lost_connection(error):
                text = self.read(timeout_s=2.0) or (
                    f"rank {self._rank} lost its connection to another rank during {doing}, and no rank said why. "
                    "A process was probably killed; look for 'out of memory' in the system log, or at the other "
                    f"processes' output. The connection reported: {error}"
                )
            else:
                text = f"rank {self._rank}, {doing}: {type(error).__name__}: {error}"
            text = self.publish(text)
            cause = failure.__cause__ if failure is not None else error
            raise PipelineError(text) from cause

    def publish(self, text: str) -> str:
        """Publishes why this rank failed and returns the text that counts: the first one published by any rank."""
        try:
            return str(self._store.compare_set("failure", "", text).decode()) or text
        except Exception:  # the store's host is gone: this rank's own text is all there is
            return text

    def read(self, timeout_s: float) -> str | None:
        """Waits for a published failure and returns its text, or None where none came within `timeout_s` seconds."""
        try:
            self._store.wait(["failure"], timedelta(seconds=timeout_s))
            return str(self._store.get("failure").decode())
        except Exception:
            return None

    def settle(self, timeout_s: float = 3.0) -> None:
        """Waits until every rank has come here, so that no rank takes the store down before its peers have read it."""
        deadline = time.monotonic() + timeout_s
        try:
            seen = self._store.add("settled", 1)
            while seen < self._world_size and time.monotonic() < deadline:
                time.sleep(0.02)
                seen = self._store.add("settled", 0)
        except Exception:  # the store went away with the last peer that hosted it
            return


def _find_pipeline_error(error: BaseException | None) -> PipelineError | None:
    """Returns the `PipelineError` in the chain of causes, for torch wraps what a stage's module raises."""
    while error is not None:
        if isinstance(error, PipelineError):
            return error
        error = error.__cause__
    return None


def _is_lost_connection(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_CONNECTION)
