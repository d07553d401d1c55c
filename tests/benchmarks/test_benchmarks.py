"""The benchmarks run, and every ratio they print follows from their tables. No test depends on how fast anything is."""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timeline import StageCost, best_split, merge, step_time
from lightning_dynmo.pipeline.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
PRECISION = 1e-3  # of a ratio computed from a table's microseconds

# The schedule's replay, against timelines drawn by hand.


def test_one_stage_does_everything_in_a_row() -> None:
    assert step_time([StageCost(1.0, 2.0, 5.0, trains_below=False)], 4) == 4 * 3.0 + 5.0


def test_two_equal_stages_idle_for_one_microbatch() -> None:
    # time     0  1  2  3  4  5  6  7  8  9  10 11
    # stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    # stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2
    stages = [StageCost(1.0, 2.0, trains_below=False), StageCost(1.0, 2.0)]
    for num_microbatches in (2, 3, 8):
        assert step_time(stages, num_microbatches) == (num_microbatches + 1) * 3.0


def test_two_stages_of_unequal_cost() -> None:
    # Stage 1 is the slower: it waits for F0 (1), then works without a break (3 * 6); at the end stage 0 runs B2 (2).
    assert step_time([StageCost(1.0, 2.0, trains_below=False), StageCost(2.0, 4.0)], 3) == 1.0 + 3 * 6.0 + 2.0
    # Stage 0 is the slower. F0 F1 until 4; B0 waits for stage 1, which has done F0 at 3 and B0 at 5: B0 5-9, F2 9-11.
    # Stage 1: F1 5-6, B1 6-8, F2 11-12, B2 12-14. Stage 0: B1 11-15, B2 15-19.
    assert step_time([StageCost(2.0, 4.0, trains_below=False), StageCost(1.0, 2.0)], 3) == 19.0


def test_frozen_first_stage_only_fills_the_pipeline() -> None:
    frozen = StageCost(1.0, trains_below=False)
    # Stage 1 waits for F0 alone, and nothing comes back.
    assert step_time([frozen, StageCost(1.0, 2.0, 0.5, trains_below=False)], 4) == 1.0 + 4 * 3.0 + 0.5
    # Where the frozen stage is the slower one, it works without a break, and the last microbatch is left.
    assert step_time([StageCost(5.0, trains_below=False), StageCost(1.0, 2.0, trains_below=False)], 4) == 4 * 5.0 + 3.0


def test_updates_overlap() -> None:
    # Stage 1 has sent B1 at 7 (F0 1-2, B0 2-4, F1 4-5, B1 5-7) and updates until 17; stage 0 ends at 9.
    assert step_time([StageCost(1.0, 2.0, trains_below=False), StageCost(1.0, 2.0, 10.0)], 2) == 17.0


@pytest.mark.parametrize("num_stages", [3, 4, 5])
@pytest.mark.parametrize("num_microbatches", [5, 6, 11])
def test_equal_stages_have_the_known_bubble(num_stages: int, num_microbatches: int) -> None:
    stages = [StageCost(1.0, 2.0, trains_below=stage > 0) for stage in range(num_stages)]
    assert step_time(stages, num_microbatches) == (num_microbatches + num_stages - 1) * 3.0


def test_merge_adds_up_layers() -> None:
    layers = [StageCost(1.0, 0.0, 0.0, False), StageCost(2.0, 4.0, 8.0, False), StageCost(3.0, 5.0, 7.0, True)]
    assert merge(layers, (2, 1)) == [StageCost(3.0, 4.0, 8.0, False), StageCost(3.0, 5.0, 7.0, True)]


def test_best_split_of_half_frozen_layers() -> None:
    frozen, first, trained = StageCost(1.0, 0.0, 0.0, False), StageCost(1.0, 2.0, 0.0, False), StageCost(1.0, 2.0)
    layers = [*[frozen] * 6, first, *[trained] * 5]
    assert step_time(merge(layers, (6, 6)), 16) == 6 + 16 * 18
    # Both stages then work 12 per microbatch; F0 of stage 0 comes first, its last backward of two layers at the end.
    assert best_split(layers, 2, 16) == ((8, 4), 16 * 12.0 + 8.0 + 4.0)


# The scripts themselves.


def tables_of(output: str) -> dict[str, list[dict[str, str]]]:
    """Reads the tables a benchmark has printed, by the first word of their titles."""
    tables = {}
    for block in output.split("== ")[1:]:
        title, header, *lines = block.split("\n\n")[0].splitlines()
        names = header.split()
        tables[title.split()[0].rstrip(",:")] = [dict(zip(names, line.split(), strict=True)) for line in lines]
    return tables


def ratios_of(output: str) -> dict[str, float]:
    lines = [line.split() for line in output.splitlines() if line.startswith("ratio: ")]
    return {name: float(value) for _, name, value in lines}


def column(table: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in table]


def median_quotient(table: list[dict[str, str]], above: str, below: str) -> float:
    return statistics.median(one / other for one, other in zip(column(table, above), column(table, below), strict=True))


