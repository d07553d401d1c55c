"""Runs cases, many in one start of processes: the same Trainer under plain Lightning on one device and as a pipeline.

The one-device run never imports the package. It sees the same batches, so a pipeline must come to the same weights up
to rounding; or, where each microbatch matters (statistics, precision), the microbatches one by one, and then to the
very same bits.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences

MICROBATCHES = 4
TOLERANCE = 1e-5
LIMIT_S = 5.0


@dataclass(frozen=True)
class Case:
    """A run of `Trainer.fit`.

    Attributes:
        module: Makes the module.
        train: Makes the training data: a list of batches, or a loader.
        val: Makes the validation data.
        ranks: Number of processes.
        strategy: Arguments of the strategy; 4 microbatches unless given.
        trainer: Arguments of the Trainer; one epoch unless given.
        callbacks: Makes callbacks, for both runs.
        plugins: Makes plugins of the Trainer.
        moves: Layers per stage to take at the end of each optimizer step, one after the other.
        plain: What the one-device run sees: the same batches, their microbatches as batches of their own, or nothing,
            if there is none.
        plain_train: Other training data of the one-device run.
        plain_trainer: Other arguments of its Trainer.
        drive: What to do with Trainer, module, training and validation data instead of one ``fit``; a folder that all
            ranks see comes last.
    """

    module: Callable[[], LightningModule]
    train: Callable[[], Any]
    val: Callable[[], Any] | None = None
    ranks: int = 2
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[Any]] = tuple
    plugins: Callable[[], list[Any]] = list
    moves: Sequence[tuple[int, ...]] = ()
    plain: Literal["batches", "microbatches", "none"] = "batches"
    plain_train: Callable[[], Any] | None = None
    plain_trainer: Mapping[str, Any] = field(default_factory=dict)
    drive: Callable[[Trainer, LightningModule, Any, Any, Path], Any] | None = None


@dataclass
class Outcome:
    """What one process saw of a case.

    Attributes:
        weights: Final ``state_dict`` of the module.
        start: The module's ``state_dict`` before the run.
        logged: ``trainer.callback_metrics`` without those of the pipeline itself.
        notes: The module's attribute ``notes``.
        result: What `Case.drive` returned.
        kind: Type of the exception that ended the run; None if none did.
        text: Its message.
        seconds: How long the run took.
        error_at: When the exception came out, on the clock that all processes share.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    notes: Any = None
    result: Any = None
    kind: str | None = None
    text: str = ""
    seconds: float = 0.0
    error_at: float = 0.0


@dataclass
class Comparison:
    """What came of a case under plain Lightning, and on each rank of the pipeline."""

    plain: Outcome | None
    ranks: list[Outcome]


def run_cases(cases: Mapping[str, Case], timeout_s: float = 400.0) -> dict[str, Comparison]:
    """Runs all cases: the one-device runs in one process, the others in one start for each number of ranks."""
    plain = {name: case for name, case in cases.items() if case.plain != "none"}
    expected: dict[str, Outcome] = {}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if plain:
            (expected,) = _start(1, plain, False, folder, timeout_s)
        for num_ranks in sorted({case.ranks for case in cases.values()}):
            some = {name: case for name, case in cases.items() if case.ranks == num_ranks}
            ranks = _start(num_ranks, some, True, folder, timeout_s)
            for name in some:
                found[name] = Comparison(expected.get(name), [outcomes[name] for outcomes in ranks])
    return found


def assert_equal_to_one_device(comparison: Comparison, *, exact: bool = False, ignore: Iterable[str] = ()) -> None:
    """Checks that no run failed, that the model learned, and that every rank has the weights and logs of one device."""
    plain = comparison.plain
    assert plain is not None
    assert plain.kind is None, f"one device: {plain.kind}: {plain.text}"
    for rank, outcome in enumerate(comparison.ranks):
        assert outcome.kind is None, f"rank {rank}: {outcome.kind}: {outcome.text}"
    assert plain.weights.keys() == comparison.ranks[0].weights.keys()
    changed = [name for name, value in plain.weights.items() if not torch.equal(value, plain.start[name])]
    assert changed, "nothing was trained, so nothing was compared"
    for outcome in comparison.ranks:
        assert differences(dict(outcome.start), dict(plain.start)) == [], "the runs began with other weights"
        assert weights_differ(outcome, plain, exact=exact, ignore=ignore) == []
    for outcome in comparison.ranks[1:]:
        assert differences(outcome.logged, comparison.ranks[0].logged) == []


def weights_differ(left: Outcome, right: Outcome, *, exact: bool = False, ignore: Iterable[str] = ()) -> list[str]:
    """Returns which weights differ, bit by bit or by more than the tolerance."""
    ignored = tuple(ignore)
    found = []
    for name, value in right.weights.items():
        if any(part in name for part in ignored):
            continue
        other = left.weights[name]
        limit = 0.0 if exact else TOLERANCE
        same_kind = (other.shape, other.dtype) == (value.shape, value.dtype)
        if not same_kind or not torch.allclose(other, value, rtol=limit, atol=limit):
            difference = (other.double() - value.double()).abs().max().item() if same_kind else "kind"
            found.append(f"{name}: {difference}")
    return found


