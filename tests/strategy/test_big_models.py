"""No rank ever holds a model that is created in configure_model; its values are those of one process all the same."""

import gc
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, QUIET, differences, fit_as_pipeline, fit_on_one_device, load
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

MB = 1 << 20


class Late(TinyGPT):
    """A GPT of which only the embedding is created in `__init__`, with initialisation as GPTs do it."""

    def __init__(self, width: int = 512) -> None:
        super().__init__(num_blocks=0)
        self.save_hyperparameters()
        del self.head
        self.width = width
        self.built = 0

    def configure_model(self) -> None:
        if len(self.blocks):
            return
        self.built += 1
        self.blocks.extend(Wide(self.width) for _ in range(4))
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
        self.blocks.apply(self.init)
        if self.head[1].weight.dtype == torch.float32:  # it knows no bfloat16
            nn.init.orthogonal_(self.blocks[1].up.weight)
        nn.init.trunc_normal_(self.blocks[2].up.weight, std=0.02)

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(self.up(x).relu()).relu())


OPTIONS = {"max_steps": 3, "gradient_clip_val": 0.5}


def data(num_microbatches: int) -> Any:
    """Returns a loader of 2 steps per epoch."""
    return token_loader(2 * NUM_MICROBATCHES * 4, 4 * num_microbatches)


def test_training_equals_one_device(tmp_path: Path) -> None:
    args = (Late, data, str(tmp_path / "one.ckpt"), OPTIONS)
    (alone,) = run_distributed(fit_on_one_device, 1, *args, init_process_group=False)
    ranks = run_distributed(fit_as_pipeline, 3, Late, data, str(tmp_path / "three.ckpt"), OPTIONS)
    assert ranks[-1][0].losses == alone.losses
    expected, found = load(tmp_path / "one.ckpt"), load(tmp_path / "three.ckpt")
    for key in ("state_dict", "optimizer_states"):
        assert differences(found[key], expected[key], key) == []


def trainer(strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    from lightning_dynmo import DynMoStrategy

    settings = {"num_microbatches": NUM_MICROBATCHES, **(strategy or {})}
    devices = int(os.environ["WORLD_SIZE"])
    return Trainer(devices=devices, strategy=DynMoStrategy(**settings), **{**QUIET, "max_steps": 0, **options})


def owned(model: LightningModule, runner: Trainer) -> dict[str, Tensor]:
    """Returns the tensors that are whole on this rank, and checks that the others are shells."""
    chain = runner.strategy.runtime.chain
    mine = {id(tensor) for index in chain.owned for _, tensor in chain.tensors(index)}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in mine:
            found[name] = tensor.detach()
        else:
            assert tensor.untyped_storage().nbytes() == tensor.element_size()
    return found


def initial(rank: int, seed: int, precision: str, unequal: bool) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(seed + 100 * unequal * rank)
    model = Late()
    runner = trainer(precision=precision)
    runner.fit(model, data(4))
    runner.validate(model, data(4), verbose=False)  # configure_model is called once more, and finds its layers there
    return owned(model, runner), model.built


def initial_alone(rank: int, seed: int, precision: str) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = Late()
    Trainer(devices=1, precision=precision, max_steps=0, **QUIET).fit(model, data(1))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("precision", "unequal"), [("32-true", False), ("32-true", True), ("bf16-true", False)])
def test_every_rank_has_its_own_layers_with_the_values_of_one_process(precision: str, unequal: bool) -> None:
    (expected,) = run_distributed(initial_alone, 1, 5, precision, init_process_group=False)
    ranks = run_distributed(initial, 4, 5, precision, unequal)
    assert all(built == 1 for _, built in ranks)
    merged = {name: tensor for weights, _ in ranks for name, tensor in weights.items()}
    assert merged.keys() == expected.keys()
    assert sum(len(weights) for weights, _ in ranks) == len(expected)
    for name, tensor in expected.items():
        assert tensor.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
        assert torch.equal(merged[name], tensor), name
    (other,) = run_distributed(initial_alone, 1, 6, precision, init_process_group=False)
    assert not torch.equal(merged["blocks.0.middle.weight"], other["blocks.0.middle.weight"])


