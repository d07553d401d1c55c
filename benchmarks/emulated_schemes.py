"""What does balancing bring, end to end, under each scheme?

Eight real processes, 48 layers that sleep, 1F1B. A training of 30,000 steps is cut into as many periods as the table
says. In each, one step runs whose costs stand for all of the period, and counts for as many. Each variant begins with a
uniform split:

* `static`: the uniform split stays. This is the baseline.
* `ours`: the library is asked as a callback asks it: it measures, decides, measures again where it wants to, and moves
  layers with all their state. Each step in which it does so runs as well, with all the time that it takes, and counts
  for one step, as it would in the training. Pruning and freezing tell when they change the layers, at the begin of a
  period, and when they will again; of the others nothing is known, and they are measured at every 1,000th step, those
  whose expected costs stay at every 3,000th.
* `oracle`: layers take the exact best split for the period's expected costs; the move is free.
* `dense`: the layers without the scheme, uniformly split: a second baseline, for comparison only.

The variants take turns within each period. The table has means per step of the training. `measuring_ms` is what
measuring, deciding and moving take beside the step, per step in which that is done: eight processes share two cores.

`oracle_over_static_<scheme>` and `ours_over_static_<scheme>` are speed-ups: the static variant's time over theirs.
`oracle_of_ours_<scheme>` is the oracle's time over ours, at most about 1; `worst_of_oracle` is the smallest of them,
and `worst_over_static` the smallest speed-up of ours over static. `bound` is the speed-up over static of a perfect
split in a pipeline without bubbles and messages: the slowest rank's work over the mean, added up over the steps. No
split can gain more than there are layers per rank.

The numbers of layers, microbatches and periods were chosen so that the layers of eight ranks become uneven enough,
within five minutes. The traces have their default parameters. The first step after layers freeze, in which shapes at
borders are found anew, is run without their cost before, in all variants, and not counted.

`--null` runs dense layers in place of the schemes: all ratios must be 1.00 +- 0.05. `--quick` runs two schemes, in
fewer periods and shorter steps.
"""

from __future__ import annotations

import argparse

from emulation import NUM_RANKS, on_all_ranks
from harness import arguments_of, ratio, table
from trainings import Result, Sizes, Trace, run_scheme

from lightning_dynmo.pipeline import PipelineGroups
from lightning_dynmo.simulation import TRACES

RUN_STEPS = 30_000
PERIODS = {"moe": 3, "pruning": 16, "freezing": 20, "sparse_attention": 14, "early_exit": 14, "mod": 3}
QUICK_PERIODS = {"sparse_attention": 5, "mod": 2}
MEASURE_EVERY, MEASURE_STEADY_EVERY, STEADY = 1000, 3000, ("moe", "mod", "dense")
SIZES, QUICK_SIZES = Sizes(48, 16, 1.8e-3), Sizes(48, 12, 1.2e-3)


def run_schemes(groups: PipelineGroups, periods: dict[str, int], sizes: Sizes) -> dict[str, Result]:
    """Runs all schemes. Every rank calls it."""
    found = {}
    for scheme, count in periods.items():
        begins = [index * RUN_STEPS // count for index in range(count + 1)]
        trace = Trace(scheme, begins, sizes, MEASURE_STEADY_EVERY if scheme in STEADY else MEASURE_EVERY)
        found[scheme] = run_scheme(groups, trace, {"ours": "worthwhile"}, ("static", "oracle", "dense"))
    return found


def main(arguments: argparse.Namespace) -> None:
    periods, sizes = (QUICK_PERIODS, QUICK_SIZES) if arguments.quick else (PERIODS, SIZES)
    if arguments.null:
        periods = {"dense": max(periods.values())}
    report(sizes, on_all_ranks(run_schemes, periods, sizes))


def report(sizes: Sizes, found: dict[str, Result]) -> None:
    print(f"{NUM_RANKS} ranks, 1F1B; a training of {RUN_STEPS} steps; {sizes}")
    for scheme in found.keys() & TRACES.keys():
        print(f"{scheme}: {TRACES[scheme]}")
    rows = [
        (
            scheme,
            *(result.times[name].mean for name in ("static", "ours", "oracle", "dense")),
            *result.costs("ours"),
            len(result.times["static"].seconds),
            f"{result.perfect:.3f}",
        )
        for scheme, result in found.items()
    ]
    times = ("static_ms", "ours_ms", "oracle_ms", "dense_ms")
    columns = ("scheme", *times, "measuring_ms", "measured", "moves", "periods", "bound")
    print("\n" + table("Schemes, mean per step", columns, rows))
    for scheme, static_s, ours_s, oracle_s, *_ in rows:
        print(ratio(f"oracle_over_static_{scheme}", static_s / oracle_s))
        print(ratio(f"ours_over_static_{scheme}", static_s / ours_s))
        print(ratio(f"oracle_of_ours_{scheme}", oracle_s / ours_s))
    print(ratio("worst_of_oracle", min(row[3] / row[2] for row in rows)))
    print(ratio("worst_over_static", min(row[1] / row[2] for row in rows)))


if __name__ == "__main__":
    main(arguments_of(__doc__))
