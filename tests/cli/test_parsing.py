"""How settings are read: short forms, class names and lists, and errors that say what was probably meant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dynmo.cli import main
from tests.cli.test_cli import CONFIG


class Command:
    """Runs the command line in this process, in a folder with its files."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._capture = capture
        self._patch = patch

    def __call__(self, *arguments: str) -> tuple[int, str]:
        self._patch.setattr(sys, "argv", ["lightning-dynmo", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        shown = self._capture.readouterr()
        return code, shown.out + shown.err


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    (tmp_path / "text.txt").write_text("A pipeline is as fast as its slowest stage. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Command(tmp_path, capsys, monkeypatch)


SHORT = CONFIG.replace(
    """
    class_path: lightning_dynmo.DynMoStrategy
    init_args: {num_microbatches: 4, balance: [3, 1]}""",
    " dynmo",
)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trainer.strategy.balance", "[3,1]"),  # with `strategy: dynmo` in the file
        ("--trainer.strategy=dynmo", "--trainer.strategy.balance=[3,1]"),
        ("--trainer.strategy", "dynmo", "--trainer.strategy.balance", "[3,1]"),
        ("--trainer.strategy={class_path: lightning_dynmo.DynMoStrategy, init_args: {balance: [3, 1]}}",),
        ("--trainer.strategy", "lightning_dynmo.DynMoStrategy", "--trainer.strategy.balance", "[3,1]"),
        ("--trainer.strategy=DynMoStrategy", "--trainer.strategy.balance=[3,1]", "--trainer.strategy.schedule=gpipe"),
    ],
)
def test_settings_on_the_command_line_combine_with_the_short_form(cli: Command, arguments: tuple[str, ...]) -> None:
    assert "strategy: dynmo" in SHORT
    (cli.folder / "short.yaml").write_text(SHORT)

    code, output = cli("plan", "--config", "short.yaml", *arguments)

    assert code == 0, output
    assert "First split, balance=[3, 1]" in output
    assert "Warning" not in output


def test_a_first_split_by_type(cli: Command) -> None:
    (cli.folder / "short.yaml").write_text(SHORT)
    (cli.folder / "typed.yaml").write_text(CONFIG.replace("balance: [3, 1]", "balance: type:block$"))

    for arguments in (("short.yaml", "--trainer.strategy.balance=type:block"), ("typed.yaml",)):
        code, output = cli("plan", "--config", *arguments)
        assert code == 0, output
        assert "First split, balance=[2, 2]" in output
    code, output = cli("plan", "--config", "short.yaml", "--trainer.strategy.balance=type:decoder")
    assert code != 0
    assert "balance='type:decoder' to match the class name of a layer, but the classes are " in output
    assert "Traceback" not in output


def test_lists_in_yaml_and_for_a_subcommand(cli: Command) -> None:
    nested = "plan:\n" + "".join(f"  {line}\n" for line in SHORT.splitlines())
    listed = SHORT.replace(
        "strategy: dynmo",
        "strategy:\n    class_path: DynMoStrategy\n    init_args:\n      balance:\n      - 3\n      - 1",
    )
    (cli.folder / "nested.yaml").write_text(nested)
    (cli.folder / "listed.yaml").write_text(listed)

    code, output = cli("--config", "nested.yaml", "plan", "--trainer.strategy.balance=[3,1]")
    assert code == 0, output
    assert "First split, balance=[3, 1]" in output
    code, output = cli("plan", "--config", "listed.yaml")
    assert code == 0, output
    assert "First split, balance=[3, 1]" in output


@pytest.mark.parametrize(
    ("change", "arguments", "expected"),
    [
        (("dynmo", "dynamo"), (), "Unknown strategy 'dynamo'. Did you mean 'dynmo'?"),
        (("dynmo", "dynamo"), ("--trainer.strategy.balance=[3,1]",), "unknown name 'dynamo'. Did you mean 'dynmo'?"),
        (("dynmo", "{class_path: DynMoStrategie}"), (), "unknown name 'DynMoStrategie'. Did you mean 'DynMoStrategy'?"),
        (
            ("dynmo", "{class_path: DynMoStrategy, init_args: {balanc: [3, 1]}}"),
            (),
            "trainer.strategy: lightning_dynmo.DynMoStrategy has no argument 'balanc'. Did you mean 'balance'?",
        ),
        (
            ("dynmo", "{class_path: DynMoStrategy, init_args: {num_microbatches: four}}"),
            (),
            "argument 'num_microbatches' of lightning_dynmo.DynMoStrategy is 'four', expected int or Literal['auto'].",
        ),
        (
            ("dynmo", "{class_path: DynMoStrategy}"),
            ("--trainer.strategy.move_when=never",),
            "'move_when' of lightning_dynmo.DynMoStrategy is 'never', expected Literal['worthwhile', 'always'].",
        ),
        (("LayerFreezing", "LayerFrezing"), (), "Did you mean 'LayerFreezingCallback'?"),
        (("start_step", "begin"), (), "has no argument 'begin'. It has: rule, start_step, every_n_steps, "),
        (("max_epochs", "max_epoch"), (), "Did you mean 'trainer.max_epochs'?"),
        (
            ("dynmo", "dynmo"),
            ("--trainer.callbacks+=lightning_dynmo.RebalanceCalback",),
            "module 'lightning_dynmo' has no 'RebalanceCalback'. Did you mean 'lightning_dynmo.RebalanceCallback'?",
        ),
        (("dynmo", "dynmo"), ("--model=GPTT",), "model: unknown name 'GPTT'. Did you mean 'GPT'?"),
    ],
)
def test_a_near_miss_is_a_short_error_that_names_what_was_meant(
    cli: Command, change: tuple[str, str], arguments: tuple[str, ...], expected: str
) -> None:
    (cli.folder / "short.yaml").write_text(SHORT.replace(*change))

    code, output = cli("plan", "--config", "short.yaml", *arguments)

    assert code in (1, 2), output
    assert expected in output
    assert len(output.splitlines()) <= 4
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["dynmo", "DynMoStrategy", "lightning_dynmo.DynMoStrategy"])
@pytest.mark.parametrize("place", ["file", "option", "two words"])
def test_a_strategy_is_named_by_alias_or_class_in_a_file_and_as_an_option(cli: Command, name: str, place: str) -> None:
    (cli.folder / "short.yaml").write_text(SHORT.replace("dynmo", name if place == "file" else "ddp", 1))
    option = {"file": (), "option": (f"--trainer.strategy={name}",), "two words": ("--trainer.strategy", name)}[place]

    code, output = cli("plan", "--config", "short.yaml", *option)

    assert code == 0, output
    assert "First split, balance=[2, 2]" in output
