"""`lightning-dynmo simulate`: what each balancer would do for a scheme, or for a recorded run."""

from __future__ import annotations

import difflib
import math
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from lightning_dynmo.cli.simulation_report import Report, print_report, write_files
from lightning_dynmo.pipeline import check_num_microbatches, find_schedule
from lightning_dynmo.pipeline.schedules import simulated_order
from lightning_dynmo.planning import DiffusionBalancer, PartitionBalancer
from lightning_dynmo.simulation import TRACES, LayerCost, Network, Recording, read_recording
from lightning_dynmo.simulation.sources import RecordedCosts, RunCosts, TraceCosts
from lightning_dynmo.simulation.timeline_drawing import new_figure
from lightning_dynmo.simulation.training import Comparison, Machine, Plan, compare

PLANS = (
    Plan("static parameters", balance="parameters"),
    Plan("Partition by time", balancer=PartitionBalancer()),
    Plan("Partition by parameters", balancer=PartitionBalancer(), load="parameters"),
    Plan("Diffusion by time", balancer=DiffusionBalancer()),
    Plan("Diffusion by parameters", balancer=DiffusionBalancer(), load="parameters"),
)
_RECORDED = ("scheme", "num_layers", "split_blocks", "forward_s", "state_bytes", "num_steps", "rebalance_every_n_steps")
"""What a recording says already."""
_QUIET_S = 3.0
"""Seconds after which it says how far it is."""


@dataclass(frozen=True)
class SimulateOptions:
    """Shows what each balancer would do on many stages, for a scheme or a recorded run. Trains nothing.

    Args:
        scheme: moe, pruning, freezing, sparse_attention, early_exit, mod or all.
        recorded: A file of ProfileRecorderCallback, in place of a scheme.
        num_stages: Stages of a pipeline. Default: 24, or as recorded.
        num_replicas: Pipelines side by side. Default: 30, or as recorded.
        num_microbatches: Microbatches per step. Default: 4 per stage, or as recorded.
        schedule: Order of a step. Default: 1f1b, or as recorded.
        num_layers: Layers of the model (blocks, where these are split).
        split_blocks: Cut each block into an attention and an MLP layer.
        forward_s: Seconds of a dense layer's forward per microbatch; its backward takes twice that.
        state_bytes: Bytes of a layer that move along, 16 per parameter.
        message_bytes: Bytes that a layer hands to the next, per microbatch. Default: 16e6, or 0 if recorded.
        bytes_per_s: Bandwidth between ranks.
        latency_s: Seconds that a message takes, whatever its size.
        profiling_s: Seconds that measuring a step costs. Default: 0.05, or as recorded.
        num_steps: Steps of the training.
        rebalance_every_n_steps: Steps from one measurement to the next.
        seed: Decides what is random in a scheme.
        output: Folder for figures, numbers (CSV) and a step before and after (Chrome trace and PNG).

    Raises:
        ValueError: If a value is out of range, or two do not go together.
    """

    scheme: str = "all"
    recorded: str | None = None
    num_stages: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    num_layers: int = 96
    split_blocks: bool = False
    forward_s: float = 3e-3
    state_bytes: float = 800e6
    message_bytes: float | None = None
    bytes_per_s: float = 25e9
    latency_s: float = 2e-5
    profiling_s: float | None = None
    num_steps: int = 10_000
    rebalance_every_n_steps: int = 500
    seed: int = 0
    output: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least = 0 if field.name in ("state_bytes", "message_bytes", "latency_s", "profiling_s", "seed") else 1
            positive = field.name in ("forward_s", "bytes_per_s")
            if not math.isfinite(value) or (value <= 0 if positive else value < least):
                expected = "a positive number" if positive else f"at least {least}"
                default = "" if field.default is None else f" Use for example --{field.name}={field.default}."
                raise ValueError(f"Expected --{field.name} to be {expected}, got {value}.{default}")
        if self.recorded is not None:
            for field in fields(self):
                if field.name in _RECORDED and getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"--{field.name}={getattr(self, field.name)} and --recorded={self.recorded} do not go "
                        f"together, since the recording says it. Leave one of them out."
                    )
        elif self.scheme != "all" and self.scheme not in TRACES:
            near = difflib.get_close_matches(self.scheme.lower(), [*TRACES, "all"], n=1)
            meant = f" Did you mean --scheme={near[0]}?" if near else ""
            raise ValueError(f"Unknown scheme {self.scheme!r}; choose one of {', '.join(TRACES)}, all.{meant}")


def simulate(options: SimulateOptions) -> None:
    """Simulates, prints tables, and writes files where a folder is given.

    Raises:
        ValueError: If the settings do not fit each other, or a file cannot be read or written.
    """
    recording = None if options.recorded is None else read_recording(options.recorded)
    folder = None if options.output is None else _folder(options.output)
    sources = _traces(options) if recording is None else _recorded(options, recording)
    num_layers = next(iter(sources.values())).num_layers
    machine, schedule = _machine(options, num_layers, recording)
    comparisons: dict[str, Comparison] = {}
    begin_s = time.monotonic()
    for name, costs in sources.items():
        comparisons[name] = _compare(name, costs, machine)
        if time.monotonic() - begin_s > _QUIET_S and len(comparisons) < len(sources):
            sys.stderr.write(f"{len(comparisons)} of {len(sources)} schemes are simulated\n")
    report = Report(
        title=f"{len(machine.placement)} stages × {machine.num_replicas} pipelines, {num_layers} layers, {schedule}, "
        f"{machine.num_microbatches} microbatches",
        assumptions=_assumptions(options, recording),
        comparisons=comparisons,
        is_recorded=recording is not None,
        may_split=recording is None and not options.split_blocks and num_layers < 3 * len(machine.placement),
    )
    print_report(report)
    if folder is not None:
        write_files(folder, report, sources, machine)


