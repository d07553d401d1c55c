"""What the terminal shows: a progress bar that fits, logs that do not break it, and tables."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Collection, Sequence

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich import box
from rich.table import Table
from typing_extensions import override


class ShortProgressBar(RichProgressBar):
    """Lightning's bar with shorter names, so that loss, imbalance and bubble fit, and without its thread.

    That thread redraws the bar while others print above it; whenever the bar has just lost a line, it eats one of
    theirs.
    """

    _SECONDS_BETWEEN_DRAWS = 0.1

    def __init__(self) -> None:
        super().__init__()
        self._drawn_at = 0.0

    @override
    def refresh(self, hard: bool = False) -> None:
        if hard or time.monotonic() - self._drawn_at > self._SECONDS_BETWEEN_DRAWS:
            super().refresh(hard=True)
            self._drawn_at = time.monotonic()

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name.removeprefix("dynmo/").removesuffix("_ratio"): value for name, value in metrics.items()}

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.progress is not None:
            self.progress.stop()  # what is printed after training comes below the bar


class _CurrentStderr:
    """Standard error as it is now: a running progress bar replaces it to draw itself below what is written."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def use_short_progress_bar(trainer: Trainer) -> None:
    """Replaces the Trainer's default progress bar; one that the user chose stays."""
    bar = trainer.progress_bar_callback
    if type(bar) is RichProgressBar:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[callbacks.index(bar)] = ShortProgressBar()


def tidy_logs() -> None:
    """Keeps Lightning's log lines clear of the progress bar, and leaves out advertisements and false alarms."""
    for handler in [*logging.getLogger("lightning.pytorch").handlers, *logging.getLogger("lightning.fabric").handlers]:
        handler.addFilter(lambda record: "💡 Tip" not in record.getMessage())
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(_CurrentStderr())
    # Lightning 2.6 on a newer torch, once per rank.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # Values logged in a pipeline are the same on all its ranks already.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*, sync_dist=True\)`")


def new_table(title: str, columns: Sequence[str], words: Collection[str] = ()) -> Table:
    """Returns an empty table in the form of all tables here.

    Args:
        title: Above it.
        columns: Their names.
        words: Those that hold words rather than numbers.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=column in words)
    return table
