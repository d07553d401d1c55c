"""The benchmarks run, and every ratio they print follows from their tables. No test depends on how fast anything is."""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_dynmo.pipeline.schedules import SCHEDULES
from lightning_dynmo.planning import Assignment
from lightning_dynmo.simulation import TRACES, LayerCost

ROOT = Path(__file__).resolve().parents[2]
PRECISION = 1e-3  # of a ratio computed from a table's microseconds


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a benchmark, which finds those beside it on its path."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_best_split_of_half_frozen_layers(benchmark: Callable[[str], ModuleType]) -> None:
    compute = benchmark("compute")
    layers = [*[LayerCost(1.0, 0.0, 2.0, trains=False)] * 6, *[LayerCost(1.0, 0.0, 2.0)] * 6]
    assert compute.step_time(layers, Assignment((6, 6))) == 6 + 16 * 18
    # Both stages then work 12 per microbatch; F0 of stage 0 comes first, its last backward of two layers at the end.
    assert compute.best_split(layers) == Assignment((8, 4))
    assert compute.step_time(layers, Assignment((8, 4))) == 16 * 12.0 + 8.0 + 4.0


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
def test_freezing_real(options: tuple[str, ...], benchmark: Callable[[str], ModuleType]) -> None:
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
    costs = []
    for row in tables["Layers"]:
        forward, backward, update = (float(row[name]) for name in ("forward_ms", "backward_ms", "update_ms"))
        costs.append(LayerCost(forward, 0.0, backward, row["trains"] == "True", update_s=update))
    compute = benchmark("compute")
    assert (steps["best"]["split"]) == "+".join(map(str, compute.best_split(costs).balance))
    for row in steps.values():
        split = Assignment(tuple(int(size) for size in row["split"].split("+")))
        assert compute.step_time(costs, split) == pytest.approx(float(row["step_ms"]), rel=PRECISION)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [(), ("--null",)])
def test_pruning_real(options: tuple[str, ...], benchmark: Callable[[str], ModuleType]) -> None:
    output = run_benchmark("pruning_real.py", *options)
    tables, ratios = tables_of(output), ratios_of(output)
    rounds, steps, memory = tables["Steps"], {row["which"]: row for row in tables["Possible"]}, tables["Memory"]
    measured = median_quotient(rounds, "static_ms", "rebalanced_ms")
    possible = float(steps["uniform"]["step_ms"]) / float(steps["best"]["step_ms"])
    expected = {
        "static_over_rebalanced": measured,
        "possible": possible,
        "rebalanced_of_possible": measured / possible,
        "dense_over_rebalanced": median_quotient(rounds, "dense_ms", "rebalanced_ms"),
    }
    assert len(rounds) >= 5
    assert ratios == pytest.approx(expected, rel=PRECISION)
    costs = [
        LayerCost(float(row["forward_ms"]), 0.0, float(row["backward_ms"]), update_s=float(row["update_ms"]))
        for row in tables["Layers"]
    ]
    compute = benchmark("compute")
    assert steps["best"]["split"] == "+".join(map(str, compute.best_split(costs).balance))
    densities = [float(row["density"]) for row in tables["Layers"] if row["density"] != "-"]
    held = {row["which"]: float(row["rank_0_mb"]) + float(row["rank_1_mb"]) for row in memory}
    if options:
        assert densities == []
        assert held["static"] == pytest.approx(held["dense"], rel=0.01)
    else:
        assert statistics.mean(densities) == pytest.approx(0.1, abs=0.005)
        assert densities == sorted(densities)
        assert held["static"] < 0.7 * held["dense"]


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


def test_parity_sees_what_does_not_hold(
    benchmark: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    parity = benchmark("parity")
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


@pytest.mark.slow
@pytest.mark.parametrize("null", [False, True])
def test_balancers(null: bool) -> None:
    output = run_benchmark("balancers.py", *(["--null"] if null else []))
    tables, ratios = tables_of(output), ratios_of(output)
    schemes, units, diffusion = tables["Schemes"], tables["Units"], tables["Diffusion"]
    placements, large = tables["Placements"], tables["Large"]

    def worst_of(balancer: str) -> float:
        own = [row for row in schemes if row["balancer"] == balancer]
        return max(float(row["bottleneck_ms"]) / float(row["optimum_ms"]) for row in own)

    expected = {f"{name}_over_optimum_worst_scheme": worst_of(name) for name in ("partition", "diffusion")}
    expected["original_bisection_over_optimum_worst_scheme"] = worst_of("original_bisection")
    bottlenecks = {(row["scheme"], row["balancer"]): float(row["bottleneck_ms"]) for row in schemes}
    for scheme in TRACES:
        gain = bottlenecks[scheme, "uniform"] / bottlenecks[scheme, "partition"]
        expected[f"uniform_over_partition_{scheme}"] = gain
        assert gain <= float(schemes[0]["bound"]) == 4
    assert units[-1]["dense_layer_s"] == "0.0001"
    expected["original_over_optimum_at_1e-4_s"] = float(units[-1]["original_bisection"])
    expected["partition_over_optimum_at_1e-4_s"] = float(units[-1]["partition"])
    expected["diffusion_over_optimum_mean"] = statistics.mean(column(diffusion, "mean"))
    expected["diffusion_above_optimum_in_largest_layers"] = max(column(diffusion, "most_in_layers"))
    expected["diffusion_rounds_of_lemma_2"] = max(
        float(row["most_rounds"]) / float(row["lemma_2"]) for row in diffusion
    )
    for shape in ("v", "loop"):
        own = [float(row["mean"]) for row in placements if row["placement"] == shape]
        expected[f"{shape}_over_optimum_mean"] = statistics.mean(own)
    expected["plan_1000x64_ms"] = min(column(large, "plain_ms"))
    assert ratios == pytest.approx(expected, rel=PRECISION)
    assert len(large) >= 5
    # What is no measurement of time does not depend on the machine, so the bounds are part of the test.
    if null:
        assert {value for name, value in ratios.items() if name.startswith("uniform_over_partition_")} == {1.0}
        assert ratios["v_over_optimum_mean"] > 1.05
    else:
        assert ratios["partition_over_optimum_worst_scheme"] <= 1.01
        assert ratios["diffusion_above_optimum_in_largest_layers"] <= 1.001
        assert ratios["diffusion_rounds_of_lemma_2"] <= 1
        assert ratios["v_over_optimum_mean"] == 1


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [(), ("--null",)])
def test_simulation(options: tuple[str, ...]) -> None:
    output = run_benchmark("simulation.py", *options)
    steps, ratios = tables_of(output)["Steps"], ratios_of(output)
    assert {row["scheme"] for row in steps} == ({"dense"} if options else set(TRACES))
    expected = {}
    for schedule in ("gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble"):
        mine = [row for row in steps if row["schedule"] == schedule]
        errors = [abs(float(row["simulated_ms"]) / float(row["emulated_ms"]) - 1) for row in mine]
        expected[f"median_error_{schedule}"] = statistics.median(errors)
        expected[f"emulated_over_simulated_{schedule}"] = median_quotient(mine, "emulated_ms", "simulated_ms")
    off = [abs(float(row["formula_ms"]) / float(row["emulated_ms"]) - 1) for row in steps]
    expected["median_error_of_formula"] = statistics.median(off)
    assert ratios == pytest.approx(expected, abs=PRECISION)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [(), ("--null",)])
