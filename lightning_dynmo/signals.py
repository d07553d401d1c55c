"""Signals that end or requeue a run, heeded by all ranks at the same border between batches.

[Note: why signals wait]
Lightning talks to the other ranks inside its handlers. A signal reaches each rank at another point of the schedule, or
one rank alone, so that ranks of a pipeline would then wait for each other's tensors and handlers at the same time, for
ever. Here a handler only takes a note. Before each batch the ranks compare their notes, and do together what Lightning
would have done: raise `SIGTERMException`, or save and requeue. In training this is before the batch is fetched, where
Lightning asks for SIGTERM too, so that a checkpoint counts no batch as read that was not trained on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dynmo._lightning import signal_connector_of
from lightning_dynmo.pipeline import FailureBoard

_PATIENCE_S = 15.0
"""For the batch that runs when SIGTERM comes: launchers kill after 30 s, and a checkpoint may have to be saved."""
_LOOK_S = 0.25
_REQUEUE, _TERMINATE = 1, 2


class Signals:
    """Stands in for Lightning's handlers of SIGTERM and of Slurm's requeue signal. See [Note: why signals wait].

    Args:
        trainer: Whose handlers they are; it installs them just before its first batch.
        failures: Where it is reported if the ranks do not come to the next batch in time.
        vote: Returns the small numbers that all ranks have passed, in order of their ranks; told what they are for.
    """

    def __init__(self, trainer: Trainer, failures: FailureBoard, vote: Callable[[int, str], list[int]]) -> None:
        self._trainer = trainer
        self._connector = signal_connector_of(trainer)
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._failures = failures
        self._vote = vote
        self._requeue: int | None = None
        self._terminated_at: float | None = None
        self._over = threading.Event()

    def take(self) -> None:
        """Puts these handlers in place of those that Lightning would install next."""
        self._connector._sigterm_notifier_fn = self._on_sigterm
        self._connector._slurm_sigusr_handler_fn = self._on_requeue
        self._epoch_loop._broadcast_sigterm_tensor = self._heed_in_training
        threading.Thread(target=self._watch, name="lightning_dynmo signals", daemon=True).start()

    def release(self) -> None:
        """Gives Lightning its handlers back."""
        self._over.set()
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            self._connector.__dict__.pop(name, None)
        self._epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def heed(self, where: str) -> None:
        """Does what the signals ask for that any rank has received; all ranks call this at the same point.

        Args:
            where: What comes next, such as ``"validation_step of batch 12"``.

        Raises:
            SIGTERMException: If a rank has received SIGTERM. With its text as the exit code, Python ends with status 1.
        """
        requeue = self._requeue  # read once, since a signal may come at any time
        wish = _REQUEUE * (requeue is not None) | _TERMINATE * (self._terminated_at is not None)
        wishes = self._vote(wish, where)
        if any(wish & _REQUEUE for wish in wishes):
            self._requeue = None
            type(self._connector)._slurm_sigusr_handler_fn(self._connector, requeue or signal.SIGUSR1, None)
        terminated = [str(rank) for rank, wish in enumerate(wishes) if wish & _TERMINATE]
        if terminated:
            self._over.set()
            self._connector.received_sigterm = True
            ranks = f"rank{'s' * (len(terminated) > 1)} {', '.join(terminated)}"
            raise SIGTERMException(f"{ranks} received SIGTERM; all ranks ended together before {where}.")

    def _heed_in_training(self) -> None:
        self.heed(f"training_step of batch {self._epoch_loop.batch_progress.total.ready}")

    def _on_sigterm(self, signum: int, _: Any) -> None:
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
            if self._trainer.strategy.launcher is not None:
                self._trainer.strategy.launcher.kill(signum)  # passes it to the processes that rank 0 has started

    def _on_requeue(self, signum: int, _: Any) -> None:
        self._requeue = signum

    def _watch(self) -> None:
        """Ends the run if the ranks do not come to the next batch; in a thread, since handlers must take no locks."""
        while not self._over.wait(_LOOK_S):
            if self._terminated_at is not None and time.monotonic() - self._terminated_at > _PATIENCE_S:
                self._failures.publish(
                    f"rank {self._failures.rank} received SIGTERM, and the ranks did not come to the next batch within "
                    f"{_PATIENCE_S:.0f} s, at which all would have ended together."
                )
                return
