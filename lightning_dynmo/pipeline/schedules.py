"""The pipeline schedules a user can name, and what each of them asks of the number of microbatches."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from lightning_dynmo.pipeline._torch import PipelineStage

SCHEDULES: dict[str, type[ScheduleGPipe] | type[Schedule1F1B]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def check_schedule(name: str) -> str:
    """Returns the schedule's name in lower case.

    Raises:
        ValueError: If there is no schedule of that name.
    """
    if name.lower() in SCHEDULES:
        return name.lower()
    close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Unknown schedule {name!r}; choose one of {', '.join(map(repr, SCHEDULES))}.{hint}")


def check_num_microbatches(name: str, num_microbatches: int, num_stages: int) -> None:
    """Checks that a schedule can run so many microbatches on so many stages.

    Raises:
        ValueError: If it cannot; names the smallest number that works.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}. Use 'auto' to have it chosen.")
    if name == "1f1b" and num_microbatches < num_stages:
        raise ValueError(
            f"Schedule '1f1b' needs at least as many microbatches as stages, got num_microbatches={num_microbatches} "
            f"for {num_stages} stages. Use num_microbatches={num_stages} and a batch size that is a multiple of "
            f"{num_stages}, or schedule='gpipe', or fewer devices."
        )


def build_schedule(
    name: str, stage: PipelineStage, num_microbatches: int, loss: Callable[[Any, Any], Tensor]
) -> ScheduleGPipe | Schedule1F1B:
    """Builds torch's schedule; gradients are left as `loss` scales them."""
    return SCHEDULES[name](stage, n_microbatches=num_microbatches, loss_fn=loss, scale_grads=False)
