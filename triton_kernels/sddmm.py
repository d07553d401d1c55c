"""Sampled dense times dense: the gradient of a sparse weight's values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import config_for

# Above this density the product of all entries, on the tensor cores in half precision, is faster than of the kept ones.
_DENSE_ABOVE = {torch.float32: 0.15, torch.float16: 0.03, torch.bfloat16: 0.03}


def sddmm_reference(row_offsets: Tensor, columns: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Returns what `sddmm` returns, by a dense product of which the kept entries are taken; takes float64 too."""
    rows = torch.repeat_interleave(
        torch.arange(g.shape[0], device=g.device), row_offsets.diff().long(), output_size=columns.numel()
    )
    return (g @ x.T)[rows, columns.long()]


def sddmm(row_offsets: Tensor, columns: Tensor, g: Tensor, x: Tensor, *, dense: bool | None = None) -> Tensor:
    """Returns the inner products of rows of `g` and `x` at the kept entries: of (i, j), ``g[i] @ x[j]``.

    It has no gradient: `csr.csr_sddmm` has. Fastest with N a multiple of 16.

    Args:
        row_offsets: Where each row begins, int32 [M + 1].
        columns: Column of each kept entry, int16 or int32 [nnz].
        g: Gradient of the product [M, N], float32, float16 or bfloat16.
        x: Activations [K, N], of the type of `g`.
        dense: Whether to multiply all of `g` and `x` and take the kept entries; by `dense_is_faster` if None.

    Returns:
        The inner products [nnz], of the type of `g`.
    """
    _check(row_offsets, columns, g, x)
    num_rows, num_tokens = g.shape
    nnz = columns.numel()
    if dense is None:
        dense = dense_is_faster(nnz / max(num_rows * x.shape[0], 1), g.dtype)
    if dense:
        return sddmm_reference(row_offsets, columns, g, x)
    out = g.new_empty(nnz)
    if nnz:
        config = config_for("sddmm", g.dtype, g.device)
        grid = (triton.cdiv(nnz, config["BLOCK_K"]),)
        steps = num_rows.bit_length()
        with torch.cuda.device_of(x):
            sddmm_kernel[grid](
                row_offsets.contiguous(),
                columns.contiguous(),
                g.contiguous(),
                x.contiguous(),
                out,
                nnz,
                num_rows,
                num_tokens,
                steps,
                num_stages=1,
                **config,
            )
    return out


def dense_is_faster(density: float, dtype: torch.dtype) -> bool:
    """Returns whether the dense product is faster than the kernel at a density in [0, 1]."""
    return density > _DENSE_ABOVE.get(dtype, 0.0)


@triton.jit
def sddmm_kernel(
    row_offsets: tl.tensor,
    columns: tl.tensor,
    g: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    nnz: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    num_steps: tl.tensor,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Computes a block of entries, of whatever rows: all programs have the same to do, however long rows are."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    kept = entries < nnz
    # The last row that begins at or before an entry, by bisection.
    row = tl.zeros([BLOCK_K], tl.int32)
    beyond = tl.zeros([BLOCK_K], tl.int32) + num_rows
    for _ in range(num_steps):
        middle = (row + beyond) // 2
        begun = tl.load(row_offsets + middle, mask=kept, other=0) <= entries
        row = tl.where(begun, middle, row)
        beyond = tl.where(begun, beyond, middle)
    column = tl.load(columns + entries, mask=kept, other=0).to(tl.int64)
    g_rows = g + row.to(tl.int64)[:, None] * num_tokens
    x_rows = x + column[:, None] * num_tokens
    # One sum for each token of a block, put together once.
    sums = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    for first in range(0, num_tokens, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        mask = kept[:, None] & (tokens < num_tokens)[None, :]
        g_block = tl.load(g_rows + tokens[None, :], mask=mask, other=0.0).to(tl.float32)
        x_block = tl.load(x_rows + tokens[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += g_block * x_block
    tl.store(out + entries, tl.sum(sums, axis=1).to(out.dtype.element_ty), mask=kept)


def _check(row_offsets: Tensor, columns: Tensor, g: Tensor, x: Tensor) -> None:
    if torch.is_grad_enabled() and (g.requires_grad or x.requires_grad):
        raise RuntimeError(
            "sddmm has no gradient, but g or x require one; call csr_sddmm, or sddmm under torch.no_grad()."
        )
    if g.dtype != x.dtype:
        raise TypeError(f"sddmm expects x of the type of g, {g.dtype}, got {x.dtype}; convert it with x.to({g.dtype}).")
    if g.dim() != 2 or x.dim() != 2 or g.shape[1] != x.shape[1] or row_offsets.shape != (g.shape[0] + 1,):
        raise ValueError(
            f"sddmm expects g [M, N], x [K, N] and M + 1 row offsets, got g {list(g.shape)}, x {list(x.shape)} and row "
            f"offsets {list(row_offsets.shape)}; pass both feature-major, with one column per token."
        )
