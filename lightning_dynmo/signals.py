"""Signals that end or requeue a run, heeded by all ranks at the same border between steps.

[Note: why signals wait]
Lightning talks to the other ranks inside its handlers. A signal reaches each rank at another point of the schedule, or
one rank alone, so that ranks of a pipeline would then wait for each other's tensors and handlers at the same time, for
ever. Here a handler only takes a note. Before the next step, and at the start of each later one, the ranks compare
their notes, and do together what Lightning would have done: raise `SIGTERMException`, or save and requeue.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dynmo._lightning import signal_connector_of
from lightning_dynmo.pipeline import FailureBoard

_PATIENCE_S = 15.0
"""For the step that runs when SIGTERM comes: launchers kill after 30 s, and a checkpoint may have to be saved."""
_LOOK_S = 0.25


class Signals:
    """Stands in for Lightning's handlers of SIGTERM and of Slurm's requeue signal. See [Note: why signals wait].

    Args:
        trainer: Whose handlers they are; it installs them just before its first step.
        failures: Where a step that does not end in time is reported.
    """

    def __init__(self, trainer: Trainer, failures: FailureBoard) -> None:
        self._connector = signal_connector_of(trainer)
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._trainer = trainer
        self._failures = failures
        self._terminated_at: float | None = None
        self._requeue: int | None = None
        self._over = threading.Event()

    @property
    def terminated(self) -> bool:
        """Whether this rank has received SIGTERM."""
        return self._terminated_at is not None

    @property
    def requeue(self) -> bool:
        """Whether this rank has received the signal to save and requeue since `heed`."""
        return self._requeue is not None

    def take(self) -> None:
        """Puts these handlers in place of those that Lightning would install next."""
        self._connector._sigterm_notifier_fn = self._on_sigterm
        self._connector._slurm_sigusr_handler_fn = self._on_requeue
        # Asks of each batch, over the devices, whether the first rank has received SIGTERM; `heed` knows already.
        self._epoch_loop._broadcast_sigterm_tensor = _do_nothing
        threading.Thread(target=self._watch, name="lightning_dynmo signals", daemon=True).start()

    def release(self) -> None:
        """Gives Lightning its handlers back."""
        self._over.set()
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            self._connector.__dict__.pop(name, None)
        self._epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def heed(self, terminated: list[int], requeue: bool, where: str) -> None:
        """Does what the signals ask for; all ranks call this at the same point, with the same arguments.

        Args:
            terminated: Ranks that have received SIGTERM.
            requeue: Whether any rank has received the signal to save and requeue.
            where: What comes next, such as ``"training_step of batch 12"``.

        Raises:
            SIGTERMException: If a rank has received SIGTERM. With its text as the exit code, Python ends with status 1.
        """
        if requeue:
            signum, self._requeue = self._requeue or signal.SIGUSR1, None
            type(self._connector)._slurm_sigusr_handler_fn(self._connector, signum, None)
        if terminated:
            self._over.set()
            self._connector.received_sigterm = True
            ranks = f"rank{'s' * (len(terminated) > 1)} {', '.join(map(str, terminated))}"
            raise SIGTERMException(f"{ranks} received SIGTERM; all ranks ended together before {where}.")

    def _on_sigterm(self, signum: int, _: Any) -> None:
        if not self.terminated:
            self._terminated_at = time.monotonic()
            if self._trainer.strategy.launcher is not None:
                self._trainer.strategy.launcher.kill(signum)  # passes it to the processes that rank 0 has started

    def _on_requeue(self, signum: int, _: Any) -> None:
        self._requeue = signum

    def _watch(self) -> None:
        """Ends the run if the ranks do not come to the next step; a thread of its own, since handlers take no locks."""
        while not self._over.wait(_LOOK_S):
            if self._terminated_at is not None and time.monotonic() - self._terminated_at > _PATIENCE_S:
                self._failures.publish(
                    f"rank {self._failures.rank} received SIGTERM, and the ranks did not come to the next step within "
                    f"{_PATIENCE_S:.0f} s, at which all would have ended together."
                )
                return


def _do_nothing() -> None:
    pass
