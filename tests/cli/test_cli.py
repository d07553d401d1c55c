"""The command line, started as users start it: `lightning-dynmo` and `python -m lightning_dynmo`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_dynmo import GPT, TextDataModule
from lightning_dynmo.cli.plan import plan

ROOT = Path(__file__).parents[2]

CONFIG = """
model:
  class_path: GPT
  init_args: {num_blocks: 2, hidden_size: 16, num_heads: 2, context_length: 16}
data:
  class_path: TextDataModule
  init_args: {path: text.txt, context_length: 16, batch_size: 8}
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_dynmo.DynMoStrategy
    init_args: {num_microbatches: 4, balance: [3, 1]}
  max_epochs: 1
  limit_train_batches: 8
  limit_val_batches: 1
  log_every_n_steps: 2
  logger: false
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {dirpath: checkpoints, filename: end}
    - class_path: LayerFreezingCallback
      init_args: {start_step: 3, every_n_steps: 2}
"""

BROKEN = '''
import torch
from torch import nn
from lightning_dynmo import GPT

class Tied(GPT):
    """Uses the embedding's table in the head, and has a parameter outside the chain."""
    def __init__(self):
        super().__init__(num_blocks=2, hidden_size=16, num_heads=2, context_length=16)
        self.layers[-1].projection = nn.Linear(16, 256, bias=False)
        self.layers[-1].projection.weight = self.layers[0].tokens.weight
        self.temperature = nn.Parameter(torch.ones(()))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("A pipeline is as fast as its slowest stage. " * 200)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def run(folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "lightning_dynmo")) -> tuple[int, str]:
    """Returns exit code and output of a command that runs in the folder."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    return done.returncode, done.stdout


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.distributed
def test_fit_trains_prints_a_table_and_leaves_a_checkpoint_for_one_process(folder: Path) -> None:
    # What pip installs as `lightning-dynmo`; Lightning starts the other ranks by running this file again.
    script = folder / "bin" / "lightning-dynmo"
    script.parent.mkdir()
    script.write_text("from lightning_dynmo.cli import main\nmain()\n")

    code, output = run(folder, "fit", "--config", "config.yaml", program=(str(script),))

    assert code == 0, output
    assert "the first 2 of 4 layers are frozen" in output
    assert "[dynmo] step 4: " in output
    assert "Stage loads per batch, by time" in output
    assert "imbalance: " in output
    assert "bubble: " in output
    assert "checkpoints/end.ckpt" in output
    assert "Traceback" not in output
    assert "Warning" not in output
    model = GPT.load_from_checkpoint(folder / "checkpoints" / "end.ckpt")
    assert len(model.layers) == 4
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())

    again, output = run(folder, "validate", "--config", "config.yaml", "--ckpt_path", "checkpoints/end.ckpt")
    assert again == 0, output
    assert "val_loss" in output


@pytest.mark.distributed
def test_a_setting_that_cannot_work_ends_in_one_error_without_traceback(folder: Path) -> None:
    code, output = run(folder, "fit", "--config", "config.yaml", "--trainer.strategy.balance", "[2, 1]")

    assert code == 1, output
    assert output.count("error: balance=[2, 1] places 3 layers on 2 stages") == 1
    assert "Traceback" not in output


def test_plan_shows_layers_and_split_and_starts_nothing(folder: Path) -> None:
    before = set(folder.iterdir())

    code, output = run(folder, "plan", "--config", "config.yaml")

    text = squeezed(output)
    assert code == 0, output
    assert "0 TokenEmbedding 4,352" in text
    assert "1 Block" in text
    assert "3 Head" in text
    assert "Shared by several layers: none" in text
    assert "Parameters outside the chain: none" in text
    assert "First split, balance=[3, 1]" in text
    assert "Chain equals forward: yes (one of 4 microbatches of 2 samples" in text
    assert "Initializing distributed" not in output
    assert {path for path in set(folder.iterdir()) - before if path.name != "__pycache__"} == set()


def test_plan_takes_short_names(folder: Path) -> None:
    code, output = run(
        folder,
        *("plan", "--model=GPT", "--data=TextDataModule", "--data.path=text.txt", "--data.val_fraction=0"),
        *("--trainer.strategy=dynmo", "--trainer.accelerator=cpu", "--trainer.devices=4", "--trainer.logger=false"),
    )

    assert code == 0, output
    assert "balance=[3, 3, 2, 2]" in output
    assert "one of 16 microbatches of 1 samples" in output


def test_plan_names_what_is_shared_and_outside_and_says_that_training_would_be_refused(folder: Path) -> None:
    code, output = run(folder, "plan", "--config", "config.yaml", "--model", "broken.Tied")

    assert code == 1, output
    assert "layers.0.tokens.weight: layers 0, 3" in output
    assert "temperature: 1, trainable" in output
    assert "error: 1 trainable parameters are in no layer of Tied.configure_pipeline(): temperature" in output
    assert "Traceback" not in output


def test_an_unknown_schedule_is_one_line_that_names_the_nearest(folder: Path) -> None:
    code, output = run(folder, "fit", "--config", "config.yaml", "--trainer.strategy.schedule", "1f1c")

    assert code == 1, output
    assert "Did you mean '1f1b'?" in output
    assert "Traceback" not in output


class SmallGPT(GPT):
    def __init__(self) -> None:
        super().__init__(num_blocks=2, hidden_size=16, num_heads=2, context_length=16)


class RunsALayerTwice(SmallGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](self.layers[1](self.layers[1](self.layers[0](tokens)))))


class ScalesBetweenLayers(SmallGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers[1](2 * self.layers[0](tokens))
        return self.layers[3](self.layers[2](hidden))


class ScalesAtTheEnd(SmallGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + 1


class ReturnsAnotherKind(SmallGPT):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(tokens)}


class LeavesOutTheEmbedding(SmallGPT):
    def configure_pipeline(self) -> list[nn.Module]:
        self.layers[0].requires_grad_(False)
        return list(self.layers[1:])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (RunsALayerTwice, r"calls the layers in the order \[0, 1, 1, 2, 3\], the chain has 0 to 3"),
        (ScalesBetweenLayers, r"differ first at layer 1 \(Block\): max difference \d"),
        (ScalesAtTheEnd, r"forward returns something else than the last layer does: max difference 1\b"),
        (ReturnsAnotherKind, "the chain gives a Tensor, forward a dict"),
        (LeavesOutTheEmbedding, r"layer 0 \(Block\) cannot run on what the batch gives it: "),
    ],
)
def test_plan_says_where_chain_and_forward_part(folder: Path, model: type[GPT], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make_plan(model(), folder, devices=2)


def test_plan_of_more_stages_than_layers_is_refused(folder: Path) -> None:
    make_plan(SmallGPT(), folder, devices=4)
    with pytest.raises(ValueError, match="there are 5 stages for 4 layers"):
        make_plan(SmallGPT(), folder, devices=5)


def make_plan(model: GPT, folder: Path, devices: int) -> None:
    trainer = Trainer(accelerator="cpu", devices=devices, strategy="dynmo", logger=False, enable_checkpointing=False)
    plan(trainer, model, TextDataModule(folder / "text.txt", context_length=16, batch_size=8))
