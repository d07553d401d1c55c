"""What users look at: the summary with stages, profiles with an entry per action, busy and waiting time per stage."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import rich
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torchmetrics import MeanMetric

from tests.cases.runs import make_loader, make_trainer
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyGPT

pytestmark = pytest.mark.distributed


class Odd(TinyGPT):
    """Has a frozen layer, a parameter in no layer and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.embedding.requires_grad_(False)
        self.mean = MeanMetric()


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def summaries(rank: int, pipeline: bool) -> list[str]:
    """Returns what the plain and the rich summary show, and a second fit of the same Trainer."""
    shown = []
    for depth, kind in ((1, ModelSummary), (2, ModelSummary), (2, RichModelSummary)):
        lines = Lines()
        logger = logging.getLogger("lightning.pytorch.callbacks.model_summary")
        logger.addHandler(lines)
        runner = make_trainer(pipeline, max_steps=1, enable_model_summary=True, callbacks=[kind(max_depth=depth)])
        with rich.get_console().capture() as capture:
            runner.fit(Odd(), make_loader(pipeline))
        logger.removeHandler(lines)
        shown.append("\n".join([*lines.texts, capture.get()]))
    return shown


def table(text: str, separator: str) -> list[list[str]]:
    """Returns the cells of a printed table, head first."""
    rows = [line for line in text.splitlines() if line.count(separator) > 2]
    return [[cell.strip() for cell in row.removeprefix("│").removesuffix("│").split(separator)] for row in rows]


def column(rows: list[list[str]], name: str) -> dict[str, str]:
    return {row[rows[0].index("Name")]: row[rows[0].index(name)] for row in rows[1:]}


def test_the_summary_counts_the_whole_model_and_shows_stages() -> None:
    (expected,) = run_distributed(summaries, 1, False, init_process_group=False)
    found, silent = run_distributed(summaries, 2, True)
    assert [text.strip() for text in silent] == ["", "", ""]
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        ours_rows, their_rows = table(ours, "|"), table(theirs, "|")
        assert [name for name in their_rows[0] if name != "FLOPs"] == [n for n in ours_rows[0] if n != "Stage"]
        for name in ("Type", "Params", "Mode"):
            assert column(ours_rows, name) == column(their_rows, name)
        totals = [line for line in theirs.splitlines() if line.endswith(("params", "(MB)", "mode"))]
        assert len(totals) == 6
        assert [line for line in ours.splitlines() if line in totals] == totals
    stages = column(table(found[0], "|"), "Stage")
    assert stages == {"embedding": "0", "blocks": "0-1", "head": "1", "mean": "all", "other params": "n/a"}
    rows = table(found[2].replace("┃", "│"), "│")
    assert column(rows, "Stage")["blocks.2"] == "0"
    assert column(rows, "Stage")["blocks.3"] == "1"
    assert column(rows, "Params") == column(table(expected[2].replace("┃", "│"), "│"), "Params")
    for line in ("Trainable params: 17.0 K", "Total params: 17.6 K"):
        assert line in found[2]
        assert line in expected[2]


def profile(rank: int, folder: str) -> tuple[dict[str, int], list[str], str]:
    profiler = PyTorchProfiler(dirpath=folder, filename="pytorch", row_limit=200)
    runner = make_trainer(True, max_steps=6, profiler=profiler)
    runner.fit(TinyGPT(), make_loader(True, 128))
    assert profiler.function_events is not None
    ranges = {event.key: event.count for event in profiler.function_events.key_averages() if "dynmo:" in event.key}
    names = []
    for name in ("simple", "advanced", "pytorch"):
        other = make_trainer(True, max_steps=6, profiler=name, default_root_dir=folder)
        other.fit(TinyGPT(), make_loader(True, 128))
        names.append(type(other.profiler).__name__)
    return ranges, names, (Path(folder) / f"fit-pytorch-{rank}.txt").read_text()


def test_profiles_name_every_action_of_the_schedule(tmp_path: Path) -> None:
    for rank, (ranges, names, text) in enumerate(run_distributed(profile, 2, str(tmp_path), timeout_s=120)):
        messages = ("sending activations", "receiving gradients"), ("receiving activations", "sending gradients")
        kinds = ("forward", "backward", *messages[rank])
        expected = {f"dynmo: {kind} of stage {rank} microbatch {m}" for kind in kinds for m in range(4)}
        assert set(ranges) == expected
        assert set(ranges.values()) == {3}  # steps that Lightning's profiler records by default
        assert names == ["SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler"]
        assert f"dynmo: forward of stage {rank} microbatch 0" in text


def log_profiles(rank: int, folder: str) -> dict[str, Any]:
    runner: Trainer = make_trainer(
        True,
        max_steps=6,
        log_every_n_steps=2,
        logger=CSVLogger(folder, version=0),
        enable_progress_bar=True,
    )
    runner.fit(TinyGPT(), make_loader(True, 128))
    return {
        "logged": {key: value.item() for key, value in runner.callback_metrics.items() if key.startswith("dynmo/")},
        "bar": sorted(runner.progress_bar_metrics),
    }


def test_busy_and_waiting_time_of_every_stage_are_logged(tmp_path: Path) -> None:
    ranks = run_distributed(log_profiles, 3, str(tmp_path))
    assert all(found == ranks[0] for found in ranks)
    logged = ranks[0]["logged"]
    step_s = logged["dynmo/step_time_s"]
    waited = 0.0
    for stage in range(3):
        busy_s, wait_s = logged[f"dynmo/busy_s/stage_{stage}"], logged[f"dynmo/wait_s/stage_{stage}"]
        assert 0 < busy_s < step_s
        assert busy_s + wait_s == pytest.approx(step_s, rel=1e-4)
        waited += wait_s
    assert logged["dynmo/bubble_ratio"] == pytest.approx(waited / (3 * step_s), rel=1e-4)
    assert {"dynmo/bubble_ratio", "dynmo/imbalance"} <= set(ranks[0]["bar"])
    head = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert "dynmo/busy_s/stage_2" in head.split(",")
    assert "dynmo/wait_s/stage_0" in head.split(",")
