"""`lightning-dynmo simulate`, started as users start it: tables, numbers and pictures that agree, and clear errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from lightning_dynmo.cli.app import main
from lightning_dynmo.cli.simulate import PLANS, SimulateOptions
from lightning_dynmo.planning import Assignment, LayerLoad
from lightning_dynmo.simulation import TRACES, RecordedStep, header_line, read_recording, step_line
from tests.cli.test_cli import run, squeezed

SMALL = ("--num_stages=4", "--num_replicas=2", "--num_layers=16", "--num_steps=4000", "--rebalance_every_n_steps=1000")
RUNS = ["dense model", "static uniform", "optimum", *(plan.name for plan in PLANS)]

CONFIG = """
model:
  class_path: GPT
  init_args: {num_blocks: 3, hidden_size: 16, num_heads: 2, context_length: 16, split_blocks: true}
data:
  class_path: TextDataModule
  init_args: {path: text.txt, context_length: 16, batch_size: 8}
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_dynmo.DynMoStrategy
    init_args: {num_microbatches: 4, schedule: interleaved1f1b}
  max_epochs: 1
  limit_train_batches: 12
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  callbacks:
    - class_path: ProfileRecorderCallback
      init_args: {every_n_steps: 3}
    - class_path: LayerFreezingCallback
      init_args: {start_step: 4, every_n_steps: 4}
"""


def numbers(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Returns the rows of the numbers, by scheme and run."""
    with (folder / "simulation.csv").open(newline="") as file:
        return {(row["scheme"], row["run"]): row for row in csv.DictReader(file)}


def cells(output: str, title: str, scheme: str, row: str) -> list[str]:
    """Returns what a table says of a run."""
    table = output[output.index(title) :]
    lines = [line.strip() for line in table[table.index(f"\n  {scheme} ") :].splitlines()]
    return next(line for line in lines if line.startswith(row)).removeprefix(row).split()


@pytest.fixture(scope="module")
def all_schemes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("simulate")
    code, output = run(folder, "simulate", *SMALL, "--output=found")
    assert code == 0, output
    return output, folder / "found"


def test_numbers_follow_from_one_another(all_schemes: tuple[str, Path]) -> None:
    rows = numbers(all_schemes[1])
    assert list(rows) == [(scheme, name) for scheme in TRACES for name in RUNS]
    for (scheme, _), row in rows.items():
        value = {name: float(text) for name, text in row.items() if name not in ("scheme", "run", "last_balance")}
        total = sum(value[f"{part}_s"] for part in ("training", "profiling", "deciding", "migrating"))
        assert value["total_s"] == pytest.approx(total, rel=1e-12)
        for baseline, column in (("static uniform", "over_static"), ("dense model", "over_dense")):
            over = float(rows[scheme, baseline]["total_s"])
            assert value[column] == pytest.approx(over / value["total_s"], rel=1e-12)
            assert value[f"optimum_{column}"] == float(rows[scheme, "optimum"][column])
        assert value["over_static"] <= value["bound_over_static"] == 4
        assert value["num_steps"] == 4000
        assert sum(map(int, row["last_balance"].split())) == 16
    assert float(rows["sparse_attention", "Partition by time"]["over_static"]) > 1.1


def test_tables_say_what_the_numbers_say(all_schemes: tuple[str, Path]) -> None:
    output, folder = all_schemes
    rows = numbers(folder)
    for scheme in TRACES:
        for name in ("static uniform", *(plan.name for plan in PLANS)):
            row = {key: text for key, text in rows[scheme, name].items()}
            bound = float(row["bound_over_static"])
            static_over_dense = float(rows[scheme, "static uniform"]["over_dense"])
            assert cells(output, "Throughput", scheme, name) == [
                f"{4000 / float(row['total_s']):.4g}",
                f"{float(row['over_static']):.2f}×",
                f"{float(row['optimum_over_static']):.2f}×",
                f"{bound:.2f}×",
                f"{float(row['over_dense']):.2f}×",
                f"{float(row['optimum_over_dense']):.2f}×",
                f"{bound * static_over_dense:.2f}×",
            ]
            if "by" in name:
                shares = [float(row[f"{part}_s"]) / float(row["total_s"]) for part in ("profiling", "migrating")]
                found = cells(output, "Overhead", scheme, name)
                assert [found[0], found[2]] == [f"{share:.4%}" for share in shares]
                assert found[4:] == [row["num_measurements"], row["num_moves"], row["moved_layers"]]
    for name in RUNS:
        line = next(line for line in output.splitlines() if line.strip().startswith(name))
        shares = [f"{float(rows[scheme, name]['idleness']):.1%}" for scheme in TRACES]
        assert line.split()[-len(shares) :] == shares


