"""The model summary that the Trainer prints, with a column that says which stages hold each module."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary.model_summary import (
    get_formatted_model_size,
    get_human_readable_count,
)
from rich import get_console
from rich.table import Table
from torch import nn
from typing_extensions import override

from lightning_dynmo._lightning import format_summary_table
from lightning_dynmo.pipeline import PipelineRuntime

log = logging.getLogger("lightning.pytorch.callbacks.model_summary")  # where Lightning's own summary appears


class StageSummary(Summary):
    """Lightning's summary of a model, with one column more. Counts are those of the whole model on every rank.

    Args:
        model: The user's module.
        runtime: Its pipeline.
        max_depth: Depth of modules that get a row.
    """

    def __init__(self, model: LightningModule, runtime: PipelineRuntime, max_depth: int) -> None:
        self._runtime = runtime
        super().__init__(model, max_depth=max_depth)

    @override
    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        # Without running the whole model on one rank nothing is known of FLOPs.
        columns = [column for column in super()._get_summary_data() if column[0] != "FLOPs"]
        stages = [stages_of(module, self._runtime) for _, module in self._shown_modules()]
        num_rows = len(columns[0][1])
        stages += ["n/a"] * (num_rows - len(stages))  # parameters of the root itself have a row of their own
        after = next(position for position, (name, _) in enumerate(columns) if name == "Params") + 1
        columns.insert(after, ("Stage", stages))
        return columns

    def _shown_modules(self) -> list[tuple[str, nn.Module]]:
        shown = set(self.layer_names)
        return [(name, module) for name, module in self.named_modules if name in shown]


class StageModelSummary(ModelSummary):
    """`ModelSummary` for pipelines."""

    @override
    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> Summary:
        return StageSummary(pl_module, trainer.strategy.runtime, self._max_depth)  # type: ignore[attr-defined]

    @staticmethod
    @override
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        text = format_summary_table(
            total_parameters, trainable_parameters, model_size, total_training_modes, total_flops, *summary_data
        )
        log.info("\n" + "\n".join(line for line in text.splitlines() if not line.endswith("Total Flops")))


class RichStageModelSummary(StageModelSummary, RichModelSummary):
    """`RichModelSummary` for pipelines: Lightning's own would show no head above a column that it does not know."""

    @staticmethod
    @override
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for name, _ in summary_data:
            table.add_column(name, justify="right" if name == "Params" else "left", no_wrap=name == "Name")
        for row in zip(*(cells for _, cells in summary_data), strict=True):
            table.add_row(*row)
        totals = {
            "Trainable params": get_human_readable_count(trainable_parameters),
            "Non-trainable params": get_human_readable_count(total_parameters - trainable_parameters),
            "Total params": get_human_readable_count(total_parameters),
            "Total estimated model params size (MB)": get_formatted_model_size(model_size),
            "Modules in train mode": total_training_modes["train"],
            "Modules in eval mode": total_training_modes["eval"],
        }
        console = get_console()
        console.print(table)
        for name, value in totals.items():
            console.print(f"[bold]{name}[/]: {value}", highlight=False)


def show_stages(trainer: Trainer) -> None:
    """Replaces the Trainer's summaries by those with stages; a subclass that the user wrote stays."""
    kinds = {ModelSummary: StageModelSummary, RichModelSummary: RichStageModelSummary}
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for position, callback in enumerate(callbacks):
        kind = kinds.get(type(callback))
        if kind is not None:
            callbacks[position] = kind(callback._max_depth, **callback._summarize_kwargs)


def stages_of(module: nn.Module, runtime: PipelineRuntime) -> str:
    """Returns the stages that hold layers, or parts of layers, of a module, such as ``"0-2"``; else ``"all"``.

    A module outside the chain is on every rank.
    """
    inside = _parts(module)
    layers = [index for index, layer in enumerate(runtime.chain.layers) if inside & _parts(layer)]
    stages = sorted({runtime.assignment.stage_of(index) for index in layers})
    if not stages:
        return "all"
    return str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


def _parts(module: nn.Module) -> set[int]:
    return {id(part) for part in [*module.modules(), *module.parameters()]}
