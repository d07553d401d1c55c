"""Gradual pruning beside other parts of Lightning, which weights it takes, and what it refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_dynmo import GPT, GradualPruningCallback
from lightning_dynmo.callbacks.pruning import prunable_weights
from lightning_dynmo.module import pipeline_layers
from lightning_dynmo.nn import SparseLinear
from lightning_dynmo.pipeline import GlobalPruning
from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.fitting import QUIET, differences
from tests.helpers.models import TinyGPT, token_loader


def names(model: LightningModule, **options: Any) -> list[str]:
    return list(prunable_weights(model, pipeline_layers(model), **options))


def test_blocks_are_pruned_and_neither_embedding_nor_head() -> None:
    found = names(TinyGPT(num_blocks=2))
    assert found == [
        f"blocks.{index}.{part}.weight" for index in range(2) for part in ("attention", "out", "mlp.1", "mlp.3")
    ]
    assert names(GPT(num_blocks=2)) == [
        f"layers.{index}.{part}.weight"
        for index in (1, 2)
        for part in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    ]


def test_patterns_choose_weights() -> None:
    model = TinyGPT(num_blocks=2)
    assert names(model, include=["*.mlp.1.*", "head.1.weight"]) == [
        "blocks.0.mlp.1.weight",
        "blocks.1.mlp.1.weight",
        "head.1.weight",
    ]
    assert names(model, exclude=["*mlp*", "*attention*"]) == ["blocks.0.out.weight", "blocks.1.out.weight"]


def test_a_pattern_may_be_a_string_and_linear_ends_are_left_alone() -> None:
    assert GradualPruningCallback(include="*.mlp.*", exclude="*x*").include == ["*.mlp.*"]
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    assert list(prunable_weights(model, list(model))) == ["1.weight", "3.weight"]


def test_patterns_that_fit_nothing_are_refused() -> None:
    model = TinyGPT(num_blocks=1)
    with pytest.raises(ValueError, match=r"The pattern 'blocks\.\*\.norm\.\*' fits no weight"):
        names(model, include=["blocks.*.norm.*"])
    with pytest.raises(ValueError, match=r"The pattern '\*typo\*' fits no weight"):
        names(model, exclude=["*typo*"])
    with pytest.raises(ValueError, match=r"TinyGPT has no weight to prune\. .*Name some in include"):
        names(model, exclude=["*"])


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate, self.gate_proj = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_proj(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.blocks[1].gate_proj.weight = self.blocks[0].gate_proj.weight


def test_routers_and_shared_weights_are_left_alone() -> None:
    model = Tied()
    with pytest.raises(ValueError, match="has no weight to prune"):
        prunable_weights(model, list(model.blocks))
    model.blocks[1].gate_proj = nn.Linear(4, 4)
    assert list(prunable_weights(model, list(model.blocks))) == [
        "blocks.0.gate_proj.weight",
        "blocks.1.gate_proj.weight",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"execution": "sparse"}, "Expected execution to be 'auto', 'dense' or 'csr', got 'sparse'"),
        ({"final_sparsity": 1.0}, r"Expected final_sparsity in \[0, 1\), got 1\.0"),
        ({"end_step": 6500}, "a multiple of every_n_steps=1000"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradualPruningCallback(**options)


def test_averages_of_weights_are_refused() -> None:
    callbacks = [EMAWeightAveraging(), GradualPruningCallback()]
    runner = Trainer(devices=1, max_steps=1, callbacks=callbacks, **QUIET)
    with pytest.raises(ValueError, match="EMAWeightAveraging and GradualPruningCallback do not go together"):
        runner.fit(TinyGPT(num_blocks=1), token_loader(16, 4))


def fit(rank: int, options: dict[str, Any], extra: str, execution: str) -> dict[str, Any]:
    """Trains 12 steps of which two prune, with something else at the same time; then tests and trains on."""
    from lightning_dynmo import DynMoStrategy, LayerFreezingCallback

    seed_everything(3, verbose=False)
    model = TinyGPT(num_blocks=4)
    pruning = GradualPruningCallback(2, 6, 2, 0.0, 0.75, execution=execution)
    callbacks: list[Any] = [pruning]
    if extra == "freezing":
        callbacks.append(LayerFreezingCallback(start_step=3, every_n_steps=4))
    world_size = int(os.environ["WORLD_SIZE"])
    strategy: Any = DynMoStrategy(num_microbatches=4) if extra != "ddp" else "ddp"
    runner = Trainer(devices=world_size, strategy=strategy, max_steps=12, callbacks=callbacks, **{**QUIET, **options})
    runner.fit(model, token_loader(12 * 16, 16))
    tested = runner.test(model, token_loader(32, 16, seed=2), verbose=False)[0]["test_loss"]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = Trainer(
        devices=world_size,
        strategy=DynMoStrategy(num_microbatches=4) if extra != "ddp" else "ddp",
        max_steps=3,
        callbacks=[GradualPruningCallback(1, 3, 1, 0.8, 0.9, execution=execution)],
        **{**QUIET, **options},
    )
    again.fit(model, token_loader(12 * 16, 16))
    return {
        "losses": model.losses,
        "test_loss": tested,
        "weights": weights,
        "later": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "sparse": len(pruning.state_dict()["compact"]),
        "shapes": {tuple(part.weight.shape) for part in model.modules() if isinstance(part, SparseLinear)},
    }


def share_of_zeros(weights: dict[str, Tensor]) -> float:
    matrices = [value for name, value in weights.items() if name.startswith("blocks") and value.dim() == 2]
    return sum(int((value == 0).sum()) for value in matrices) / sum(value.numel() for value in matrices)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "extra", "tolerance"),
    [
        ({}, "freezing", 1e-4),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, "", 1e-4),
        ({"precision": "bf16-mixed"}, "", 5e-2),
    ],
)
def test_together_with(options: dict[str, Any], extra: str, tolerance: float) -> None:
    masked, compact = (
        run_distributed(fit, 2, options, extra, execution, timeout_s=120) for execution in ("dense", "csr")
    )
    for ranks in (masked, compact):
        assert differences(ranks[0]["weights"], ranks[1]["weights"]) == []
        assert share_of_zeros(ranks[0]["weights"]) == pytest.approx(0.75, abs=1e-3)
        assert share_of_zeros(ranks[0]["later"]) == pytest.approx(0.9, abs=1e-3)
        for name, value in ranks[0]["weights"].items():  # what was pruned stays so in the next run
            if name.startswith("blocks") and value.dim() == 2:
                assert (ranks[0]["later"][name][value == 0] == 0).all()
    assert (masked[0]["sparse"], compact[0]["sparse"]) == (0, 16)
    assert all(len(shape) == 2 for shape in compact[0]["shapes"])  # as before, once the run is over
    losses = torch.tensor(masked[-1]["losses"]) - torch.tensor(compact[-1]["losses"])
    assert losses.abs().max() < tolerance
    assert abs(masked[0]["test_loss"] - compact[0]["test_loss"]) < tolerance


@pytest.mark.distributed
def test_under_ddp_zeros_stay_in_place() -> None:
    ranks = run_distributed(fit, 2, {}, "ddp", "auto", timeout_s=120, init_process_group=False)
    assert differences(ranks[0]["weights"], ranks[1]["weights"]) == []
    assert share_of_zeros(ranks[0]["weights"]) == pytest.approx(0.75, abs=1e-3)
    assert ranks[0]["sparse"] == 0


@pytest.mark.parametrize("execution", ["auto", "csr", "dense"])
def test_a_resumed_run_makes_compact_what_was_and_nothing_else(execution: Any) -> None:
    layers = {name: (0, SparseLinear(4, 4)) for name in ("called", "read")}
    for _, layer in layers.values():
        layer.weight.data[0] = 0.0
    GlobalPruning(layers, execution=execution).restore(["called"], [])
    assert [layer.is_compact for _, layer in layers.values()] == [execution != "dense", False]
    assert all(layer.density == 0.75 for _, layer in layers.values())


class Disturbed(TinyGPT):
    """Has its gradients changed between backward and optimizer step, in pruned entries too."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and type(parameter.grad) is Tensor:
                parameter.grad.add_(0.01)


