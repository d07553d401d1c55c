"""Each attempt of a run has keys of its own, whatever died ranks have left in the store that torchrun keeps."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.helpers.distributed import RankError, run_distributed

pytestmark = pytest.mark.distributed

TIMEOUT = timedelta(seconds=20)


def attempts(rank: int, port_of: str) -> list[Any]:
    """Goes through three attempts on one store; ranks die in the second before they have an answer."""
    from lightning_dynmo.pipeline.rendezvous import fresh_store

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = _tell_port(rank, port_of, server)
    agent = server or TCPStore("127.0.0.1", port, is_master=False)
    first = fresh_store(agent, rank, 3, TIMEOUT)
    first.set(f"address/{rank}", "first")
    if rank:
        agent.set(f"lightning_dynmo/attempts/asks/{rank}", "a process that is gone")
    found = []
    third = fresh_store(agent, rank, 3, TIMEOUT)
    found.append(third.check([f"address/{other}" for other in range(3)]))
    third.set(f"address/{rank}", "third")
    third.wait([f"address/{other}" for other in range(3)], TIMEOUT)
    found.extend(third.get(f"address/{other}").decode() for other in range(3))
    third.add("left", 1)
    while server is not None and int(third.add("left", 0)) < 3:  # the others still talk to it
        time.sleep(0.01)
    return found


def _tell_port(rank: int, path: str, server: Any) -> int:
    file = Path(path)
    if rank == 0:
        draft = file.with_suffix(".draft")
        draft.write_text(str(server.port))
        draft.rename(file)
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


def test_each_attempt_begins_with_an_empty_store(tmp_path: Any) -> None:
    ranks = run_distributed(attempts, 3, str(tmp_path / "port"), init_process_group=False)
    assert ranks == [[False, "third", "third", "third"]] * 3


def alone(rank: int) -> None:
    from lightning_dynmo.pipeline.rendezvous import fresh_store

    fresh_store(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 3, timedelta(seconds=0.2))


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RankError, match=r"Ranks \[1, 2\] have not started within"):
        run_distributed(alone, 1, init_process_group=False)