def test_emulated_schemes(options: tuple[str, ...]) -> None:
    output = run_benchmark("emulated_schemes.py", *options)
    schemes, ratios = tables_of(output)["Schemes"], ratios_of(output)
    expected = {}
    for row in schemes:
        expected[f"oracle_over_static_{row['scheme']}"] = quotient(row, "static_ms", "oracle_ms")
        expected[f"ours_over_static_{row['scheme']}"] = quotient(row, "static_ms", "ours_ms")
        expected[f"oracle_of_ours_{row['scheme']}"] = quotient(row, "oracle_ms", "ours_ms")
    expected["worst_of_oracle"] = min(quotient(row, "oracle_ms", "ours_ms") for row in schemes)
    expected["worst_over_static"] = min(quotient(row, "static_ms", "ours_ms") for row in schemes)
    assert ratios == pytest.approx(expected, rel=PRECISION)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [(), ("--null",)])
def test_memoryless(options: tuple[str, ...]) -> None:
    output = run_benchmark("memoryless.py", *options)
    rows, ratios = tables_of(output)["Memoryless"], ratios_of(output)
    expected = {f"memoryless_{row['move_when']}": quotient(row, "static_ms", "ours_ms") for row in rows}
    assert ratios == pytest.approx(expected, rel=PRECISION)
    assert set(expected) == {"memoryless_worthwhile", "memoryless_always"}
    assert all(int(row["measured"]) == int(row["steps"]) for row in rows)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [(), ("--null",)])
def test_threshold(options: tuple[str, ...]) -> None:
    output = run_benchmark("threshold.py", *options)
    rounds, ratios = tables_of(output)["Searches"], ratios_of(output)
    expected = {
        "gather_over_radix": median_quotient(rounds, "gather_ms", "radix_ms"),
        "radix_over_abs_max": median_quotient(rounds, "radix_ms", "abs_max_ms"),
        "radix_over_read": median_quotient(rounds, "radix_ms", "read_ms"),
    }
    most_bytes = max(column(rounds, "radix_bytes"))
    if options:
        assert most_bytes == pytest.approx(max(column(rounds, "gather_bytes")), rel=0.1)
    else:
        expected["radix_bytes_over_50_kb"] = most_bytes / 50_000
        # Both are sums of messages whose sizes do not depend on the machine: 4 times 2 KB, and 4 bytes per magnitude.
        assert 8_000 < most_bytes <= 50_000
        kept = int(output.split(" are kept")[0].split()[-1].replace(",", ""))
        assert min(column(rounds, "gather_bytes")) > 4 * kept
    assert len(rounds) >= 5
    assert ratios == pytest.approx(expected, rel=PRECISION)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--null",)])
def test_spmm(options: tuple[str, ...]) -> None:
    output = run_benchmark("spmm.py", *options)
    steps, ratios = tables_of(output)["Steps"], ratios_of(output)
    expected = {f"step_{row['percent']}_dense_over_sparse": quotient(row, "dense_ms", "sparse_ms") for row in steps}
    assert {"step_75_dense_over_sparse", "step_90_dense_over_sparse", "step_95_dense_over_sparse"} <= set(expected)
    expected["auto_worst"] = min(quotient(row, "dense_ms", "auto_ms") for row in steps)
    steps_only = {name: value for name, value in ratios.items() if not name.startswith("product_")}  # of a GPU
    assert steps_only == pytest.approx(expected, rel=PRECISION)
    assert all(row["auto_ms"] == row[f"{row['auto']}_ms"] for row in steps)
    assert {row["auto"] for row in steps} <= {"dense", "sparse"}


def quotient(row: dict[str, str], above: str, below: str) -> float:
    return float(row[above]) / float(row[below])