class WithMuon(TinyGPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Muon([weight for weight in self.blocks.parameters() if weight.dim() == 2], lr=0.01)


def fit_module(rank: int, kind: type[TinyGPT], execution: str, *schedule: Any) -> dict[str, Tensor]:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    model = kind(num_blocks=3)
    pruning = GradualPruningCallback(*schedule, execution=execution)
    runner = Trainer(devices=2, strategy=DynMoStrategy(num_microbatches=4), max_steps=8, callbacks=[pruning], **QUIET)
    runner.fit(model, token_loader(8 * 16, 16))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [Disturbed, WithMuon])
def test_pruned_entries_stay_zero_whatever_moves_weights(kind: type[TinyGPT]) -> None:
    execution = "dense" if kind is Disturbed else "auto"
    for weights in run_distributed(fit_module, 2, kind, execution, 2, 6, 2, 0.0, 0.75, timeout_s=90):
        assert share_of_zeros(weights) == pytest.approx(0.75, abs=1e-3)


@pytest.mark.distributed
def test_optimizers_for_matrices_refuse_compressed_rows() -> None:
    with pytest.raises(RankError, match=r"keeps weights as matrices, which Muon relies on, got 'csr'"):
        run_distributed(fit_module, 2, WithMuon, "csr", timeout_s=60)


