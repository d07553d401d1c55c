"""LightningCLI with two more subcommands, `plan` and `simulate`, and errors that read well when many ranks raise."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

import lightning_dynmo
from lightning_dynmo.cli.parsing import DynMoParser, check_strategy_name, spell_out_strategies
from lightning_dynmo.cli.plan import plan
from lightning_dynmo.cli.simulate import SimulateOptions, simulate
from lightning_dynmo.cli.terminal import tidy_logs, use_short_progress_bar
from lightning_dynmo.pipeline import PipelineError

_LIBRARIES = tuple(library.__path__[0] for library in (lightning_dynmo, lightning, jsonargparse))


class PlanningTrainer(Trainer):
    """Lightning's Trainer with one method more."""

    def plan(self, model: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Shows layers and first split, and checks the chain against the module's own forward. Starts no ranks.

        Args:
            model: The module.
            datamodule: Its data; without one, the module's own training data.

        Raises:
            TypeError: If the module is no pipeline.
            ValueError: If training would be refused, or the chain and the forward differ.
        """
        plan(self, model, datamodule)


class DynMoCLI(LightningCLI):
    """The command line. Names of classes are import paths, or bare names for what this package and Lightning export."""

    def __init__(self) -> None:
        super().__init__(
            trainer_class=PlanningTrainer,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_class=DynMoParser,
            parser_kwargs={
                "prog": "lightning-dynmo",
                "description": "Trains LightningModules as pipelines that stay balanced.",
                # Else every error would begin with two pages of options, which --help lists too.
                **{name: {"usage": f"lightning-dynmo {name} --config FILE [options]"} for name in self.subcommands()},
            },
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}}

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        assert isinstance(self.parser, DynMoParser)
        self.parser.add_subcommand_of(SimulateOptions, "simulate")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(spell_out_strategies(sys.argv[1:]))
        if self.config.subcommand == "simulate":  # there is no model to make, and no Trainer
            simulate(SimulateOptions(**self.config.simulate))
            sys.exit()

    @override
    def before_instantiate_classes(self) -> None:
        check_strategy_name(self.config[self.subcommand].trainer.strategy)

    @override
    def after_instantiate_classes(self) -> None:
        use_short_progress_bar(self.trainer)

    def after_fit(self) -> None:
        """Says where the checkpoint is; LightningCLI calls it after `fit`."""
        callback = self.trainer.checkpoint_callback
        if isinstance(callback, ModelCheckpoint) and (path := callback.last_model_path or callback.best_model_path):
            self.trainer.print(f"Checkpoint: {path}")


def main() -> None:
    """Runs the command line."""
    sys.path.insert(0, str(Path.cwd()))  # users' own classes: as under `python -m`, and as for a script of their own
    tidy_logs()
    try:
        DynMoCLI()
    except Exception as error:
        if not _explains_itself(error):
            raise
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            sys.stderr.write(f"\nerror: {error}\n")
        sys.exit(1)


def _explains_itself(error: BaseException | None) -> bool:
    """Returns whether the text of an error says all, so that a traceback, one per rank, would only bury it.

    That is so for what the libraries raise about settings, and for what another rank has reported in full already.
    """
    if isinstance(error, PipelineError):
        from_here = str(error).startswith(f"rank {rank_zero_only.rank},")  # type: ignore[attr-defined]
        return not from_here or _explains_itself(error.__cause__)
    if not isinstance(error, ValueError | TypeError | OSError | MisconfigurationException):
        return False
    origin = traceback.extract_tb(error.__traceback__)[-1]
    return origin.filename.startswith(_LIBRARIES) and (origin.line or "").startswith("raise ")
