"""What the terminal shows: a progress bar that fits, and logs that do not break it."""

from __future__ import annotations

import logging
import sys
import warnings

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from typing_extensions import override


class ShortProgressBar(RichProgressBar):
    """Lightning's bar with shorter names, so that loss, imbalance and bubble fit."""

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name.removeprefix("dynmo/").removesuffix("_ratio"): value for name, value in metrics.items()}


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
