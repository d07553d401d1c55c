"""The compiled kernels give the same bits on any number of threads, in ranks, and in forked processes."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dynmo.nn import _products
from lightning_dynmo.nn.csr import CSRPattern
from lightning_dynmo.nn.csr_linear import csr_linear
from tests.helpers.distributed import run_distributed

pytest.importorskip("numba", reason="the kernels are compiled by numba")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def step(threads: int, seed: int = 0) -> list[Tensor]:
    """Returns output and gradients of a layer whose rows differ much in length, computed on so many threads."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(600, 500, generator=generator) < torch.linspace(0, 0.4, 600)[:, None]
    mask[5] = True
    pattern = CSRPattern.from_mask(mask)
    shapes = ((300, 500), (pattern.nnz,), (600,), (300, 600))
    x, values, bias, gradient = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [leaf.requires_grad_() for leaf in (x, values, bias)]
    output = csr_linear(*leaves[:2], pattern, bias)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def rank_step(rank: int, threads: int) -> list[Tensor]:
    return step(threads)


def multiply_into(results: Any, pattern: CSRPattern, values: Tensor, panels: Tensor) -> None:
    """Runs in a forked process, where threads of torch's own would wait for ever for those left behind."""
    assert len(_products._by_entries(pattern.row_offsets, 10 * _products._LEAST_WORK)) == 3
    results.put(_products._NUMBA.multiply(values, pattern, panels, 300, None, transposed=True).numpy())


def test_the_same_bits_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(_products, "_LEAST_WORK", 1000)
    run = _products._run
    monkeypatch.setattr(
        _products, "_run", lambda kernel, tensors, parts: (started.append(len(parts) - 1), run(kernel, tensors, parts))
    )
    expected = step(1)
    assert set(started) == {1}
    for threads in (1, 2, 3, 7):
        started.clear()
        assert same(step(threads), expected)
        assert set(started) == {threads}
    assert not same(step(1, seed=1), expected)


def test_little_work_starts_no_threads() -> None:
    torch.set_num_threads(4)
    assert _products._even(1000, _products._LEAST_WORK) == [0, 1000]
    assert _products._even(1000, 3 * _products._LEAST_WORK) == [0, 333, 666, 1000]


def test_rows_are_shared_out_by_their_entries() -> None:
    torch.set_num_threads(2)
    offsets = torch.tensor([0, 90, 95, 100, 100, 100], dtype=torch.int32)
    assert _products._by_entries(offsets, 10 * _products._LEAST_WORK) == [0, 1, 5]
    assert _products._by_entries(torch.zeros(4, dtype=torch.int32), 10 * _products._LEAST_WORK)[-1] == 3


def test_callers_on_several_threads() -> None:
    expected = step(2)
    with ThreadPoolExecutor(4) as pool:
        assert all(same(found, expected) for found in pool.map(step, [2] * 12))


def test_a_failure_on_another_thread_is_not_lost() -> None:
    torch.set_num_threads(2)

    def kernel(array: Any, begin: int, end: int) -> None:
        if begin:
            raise FloatingPointError("second part")

    with pytest.raises(FloatingPointError, match="second part"):
        _products._run(kernel, (torch.zeros(4),), [0, 2, 4])


def test_in_a_forked_process() -> None:
    torch.set_num_threads(2)
    pattern = CSRPattern.from_mask(torch.rand(600, 500) < 0.2)
    values, panels = torch.randn(pattern.nnz), torch.randn(5, 600, 64)
    assert 4 * pattern.nnz * 5 > 2 * _products._LEAST_WORK
    expected = _products._NUMBA.multiply(values, pattern, panels, 300, None, transposed=True)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=multiply_into, args=(results, pattern, values, panels))
    child.start()
    found = torch.from_numpy(results.get(timeout=60))
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(found, expected)


@pytest.mark.distributed
def test_in_ranks() -> None:
    expected = step(1)
    for found in run_distributed(rank_step, 2, 2):
        assert same(found, expected)


def test_compiles_where_no_folder_can_keep_the_code() -> None:
    from lightning_dynmo.nn import _panel_kernels

    found: dict[str, Any] = {}
    exec(
        "def double(values, begin, end):\n    for i in range(begin, end):\n        values[i] *= 2", found
    )  # has no file
    values = torch.ones(3)
    _panel_kernels._compile(found["double"])(values.numpy(), 0, 2)
    assert values.tolist() == [2, 2, 1]


@pytest.mark.slow
def test_several_processes_compile_at_once_and_the_next_one_finds_the_code(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import torch
        from lightning_dynmo.nn import _panel_kernels
        from tests.nn.test_csr_threads import step
        total = sum(value.double().sum().item() for value in step(1))
        print(total, sum(_panel_kernels.multiply.stats.cache_hits.values()))
        """
    )
    environment = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)

    first = [process.communicate(timeout=200)[0].split() for process in [start() for _ in range(2)]]
    (again,) = [process.communicate(timeout=200)[0].split() for process in [start()]]
    assert len({total for total, _ in [*first, again]}) == 1
    assert int(again[1]) == 1


def test_importing_the_package_does_not_import_numba() -> None:
    script = "import sys, lightning_dynmo.nn.csr_linear; assert not {'numba', 'llvmlite'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT)}, check=True, timeout=100)
