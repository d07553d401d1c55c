"""A pipeline trains with the numbers of one device, wherever its layers are and however often they move."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, differences, fit_as_pipeline, fit_on_one_device, load
from tests.helpers.models import TinyGPT, token_loader

pytestmark = pytest.mark.distributed

STEPS = 12
OPTIONS = {"max_steps": STEPS, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
BALANCES = {2: [(4, 3), (1, 6), (6, 1), (3, 4)], 4: [(2, 2, 2, 1), (1, 1, 1, 4), (4, 1, 1, 1), (1, 2, 3, 1)]}
# The checkpoint's entries that hold numbers of the training itself.
NUMBERS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")


def data(num_microbatches: int) -> Any:
    return token_loader(STEPS * 2 * NUM_MICROBATCHES * 4, 4 * num_microbatches)


def one_device(path: Path, module: Any = TinyGPT) -> tuple[TinyGPT, dict[str, Any]]:
    (model,) = run_distributed(
        fit_on_one_device, 1, module, data, str(path), OPTIONS, init_process_group=False, timeout_s=120
    )
    return model, load(path)


def pipeline(
    world_size: int, path: Path, module: Any = TinyGPT, balances: Any = (), strategy: Any = None
) -> tuple[list[Any], dict[str, Any]]:
    args = (module, data, str(path), OPTIONS, balances, strategy)
    return run_distributed(fit_as_pipeline, world_size, *args, timeout_s=120), load(path)


def numbers_differ(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return [entry for key in NUMBERS for entry in differences(left[key], right[key], key)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyGPT, dict[str, Any]]:
    return one_device(tmp_path_factory.mktemp("reference") / "one.ckpt")


def test_the_reference_learns(reference: tuple[TinyGPT, dict[str, Any]]) -> None:
    losses = reference[0].losses
    assert len(losses) == STEPS * 2 * NUM_MICROBATCHES
    assert sum(losses[-8:]) <= 0.8 * sum(losses[:8])


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        (1, {}),
        (2, {}),
        (4, {}),
        (2, {"schedule": "gpipe"}),
        (4, {"balance": [1, 1, 1, 4]}),
        (3, {"balance": "parameters"}),
    ],
)
def test_static_pipeline_equals_one_device(
    world_size: int, strategy: dict[str, Any], reference: tuple[TinyGPT, dict[str, Any]], tmp_path: Path
) -> None:
    ranks, checkpoint = pipeline(world_size, tmp_path / "pipeline.ckpt", strategy=strategy)
    assert ranks[-1][0].losses == reference[0].losses
    assert numbers_differ(checkpoint, reference[1]) == []
    for model, _ in ranks:  # every rank has the whole model in the end
        assert differences(dict(model.state_dict()), dict(reference[1]["state_dict"])) == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_moving_pipeline_equals_one_device(
    world_size: int, reference: tuple[TinyGPT, dict[str, Any]], tmp_path: Path
) -> None:
    ranks, checkpoint = pipeline(world_size, tmp_path / "moves.ckpt", balances=BALANCES[world_size])
    assert ranks[-1][0].losses == reference[0].losses
    assert numbers_differ(checkpoint, reference[1]) == []

    moves = ranks[0][1]
    assert moves.moved_bytes > 0
    owners_of_layer = list(zip(*moves.owners, strict=True))
    assert all(len(set(owners)) >= 2 for owners in owners_of_layer[1:-1])  # the ends stay where the pipeline ends
    assert {owners[0] for owners in (owners_of_layer[0], owners_of_layer[-1])} == {0, world_size - 1}


def test_dropout_draws_the_same_numbers_wherever_layers_run(tmp_path: Path) -> None:
    module = partial(TinyGPT, dropout=0.1)
    (alone,), one = pipeline(1, tmp_path / "one.ckpt", module)
    moved, many = pipeline(4, tmp_path / "four.ckpt", module, balances=BALANCES[4])
    assert moved[-1][0].losses == alone[0].losses
    assert numbers_differ(many, one) == []

    (without,), _ = pipeline(1, tmp_path / "without.ckpt")
    assert without[0].losses != alone[0].losses


class ForgetfulMoves:
    """Loses the optimizer state of every layer that moves, as a wrong migration would."""

    def __call__(self) -> TinyGPT:
        from lightning_dynmo.pipeline import migration, runtime

        def forgetful(chain: Any, moves: Any, groups: Any, optimizers: Any) -> Any:
            result = migrate(chain, moves, groups, optimizers)
            for move in result.moves:
                for optimizer in optimizers:
                    for parameter in chain.parameters(move.layer):
                        optimizer.state.pop(parameter, None)
            return result

        migrate = migration.migrate
        runtime.migrate = forgetful
        return TinyGPT()


class SwappingMoves:
    """Mixes up two layers of equal shape when layers move, as a wrong migration would."""

    def __call__(self) -> TinyGPT:
        from lightning_dynmo.pipeline import migration, runtime

        def swapping(chain: Any, moves: Any, groups: Any, optimizers: Any) -> Any:
            result = migrate(chain, moves, groups, optimizers)
            blocks = [index for index in chain.owned if 0 < index < len(chain) - 1]
            if result.moves and len(blocks) > 1:
                left, right = (chain.tensors(index) for index in blocks[:2])
                for (_, a), (_, b) in zip(left, right, strict=True):
                    a.data, b.data = b.data, a.data
            return result

        migrate = migration.migrate
        runtime.migrate = swapping
        return TinyGPT()


@pytest.mark.parametrize("wrong", [ForgetfulMoves(), SwappingMoves()])
def test_a_wrong_migration_is_noticed(wrong: Any, reference: tuple[TinyGPT, dict[str, Any]], tmp_path: Path) -> None:
    ranks, checkpoint = pipeline(2, tmp_path / "wrong.ckpt", wrong, balances=BALANCES[2])
    assert ranks[-1][0].losses != reference[0].losses
    assert numbers_differ(checkpoint, reference[1]) != []


def initial_weights(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    import os

    from lightning.pytorch import Trainer

    from lightning_dynmo import DynMoStrategy
    from tests.helpers.fitting import QUIET

    torch.manual_seed(100 + rank)  # as in processes that nobody has seeded alike
    model = TinyGPT()
    own = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = Trainer(devices=int(os.environ["WORLD_SIZE"]), strategy=DynMoStrategy(), max_steps=0, **QUIET)
    trainer.fit(model, data(4))
    return own, dict(model.state_dict())


@pytest.mark.parametrize("world_size", [1, 3])
def test_initial_weights_are_those_of_the_first_rank(world_size: int) -> None:
    ranks = run_distributed(initial_weights, world_size)
    first = ranks[0][0]
    for _, after in ranks:
        assert differences(after, first) == []
    if world_size > 1:
        assert differences(ranks[1][0], first) != []
