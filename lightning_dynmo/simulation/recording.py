"""Recorded runs: the measured steps of a training run, one line of JSON each, from which a simulation can start.

The first line says which format it is and how the run was set up. A run that goes on in the same file writes such a
line again, with the step from which it goes on: what an earlier run recorded beyond that step counts no more.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

from lightning_dynmo.planning import Assignment, LayerLoad
from lightning_dynmo.planning.loads import non_negative
from lightning_dynmo.simulation.costs import LayerCost

FORMAT = "lightning-dynmo recording"
VERSION = 1
_CURE = "Pass a file that ProfileRecorderCallback wrote, for example dynmo_profiles.jsonl."


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One measured batch.

    Args:
        step: Optimizer steps done at its end.
        balance: Layers per stage while it ran.
        placement: The rank that ran each stage.
        schedule: Name of the schedule.
        num_microbatches: Microbatches that it was cut into.
        loads: Cost of each layer, over all microbatches.
        step_s: Seconds of the batch.
        busy_s: Seconds in which each rank worked.
        moved_layers: Layers that have changed their rank since the line before.
        overhead_s: Seconds of profiles, plans and moves since training began or was resumed.
    """

    step: int
    balance: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: str
    num_microbatches: int
    loads: tuple[LayerLoad, ...]
    step_s: float
    busy_s: tuple[float, ...]
    moved_layers: int
    overhead_s: float

    def __post_init__(self) -> None:
        assignment = Assignment(self.balance)
        if len(self.loads) != assignment.num_layers or len(self.placement) != assignment.num_stages:
            raise ValueError(
                f"balance={list(self.balance)} does not fit {len(self.loads)} layers and {len(self.placement)} stages"
            )
        if set(self.placement) != set(range(len(set(self.placement)))):
            raise ValueError(f"placement={list(self.placement)} does not number the ranks from 0 without gaps")
        if not isinstance(self.schedule, str):
            raise ValueError(f"schedule is {self.schedule!r}, not a name")
        for name, least in (("step", 0), ("num_microbatches", 1), ("moved_layers", 0)):
            _check_whole(name, getattr(self, name), least)
        non_negative([self.step_s, self.overhead_s, *self.busy_s], "time")
        for field in fields(LayerLoad):
            values = [getattr(load, field.name) for load in self.loads]
            if field.name.endswith("_s"):
                non_negative(values, f"{field.name} of layer")
            else:
                for layer, value in enumerate(values):
                    _check_whole(f"{field.name} of layer {layer}", value, 0)

    def layer_costs(self, output_bytes: int = 0) -> list[LayerCost]:
        """Returns what each layer costs per microbatch, as far as it was measured.

        A backward is measured as one. Where it has two parts, each counts for half; the first layer that trains has no
        gradient of its input, and one without a backward does not train. Gradients count 4 bytes per parameter.

        Args:
            output_bytes: What each layer hands to the next per microbatch, which is not recorded.
        """
        trains = [load.backward_s > 0 for load in self.loads]
        first = trains.index(True) if any(trains) else len(trains)
        costs = []
        for index, load in enumerate(self.loads):
            backward_s = load.backward_s / self.num_microbatches
            input_s = backward_s / 2 if index > first else 0.0
            costs.append(
                LayerCost(
                    forward_s=load.forward_s / self.num_microbatches,
                    input_gradient_s=input_s,
                    weight_gradient_s=backward_s - input_s,
                    trains=trains[index],
                    activation_bytes=load.activation_bytes,
                    output_bytes=output_bytes,
                    gradient_bytes=4 * load.num_parameters if trains[index] else 0,
                )
            )
        return costs


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file holds.

    Args:
        settings: How the run was set up last.
        steps: The measured batches in order, at least one.
    """

    settings: Mapping[str, Any]
    steps: tuple[RecordedStep, ...]

    @property
    def measurement_s(self) -> float:
        """What a measurement typically cost, in seconds: how much the overhead grew from one line to the next."""
        overheads = [0.0, *(step.overhead_s for step in self.steps)]
        grown = [after - before for before, after in pairwise(overheads) if after > before]  # it restarts with a run
        return median_low(grown) if grown else 0.0


def _check_whole(name: str, value: object, least: int) -> None:
    """Checks a number that counts something.

    Raises:
        ValueError: If it is not a whole number of at least `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, not a whole number of at least {least}")


def header_line(settings: Mapping[str, Any], first_step: int) -> str:
    """Returns the line with which a run begins.

    Args:
        settings: Whatever readers may want to know of the run; plain values.
        first_step: Optimizer steps done before it; 0 unless the run was resumed.
    """
    return _line({"format": FORMAT, "version": VERSION, "first_step": first_step, "settings": dict(settings)})


def step_line(step: RecordedStep) -> str:
    """Returns the line of a measured batch; of the layers, one list per kind of cost."""
    values = {field.name: getattr(step, field.name) for field in fields(step) if field.name != "loads"}
    loads = [asdict(load) for load in step.loads]
    return _line({**values, "layers": {name: [load[name] for load in loads] for name in loads[0]}})


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n"


def read_recording(path: str | Path) -> Recording:
    """Reads the measured batches of a run; what a killed process has left half-written is passed over.

    Raises:
        ValueError: If the file cannot be read, or is no recording; names the line.
    """
    lines = _lines_of(path)
    settings: Mapping[str, Any] = {}
    steps: list[RecordedStep] = []
    for number, text in enumerate(lines, start=1):
        values = _parsed(text)
        if "format" in values or number == 1:
            _check_header(path, number, text, values)
            settings = values["settings"]
            steps = [step for step in steps if step.step <= values["first_step"]]
        elif values:
            step = _step_of(path, number, values)
            if steps and step.step < steps[-1].step:
                raise _not_a_step(path, number, f"step {step.step} comes after step {steps[-1].step}")
            steps.append(step)
        elif number < len(lines) and "format" not in _parsed(lines[number]):
            raise ValueError(
                f"Line {number} of {path} is not a measured step, but {_excerpt(text)}. Remove that line, or record "
                "the run again."
            )
    if not steps or steps[-1].step == 0:
        raise ValueError(f"{path} has no measured step. Let the run go on until an optimizer step has been measured.")
    if len({len(step.loads) for step in steps}) > 1:
        raise ValueError(f"{path} holds runs of models with different numbers of layers. Record each in its own file.")
    return Recording(settings, tuple(steps))


def check_appendable(path: str | Path) -> None:
    """Checks that a run can be recorded in a file, by opening it for that.

    Raises:
        ValueError: If the file cannot be written, or holds something else.
    """
    try:
        with open(path, "a+b") as file:
            file.seek(0)
            first = file.readline(1 << 16)
    except OSError as error:
        raise ValueError(
            f"Cannot record the run in {path}: {error.strerror}. Choose a file that can be written, for example "
            "path='dynmo_profiles.jsonl'."
        ) from None
    if first and _parsed(first.decode(errors="replace")).get("format") != FORMAT:
        raise ValueError(
            f"Cannot record the run in {path}, which holds something else: {_excerpt(first.decode(errors='replace'))}. "
            "Choose another file, for example path='dynmo_profiles.jsonl'."
        )


def _lines_of(path: str | Path) -> Sequence[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"Cannot read the recording {path}: {error.strerror}. {_CURE}") from None
    if not lines:
        raise ValueError(f"The recording {path} is empty. {_CURE}")
    return lines


def _parsed(text: str) -> dict[str, Any]:
    """Returns the object in a line; an empty one where there is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _check_header(path: str | Path, number: int, text: str, values: Mapping[str, Any]) -> None:
    if values.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recorded run: line {number} is {_excerpt(text)}. {_CURE}")
    if values.get("version") != VERSION:
        raise ValueError(
            f"Line {number} of {path} says version {values.get('version')} of the format, but this release reads "
            f"version {VERSION}. Install the release that wrote it, or record again."
        )
    if not isinstance(values.get("settings"), dict) or not isinstance(values.get("first_step"), int):
        raise ValueError(f"Line {number} of {path} lacks settings or first_step. Remove that part, or record again.")
    try:
        _check_whole("data_parallel_size", values["settings"].get("data_parallel_size", 1), 1)
    except ValueError as error:
        raise ValueError(
            f"Line {number} of {path} is not how a run begins: {error}. Correct it, or record again."
        ) from None


def _step_of(path: str | Path, number: int, values: dict[str, Any]) -> RecordedStep:
    try:
        columns = values.pop("layers")
        known = [field for field in fields(LayerLoad) if field.default is MISSING or field.name in columns]
        rows = zip(*(columns[field.name] for field in known), strict=True)
        loads = tuple(LayerLoad(**dict(zip((field.name for field in known), row, strict=True))) for row in rows)
        given = {field.name: values[field.name] for field in fields(RecordedStep) if field.name != "loads"}
        for name in ("balance", "placement", "busy_s"):
            given[name] = tuple(given[name])
        return RecordedStep(**given, loads=loads)
    except KeyError as error:
        problem = f"{error.args[0]} is missing"
    except (TypeError, ValueError) as error:
        problem = str(error).rstrip(".")
    raise _not_a_step(path, number, problem)


def _not_a_step(path: str | Path, number: int, problem: str) -> ValueError:
    return ValueError(
        f"Line {number} of {path} is not a measured step: {problem}. Remove that line, or record the run again."
    )


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
