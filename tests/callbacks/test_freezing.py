"""Layer freezing: the rule's numbers, and the same training with and without a pipeline."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_dynmo.callbacks import LayerFreezingCallback, PipeTransformerRule
from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences
from tests.helpers.models import TinyGPT, token_loader


def freeze_repeatedly(rule: PipeTransformerRule, num_layers: int, times: int, norms: Any = None) -> list[int]:
    """Returns how many layers are frozen after each decision, whole layers counted."""
    frozen, counts = 0.0, []
    for _ in range(times):
        frozen = rule.advance(frozen, num_layers, norms)
        counts.append(-int(-round(frozen, 9) // 1))
    return counts


def test_the_rule_freezes_as_in_the_published_table() -> None:
    assert freeze_repeatedly(PipeTransformerRule(1 / 3), 12, 8) == [4, 7, 9, 10, 11, 11, 12, 12]
    assert freeze_repeatedly(PipeTransformerRule(1 / 2), 12, 4) == [6, 9, 11, 12]


def test_large_gradients_hold_layers_back() -> None:
    rule = PipeTransformerRule(1 / 2, use_gradient_norms=True)
    assert rule.needs_gradient_norms
    assert freeze_repeatedly(rule, 8, 3, [5, 4, 1, 2, 3, 3, 3, 3]) == [
        2,
        2,
        2,
    ]  # the smallest is layer 2, again and again
    assert freeze_repeatedly(rule, 8, 2, [5, 4, 9, 2, 3, 3, 3, 1]) == [4, 6]  # the smallest is far behind


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.5])
def test_an_alpha_out_of_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be greater than 0 and at most 1"):
        PipeTransformerRule(alpha)


@pytest.mark.parametrize("interval", ["start_step", "every_n_steps", "rebalance_every_n_steps"])
def test_an_interval_of_zero_is_refused(interval: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LayerFreezingCallback(**{interval: 0})


class Watch(Callback):
    """Notes assignments, gradient messages of this rank, and what moved."""

    def __init__(self) -> None:
        self.balances: list[tuple[int, ...]] = []
        self.gradient_messages: list[int] = []
        self._count = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        from lightning_dynmo.pipeline.execution import ScheduleRun

        if not self.balances:
            watch, send = self, ScheduleRun._send

            def counted(run: ScheduleRun, message: Any) -> None:
                if message[0] == "gradients":
                    watch._count += sum(tensor is not None for tensor in run._made[message])
                send(run, message)

            ScheduleRun._send = counted
        self.balances.append(trainer.strategy.runtime.assignment.balance)
        self._count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.gradient_messages.append(self._count)


def fit(rank: int, pipeline: bool, norms: bool, balance: Any) -> dict[str, Any]:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    model = TinyGPT(num_blocks=7)
    rule = PipeTransformerRule(alpha=0.5, use_gradient_norms=norms)
    freezing, watch = LayerFreezingCallback(rule, start_step=4, every_n_steps=4, rebalance_every_n_steps=5), Watch()
    if pipeline:
        strategy = DynMoStrategy(num_microbatches=4, balance=balance, move_when="always")
        runner = Trainer(
            devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=16, callbacks=[freezing, watch], **QUIET
        )
    else:
        runner = Trainer(devices=1, accumulate_grad_batches=4, max_steps=16, callbacks=[freezing], **QUIET)
    runner.fit(model, token_loader(16 * 16, 16 if pipeline else 4))
    return {
        "weights": dict(model.state_dict()),
        "losses": model.losses,
        "frozen": freezing.num_frozen,
        "training": [module.training for module in model.configure_pipeline()],
        "balances": watch.balances,
        "messages": watch.gradient_messages,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("norms", [False, True])
def test_freezing_with_a_pipeline_equals_freezing_on_one_device(norms: bool) -> None:
    (expected,) = run_distributed(fit, 1, False, norms, None, init_process_group=False)
    ranks = run_distributed(fit, 3, True, norms, [3, 3, 3], timeout_s=90)
    assert ranks[-1]["losses"] == expected["losses"]
    for found in ranks:
        assert differences(found["weights"], expected["weights"]) == []
        assert found["frozen"] == expected["frozen"] > 0
        assert found["training"] == [False] * found["frozen"] + [True] * (9 - found["frozen"])
        assert found["balances"] == ranks[0]["balances"]
    if not norms:
        assert expected["frozen"] == 8  # 5, 7, 8, and never the last


@pytest.mark.distributed
def test_no_gradient_is_sent_to_frozen_stages() -> None:
    ranks = run_distributed(fit, 2, True, False, "uniform", timeout_s=90)
    (first, last) = (ranks[0]["messages"], ranks[1]["messages"])
    assert first == [0] * 16
    assert last[:4] == [4] * 4  # one per microbatch while everything trains
    assert last[4] == 0  # 5 of 9 layers are frozen, and stage 0 has 5


class Freezing(Callback):
    """Freezes everything."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            for parameter in pl_module.parameters():
                parameter.requires_grad_(False)


def freeze_all(rank: int) -> str:
    from lightning_dynmo import DynMoStrategy

    runner = Trainer(
        devices=2, strategy=DynMoStrategy(num_microbatches=2), max_steps=4, callbacks=[Freezing()], **QUIET
    )
    try:
        runner.fit(TinyGPT(), token_loader(64, 8))
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.mark.distributed
def test_nothing_to_train_is_an_error_on_every_rank() -> None:
    for text in run_distributed(freeze_all, 2):
        assert "there is nothing to train" in text


class Thaw(Callback):
    """Freezes the first layers for a while and then trains them again."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        layers: Sequence[Any] = pl_module.configure_pipeline()
        accumulated = trainer.accumulate_grad_batches
        if trainer.global_step in (2, 5) and batch_idx % accumulated == 0:
            for layer in layers[:4]:
                layer.requires_grad_(trainer.global_step == 5)
                for parameter in layer.parameters():
                    parameter.grad = None


def thaw(rank: int, pipeline: bool) -> dict[str, torch.Tensor]:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    model = TinyGPT()
    if pipeline:
        strategy = DynMoStrategy(num_microbatches=4)
        runner = Trainer(devices=3, strategy=strategy, max_steps=8, callbacks=[Thaw()], **QUIET)
    else:
        runner = Trainer(devices=1, accumulate_grad_batches=4, max_steps=8, callbacks=[Thaw()], **QUIET)
    runner.fit(model, token_loader(16 * 8, 16 if pipeline else 4))
    return dict(model.state_dict())


@pytest.mark.distributed
def test_layers_can_be_frozen_and_trained_again() -> None:
    (expected,) = run_distributed(thaw, 1, False, init_process_group=False)
    for found in run_distributed(thaw, 3, True):
        assert differences(found, expected) == []