def _compare(name: str, costs: RunCosts, machine: Machine) -> Comparison:
    try:
        with np.errstate(over="raise"):
            comparison = compare(costs, machine, PLANS)
        totals_s = [run.total_s for run in comparison.runs.values()]
    except (FloatingPointError, OverflowError):
        totals_s = [math.inf]
    if min(totals_s) == 0:
        raise ValueError(
            f"The steps of {name} take no time at all, so there is nothing to compare. Record a run in which layers "
            f"take some, or give messages a time, for example --latency_s={SimulateOptions.latency_s}."
        )
    if not all(map(math.isfinite, totals_s)):
        raise ValueError(
            f"The times of {name} are too large for numbers to hold. Check that times are given in seconds, and "
            f"--bytes_per_s in bytes per second."
        )
    return comparison


def _assumptions(options: SimulateOptions, recording: Recording | None) -> str:
    common = (
        f"Messages and moves take {options.bytes_per_s / 1e9:.3g} GB/s and {options.latency_s * 1e6:.3g} us each, a "
        f"measurement {_profiling_s(options, recording) * 1e3:.3g} ms. Decisions are those of RebalancePolicy, timed "
        "on this machine."
    )
    if recording is not None:
        return (
            f"A simulation from {len(recording.steps)} measured steps of {options.recorded}; each stands for the steps "
            f"since the one before. {common}"
        )
    return (
        f"A simulation, not a measurement: layers cost what closed-form traces of the schemes say, relative to a dense "
        f"layer of {options.forward_s * 1e3:.3g} ms forward and twice that backward. One step stands for "
        f"{options.rebalance_every_n_steps} of {options.num_steps}. {common}"
    )


def _profiling_s(options: SimulateOptions, recording: Recording | None) -> float:
    if options.profiling_s is not None:
        return options.profiling_s
    return 0.05 if recording is None else recording.measurement_s


def _recorded(options: SimulateOptions, recording: Recording) -> dict[str, RunCosts]:
    return {Path(str(options.recorded)).stem: RecordedCosts(recording, round(options.message_bytes or 0))}


def _traces(options: SimulateOptions) -> dict[str, RunCosts]:
    block = LayerCost(
        forward_s=options.forward_s,
        input_gradient_s=options.forward_s,
        weight_gradient_s=options.forward_s,
        output_bytes=round(16e6 if options.message_bytes is None else options.message_bytes),
        gradient_bytes=round(options.state_bytes / 8),  # 2 bytes per parameter
    )
    return {
        name: TraceCosts(
            trace=TRACES[name],
            block=block,
            num_blocks=options.num_layers,
            block_parameters=max(round(options.state_bytes / 16), 1),
            block_bytes=round(options.state_bytes),
            num_steps=options.num_steps,
            every_n_steps=options.rebalance_every_n_steps,
            split_blocks=options.split_blocks,
            seed=options.seed,
        )
        for name in (TRACES if options.scheme == "all" else [options.scheme])
    }


def _machine(options: SimulateOptions, num_layers: int, recording: Recording | None) -> tuple[Machine, str]:
    """Returns the pipelines, and the name of their schedule."""
    ran = None if recording is None else recording.steps[-1]
    num_replicas = 30 if recording is None else recording.settings.get("data_parallel_size", 1)
    schedule = find_schedule(options.schedule or (ran.schedule if ran else "1f1b"))
    per_rank = schedule.stages_per_rank
    if ran is not None and schedule.name == ran.schedule:
        per_rank = ran.placement.count(0)
    num_stages = options.num_stages or (len(ran.placement) if ran else 24)
    if num_stages > num_layers:
        split = "" if ran or options.split_blocks else " or --split_blocks=true"
        more = f", or --num_layers={num_stages}{split}" if ran is None else ""
        raise ValueError(
            f"Every stage needs at least one layer, but there are {num_stages} stages for {num_layers} layers. Use "
            f"--num_stages={num_layers}{more}."
        )
    if num_stages % per_rank:
        raise ValueError(
            f"Schedule {schedule.name!r} runs {per_rank} stages on each rank, got --num_stages={num_stages}. Use a "
            f"multiple of {per_rank}, for example --num_stages={num_stages + per_rank - num_stages % per_rank}."
        )
    num_ranks = num_stages // per_rank
    num_microbatches = options.num_microbatches or (ran.num_microbatches if ran else 4 * num_stages)
    check_num_microbatches(schedule, num_microbatches, num_ranks, num_stages)
    machine = Machine(
        order=simulated_order(schedule, num_ranks, per_rank, num_microbatches),
        placement=schedule.place(num_ranks, per_rank),
        num_microbatches=num_microbatches,
        num_replicas=options.num_replicas or num_replicas,
        network=Network(options.latency_s, options.bytes_per_s, options.bytes_per_s),
        profiling_s=_profiling_s(options, recording),
    )
    return machine, schedule.name


def _folder(output: str) -> Path:
    folder = Path(output)
    try:
        new_figure(1.0, 1.0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "simulation.csv").touch()
    except ModuleNotFoundError as error:
        raise ValueError(f"{error} Or leave --output away.") from None
    except OSError as error:
        raise ValueError(
            f"Cannot write to --output={output}: {error.strerror}. Choose another folder, for example --output=figures."
        ) from None
    return folder
