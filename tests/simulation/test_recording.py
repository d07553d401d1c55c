"""Recorded runs: what is written is read back, what a killed run leaves is passed over, and what is none is refused."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from lightning_dynmo.planning import Assignment, LayerLoad
from lightning_dynmo.simulation import (
    RecordedStep,
    check_appendable,
    header_line,
    read_recording,
    stage_costs,
    step_line,
)

LOADS = (LayerLoad(0.25, 0.0, 5, 20), LayerLoad(0.5, 1.0, 8, 96), LayerLoad(0.125, 0.5, 3, 36))
STEP = RecordedStep(
    step=10,
    balance=(2, 1),
    placement=(0, 1),
    schedule="1f1b",
    num_microbatches=4,
    loads=LOADS,
    step_s=3.0,
    busy_s=(1.75, 0.625),
    moved_layers=1,
    overhead_s=0.5,
)
SETTINGS = {"schedule": "1f1b", "num_layers": 3}


def steps(*numbers: int) -> list[str]:
    return [step_line(replace(STEP, step=number)) for number in numbers]


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def numbers_in(path: Path) -> list[int]:
    return [step.step for step in read_recording(path).steps]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", header_line(SETTINGS, 0), step_line(STEP))

    recording = read_recording(path)

    assert recording.settings == SETTINGS
    assert recording.steps == (STEP,)
    assert json.loads(path.read_text().splitlines()[1])["layers"]["backward_s"] == [0.0, 1.0, 0.5]


def test_every_number_counts(tmp_path: Path) -> None:
    for field in fields(RecordedStep):
        values = json.loads(step_line(STEP))
        name = "layers" if field.name == "loads" else field.name
        changed = dict(values["layers"], forward_s=[1.0, 1.0, 1.0]) if name == "layers" else values[name]
        if name in ("step", "num_microbatches", "moved_layers", "step_s", "overhead_s"):
            changed += 1
        elif name == "schedule":
            changed = "gpipe"
        elif name != "layers":
            changed = list(reversed(changed))
        line = json.dumps({**values, name: changed}) + "\n"
        assert read_recording(written(tmp_path / "run.jsonl", header_line({}, 0), line)).steps != (STEP,), name


def test_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    again = [header_line({"load": "parameters"}, 20), *steps(25, 30)]
    path = written(tmp_path / "run.jsonl", header_line(SETTINGS, 0), *steps(10, 20, 30, 40), *again)

    assert numbers_in(path) == [10, 20, 25, 30]
    assert read_recording(path).settings == {"load": "parameters"}


def test_a_new_run_in_the_same_file_counts_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", header_line({}, 0), *steps(10, 20), header_line({}, 0), *steps(5))

    assert numbers_in(path) == [5]


@pytest.mark.parametrize("kept", [1, 30, 200])
def test_the_last_line_of_a_killed_run_may_be_torn(tmp_path: Path, kept: int) -> None:
    torn = steps(30)[0][:kept]
    path = written(tmp_path / "run.jsonl", header_line({}, 0), *steps(10, 20), torn)
    assert numbers_in(path) == [10, 20]

    resumed = written(path, path.read_text(), "\n", header_line({}, 20), *steps(40))
    assert numbers_in(resumed) == [10, 20, 40]


def test_a_last_line_without_its_end_counts_when_it_is_whole(tmp_path: Path) -> None:
    assert numbers_in(written(tmp_path / "run.jsonl", header_line({}, 0), *steps(10), steps(20)[0].rstrip())) == [
        10,
        20,
    ]


def test_a_torn_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", header_line({}, 0), steps(10)[0][:40] + "\n", *steps(20))
    with pytest.raises(ValueError, match=r"Line 2 of .*run.jsonl is not a measured step, but .*Remove that line"):
        read_recording(path)


def test_costs_are_those_of_a_microbatch_and_add_up_to_what_was_measured() -> None:
    costs = STEP.layer_costs(output_bytes=7)

    assert [cost.trains for cost in costs] == [False, True, True]
    assert costs[1].input_gradient_s == 0.0  # nothing before it trains
    assert (costs[2].input_gradient_s, costs[2].weight_gradient_s) == (0.0625, 0.0625)
    assert [cost.gradient_bytes for cost in costs] == [0, 32, 12]
    assert {cost.output_bytes for cost in costs} == {7}
    for balance in ((2, 1), (1, 2)):
        assignment = Assignment(balance)
        measured = assignment.stage_loads([load.time_s for load in LOADS])
        for stage, cost in enumerate(stage_costs(costs, assignment)):
            total = cost.forward_s + cost.input_gradient_s + cost.weight_gradient_s
            assert 4 * total == pytest.approx(measured[stage], rel=1e-12)


def test_a_measurement_costs_what_the_overhead_grows_by_from_line_to_line(tmp_path: Path) -> None:
    overheads = [0.5, 0.75, 3.75, 4.0, 0.25, 0.5]  # a move in between, and a resumed run
    lines = [step_line(replace(STEP, step=step, overhead_s=found)) for step, found in enumerate(overheads)]

    assert read_recording(written(tmp_path / "run.jsonl", header_line({}, 0), *lines)).measurement_s == 0.25


def changed(**values: object) -> str:
    return json.dumps({**json.loads(step_line(STEP)), **values}) + "\n"


def with_layers(**values: object) -> str:
    return changed(layers={**json.loads(step_line(STEP))["layers"], **values})


def without(name: str) -> str:
    values = json.loads(step_line(STEP))
    del values[name]
    return json.dumps(values) + "\n"


HEADER = header_line(SETTINGS, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"is empty\. Pass a file that ProfileRecorderCallback wrote"),
        ("model:\n  class_path: GPT\n", r"is not a recorded run: line 1 is 'model:'\. Pass a file that"),
        ('{"a": 1}\n', r"is not a recorded run: line 1 is '\{\"a\": 1\}'"),
        (HEADER, r"has no measured step\. Let the run go on"),
        (HEADER.replace('"version":1', '"version":9'), r"Line 1 .* version 9 .* reads version 1\. Install the release"),
        (HEADER.replace('"first_step":0', '"first_step":null'), r"Line 1 .* lacks settings or first_step"),
        (HEADER + without("busy_s"), r"Line 2 .*: busy_s is missing\. Remove that line, or record the run again"),
        (HEADER + without("layers"), r"Line 2 .*: layers is missing"),
        (HEADER + changed(balance=[2, 2]), r"Line 2 .*: balance=\[2, 2\] does not fit 3 layers and 2 stages"),
        (HEADER + changed(balance=[3, 0]), r"Line 2 .*: Every stage needs at least 1 layer"),
        (HEADER + changed(num_microbatches=0), r"Line 2 .*: num_microbatches is 0"),
        (HEADER + changed(step_s=-1.0), r"Line 2 .*: .*got -1.0"),
        (HEADER + changed(step=1.5), r"Line 2 .*: step is 1.5, not a whole number of at least 0\. Remove that line"),
        (HEADER + changed(step="10"), r"Line 2 .*: step is '10', not a whole number"),
        (HEADER + changed(step=None), r"Line 2 .*: step is None"),
        (HEADER + changed(step=0), r"has no measured step\. Let the run go on"),
        (HEADER + step_line(STEP) + changed(step=5), r"Line 3 .*: step 5 comes after step 10"),
        (HEADER + changed(num_microbatches=2.5), r"Line 2 .*: num_microbatches is 2.5"),
        (HEADER + changed(placement=[1, 2]), r"Line 2 .*: placement=\[1, 2\] does not number the ranks"),
        (HEADER + changed(schedule=None), r"Line 2 .*: schedule is None, not a name"),
        (HEADER + with_layers(forward_s=[1.0, -0.5, 1.0]), r"Line 2 .*forward_s of layer 1 .*, got -0.5.*pass 0\. Rem"),
        (HEADER + with_layers(state_bytes=[1, 2, 1.5]), r"Line 2 .*: state_bytes of layer 2 is 1.5"),
        (HEADER + with_layers(num_parameters=[None, 2, 3]), r"Line 2 .*: num_parameters of layer 0 is None"),
        (header_line({"data_parallel_size": 0}, 0), r"Line 1 .*: data_parallel_size is 0, not a whole number of at l"),
        (HEADER + changed(layers={"forward_s": [1.0]}), r"Line 2 .*: backward_s is missing"),
        (HEADER + changed(layers=3), r"Line 2 .* is not a measured step"),
        (HEADER + "[1, 2]\n" + step_line(STEP), r"Line 2 .* is not a measured step, but '\[1, 2\]'"),
        (
            HEADER + step_line(STEP) + changed(balance=[1, 1], layers={f.name: [1, 1] for f in fields(LayerLoad)}),
            r"models with different numbers of layers\. Record each in its own file",
        ),
    ],
)
def test_what_is_no_recording_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recording(written(tmp_path / "run.jsonl", text))


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Cannot read the recording .*none.jsonl: No such file"):
        read_recording(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"Cannot read the recording .*: Is a directory"):
        read_recording(tmp_path)
    with pytest.raises(ValueError, match=r"Cannot record the run in .*: Is a directory.*path='dynmo_profiles.jsonl'"):
        check_appendable(tmp_path)
    with pytest.raises(ValueError, match=r"Cannot record the run in .*: No such file"):
        check_appendable(tmp_path / "missing" / "run.jsonl")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="not a recorded run"):
        read_recording(tmp_path / "binary")


def test_a_file_that_holds_something_else_is_not_appended_to(tmp_path: Path) -> None:
    path = written(tmp_path / "notes.txt", "Buy milk\n")
    with pytest.raises(ValueError, match="holds something else: 'Buy milk"):
        check_appendable(path)
    assert path.read_text() == "Buy milk\n"

    check_appendable(written(tmp_path / "run.jsonl", HEADER))
    check_appendable(tmp_path / "new.jsonl")
