"""Hooks that look at gradients see those of the whole model on every rank, as on one device."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import grad_norm

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, QUIET, differences
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed


class LogsNorms(TinyGPT):
    """Logs norms in the way that Lightning documents, and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.embedding.positions.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.seen.append({str(key): float(value) for key, value in grad_norm(self, norm_type=2).items()})
        self.seen.append({str(key): float(value) for key, value in grad_norm(self, norm_type=1).items()})
        self.seen.append({str(key): float(value) for key, value in grad_norm(self, norm_type="inf").items()})


class Clips(TinyGPT):
    """Clips by itself, in one way after another."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_after_backward(self) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5
                parameter.grad = parameter.grad / torch.tensor(2.0)
        self.seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.005)


class ClipsOnce(TinyGPT):
    """Clips before each optimizer step, where a pipeline and one device have the same gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)))


class LogsNormsByCallback(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        pl_module.log_dict(grad_norm(pl_module, norm_type=2))
        pl_module.seen.append({str(key): float(value) for key, value in grad_norm(pl_module, norm_type=2).items()})


class NotesLosses(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


MODULES: dict[str, tuple[Callable[[], TinyGPT], type[Callback] | None]] = {
    "logs": (LogsNorms, None),
    "clips": (Clips, None),
    "clips once": (ClipsOnce, None),
    "callback": (NotesLosses, LogsNormsByCallback),
}


def fit(rank: int, pipeline: bool) -> dict[str, Any]:
    found = {}
    for name, (module, callback) in MODULES.items():
        seed_everything(3, verbose=False)
        model = module()
        options: dict[str, Any] = {**QUIET, "max_epochs": 1, "gradient_clip_val": 1.0 if name == "logs" else None}
        if callback is not None:
            options["callbacks"] = [callback()]
        batches = token_loader(64, 16 if pipeline else 4)
        if pipeline:
            from lightning_dynmo import DynMoStrategy

            strategy = DynMoStrategy(num_microbatches=NUM_MICROBATCHES)
            runner = Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **options)
        else:
            runner = Trainer(devices=1, accumulate_grad_batches=NUM_MICROBATCHES, **options)
        runner.fit(model, batches)
        logged = {key: value.item() for key, value in runner.callback_metrics.items() if key.startswith("grad_")}
        found[name] = {"seen": model.seen, "logged": logged, "weights": dict(model.state_dict())}
        assert all(parameter.grad is None or type(parameter.grad) is torch.Tensor for parameter in model.parameters())
    if not pipeline:
        assert "lightning_dynmo" not in sys.modules
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    (found,) = run_distributed(fit, 1, False, init_process_group=False)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(fit, 3, True)


@pytest.mark.parametrize("name", ["logs", "callback"])
def test_norms_are_those_of_one_device_to_the_last_bit(
    name: str, reference: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    expected = reference[name]
    assert any("head" in key for key in expected["logged"])
    assert "grad_2.0_norm_total" in expected["logged"]
    for found in ranks:
        assert found[name]["seen"] == expected["seen"]
        assert found[name]["logged"] == expected["logged"]
        assert differences(found[name]["weights"], expected["weights"]) == []


def test_frozen_parameters_have_no_norm(ranks: list[dict[str, Any]]) -> None:
    assert not any("positions" in key for found in ranks for key in found["logs"]["logged"])
    assert all(any("tokens" in key for key in found["logs"]["logged"]) for found in ranks)


def test_all_ways_of_clipping_are_those_of_a_pipeline_of_one_rank(ranks: list[dict[str, Any]]) -> None:
    # Not of plain Lightning, which calls on_after_backward after each microbatch.
    (alone,) = run_distributed(fit, 1, True)
    expected = alone["clips"]
    assert len(expected["seen"]) == 8
    for found in (entry["clips"] for entry in ranks):
        assert found["seen"] == pytest.approx(expected["seen"], rel=1e-6)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-6)
    # The negative twin: with less clipping the weights are others.
    other = alone["clips once"]["weights"]
    assert max((other[name] - weight).abs().max() for name, weight in expected["weights"].items()) > 1e-4


def test_clipping_in_a_hook_gives_the_weights_of_one_device(
    reference: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    expected = reference["clips once"]
    assert max(expected["seen"]) > 0.1
    for found in ranks:
        assert found["clips once"]["seen"] == expected["seen"]
        assert differences(found["clips once"]["weights"], expected["weights"]) == []
    # The negative twin: without clipping the weights are others.
    assert differences(expected["weights"], reference["callback"]["weights"])


class AsksForElements(TinyGPT):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.abs().max()


class ClampsBeforeNorm(TinyGPT):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)
        grad_norm(self, norm_type=2)


class OtherNorm(TinyGPT):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grad_norm(self, norm_type=3)


def ask(rank: int, module: type[TinyGPT]) -> str:
    from lightning_dynmo import DynMoStrategy

    runner = Trainer(devices=2, strategy=DynMoStrategy(num_microbatches=4), max_steps=1, **QUIET)
    try:
        runner.fit(module(), token_loader(64, 16))
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (AsksForElements, r"called abs on the gradient of \S+ \(pipeline rank [01]\), but"),
        (ClampsBeforeNorm, r"called norm\(.*\) on the gradient of \S+ \(pipeline rank [01]\) after changing"),
        (OtherNorm, r"called norm\(p=3.0, .*\) on the gradient of \S+ \(pipeline rank [01]\), but"),
    ],
)
def test_what_a_rank_cannot_know_is_an_error_that_says_where_it_is(module: type[TinyGPT], expected: str) -> None:
    for text in run_distributed(ask, 2, module):
        assert re.search(expected, text), text
        assert ".norm(p) works for p = 1, 2 and inf" in text