def run_benchmark(name: str, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--quick", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [(), ("--null",)])
def test_freezing_real(options: tuple[str, ...]) -> None:
    output = run_benchmark("freezing_real.py", *options)
    tables, ratios = tables_of(output), ratios_of(output)
    rounds, steps = tables["Steps"], {row["which"]: row for row in tables["Possible"]}
    measured = median_quotient(rounds, "static_ms", "rebalanced_ms")
    possible = float(steps["uniform"]["step_ms"]) / float(steps["best"]["step_ms"])
    assert len(rounds) >= 5
    assert ratios == pytest.approx(
        {"static_over_rebalanced": measured, "possible": possible, "rebalanced_of_possible": measured / possible},
        rel=PRECISION,
    )
    costs = [
        StageCost(*(float(row[name]) for name in ("forward_ms", "backward_ms", "update_ms")), row["gradient"] == "True")
        for row in tables["Layers"]
    ]
    assert (steps["best"]["split"]) == "+".join(map(str, best_split(costs, 2, 16)[0]))
    for row in steps.values():
        balance = [int(size) for size in row["split"].split("+")]
        assert step_time(merge(costs, balance), 16) == pytest.approx(float(row["step_ms"]), rel=PRECISION)


@pytest.mark.slow
@pytest.mark.distributed
def test_overhead() -> None:
    output = run_benchmark("overhead.py")
    tables, ratios = tables_of(output), ratios_of(output)
    windows, cycles = tables["Windows"], tables["Rebalances"]
    parts = [column(cycles, f"{part}_ms") for part in ("profile", "plan", "moves", "rebuilds")]
    rebalance_ms = statistics.median(map(sum, zip(*parts, strict=True)))
    share = rebalance_ms / (100 * statistics.median(column(cycles, "step_ms")))
    assert len(windows) >= 5
    assert len(cycles) >= 5
    measured = median_quotient(windows, "strategy_ms", "loop_ms")
    assert ratios["strategy_over_loop"] == pytest.approx(measured, rel=PRECISION)
    assert ratios["rebalance_share"] == pytest.approx(share, abs=1e-4)
    assert min(column(windows, "loop_ms")) >= 100


@pytest.mark.slow
@pytest.mark.distributed
def test_overhead_of_nothing() -> None:
    output = run_benchmark("overhead.py", "--null")
    windows, ratios = tables_of(output)["Windows"], ratios_of(output)
    measured = median_quotient(windows, "strategy_ms", "loop_ms")
    assert ratios == pytest.approx({"strategy_over_loop": measured}, rel=PRECISION)


def total_of(table: list[dict[str, str]]) -> float:
    return max((max(float(row["loss"]), float(row["weights"])) for row in table), default=0.0)


@pytest.mark.slow
@pytest.mark.distributed
def test_parity() -> None:
    output = run_benchmark("parity.py")
    tables, ratios = tables_of(output), ratios_of(output)
    rows, faults = tables["Differences"], tables["Faults"]
    in_fp32 = [row for row in rows if row["precision"] == "32-true"]
    assert ratios == pytest.approx(
        {
            "max_relative_difference_fp32": total_of(in_fp32),
            "max_relative_difference_placement_only": total_of([row for row in rows if row["bound"] == "0"]),
            "max_relative_difference_bf16": total_of([row for row in rows if row not in in_fp32]),
            **{f"fault_{row['fault']}": total_of([row]) / 1e-5 for row in faults},
        },
        rel=1e-2,  # of three digits
    )
    assert {row["schedule"] for row in rows} == set(SCHEDULES)
    switches = {switch for row in rows for switch in row["switches"].split("+")}
    assert switches == {"none", "accumulation", "clipping", "dropout", "tied", "frozen", "moves"}
    # What is measured here does not depend on the machine, so the bounds are part of the test.
    assert {row["bound"] for row in in_fp32} == {"0", "1e-05"}
    assert ratios["max_relative_difference_placement_only"] == 0
    assert 0 < ratios["max_relative_difference_fp32"] <= 1e-5
    assert len(faults) == 3
    assert min(ratios[f"fault_{row['fault']}"] for row in faults) >= 100


@pytest.mark.slow
@pytest.mark.distributed
def test_parity_of_references_with_themselves() -> None:
    output = run_benchmark("parity.py", "--null")
    assert set(ratios_of(output).values()) == {0.0}
    assert total_of(tables_of(output)["Differences"]) == 0


def test_parity_sees_what_does_not_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parity = importlib.import_module("parity")
    row, faulty = parity.Row("1f1b", (2, 2), ("tied",)), parity.Row("gpipe", (1, 2), (), fault="forgetful_moves")
    moved = parity.Row("gpipe", (1, 2), ("moves",))
    near, far = parity.Difference(9e-6, 1e-7), parity.Difference(1e-7, 1.1e-5)
    zero, broken = parity.Difference(0.0, 0.0), parity.Difference(0.0, float("nan"))
    found = parity.Difference(0.0, 1.1e-3)

    def failures(of_row: Any, of_moved: Any, of_faulty: Any) -> list[str]:
        rows = [(row, row.bound, of_row), (moved, moved.bound, of_moved)]
        return [text.split()[0] for text in parity.report(rows, [(faulty, of_faulty)])]

    assert failures(near, zero, found) == []
    assert failures(far, zero, found) == ["1f1b"]
    assert failures(broken, zero, found) == ["1f1b"]
    assert failures(near, near, found) == ["gpipe"]
    assert failures(near, zero, near) == ["the"]
    assert "ratio: max_relative_difference_fp32 nan" in capsys.readouterr().out