def assert_refused_alike(comparison: Comparison, kind: str, *parts: str) -> None:
    """Checks that every rank raised the same error within seconds, and that its text has all the parts."""
    outcomes = comparison.ranks
    assert {outcome.kind for outcome in outcomes} == {kind}, [(outcome.kind, outcome.text) for outcome in outcomes]
    texts = {outcome.text for outcome in outcomes}
    assert len(texts) == 1, texts
    text = texts.pop()
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
    assert max(outcome.seconds for outcome in outcomes) < LIMIT_S, [outcome.seconds for outcome in outcomes]


def _start(num_ranks: int, cases: Mapping[str, Case], pipeline: bool, folder: str, timeout_s: float) -> list[Any]:
    # The process group is left to Lightning, as in a user's run.
    args = (cases, pipeline, folder)
    return run_distributed(_run_all, num_ranks, *args, init_process_group=False, timeout_s=timeout_s)


def _run_all(rank: int, cases: Mapping[str, Case], pipeline: bool, folder: str) -> dict[str, Outcome]:
    outcomes = {}
    for number, (name, case) in enumerate(cases.items()):
        outcomes[name] = _run(rank, case, pipeline, Path(folder, f"{os.environ['WORLD_SIZE']}-{pipeline}-{number}"))
    assert pipeline or not any(module.split(".")[0] == "lightning_dynmo" for module in sys.modules)
    return outcomes


def _run(rank: int, case: Case, pipeline: bool, folder: Path) -> Outcome:
    outcome = Outcome()
    begin = time.monotonic()
    try:
        seed_everything(3, verbose=False)
        module = case.module()
        outcome.start = _copy(module.state_dict())
        trainer = _trainer(case, pipeline)
        train = (case.plain_train or case.train)() if not pipeline else case.train()
        train, val = _loader(rank, case, train, pipeline), case.val() if case.val is not None else None
        val = _loader(rank, case, val, pipeline, training=False)
        begin = time.monotonic()
        if case.drive is None:
            trainer.fit(module, train, val)
        else:
            outcome.result = case.drive(trainer, module, train, val, folder)
        outcome.weights = _copy(module.state_dict())
        logged = trainer.callback_metrics.items()
        outcome.logged = {key: value.detach().clone() for key, value in logged if "dynmo" not in key}
        outcome.notes = getattr(module, "notes", None)
    except Exception as error:
        outcome.kind, outcome.text, outcome.error_at = type(error).__name__, str(error), time.monotonic()
    outcome.seconds = time.monotonic() - begin
    return outcome


def _trainer(case: Case, pipeline: bool) -> Trainer:
    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, **case.trainer}
    if plugins := case.plugins():
        options["plugins"] = plugins
    callbacks = list(case.callbacks())
    if not pipeline:
        options |= case.plain_trainer
        if case.plain == "microbatches":
            options["accumulate_grad_batches"] = options.get("accumulate_grad_batches", 1) * MICROBATCHES
        return Trainer(devices=1, callbacks=callbacks, **options)
    from lightning_dynmo import DynMoStrategy

    strategy = DynMoStrategy(**{"num_microbatches": MICROBATCHES, **case.strategy})
    if strategy.data_parallel_size > 1:
        options.setdefault("use_distributed_sampler", False)  # the cases give each replica its part
    if case.moves:
        callbacks.append(_moving(case.moves))
    return Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, callbacks=callbacks, **options)


def _moving(balances: Sequence[tuple[int, ...]]) -> Any:
    from lightning.pytorch import Callback

    from lightning_dynmo import Assignment

    class Moving(Callback):
        """Moves layers after each optimizer step."""

        step = 0

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step > self.step:
                balance = balances[self.step % len(balances)]
                self.step = trainer.global_step
                trainer.strategy.runtime.move_to(Assignment(balance))

    return Moving()


def _loader(rank: int, case: Case, data: Any, pipeline: bool, training: bool = True) -> Any:
    """Returns a loader of the batches; each replica gets its part, and one device may get microbatches."""
    if not isinstance(data, list):
        return data
    replicas = int(case.strategy.get("data_parallel_size", 1))
    if pipeline and replicas > 1:
        data = [cut(batch, replicas)[rank % replicas] for batch in data]
    if not pipeline and case.plain == "microbatches":
        data = [part for batch in data for part in cut(batch, MICROBATCHES)]
    return DataLoader(data, batch_size=None, collate_fn=_as_it_is)


def cut(batch: Any, num_parts: int) -> list[Any]:
    """Cuts tuples of tensors into equal parts along dim 0."""
    return list(zip(*(tensor.chunk(num_parts) for tensor in batch), strict=True))


def _as_it_is(batch: Any) -> Any:
    return batch


def _copy(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in state.items() if isinstance(value, Tensor)}
