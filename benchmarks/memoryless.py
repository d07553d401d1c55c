"""Does it do harm to rebalance where there is nothing to gain?

A mixture of experts whose loads are drawn anew in every step, with the same expectation for all layers: what a
measurement says of the next step is nothing. Four real processes, 32 layers that sleep, 1F1B. Each variant begins with
a uniform split:

* `static`: the uniform split stays.
* `worthwhile`: the library measures, decides and perhaps moves layers in every single step.
* `always`: so does this one, but with `move_when="always"`, which follows each measurement.

The variants take turns in each step. `measuring_ms` is what measuring, deciding and moving take beside the step, per
step. `memoryless_worthwhile` and `memoryless_always` are the static variant's time over theirs: below 1 is a loss. What
measuring costs does not grow with the length of a step, but with the number of processes that share two cores: hence
few ranks and long layers.

`--null` runs dense layers: both ratios must be 1.00 +- 0.05. `--quick` runs fewer and shorter steps.
"""

from __future__ import annotations

import argparse
from typing import get_args

from emulation import on_all_ranks
from harness import arguments_of, ratio, table
from trainings import Result, Sizes, Trace, run_scheme

from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.planning import MoveWhen
from lightning_dynmo.simulation import TRACES

NUM_RANKS = 4
FIRST_STEP = 30_000
SIZES, QUICK_SIZES = Sizes(32, 8, 10e-3), Sizes(32, 8, 4e-3)
STEPS, QUICK_STEPS = 20, 6


def run_steps(groups: PipelineGroups, scheme: str, sizes: Sizes, num_steps: int) -> Result:
    """Runs all variants. Every rank calls it."""
    trace = Trace(scheme, range(FIRST_STEP, FIRST_STEP + num_steps + 1), sizes)
    return run_scheme(groups, trace, {rule: rule for rule in get_args(MoveWhen)}, ("static",))


def main(arguments: argparse.Namespace) -> None:
    sizes, steps = (QUICK_SIZES, QUICK_STEPS) if arguments.quick else (SIZES, STEPS)
    scheme = "dense" if arguments.null else "moe"
    report(scheme, sizes, on_all_ranks(run_steps, scheme, sizes, steps, num_ranks=NUM_RANKS))


def report(scheme: str, sizes: Sizes, result: Result) -> None:
    print(f"{NUM_RANKS} ranks, 1F1B; {scheme}: {TRACES.get(scheme, 'all layers alike')}; {sizes}")
    static_s = result.times["static"].mean
    rows = [
        (rule, static_s, result.times[rule].mean, *result.costs(rule), len(result.times[rule].seconds))
        for rule in result.measured
    ]
    columns = ("move_when", "static_ms", "ours_ms", "measuring_ms", "measured", "moves", "steps")
    print("\n" + table("Memoryless, mean per step", columns, rows))
    for rule, static_s, ours_s, *_ in rows:
        print(ratio(f"memoryless_{rule}", static_s / ours_s))


if __name__ == "__main__":
    main(arguments_of(__doc__))