def test_says_what_the_numbers_are_and_what_cannot_be(all_schemes: tuple[str, Path]) -> None:
    text = squeezed(all_schemes[0])
    assert "A simulation, not a measurement: layers cost what closed-form traces" in text
    assert "One step stands for 1000 of 4000" in text
    assert "moving whole layers gains at most a factor of 4 over the static split" in text
    assert "early_exit 4.52× over dense model (here at best" in text
    assert "Warning" not in text
    assert "split_blocks" not in text  # 4 layers per stage will do


def test_pictures_and_steps_are_there(all_schemes: tuple[str, Path]) -> None:
    _, folder = all_schemes
    steps = [f"step_{scheme}" for scheme in TRACES]
    pictures = {f"{name}.png" for name in ("idleness", "throughput", "overhead", *steps)}
    traces = {f"{step}_{when}.json" for step in steps for when in ("before", "after")}
    assert {path.name for path in folder.iterdir()} == {"simulation.csv"} | pictures | traces
    for name in pictures:
        pixels = imread(folder / name)
        assert pixels.shape[1] >= 1200
        assert len({tuple(pixel) for pixel in pixels[::3, ::3, :3].reshape(-1, 3).tolist()}) > 3
    lengths = {}
    for when in ("before", "after"):
        events = json.loads((folder / f"step_sparse_attention_{when}.json").read_text())["traceEvents"]
        assert {event["tid"] for event in events} == {0, 1, 2, 3}
        assert sum(event.get("cat") == "forward" for event in events) == 4 * 16
        lengths[when] = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert lengths["after"] < 0.95 * lengths["before"]


def test_one_scheme_with_few_layers_suggests_to_split_blocks(tmp_path: Path) -> None:
    options = ("--scheme=early_exit", *SMALL[:2], "--num_layers=8", *SMALL[3:])

    code, output = run(tmp_path, "simulate", *options)
    again, halves = run(tmp_path, "simulate", *options, "--split_blocks=true", "--schedule=zbvzerobubble")

    assert code == again == 0, output + halves
    assert "4 stages × 2 pipelines, 8 layers, 1f1b, 16 microbatches" in output
    assert "--split_blocks=true cuts blocks into attention and MLP layers" in squeezed(output)
    assert "pruning" not in output
    assert "4 stages × 2 pipelines, 16 layers, zbvzerobubble, 16 microbatches" in halves
    assert "--split_blocks" not in halves
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a training was recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("A pipeline is as fast as its slowest stage. " * 200)
    code, output = run(folder, "fit", "--config=config.yaml")
    assert code == 0, output
    return folder


@pytest.mark.distributed
def test_a_recorded_run_is_simulated_as_it_ran(recorded: Path) -> None:
    recording = read_recording(recorded / "dynmo_profiles.jsonl")

    code, output = run(recorded, "simulate", "--recorded=dynmo_profiles.jsonl", "--output=found", "--bytes_per_s=1e9")

    assert code == 0, output
    assert "4 stages × 1 pipelines, 8 layers, interleaved1f1b, 4 microbatches" in output
    text = squeezed(output)
    assert f"A simulation from {len(recording.steps)} measured steps of dynmo_profiles.jsonl" in text
    assert "the paper" not in text.lower().replace("papers", "")
    assert "first measurement" in text
    rows = numbers(recorded / "found")
    assert {scheme for scheme, _ in rows} == {"dynmo_profiles"}
    static = rows["dynmo_profiles", "static uniform"]
    assert int(static["num_steps"]) == recording.steps[-1].step
    assert static["last_balance"] == " ".join(map(str, Assignment.uniform(8, 4).balance))
    # No rank can be faster than the work that was measured.
    work_s = sum(load.time_s for load in recording.steps[-1].loads) / 2
    longest_s = float(static["training_s"])
    assert longest_s > work_s


@pytest.mark.distributed
def test_a_recorded_run_on_other_stages_and_another_schedule(recorded: Path) -> None:
    options = ("--num_stages=2", "--schedule=gpipe", "--num_microbatches=6", "--num_replicas=3")
    code, output = run(recorded, "simulate", "--recorded=dynmo_profiles.jsonl", *options)
    assert code == 0, output
    assert "2 stages × 3 pipelines, 8 layers, gpipe, 6 microbatches" in output


