from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import RankError, run_distributed

pytestmark = pytest.mark.distributed


def _all_reduce(rank: int, value: torch.Tensor, scale: float) -> dict[str, Any]:
    total = value * (rank + 1)
    dist.all_reduce(total)
    return {"rank": rank, "total": total * scale, "names": ["a", ("b", None)]}


def test_collectives_arguments_and_results() -> None:
    value = torch.arange(4.0)
    results = run_distributed(_all_reduce, 3, value, 0.5)
    assert [result["rank"] for result in results] == [0, 1, 2]
    for result in results:
        assert torch.equal(result["total"], value * 3)
        assert result["names"] == ["a", ("b", None)]
    assert torch.equal(value, torch.arange(4.0))


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task")) if sys.platform == "linux" else 1


def _surroundings(rank: int) -> dict[str, Any]:
    at_start = _threads(os.getpid())
    weight = torch.randn(64, 64, requires_grad=True)
    (weight @ weight).relu().sum().backward()
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_JOB_ID", "OF_THE_TEST"]
    return {
        "threads": [_threads(os.getppid()), at_start, torch.get_num_threads(), threading.active_count()],
        "backward": weight.grad is not None and bool(weight.grad.isfinite().all()),
        "first_weight": weight[0, 0].item(),
        "environment": {name: os.environ.get(name) for name in names},
        "initialized": dist.is_initialized(),
        "imported": "lightning_dynmo" in sys.modules,
    }


def test_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    run_distributed(_surroundings, 1)  # the server's environment is older than these variables
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("OF_THE_TEST", "yes")
    results = run_distributed(_surroundings, 2, init_process_group=False)
    for rank, result in enumerate(results):
        assert result["threads"] == [1, 2, 1, 1]  # the second one of a rank is its deadline's
        assert result["backward"]
        assert result["environment"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "SLURM_JOB_ID": None,
            "OF_THE_TEST": "yes",
        }
        assert not result["initialized"]
        assert not result["imported"]
    assert results[0]["first_weight"] == results[1]["first_weight"]
    assert os.environ["RANK"] == "7"


def _group_of_its_own(rank: int) -> int:
    dist.init_process_group("gloo")  # by the environment's address and port
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return int(total)


def test_function_may_initialize_the_group() -> None:
    assert run_distributed(_group_of_its_own, 2, init_process_group=False) == [3, 3]


def _rank_1_fails(rank: int) -> None:
    if rank == 1:
        time.sleep(0.1)
        raise ValueError("the stage sizes differ")
    dist.all_reduce(torch.ones(1))  # fails as soon as rank 1 is gone


def test_first_failure_is_reported() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 failed first: ValueError: the stage sizes differ") as info:
        run_distributed(_rank_1_fails, 3)
    assert info.value.rank == 1
    assert "_rank_1_fails" in info.value.text
    assert isinstance(info.value.__cause__, ValueError)
    assert "then rank 0: " in str(info.value)


def _rank_0_hangs_after_failure(rank: int) -> None:
    if rank == 1:
        raise KeyError("layer")
    time.sleep(60)


def test_peers_of_a_failure_are_not_waited_for() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed first: KeyError"):
        run_distributed(_rank_0_hangs_after_failure, 2)
    assert time.monotonic() - start < 10


def _waits_in_vain(rank: int, directory: Path) -> None:
    (directory / str(rank)).write_text(str(os.getpid()))
    if rank == 2:
        return
    if rank == 0:
        dist.recv(torch.empty(1), src=1)
    _sleeps_for_ever()


def _sleeps_for_ever() -> None:
    while True:
        time.sleep(1)


def _is_running(pid: int) -> bool:
    # A killed process may linger for a moment until the server has reaped it.
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_deadline_kills_and_names_ranks(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError) as info:
        run_distributed(_waits_in_vain, 3, tmp_path, timeout_s=2.0)
    message = str(info.value)
    assert message.startswith("ranks 0, 1 of 3 still running after 2 s (rank 2 had finished)")
    assert "_sleeps_for_ever" in message.partition("--- rank 1")[2]
    assert "_waits_in_vain" in message.partition("--- rank 0")[2].partition("--- rank 1")[0]
    assert "recv" in message.partition("--- rank 0")[2].partition("--- rank 1")[0]
    assert not any(_is_running(int(path.read_text())) for path in tmp_path.iterdir())


def _rank_0_dies(rank: int) -> None:
    if rank == 0:
        time.sleep(0.1)
        os.write(2, b"out of luck\n")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed first: killed by SIGKILL") as info:
        run_distributed(_rank_0_dies, 2)
    assert "out of luck" in str(info.value)
    assert "then rank 1: " in str(info.value)


def _leaves(rank: int) -> None:
    os._exit(0)


def test_rank_that_leaves_is_a_failure() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 failed first: ended with exit code 0 inside the function"):
        run_distributed(_leaves, 1)


def _returns_what_no_file_can_hold(rank: int) -> Any:
    return lambda: rank


def test_value_that_cannot_be_copied() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 failed first: .*lambda"):
        run_distributed(_returns_what_no_file_can_hold, 1)


def test_function_must_be_at_the_top_level() -> None:
    def local(rank: int) -> None: ...

    with pytest.raises(TypeError, match="top level of a module"):
        run_distributed(local, 1)
    with pytest.raises(TypeError, match="top level of a module"):
        run_distributed(lambda rank: None, 1)


def _starts_a_process(rank: int) -> int:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if rank == 1:
        raise RuntimeError(f"child {child.pid}")
    return child.pid


def test_nothing_is_left_behind() -> None:
    with pytest.raises(RankError, match=r"child \d+") as info:
        run_distributed(_starts_a_process, 2)
    pid = int(str(info.value.__cause__).split()[-1])
    until = time.monotonic() + 5
    while _is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _is_running(pid)


def _prints(rank: int) -> None:
    print(f"hello from {rank}")  # noqa: T201
    if rank == 1:
        raise ValueError("loud")


def test_output_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="loud"):
        run_distributed(_prints, 2)
    output = capsys.readouterr().out
    assert "--- output of rank 0\nhello from 0" in output
    assert "--- output of rank 1\nhello from 1" in output


def _fit(rank: int) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        limit_train_batches=4,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = BoringModel()
    trainer.fit(model)
    return {
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "steps": trainer.global_step,
        "weight": model.layer.weight.detach(),
    }


def test_trainer_fits_inside() -> None:
    results = run_distributed(_fit, 2)
    for rank, result in enumerate(results):
        assert result["environment"] == "TorchElasticEnvironment"
        assert (result["rank"], result["world_size"], result["steps"]) == (rank, 2, 4)
    assert torch.equal(results[0]["weight"], results[1]["weight"])
