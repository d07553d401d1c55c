"""Sparse times dense: a weight in CSR form times feature-major activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import config_for

# A stretch of 128 bytes of so many rows of the activations stays in the first-level cache of an A100 or later.
_PANEL_COLUMNS = 1024
# A panel in which a row has fewer entries than the kernel takes at a time costs more than the cache saves.
_ENTRIES_PER_PANEL = 16
# Places are counted in 32 bits where they fit, a block of tokens included: in 64, counting takes as long as adding.
_LARGEST_INT32_PLACE = 2**31 - 2**16


def spmm_reference(
    values: Tensor, row_offsets: Tensor, columns: Tensor, x: Tensor, num_rows: int, *, order: Tensor | None = None
) -> Tensor:
    """Returns what `spmm` returns, by plain torch in the type of `values`; takes float64 too."""
    if order is not None:
        values = values[order.long()]
    rows = torch.repeat_interleave(torch.arange(num_rows, device=columns.device), row_offsets.diff().long())
    dense = values.new_zeros(num_rows, x.shape[0]).index_put((rows, columns.long()), values)
    return dense @ x


def spmm(
    values: Tensor,
    row_offsets: Tensor,
    columns: Tensor,
    x: Tensor,
    num_rows: int,
    *,
    order: Tensor | None = None,
    tasks: Tensor | None = None,
) -> Tensor:
    """Multiplies a sparse weight [M, K] by activations [K, N].

    It has no gradient: `csr.csr_spmm` has. Fastest with N a multiple of 16.

    Args:
        values: Kept entries, float32, float16 or bfloat16 [nnz].
        row_offsets: Where each row begins, int32 [M + 1].
        columns: Column of each entry, ascending within a row, int16 or int32 [nnz].
        x: Activations [K, N], of the type of `values`.
        num_rows: M.
        order: Row by row, the entries are ``values[order]``, int32 [nnz]: with offsets, columns and order of the
            transpose, this is the product with the transpose.
        tasks: `row_tasks` of these rows. Made anew if None, by a dozen small operations: keep it.

    Returns:
        The product [M, N], of the type of `values`.
    """
    _check(values, row_offsets, columns, x, num_rows)
    if order is not None and order.shape != columns.shape:
        raise ValueError(
            f"spmm expects an order of {columns.numel()} places, one for each entry, got shape {list(order.shape)}; "
            "pass the order of the same rows."
        )
    if tasks is None:
        tasks = row_tasks(row_offsets, columns, x.shape[0])
    elif tasks.dim() != 3 or tasks.shape[1:] != (num_rows, 3):
        raise ValueError(
            f"spmm expects tasks [panels, {num_rows}, 3], got {list(tasks.shape)}; make them by row_tasks of the same "
            "rows, again after a change of the pattern."
        )
    # Gathered once: inside the kernel each slice of tokens would gather them again, and each of them costs 32 bytes of
    # bandwidth, a quarter of what its entry reads of x.
    values = values.contiguous() if order is None else values.index_select(0, order)
    out = x.new_empty(num_rows, x.shape[1])
    if out.numel():
        with torch.cuda.device_of(x):
            _launch(tasks.contiguous(), values, columns.contiguous(), x.contiguous(), out)
    return out


def _launch(tasks: Tensor, values: Tensor, columns: Tensor, x: Tensor, out: Tensor) -> None:
    num_rows, num_tokens = out.shape
    config = config_for("spmm", values.dtype, values.device)
    grid = (num_rows * triton.cdiv(num_tokens, config["BLOCK_N"]),)
    large = max(values.numel(), x.numel()) > _LARGEST_INT32_PLACE
    last = len(tasks) - 1
    # Sums of panels stay in float32 until the last one.
    partial = out if last == 0 or out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    for panel, panel_tasks in enumerate(tasks):
        spmm_kernel[grid](
            panel_tasks,
            values,
            columns,
            x,
            partial,
            out if panel == last else partial,
            num_rows,
            num_tokens,
            ADD=panel > 0,
            INDEX=tl.int64 if large else tl.int32,
            num_stages=1,
            **config,
        )


def row_tasks(row_offsets: Tensor, columns: Tensor, num_columns: int) -> Tensor:
    """Returns the kernel's work: row, first entry and end of its entries, int32 [panels, M, 3].

    Each panel is a range of columns whose activations fit the cache; in each, the longest rows come first, so that
    none of them is alone at the end. It depends on what is kept, not on the values.
    """
    num_rows = row_offsets.numel() - 1
    panels = num_panels(num_rows, num_columns, columns.numel())
    device = columns.device
    rows = torch.repeat_interleave(
        torch.arange(num_rows, device=device), row_offsets.diff().long(), output_size=columns.numel()
    )
    # Entries are in the order of (row, panel), as columns ascend within a row.
    panel_of_entry = columns.long().div(_PANEL_COLUMNS, rounding_mode="floor").clamp(max=panels - 1)
    bounds = torch.searchsorted(rows * panels + panel_of_entry, torch.arange(num_rows * panels + 1, device=device))
    first = bounds[:-1].view(num_rows, panels).T
    end = bounds[1:].view(num_rows, panels).T
    longest_first = torch.argsort(end - first, dim=1, descending=True, stable=True)
    tasks = (longest_first, first.gather(1, longest_first), end.gather(1, longest_first))
    return torch.stack(tasks, dim=-1).to(torch.int32)


def num_panels(num_rows: int, num_columns: int, nnz: int) -> int:
    """Returns into how many ranges of columns the product is split."""
    panels = max(triton.cdiv(num_columns, _PANEL_COLUMNS), 1)
    return panels if nnz >= _ENTRIES_PER_PANEL * num_rows * panels else 1


@triton.jit
def spmm_kernel(
    tasks: tl.tensor,
    values: tl.tensor,
    columns: tl.tensor,
    x: tl.tensor,
    partial: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    ADD: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Adds up one row's entries of a panel for one slice of tokens.

    Neighbouring programs have the same slice, so that they find it in the cache.
    """
    program = tl.program_id(0)
    task = tasks + 3 * (program % num_rows)
    row = tl.load(task).to(tl.int64)
    start = tl.load(task + 1).to(INDEX)
    end = tl.load(task + 2).to(INDEX)
    tokens = (program // num_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = tokens < num_tokens
    # One sum for each entry of a block, put together once.
    sums = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_K):
        entries = first + tl.arange(0, BLOCK_K)
        kept = entries < end
        value = tl.load(values + entries, mask=kept, other=0.0).to(tl.float32)
        column = tl.load(columns + entries, mask=kept, other=0).to(INDEX)
        places = column[:, None] * num_tokens + tokens[None, :]
        block = tl.load(x + places, mask=kept[:, None] & exists[None, :], other=0.0).to(tl.float32)
        sums += value[:, None] * block
    total = tl.sum(sums, axis=0)
    places = row * num_tokens + tokens
    if ADD:
        total += tl.load(partial + places, mask=exists, other=0.0)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=exists)


def _check(values: Tensor, row_offsets: Tensor, columns: Tensor, x: Tensor, num_rows: int) -> None:
    if torch.is_grad_enabled() and (values.requires_grad or x.requires_grad):
        raise RuntimeError(
            "spmm has no gradient, but values or x require one; call csr_spmm, or spmm under torch.no_grad()."
        )
    if x.dtype != values.dtype:
        raise TypeError(
            f"spmm expects x of the type of the values, {values.dtype}, got {x.dtype}; "
            f"convert it with x.to({values.dtype})."
        )
    if x.dim() != 2 or values.shape != columns.shape or row_offsets.shape != (num_rows + 1,):
        raise ValueError(
            f"spmm expects x [K, N], as many values as columns and {num_rows + 1} row offsets, got x "
            f"{list(x.shape)}, values {list(values.shape)}, columns {list(columns.shape)} and row offsets "
            f"{list(row_offsets.shape)}; take indices and values from the same pattern."
        )