@pytest.mark.distributed
def test_a_recording_that_ends_in_the_middle_of_a_line_is_read_and_a_garbled_one_is_not(recorded: Path) -> None:
    text = (recorded / "dynmo_profiles.jsonl").read_text()
    (recorded / "killed.jsonl").write_text(text[:-200])
    lines = text.splitlines(keepends=True)
    (recorded / "garbled.jsonl").write_text(lines[0] + lines[1][:100] + "\n" + "".join(lines[2:]))

    code, output = run(recorded, "simulate", "--recorded=killed.jsonl")
    assert code == 0, output
    assert f"from {len(lines) - 2} measured steps" in squeezed(output)
    code, output = run(recorded, "simulate", "--recorded=garbled.jsonl")
    assert code == 1
    assert "error: Line 2 of garbled.jsonl is not a measured step, but" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--num_layers=20"], "there are 24 stages for 20 layers. Use --num_stages=20, or --num_layers=24 or --split_"),
        (["--num_microbatches=23"], "needs at least as many microbatches as stages (24), got num_microbatches=23"),
        (["--scheme=early_exits"], "Unknown scheme 'early_exits'; choose one of moe, pruning, freezing"),
        (["--scheme=early_exits"], "Did you mean --scheme=early_exit?"),
        (["--schedule=1f1c"], "Unknown schedule '1f1c'"),
        (["--schedule=interleaved1f1b", "--num_stages=9"], "runs 2 stages on each rank, got --num_stages=9"),
        (["--recorded=config.yaml"], "config.yaml is not a recorded run: line 1 is 'model:'"),
        (["--recorded=none.jsonl"], "Cannot read the recording none.jsonl: No such file or directory. Pass a file"),
        (["--recorded=none.jsonl", "--scheme=moe"], "--scheme=moe and --recorded=none.jsonl do not go together"),
        (["--num_replicas=0"], "Expected --num_replicas to be at least 1, got 0"),
        (
            ["--bytes_per_s=0"],
            "Expected --bytes_per_s to be a positive number, got 0.0. Use for example --bytes_per_s=2",
        ),
        (
            ["--forward_s=1e305", "--scheme=pruning"],
            "The times of pruning are too large for numbers to hold. Check that",
        ),
        (["--bytes_per_s=1e-300", "--scheme=mod"], "The times of mod are too large for numbers to hold. Check that"),
        (
            ["--recorded=idle.jsonl", "--latency_s=0"],
            "The steps of idle take no time at all, so there is nothing to compare. Record",
        ),
        (["--latency_s=-1"], "Expected --latency_s to be at least 0, got -1.0"),
        (["--output=config.yaml/figures"], "Cannot write to --output=config.yaml/figures: Not a directory"),
    ],
)
def test_what_cannot_be_simulated_is_one_error(
    options: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.yaml").write_text("model:\n")
    free = (LayerLoad(0.0, 0.0, 1, 16),) * 2
    idle = RecordedStep(1, (1, 1), (0, 1), "gpipe", 2, free, 1.0, (0.0, 0.0), 0, 0.0)
    (tmp_path / "idle.jsonl").write_text(header_line({}, 0) + step_line(idle))
    monkeypatch.chdir(tmp_path)
    code, _, shown = call(["simulate", *options], monkeypatch, capsys)
    assert code == 1
    assert error in shown
    assert "Traceback" not in shown


def call(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Runs the program in this process; returns its exit code and what it wrote to its two streams."""
    monkeypatch.setattr("sys.argv", ["lightning-dynmo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_an_unknown_option_ends_with_the_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, shown = call(["simulate", "--stages=4"], monkeypatch, capsys)
    assert code == 2
    assert "usage: lightning-dynmo simulate [options]" in shown
    assert "unrecognized arguments: --stages=4" in shown

    code, _, shown = call(["simulate", "--num_stages=four"], monkeypatch, capsys)
    assert code == 2
    assert "num_stages:\n  - Expected a <class 'int'>\n" in shown
    assert "Subtypes" not in shown


def test_help_lists_it_and_fits_on_a_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, _ = call(["--help"], monkeypatch, capsys)
    assert code == 0
    assert "simulate Shows what each balancer would do on many stages" in squeezed(shown)

    code, shown, _ = call(["simulate", "--help"], monkeypatch, capsys)
    assert code == 0
    assert len(shown.splitlines()) < 75
    for name in SimulateOptions.__dataclass_fields__:
        assert f"--{name} " in shown


def test_every_option_has_a_text() -> None:
    for name in SimulateOptions.__dataclass_fields__:
        assert f"        {name}: " in str(SimulateOptions.__doc__)