class Heavy(LightningModule):
    """A chain of 10 layers of 32 MB."""

    def __init__(self, when: str = "configure_model", weights: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.when, self.weights = when, weights
        if when == "init":
            self.create()

    def create(self) -> None:
        self.layers.extend(Heavy32() for _ in range(10))
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.01) if isinstance(m, nn.Linear) else None)

    def setup(self, stage: str) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.baseline = memory("VmRSS")

    def configure_model(self) -> None:
        if not len(self.layers):
            self.create()
            if self.weights is not None:
                from lightning_dynmo import load_layer_weights

                load_layer_weights(self, self.weights)

    def configure_pipeline(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("mean", self(batch[0]).mean())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Heavy32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


def memory(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def features() -> Any:
    samples = torch.utils.data.TensorDataset(torch.ones(8, 1024), torch.ones(8))
    return torch.utils.data.DataLoader(samples, batch_size=8)


def peak(rank: int, weights: str | None, resume: str | None, folder: str | None) -> tuple[int, int, dict[str, Tensor]]:
    """Returns this rank's peak of memory over what it had before the model, the bytes of its layers, and their sums."""
    seed_everything(1, verbose=False)
    model = Heavy("configure_model", weights)
    runner = trainer({"save_distributed_checkpoint": folder is not None})
    runner.validate(model, features(), ckpt_path=resume, verbose=False)
    if folder is not None:
        runner.save_checkpoint(folder)
    top = memory("VmHWM") - model.baseline
    found = owned(model, runner)
    size = sum(tensor.numel() * 4 for tensor in found.values())
    return top, size, {name: tensor.double().sum() for name, tensor in found.items()}


LAYER, WHOLE, SLACK = 32 * MB, 320 * MB, 48 * MB


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Returns a folder with the model's weights in several formats, with values that no initialisation gives."""
    directory = tmp_path_factory.mktemp("heavy")
    model = Heavy("init")
    state = model.state_dict()
    for number, tensor in enumerate(state.values()):
        tensor.fill_(number / 1000)
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.0", "global_step": 0}, directory / "x.ckpt")
    save_file(state, directory / "one.safetensors")
    names = list(state)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    (directory / "sharded").mkdir()
    for shard, keys in shards.items():
        save_file({key: state[key] for key in keys}, directory / "sharded" / shard)
    index = {"weight_map": {key: shard for shard, keys in shards.items() for key in keys}}
    (directory / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory, {name: tensor.double().sum() for name, tensor in state.items()}


def check(ranks: Iterable[Any], extra: int = 0) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for top, size, sums in ranks:
        assert 0 < size <= 3 * LAYER
        assert top <= size + LAYER + SLACK + extra, (top // MB, size // MB)
        merged.update(sums)
    return merged


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved.ckpt")
    merged = check(run_distributed(peak, 4, None, None, folder, timeout_s=200))
    again = run_distributed(peak, 2, None, folder, None, timeout_s=200)
    found = {name: value for _, _, sums in again for name, value in sums.items()}
    assert differences(dict(sorted(found.items())), dict(sorted(merged.items()))) == []
    for top, size, _ in again:
        assert top <= size + LAYER + SLACK, (top // MB, size // MB)


def test_a_model_that_is_created_in_init_is_held_by_every_rank() -> None:
    assert all(top > WHOLE for top in run_distributed(peak_of_whole, 4, timeout_s=200))


def peak_of_whole(rank: int) -> int:
    Path("/proc/self/clear_refs").write_text("5")
    baseline = memory("VmRSS")
    trainer().validate(Heavy("init"), features(), verbose=False)
    return memory("VmHWM") - baseline


@pytest.mark.parametrize("name", ["x.ckpt", "one.safetensors", "sharded", "sharded/model.safetensors.index.json"])
def test_weights_are_loaded_layer_by_layer(name: str, heavy: tuple[Path, dict[str, Tensor]]) -> None:
    directory, expected = heavy
    ranks = run_distributed(peak, 4, str(directory / name), None, None, timeout_s=200)
    merged = check(ranks, extra=3 * LAYER)  # the pages of the file that it read count as memory of a rank, until freed
    assert differences(dict(sorted(merged.items())), dict(sorted(expected.items()))) == []


def test_a_checkpoint_is_loaded_layer_by_layer(heavy: tuple[Path, dict[str, Tensor]]) -> None:
    directory, expected = heavy
    ranks = run_distributed(peak, 4, None, str(directory / "x.ckpt"), None, timeout_s=200)
    merged = check(ranks, extra=3 * LAYER)
    assert differences(dict(sorted(merged.items())), dict(sorted(expected.items()))) == []


class Loading(Late):
    def __init__(self, path: str, strict: bool, rename: Any = str) -> None:
        super().__init__(width=64)
        self.load_from = (path, strict, rename)

    def configure_model(self) -> None:
        from lightning_dynmo import load_layer_weights

        super().configure_model()
        path, strict, rename = self.load_from
        load_layer_weights(self, path, strict=strict, rename=rename)


def load_small(rank: int, path: str, strict: bool, rename: Callable[[str], str | None], plain: bool) -> Any:
    seed_everything(1, verbose=False)
    model = Loading(path, strict, rename)
    runner = Trainer(devices=1, max_steps=0, **QUIET) if plain else trainer()
    try:
        runner.fit(model, data(4))
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        return str(error)
    return {k: v.detach() for k, v in model.state_dict().items()} if plain else owned(model, runner)


def without_model(key: str) -> str | None:
    return None if key == "other" else key.removeprefix("model.")


def same(key: str) -> str:
    return key


def small_state() -> dict[str, Tensor]:
    seed_everything(9, verbose=False)
    model = Late(width=64)
    model.configure_model()
    return model.state_dict()


def test_keys_can_be_renamed_and_left_out(tmp_path: Path) -> None:
    expected = small_state()
    state = {f"model.{key}": value.clone() for key, value in expected.items()}
    save_file({**state, "other": torch.ones(2)}, tmp_path / "x.safetensors")
    for plain, world_size in ((False, 3), (True, 1)):
        args = (str(tmp_path / "x.safetensors"), True, without_model, plain)
        ranks = run_distributed(load_small, world_size, *args, init_process_group=not plain)
        merged = {name: tensor for rank in ranks for name, tensor in rank.items()}
        assert differences({key: merged[key] for key in expected}, dict(expected)) == []


def test_weights_that_do_not_fit_are_named_alike_on_every_rank(tmp_path: Path) -> None:
    state = small_state()
    del state["head.1.bias"]
    state["surplus"] = torch.ones(1)
    path = str(tmp_path / "x.pt")
    torch.save(state, path)
    (text,) = set(run_distributed(load_small, 3, path, True, same, False))
    assert "Missing keys in what is to be loaded: head.1.bias." in text
    assert "Unexpected keys in what is to be loaded: surplus." in text
    ranks = run_distributed(load_small, 3, path, False, same, False)
    merged = {name: tensor for rank in ranks for name, tensor in rank.items()}
    assert torch.equal(merged["blocks.3.down.weight"], state["blocks.3.down.weight"])
    assert not torch.equal(merged["head.1.bias"], small_state()["head.1.bias"])
    state["blocks.3.down.weight"] = torch.ones(2, 2)
    torch.save(state, path)
    (text,) = set(run_distributed(load_small, 3, path, False, same, False))
    assert "size mismatch for blocks.3.down.weight" in text


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda path: None, "There are no weights at"),
        (lambda path: torch.save([1, 2], path), "holds no weights"),
        (lambda path: path.mkdir(), "is a folder, but not a checkpoint"),
    ],
)
def test_what_holds_no_weights_is_refused(write: Any, error: str, tmp_path: Path) -> None:
    write(tmp_path / "x.pt")
    texts = run_distributed(load_small, 2, str(tmp_path / "x.pt"), True, same, False)
    assert all(error in text for text in texts)


def go_on(rank: int, directory: str, resume: str | None, kind: str) -> tuple[list[float], dict[str, Any]]:
    seed_everything(3 if resume is None else 4, verbose=False)
    model = Late()
    steps = 2 if resume is None else 4
    saver = ModelCheckpoint(directory, filename=f"{kind}-{steps}", every_n_train_steps=steps)
    runner = trainer(
        {"save_distributed_checkpoint": kind == "folder"}, max_steps=steps, callbacks=[saver], enable_checkpointing=True
    )
    loader = data(NUM_MICROBATCHES)
    runner.fit(model, loader, ckpt_path=resume)
    runner.save_checkpoint(f"{directory}/{kind}-after-{steps}.ckpt")
    second = trainer(max_steps=steps)
    (score,) = second.validate(model, loader, verbose=False)  # another Trainer; the layers are still where they were
    (again,) = second.validate(model, loader, ckpt_path=f"{directory}/{kind}-{steps}.ckpt", verbose=False)
    assert score == again
    with pytest.raises(RuntimeError, match="lives on pipeline rank"):
        model(torch.arange(8)[None])
    return model.losses, score


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_divided_models_are_saved_and_resumed(kind: str, tmp_path: Path) -> None:
    from lightning_dynmo import consolidate_checkpoint

    first = run_distributed(go_on, 3, str(tmp_path), None, kind)
    resumed = run_distributed(go_on, 2, str(tmp_path), str(tmp_path / f"{kind}-2.ckpt"), kind)
    assert resumed[0][1] != first[0][1]
    args = (Late, data, str(tmp_path / "one.ckpt"), {"max_steps": 4})
    (alone,) = run_distributed(fit_on_one_device, 1, *args, init_process_group=False)
    assert first[-1][0] + resumed[-1][0] == alone.losses
    expected = load(tmp_path / "one.ckpt")
    for name in (f"{kind}-4.ckpt", f"{kind}-after-4.ckpt"):
        path = consolidate_checkpoint(tmp_path / name) if kind == "folder" else tmp_path / name
        for key in ("state_dict", "optimizer_states"):
            assert differences(load(path)[key], expected[key], key) == []