@pytest.mark.distributed
@pytest.mark.parametrize("execution", ["dense", "csr"])
def test_all_but_a_few_weights(execution: str) -> None:
    for weights in run_distributed(fit_module, 2, TinyGPT, execution, 2, 6, 2, 0.0, 0.999, timeout_s=90):
        assert 1 - share_of_zeros(weights) == pytest.approx(0.001, abs=1e-4)
        assert all(value.isfinite().all() for value in weights.values())


class Encoder(LightningModule):
    """Of torch's own blocks, which read the weights of their MLP themselves in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def configure_pipeline(self) -> list[nn.Module]:
        return [*self.blocks, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.configure_pipeline():
            x = layer(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit_encoder(rank: int) -> tuple[float, float]:
    from lightning_dynmo import DynMoStrategy

    seed_everything(3, verbose=False)
    model = Encoder()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(48, 5, 16)), batch_size=8)
    pruning = GradualPruningCallback(1, 3, 1, 0.0, 0.5, execution="csr")
    runner = Trainer(devices=2, strategy=DynMoStrategy(num_microbatches=4), max_steps=6, callbacks=[pruning], **QUIET)
    runner.fit(model, data, data)
    (again,) = runner.validate(model, data, verbose=False)
    (zeros,) = [(model.blocks[0].linear1.weight == 0).float().mean().item()]
    return again["val_loss"], zeros


@pytest.mark.distributed
def test_blocks_of_torch_validate_after_pruning() -> None:
    (loss, zeros), _ = run_distributed(fit_encoder, 2, timeout_s=90)
    assert 0 < loss < 1
    assert zeros > 0.1


class Restores(Callback):
    """Loads the weights that there are, as one does who goes back to better ones."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 7:
            pl_module.load_state_dict(pl_module.state_dict())


@pytest.mark.distributed
@pytest.mark.parametrize("execution", ["dense", "csr"])
def test_loading_weights_in_mid_run_keeps_what_is_pruned(execution: str) -> None:
    (weights,) = run_distributed(fit_alone, 1, execution, init_process_group=False)
    assert share_of_zeros(weights) == pytest.approx(0.75, abs=1e-3)


def fit_alone(rank: int, execution: str) -> dict[str, Tensor]:
    seed_everything(3, verbose=False)
    model = TinyGPT(num_blocks=2)
    callbacks = [GradualPruningCallback(2, 6, 2, 0.0, 0.75, execution=execution), Restores()]
    Trainer(devices=1, max_steps=10, callbacks=callbacks, **QUIET).fit(model, token_loader(160, 16))
    return dict(model.state_dict())


class ReadsWeights(TinyGPT):
    """Its blocks read a weight instead of calling its module."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        for block in self.blocks:
            block.mlp[3] = Reads(block.mlp[3])


class Reads(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.linear.weight * 0.5, self.linear.bias)


class Emptied(TinyGPT):
    """Has a matrix that loses all of its weights, and a hook that looks at all gradients."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.blocks[1].out.weight.data *= 1e-6

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type="inf"))


class EmptiedAdafactor(Emptied):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [ReadsWeights, Emptied, EmptiedAdafactor])
def test_compressed_rows_with(kind: type[TinyGPT]) -> None:
    for weights in run_distributed(fit_module, 2, kind, "csr", 2, 6, 2, 0.0, 0.75, timeout_s=90):
        assert share_of_zeros(weights) == pytest.approx(0.75, abs=1e-3)
        if kind is not ReadsWeights:
            assert not weights["blocks.1.out.weight"].any()
