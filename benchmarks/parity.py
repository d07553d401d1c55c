"""Does a pipeline train with the numbers of one device, whatever the schedule, the mesh and the options?

Each row is a whole `Trainer.fit` with `DynMoStrategy` in real processes, 20 optimizer steps of 8 microbatches, twice as
many with accumulation. Its reference is the same module under plain Lightning in one process that never imports this
library, with batches of one microbatch and as many of them accumulated; replicas' samples come in their order. Plain
Lightning draws all dropout masks from one stream, which no pipeline can, so rows with dropout are held against
`DynMoStrategy` on one rank; the rows of mesh (1, 1) hold that against plain Lightning.

`loss` is the largest relative difference of a microbatch's loss over all steps. `weights` is the largest difference of
a layer after the last step, relative to how far it has travelled since the start: the norm of ``w - w_reference`` over
that of ``w_reference - w_start``. Layer by layer, so that none is lost in the whole; not tensor by tensor, since the
gains of norms, which are close to 1, travel so little in 20 steps that the last bit of a single one is some 1e-5 of it.
The optimizer is SGD with momentum, whose steps are proportional to gradients. Adam divides a gradient by its own size,
so a parameter whose true gradient is zero, as that of a key's bias, would travel by rounding alone; the module has no
such bias either.

Where only the placement of layers differs, both must be 0: schedules that run whole backwards in the microbatches'
order, one replica, no parameter that two ranks share. Elsewhere sums are rounded in another order, and in fp32 both
must be at most 1e-5. Roundings of bf16 are as large as any fault there, so those rows have no bound.

The last rows have a fault each, seeded on purpose; `fault_<name>` says how many times the bound it exceeds, which must
be a hundred times or more. The exit code is 1 where a bound does not hold.

`--null` runs every reference a second time in its place: all differences must be 0.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from harness import arguments_of, ratio, start_ranks, table, wait_for
from lightning.pytorch import Callback, LightningModule, Trainer
from plain import NUM_LAYERS, NUM_MICROBATCHES, STEPS, Outcome, Training, train
from torch import Tensor

BOUND, FAULTS_EXCEED_IT = 1e-5, 100
IN_ORDER = ("gpipe", "1f1b", "interleaved1f1b")
SCHEDULES = (*IN_ORDER, "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
SWITCHES = ("accumulation", "clipping", "dropout", "tied", "frozen", "moves")
COLUMNS = ("schedule", "dp", "pp", "precision", "switches", "reference", "loss", "weights")
MOVE_EVERY = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One training as a pipeline.

    Attributes:
        schedule: Schedule.
        mesh: Replicas, and ranks of each.
        switches: Some of `SWITCHES`, in their order.
        precision: The Trainer's.
        fault: Name of the fault that is seeded; empty for none.
    """

    schedule: str
    mesh: tuple[int, int]
    switches: tuple[str, ...]
    precision: str = "32-true"
    fault: str = ""

    @property
    def world_size(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def training(self) -> Training:
        return Training(frozenset(self.switches) - {"moves"}, self.precision, self.mesh[0])

    @property
    def only_placement(self) -> bool:
        replicas, ranks = self.mesh
        return replicas == 1 and self.schedule in IN_ORDER and ("tied" not in self.switches or ranks == 1)

    @property
    def bound(self) -> float | None:
        if self.only_placement and not self.fault:
            return 0.0
        return BOUND if self.precision == "32-true" else None


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a training is from its reference; both are NaN where a number is.

    Attributes:
        loss: Largest relative difference of a loss.
        weights: Largest difference of a layer, relative to its way.
    """

    loss: float
    weights: float

    @property
    def largest(self) -> float:
        return largest([self.loss, self.weights])


# The rows.


def without(*switches: str) -> tuple[str, ...]:
    return tuple(switch for switch in SWITCHES if switch not in switches)


def all_rows() -> Iterator[Row]:
    """Yields what covers each option with each other one, though not all of them with all others."""
    for schedule in SCHEDULES:
        yield Row(schedule, (1, 2), without("dropout"))
        yield Row(schedule, (1, 3), without("accumulation", "tied"))
        yield Row(schedule, (1, 4), without("accumulation", "dropout"))
        yield Row(schedule, (2, 2), without("accumulation", "dropout"))
    for schedule in IN_ORDER:
        yield Row(schedule, (1, 2), without("dropout", "tied"))
        yield Row(schedule, (1, 4), without("dropout", "tied"))
    for switches in [(), *((switch,) for switch in SWITCHES), SWITCHES]:
        yield Row("zbvzerobubble", (1, 2), switches)
        yield Row("1f1b", (2, 2), switches)
    for precision in ("bf16-mixed", "bf16-true"):
        yield Row("1f1b", (1, 2), without("accumulation", "dropout", "tied"), precision)
        yield Row("interleaved1f1b", (1, 4), without("accumulation", "tied"), precision)
        yield Row("zbvzerobubble", (1, 2), without("accumulation", "dropout"), precision)
        yield Row("1f1b", (2, 2), without("accumulation", "dropout"), precision)
    yield Row("1f1b", (1, 1), without("dropout"))


def quick_rows() -> Iterator[Row]:
    """Yields every schedule, switch and precision at least once."""
    yield Row("1f1b", (1, 1), ())
    yield Row("1f1b", (1, 2), without("dropout", "tied"))
    yield Row("gpipe", (1, 2), ("dropout", "moves"))
    yield Row("loopedbfs", (1, 2), ("tied", "frozen"))
    yield Row("interleavedzerobubble", (1, 2), ("frozen", "moves"))
    yield Row("zbvzerobubble", (1, 2), ("clipping", "tied"))
    yield Row("interleaved1f1b", (2, 2), ("tied", "moves"))
    yield Row("dualpipev", (2, 2), ("clipping", "frozen"))
    for precision in ("bf16-mixed", "bf16-true"):
        yield Row("1f1b", (1, 2), ("clipping", "moves"), precision)


def faulty_rows(quick: bool) -> Iterator[Row]:
    switches = () if quick else without("accumulation", "dropout", "moves")
    yield Row("zbvzerobubble", (1, 2), switches, fault="lost_microbatch")
    yield Row("1f1b", (2, 2), switches, fault="own_gradients_only")
    yield Row("gpipe", (1, 2), (*switches, "moves"), fault="forgetful_moves")


# On the ranks.


def reference(training: Training) -> Outcome:
    """Trains in one process: by plain Lightning, or with dropout as a pipeline of one rank."""
    if "dropout" not in training.switches:
        outcome = train(training)
        assert not any(name.partition(".")[0] == "lightning_dynmo" for name in sys.modules)
        return outcome
    from lightning_dynmo import DynMoStrategy

    strategy = DynMoStrategy(num_microbatches=NUM_MICROBATCHES)
    return train(training, microbatches_per_batch=NUM_MICROBATCHES, strategy=strategy)


def references(rank: int, trainings: Sequence[Training], path: Path) -> None:
    be_quiet()
    torch.save({training: reference(training) for training in trainings}, path)


def pipelines(rank: int, rows: Sequence[Row], expected: Sequence[Path], path: Path) -> None:
    """Trains one row after the other as pipelines, and writes how far this rank is from the references."""
    be_quiet()
    outcomes = load(expected)
    torch.save([difference(pipeline(row), outcomes[row.training], row.mesh[0], rank) for row in rows], path / f"{rank}")


def pipeline(row: Row) -> Outcome:
    from lightning_dynmo import DynMoStrategy

    replicas, ranks = row.mesh
    count = NUM_MICROBATCHES // replicas
    strategy = DynMoStrategy(ranks, replicas, num_microbatches=count, schedule=row.schedule)
    moves = [Moves()] if "moves" in row.switches else []
    with FAULTS[row.fault]():
        return train(row.training, microbatches_per_batch=count, strategy=strategy, callbacks=moves)


class Moves(Callback):
    """Moves layers every few steps: to the front, to the back, and to where they came from."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        even = trainer.strategy.runtime.assignment.balance
        rest = NUM_LAYERS - len(even) + 1
        ones = (1,) * (len(even) - 1)
        self._balances = [even, (rest, *ones), (*ones, rest)]
        self._step = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        from lightning_dynmo import Assignment

        step = trainer.global_step
        if step > self._step and step % MOVE_EVERY == 0:
            trainer.strategy.runtime.move_to(Assignment(self._balances[step // MOVE_EVERY % len(self._balances)]))
        self._step = step


def be_quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


# The faults: each replaces a part of the library by one that forgets something, as a wrong one would.


def lost_microbatch() -> AbstractContextManager[Any]:
    """The second stage loses the gradients of its weights of one microbatch."""
    from lightning_dynmo.pipeline.stage import Stage

    original = Stage.backward_of_weights

    def forgetful(stage: Any, microbatch: int) -> None:
        if (stage.index, microbatch) != (1, 3):
            original(stage, microbatch)

    return patch.object(Stage, "backward_of_weights", forgetful)


def own_gradients_only() -> AbstractContextManager[Any]:
    """Replicas wait for the sums of their gradients, and then use their own."""
    from lightning_dynmo.pipeline.replicas import ReplicaSums

    def forgetful(sums: Any) -> None:
        for _, _, work in sums._pending:
            work.wait()
        sums._pending.clear()

    return patch.object(ReplicaSums, "finish", forgetful)


def forgetful_moves() -> AbstractContextManager[Any]:
    """Layers that move lose their momentum."""
    from lightning_dynmo.pipeline import migration, runtime

    def forgetful(chain: Any, moves: Iterable[Any], groups: Any, optimizers: Any) -> Any:
        return migration.migrate(chain, moves, groups, ())

    return patch.object(runtime, "migrate", forgetful)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "lost_microbatch": lost_microbatch,
    "own_gradients_only": own_gradients_only,
    "forgetful_moves": forgetful_moves,
}


# The differences, and what is made of them.


def difference(outcome: Outcome, expected: Outcome, replicas: int = 1, rank: int = 0) -> Difference:
    """Returns how far a rank's outcome is from the reference; of each batch's losses, each replica has its part."""
    losses = expected.losses.view(-1, replicas, NUM_MICROBATCHES // replicas)[:, rank % replicas].flatten()
    ways = [relative_way(*layer) for layer in zip(outcome.final, expected.final, expected.initial, strict=True)]
    return Difference(largest(((outcome.losses - losses).abs() / losses).tolist()), largest(ways))


def relative_way(final: Tensor, expected: Tensor, initial: Tensor) -> float:
    assert final.dtype == expected.dtype
    way = (expected.double() - initial.double()).norm().item()
    apart = (final.double() - expected.double()).norm().item()
    return apart / way if way else float("inf" if apart else 0)


def largest(values: Iterable[float]) -> float:
    """Returns the largest number, or NaN if one is, which Python's `max` may pass over."""
    return torch.tensor([0.0, *values], dtype=torch.float64).max().item()


def measure(rows: Sequence[Row], null: bool) -> dict[Row, Difference]:
    """Runs the references, then all rows in as few processes as there are ranks at a time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = run_references(rows, folder, "expected")
        if null:
            first, second = load(expected), load(run_references(rows, folder, "again"))
            return {row: difference(second[row.training], first[row.training]) for row in rows}
        found = {}
        for world_size in sorted({row.world_size for row in rows}):
            # Of one mesh after the other, since each makes process groups of its own.
            own = sorted((row for row in rows if row.world_size == world_size), key=lambda row: row.mesh)
            path = folder / f"{world_size} ranks"
            path.mkdir()
            wait_for(start_ranks(pipelines, world_size, own, expected, path))
            ranks = [torch.load(file, weights_only=False) for file in path.iterdir()]
            for row, parts in zip(own, zip(*ranks, strict=True), strict=True):
                found[row] = Difference(largest(part.loss for part in parts), largest(part.weights for part in parts))
        return found


def run_references(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    trainings = dict.fromkeys(row.training for row in rows)
    parts = {folder / f"{name} {dropout}": [] for dropout in (False, True)}
    for training in trainings:
        parts[folder / f"{name} {'dropout' in training.switches}"].append(training)
    for started in [start_ranks(references, 1, part, path) for path, part in parts.items()]:
        wait_for(started)
    return list(parts)


def load(paths: Iterable[Path]) -> dict[Training, Outcome]:
    return {key: outcome for path in paths for key, outcome in torch.load(path, weights_only=False).items()}


def main(arguments: argparse.Namespace) -> int:
    rows = list(quick_rows() if arguments.quick else all_rows())
    faulty = [] if arguments.null else list(faulty_rows(arguments.quick))
    found = measure([*rows, *faulty], arguments.null)
    bounds = {row: 0.0 if arguments.null else row.bound for row in rows}
    failed = report([(row, bounds[row], found[row]) for row in rows], [(row, found[row]) for row in faulty])
    for name in failed:
        print(f"does not hold: {name}")
    return bool(failed)


def report(rows: Sequence[tuple[Row, float | None, Difference]], faulty: Sequence[tuple[Row, Difference]]) -> list[str]:
    """Prints tables and ratios; returns what does not hold."""
    print(f"\n{NUM_LAYERS} layers, {STEPS} steps of {NUM_MICROBATCHES} microbatches, twice as many with accumulation\n")
    cells, failed = [], []
    for row, bound, apart in rows:
        holds = bound is None or apart.largest <= bound
        text = "none" if bound is None else f"{bound:.0e}" if bound else "0"
        cells.append((*described(row, apart), text, "yes" if holds else "no"))
        failed += [] if holds else [" ".join(cells[-1])]
    print(table("Differences from the reference", (*COLUMNS, "bound", "holds"), cells))
    print("precision='16-mixed' has no row: DynMoStrategy refuses it by name, since it would have to scale losses.\n")
    if faulty:
        cells = [(row.fault, *described(row, apart)) for row, apart in faulty]
        print(table("Faults seeded on purpose", ("fault", *COLUMNS), cells))
    for name, chosen in KINDS.items():
        value = largest(apart.largest for row, _, apart in rows if chosen(row))
        print(ratio(f"max_relative_difference_{name}", value, ".3g"))
    for row, apart in faulty:
        times = apart.largest / BOUND
        print(ratio(f"fault_{row.fault}", times, ".3g"))
        failed += [] if times >= FAULTS_EXCEED_IT else [f"the fault {row.fault} is to exceed the bound a hundredfold"]
    return failed


def described(row: Row, apart: Difference) -> tuple[str, ...]:
    reference = "one_rank" if "dropout" in row.switches else "lightning"
    differences = f"{apart.loss:.3g}", f"{apart.weights:.3g}"
    sizes = map(str, row.mesh)
    return (row.schedule, *sizes, row.precision, "+".join(row.switches) or "none", reference, *differences)


KINDS: dict[str, Callable[[Row], bool]] = {
    "fp32": lambda row: row.precision == "32-true",
    "placement_only": lambda row: row.only_placement,
    "bf16": lambda row: row.precision != "32-true",
}


if __name__ == "__main__":
    sys.exit(main(arguments_of(__doc__)))
