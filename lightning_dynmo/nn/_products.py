"""The products of a sparse weight with activations, by the best means there are on a device. See [Note: panels]."""

from __future__ import annotations

import _thread
import importlib.util
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dynmo import _kernels
from lightning_dynmo._torch import FakeTensor
from lightning_dynmo.nn.csr import CSRPattern

_LEAST_WORK = 250_000  # numbers moved in about the time of two threads' starts: each thread has that much to do
_PER_ENTRY = 4  # numbers that could be moved while an entry meets a panel


def products_for(tokens: Tensor) -> Products:
    """Returns what computes with these activations."""
    if isinstance(tokens, FakeTensor) or tokens.is_meta:
        return _SHAPES
    if tokens.is_cuda:  # the kernels know no float64
        return _TRITON if _kernels.available(tokens.device) and tokens.dtype is not torch.float64 else _TORCH
    return _TORCH if _compiled() is None else _NUMBA


class Products:
    """Products of a sparse weight ``[M, K]`` by torch alone, with one panel as wide as there are tokens.

    The compressed rows are on the left of a dense matrix, which is the one form that torch has fast code for.
    """

    def pack(self, tokens: Tensor) -> Tensor:
        """Returns ``[T, F]`` as panels."""
        return tokens.t().contiguous()[None]

    def multiply(
        self,
        values: Tensor,
        pattern: CSRPattern,
        panels: Tensor,
        num_tokens: int,
        bias: Tensor | None,
        transposed: bool,
    ) -> Tensor:
        """Returns the weight, or its transpose, times panels, with a bias ``[F]`` added, as ``[T, F]``."""
        product = self._product(values, pattern, panels[0], transposed)[:, :num_tokens].t()
        return product.contiguous() if bias is None else torch.add(product, bias, out=product.new_empty(product.shape))

    def _product(self, values: Tensor, pattern: CSRPattern, columns: Tensor, transposed: bool) -> Tensor:
        """Returns the product with a matrix."""
        num_columns, num_rows = pattern.shape if transposed else pattern.shape[::-1]
        if not pattern.nnz:  # for which MKL wants no pointer
            return columns.new_zeros(num_rows, columns.shape[1])
        if transposed:
            values = values[pattern.t_order]
        matrix = _matrix(*_indices(pattern, transposed), values, (num_rows, num_columns))
        with torch.autocast(columns.device.type, enabled=False):
            product: Tensor = matrix @ columns
        return product

    def sample(self, pattern: CSRPattern, left: Tensor, right: Tensor) -> Tensor:
        """Returns the product of feature i of `left` with feature j of `right` for each kept (i, j), ``[nnz]``."""
        if not pattern.nnz:
            return left.new_zeros(0)
        kept = _matrix(*_indices(pattern, False), left.new_zeros(pattern.nnz), pattern.shape)
        with torch.autocast(left.device.type, enabled=False):
            products: Tensor = torch.sparse.sampled_addmm(kept, left[0], right[0].t(), beta=0.0).values()
        return products


class _ShapesOnly(Products):
    """Says how large the results are, for tensors without data."""

    @override
    def _product(self, values: Tensor, pattern: CSRPattern, columns: Tensor, transposed: bool) -> Tensor:
        return columns.new_empty(pattern.shape[1 if transposed else 0], columns.shape[1])

    @override
    def sample(self, pattern: CSRPattern, left: Tensor, right: Tensor) -> Tensor:
        return left.new_empty(pattern.nnz)


