"""One pipeline across several nodes, as torchrun and Slurm start it, with the numbers of one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.fitting import NUM_MICROBATCHES, differences, fit_on_one_device, load
from tests.helpers.models import TinyGPT, token_loader
from tests.strategy.scripts.processes import free_port, plain, run_all, torchrun
from tests.strategy.scripts.train import BATCH_SIZE, NUM_SAMPLES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def data(num_microbatches: int) -> DataLoader:
    return token_loader(NUM_SAMPLES, BATCH_SIZE // NUM_MICROBATCHES * num_microbatches)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of plain Lightning on one device."""
    path = str(tmp_path_factory.mktemp("one_device") / "last.ckpt")
    (model,) = run_distributed(fit_on_one_device, 1, TinyGPT, data, path, {"max_epochs": 2}, init_process_group=False)
    return dict(model.state_dict())


def agents(folder: Path, options: dict[str, Any], processes: int, *arguments: str) -> list[list[str]]:
    """Returns the commands of two agents, as they are given on two machines."""
    where = f"--rdzv-endpoint=localhost:{free_port()}"
    common = ["--nnodes=2", f"--nproc-per-node={processes}", "--rdzv-backend=c10d", where, *arguments]
    return [torchrun(folder, options, *common, f"--node-rank={node}") for node in range(2)]


def test_two_torchrun_agents(tmp_path: Path, expected: dict[str, Any]) -> None:
    options = {"devices": 2, "num_nodes": 2, "dropout": 0.0}
    ended = run_all(tmp_path, agents(tmp_path, options, 2))
    assert ended.returncodes == [0, 0], ended.output[-5000:]
    assert sorted(ended.notes) == sorted(f"{name}-0-{rank}" for name in ("start", "exit") for rank in range(4))
    assert differences(load(tmp_path / "weights.pt"), expected) == []


def test_two_torchrun_agents_restart_after_one_rank_is_terminated(tmp_path: Path, expected: dict[str, Any]) -> None:
    options = {"devices": 1, "num_nodes": 2, "dropout": 0.0, "signals": {1: ["SIGTERM"]}}
    ended = run_all(tmp_path, agents(tmp_path, options, 1, "--max-restarts=2"))
    assert ended.returncodes == [0, 0], ended.output[-5000:]
    assert ended.output.count("rank 1 received SIGTERM; all ranks ended together before training_step of batch 5") == 2
    assert [note["step"] for name, note in sorted(ended.notes.items()) if name.startswith("start")] == [0, 0, 4, 4]
    assert differences(load(tmp_path / "weights.pt"), expected) == []


def slurm(node: int, folder: Path, port: int) -> dict[str, str]:
    """Returns what srun sets for one task on each of two nodes."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "localhost",
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


def test_slurm_requeues_a_job_which_then_goes_on(tmp_path: Path, expected: dict[str, Any]) -> None:
    scontrol = tmp_path / "scontrol"  # of the cluster, which is not here; it writes down what it is asked to do
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked.txt\n')
    scontrol.chmod(0o755)
    signals = {0: ["SIGUSR1"], 1: ["SIGUSR1", "SIGTERM"]}
    options = {"devices": 1, "num_nodes": 2, "dropout": 0.0, "signals": signals, "ckpt_path": None}

    def run_job() -> Any:
        port = free_port()
        environments = [slurm(node, tmp_path, port) for node in range(2)]
        return run_all(tmp_path, [plain(tmp_path, options)] * 2, environments)

    ended = run_job()
    assert ended.returncodes == [1, 1], ended.output[-5000:]
    assert ended.output.count("rank 1 received SIGTERM; all ranks ended together before training_step of batch 5") == 2
    assert (tmp_path / "asked.txt").read_text() == "requeue 4711\n"
    assert load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 5
    ended = run_job()
    assert ended.returncodes == [0, 0], ended.output[-5000:]
    starts = [ended.notes[f"start-0-{rank}"] for rank in range(2)]
    assert [(start["step"], start["environment"]) for start in starts] == [(5, "SLURMEnvironment")] * 2
    assert differences(load(tmp_path / "weights.pt"), expected) == []
