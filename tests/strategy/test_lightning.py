"""What Lightning users rely on works as on one device: evaluation, logs, metrics, monitors, hooks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import QUIET, differences
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed


def trainer(pipeline: bool, **options: Any) -> Trainer:
    """Returns a Trainer that cuts batches into 4, or accumulates 4 of a quarter of the size on one device."""
    if not pipeline:
        return Trainer(devices=1, accumulate_grad_batches=4, **{**QUIET, **options})
    from lightning_dynmo import DynMoStrategy

    strategy = DynMoStrategy(num_microbatches=4)
    return Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **{**QUIET, **options})


def loader(pipeline: bool, num_samples: int = 64, seed: int = 1) -> Any:
    return token_loader(num_samples, 16 if pipeline else 4, seed=seed)


def evaluate_everywhere(rank: int, pipeline: bool) -> dict[str, Any]:
    """Validates before any training, trains with the sanity check and validations between, tests and predicts."""
    seed_everything(3, verbose=False)
    model = TinyGPT()
    runner = trainer(pipeline, max_epochs=2, num_sanity_val_steps=2)
    training, other = loader(pipeline), token_loader(12, 6, seed=2)  # evaluation with another batch size
    found: dict[str, Any] = {"before": runner.validate(model, other, verbose=False)}
    runner.fit(model, training, other)
    found["fit"] = {key: value.item() for key, value in runner.callback_metrics.items() if "dynmo" not in key}
    found["test"] = runner.test(model, other, verbose=False)
    found["predict"] = runner.predict(model, other)
    runner.fit_loop.max_epochs = 3
    runner.fit(model, training, other)  # a second fit goes on
    found["weights"] = dict(model.state_dict())
    with torch.no_grad():
        found["call"] = model(other.dataset.tensors[0])  # afterwards the module is whole, on every rank
    return found


def test_evaluation_equals_one_device() -> None:
    (expected,) = run_distributed(evaluate_everywhere, 1, False, init_process_group=False)
    ranks = run_distributed(evaluate_everywhere, 3, True)
    for rank, found in enumerate(ranks):
        for key in ("before", "test"):
            assert found[key][0] == pytest.approx(expected[key][0], abs=1e-6)
        assert found["fit"]["val_loss"] == pytest.approx(expected["fit"]["val_loss"], abs=1e-6)
        counts = [key for key in expected["weights"] if key.endswith("calls")]  # evaluation runs other microbatches
        assert differences(_without(found["weights"], counts), _without(expected["weights"], counts)) == []
        assert torch.equal(found["call"], expected["call"])
        if rank == 0:
            assert differences(found["predict"], expected["predict"]) == []
        else:
            assert found["predict"] == [] or all(entry is None for entry in found["predict"])


def _without(mapping: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


class Logging(TinyGPT):
    """Logs in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = MeanMetric()
        self.max_metric = MaxMetric()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log("loss_epoch", loss, on_step=False, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log_dict({"token": batch[0].float().mean(), "constant": 2}, on_step=False, on_epoch=True)
        self.log("sized", batch[0][0, 0].float(), batch_size=len(batch[0]), on_step=False, on_epoch=True)
        self.mean_metric(loss.detach(), weight=2.0)
        self.max_metric.update(loss.detach())
        self.log("mean_metric", self.mean_metric, on_step=True, on_epoch=True)
        return {"loss": loss, "tokens": batch[0].sum()}

    def on_train_epoch_end(self) -> None:
        self.log("max_metric", self.max_metric.compute())


def log_everything(rank: int, pipeline: bool) -> dict[str, float]:
    seed_everything(3, verbose=False)
    runner = trainer(pipeline, max_epochs=2)
    runner.fit(Logging(), loader(pipeline))
    return {key: value.item() for key, value in runner.callback_metrics.items() if "dynmo" not in key}


def test_logged_values_are_equal_on_every_rank_and_on_one_device() -> None:
    (expected,) = run_distributed(log_everything, 1, False, init_process_group=False)
    ranks = run_distributed(log_everything, 3, True)
    assert all(found == ranks[0] for found in ranks)
    found = ranks[0]
    assert found.keys() == expected.keys()
    for key in expected.keys() - {"mean_metric", "mean_metric_step"}:
        assert found[key] == pytest.approx(expected[key], abs=1e-6), key
    # The value of a step is that of the last batch: four microbatches here, the last of them there.
    assert found["mean_metric_step"] != expected["mean_metric_step"]


class Order(Callback):
    """Notes the order of hooks in a step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for name in (
            "on_train_batch_start",
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
        ):
            setattr(self, name, lambda *args, name=name, **kwargs: self.calls.append(name))


class Gradients(Callback):
    """Notes whether gradients are there when each hook runs."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bool]] = []

    def _note(self, name: str, module: LightningModule) -> None:
        self.found.append((name, any(parameter.grad is not None for parameter in module.parameters())))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._note("on_before_backward", pl_module)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("on_after_backward", pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._note("on_before_optimizer_step", pl_module)


def hooks(rank: int, pipeline: bool) -> tuple[list[str], list[tuple[str, bool]]]:
    order, gradients = Order(), Gradients()
    options = {"max_steps": 4, "callbacks": [order, gradients]}
    if pipeline:
        runner, batches = trainer(True, accumulate_grad_batches=2, **options), loader(True, 256)
    else:
        runner, batches = Trainer(devices=1, accumulate_grad_batches=2, **{**QUIET, **options}), token_loader(256, 16)
    runner.fit(TinyGPT(), batches)
    return order.calls, gradients.found


def test_hooks_fire_once_per_step_in_the_order_of_one_device() -> None:
    (expected,) = run_distributed(hooks, 1, False, init_process_group=False)
    for found in run_distributed(hooks, 2, True):
        assert found == expected


def monitors(rank: int, directory: str) -> dict[str, Any]:
    checkpoint = ModelCheckpoint(directory, monitor="val_loss", save_top_k=1, save_last=True)
    stopping = EarlyStopping("train_loss", stopping_threshold=3.3, patience=100, check_on_train_epoch_end=False)
    rates = LearningRateMonitor("step")
    logger = CSVLogger(directory, name="logs", version=0)
    runner = trainer(
        True,
        max_epochs=20,
        val_check_interval=2,
        log_every_n_steps=2,
        enable_checkpointing=True,
        enable_progress_bar=True,
        enable_model_summary=True,
        logger=logger,
        callbacks=[checkpoint, stopping, rates],
    )
    runner.fit(TinyGPT(), loader(True, 256), loader(True, 32, seed=2))
    return {
        "steps": runner.global_step,
        "stopped": stopping.stopped_epoch,
        "best": checkpoint.best_model_path,
        "score": checkpoint.best_model_score,
        "metrics": sorted(runner.callback_metrics),
    }


def test_monitors_work_and_agree_on_every_rank(tmp_path: Path) -> None:
    ranks = run_distributed(monitors, 2, str(tmp_path))
    assert all(found == ranks[0] for found in ranks)
    assert ranks[0]["steps"] < 20 * 16  # stopped early
    assert Path(ranks[0]["best"]).is_file()
    assert (tmp_path / "last.ckpt").is_file()
    header = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    for key in ("train_loss", "val_loss", "dynmo/imbalance", "dynmo/bubble_ratio", "dynmo/load/stage_1", "lr-AdamW"):
        assert key in header


class Weighted(LightningModule):
    """A mean over the tokens that count, of which each microbatch has another number."""

    def __init__(self, whole_batch: bool) -> None:
        super().__init__()
        self.gpt = TinyGPT(num_blocks=2)
        self.whole_batch = whole_batch

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return self.gpt.configure_pipeline()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        tokens, targets = batch
        counted = tokens < 10
        losses = nn.functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        loss = losses[counted.flatten()].mean()
        self.log("loss", loss, batch_size=int(counted.sum()), on_step=False, on_epoch=True)
        return loss if self.whole_batch else {"loss": loss, "weight": counted.sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def weighted(rank: int, pipeline: bool) -> tuple[dict[str, Tensor], float]:
    """Trains on 32 samples per step: in two batches of 4 microbatches, or in one batch."""
    seed_everything(3, verbose=False)
    model = Weighted(whole_batch=not pipeline)
    if pipeline:
        runner, batches = trainer(True, max_steps=3, accumulate_grad_batches=2), token_loader(96, 16)
    else:
        runner, batches = Trainer(devices=1, max_steps=3, **QUIET), token_loader(96, 32)
    runner.fit(model, batches)
    return dict(model.state_dict()), runner.callback_metrics["loss"].item()


def test_weighted_losses_are_a_mean_over_the_whole_step() -> None:
    ((expected, expected_loss),) = run_distributed(weighted, 1, False, init_process_group=False)
    for found, loss in run_distributed(weighted, 2, True):
        for key in expected:
            if not key.endswith("calls"):
                torch.testing.assert_close(found[key], expected[key], atol=1e-6, rtol=0)
        assert loss == pytest.approx(expected_loss, abs=1e-6)


def unweighted(rank: int) -> dict[str, Tensor]:
    """The negative twin: the mean of the microbatches' means."""
    seed_everything(3, verbose=False)
    model = Weighted(whole_batch=True)
    runner = trainer(True, max_steps=3, accumulate_grad_batches=2)
    runner.fit(model, token_loader(96, 16))
    return dict(model.state_dict())


def test_a_mean_of_means_is_not_the_mean() -> None:
    ((expected, _),) = run_distributed(weighted, 1, False, init_process_group=False)
    found = run_distributed(unweighted, 2)[0]
    assert max((found[key] - expected[key]).abs().max() for key in expected if "calls" not in key) > 1e-4


def vision(rank: int, pipeline: bool) -> dict[str, Any]:
    from examples.existing_module import ShapesDataModule, ShapesViT

    seed_everything(3, verbose=False)
    model = ShapesViT(num_blocks=2)
    data = ShapesDataModule(batch_size=32 if pipeline else 8, num_train=128, num_val=32)
    runner = trainer(pipeline, max_epochs=2)
    runner.fit(model, data)
    metrics = {key: value.item() for key, value in runner.callback_metrics.items() if "dynmo" not in key}
    return {"metrics": metrics, "weights": dict(model.state_dict())}


def test_an_existing_module_keeps_its_numbers_and_accuracy() -> None:
    ((expected),) = run_distributed(vision, 1, False, init_process_group=False)
    for found in run_distributed(vision, 2, True):
        assert differences(found["weights"], expected["weights"]) == []
        epoch = [key for key in expected["metrics"] if key.endswith("_epoch") or key.startswith("val")]
        assert epoch
        for key in epoch:
            assert found["metrics"][key] == pytest.approx(expected["metrics"][key], abs=1e-6), key


class Masked(LightningModule):
    """Layers that all take a mask; inputs in a dict."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            return torch.relu(self.linear(values)) * mask

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.ModuleList(self.Layer() for _ in range(3))

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return list(self.chain)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        for layer in self.chain:
            values = layer(values, mask=mask)
        return values

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self(batch["values"], mask=batch["mask"]) - batch["target"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def masked(rank: int, pipeline: bool) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 8, generator=generator)
    samples = [{"values": row, "mask": (row > 0).float(), "target": row.flip(0)} for row in rows]
    model = Masked()
    trainer(pipeline, max_epochs=2).fit(model, torch.utils.data.DataLoader(samples, batch_size=16 if pipeline else 4))
    return dict(model.state_dict())


def test_keyword_arguments_reach_every_stage() -> None:
    (expected,) = run_distributed(masked, 1, False, init_process_group=False)
    for found in run_distributed(masked, 3, True):
        assert differences(found, expected) == []