class _Triton(Products):
    """By the kernels for GPUs, which load wide where there are tokens in sixteens."""

    @override
    def pack(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.pad(tokens.t(), (0, -len(tokens) % 16)).contiguous()[None]

    @override
    def _product(self, values: Tensor, pattern: CSRPattern, columns: Tensor, transposed: bool) -> Tensor:
        order, tasks = (pattern.t_order, pattern.t_tasks) if transposed else (None, pattern.tasks)
        num_rows = pattern.shape[1 if transposed else 0]
        return _kernels.spmm(values, *_indices(pattern, transposed), columns, num_rows, order=order, tasks=tasks)

    @override
    def sample(self, pattern: CSRPattern, left: Tensor, right: Tensor) -> Tensor:
        return _kernels.sddmm(*_indices(pattern, False), left[0], right[0])


class _Numba(Products):
    """By the kernels that numba compiles, on as many threads as torch uses.

    The threads end with the call: there is nothing that a forked process could miss, or that callers on several
    threads could get into each other's way with.
    """

    @override
    def pack(self, tokens: Tensor) -> Tensor:
        kernels = _compiled_or_fail()
        num_tokens, num_features = tokens.shape
        panels = tokens.new_empty(-(-num_tokens // kernels.WIDTH), num_features, kernels.WIDTH)
        _run(kernels.pack, (tokens, panels), _even(num_features, panels.numel()))
        return panels

    @override
    def multiply(
        self,
        values: Tensor,
        pattern: CSRPattern,
        panels: Tensor,
        num_tokens: int,
        bias: Tensor | None,
        transposed: bool,
    ) -> Tensor:
        if not pattern.nnz:  # maybe for want of features to have entries in
            empty = panels.new_zeros(num_tokens, pattern.shape[1 if transposed else 0])
            return empty if bias is None else empty + bias
        offsets, columns = _indices(pattern, transposed)
        order = pattern.t_order if transposed else pattern.t_order[:0]
        bias = panels.new_empty(0) if bias is None else bias
        tokens = panels.new_empty(num_tokens, len(offsets) - 1)
        work = _PER_ENTRY * pattern.nnz * len(panels) + tokens.numel()
        arguments = (values, order, offsets, columns, panels, bias, tokens)
        _run(_compiled_or_fail().multiply, arguments, _by_entries(offsets, work))
        return tokens

    @override
    def sample(self, pattern: CSRPattern, left: Tensor, right: Tensor) -> Tensor:
        offsets, columns = _indices(pattern, False)
        result = left.new_empty(pattern.nnz)
        work = _PER_ENTRY * pattern.nnz * len(left)
        _run(_compiled_or_fail().sample, (offsets, columns, left, right, result), _by_entries(offsets, work))
        return result


_SHAPES, _TORCH, _TRITON, _NUMBA = _ShapesOnly(), Products(), _Triton(), _Numba()


def _indices(pattern: CSRPattern, transposed: bool) -> tuple[Tensor, Tensor]:
    if transposed:
        return pattern.t_row_offsets, pattern.t_columns
    return pattern.row_offsets, pattern.columns


def _matrix(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_csr_tensor(offsets, columns.int(), values, shape, check_invariants=False)


@cache
def _compiled() -> ModuleType | None:
    """Returns the compiled kernels, or None where numba is missing; imported late, since that takes a second."""
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("lightning_dynmo.nn._panel_kernels")


def _compiled_or_fail() -> ModuleType:
    kernels = _compiled()
    assert kernels is not None
    return kernels


def _num_threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // _LEAST_WORK))


def _even(count: int, work: int) -> list[int]:
    """Returns where the parts of a range begin, one for each thread, and where the last one ends."""
    threads = _num_threads(work)
    return [count * thread // threads for thread in range(threads + 1)]


def _by_entries(offsets: Tensor, work: int) -> list[int]:
    """Returns the same for rows, by the number of their entries."""
    threads = _num_threads(work)
    goals = torch.arange(1, threads) * (int(offsets[-1]) / threads)
    return [0, *torch.searchsorted(offsets.double(), goals.double()).tolist(), len(offsets) - 1]


def _run(kernel: Callable[..., None], tensors: tuple[Tensor, ...], bounds: list[int]) -> None:
    """Calls a kernel once for each part of its rows, side by side."""
    arrays: list[Any] = [tensor.detach().contiguous().numpy() for tensor in tensors]
    parts = list(pairwise(bounds))
    failures: list[BaseException] = []
    others = [_start(kernel, arrays, part, failures) for part in parts[1:]]
    kernel(*arrays, *parts[0])
    for ended in others:
        ended.acquire()
    if failures:
        raise failures[0]


def _start(kernel: Callable[..., None], arrays: list[Any], part: tuple[int, int], failures: list[BaseException]) -> Any:
    """Starts a thread, by the plain means, which takes half the time; returns a lock that it lets go at its end."""
    ended = _thread.allocate_lock()
    ended.acquire()

    def work() -> None:
        try:
            kernel(*arrays, *part)
        except BaseException as failure:  # raised again where the result is waited for
            failures.append(failure)
        finally:
            ended.release()

    _thread.start_new_thread(work, ())
    return ended
