"""The two kernels as differentiable ops of torch: `lightning_dynmo::csr_spmm` and `lightning_dynmo::csr_sddmm`.

Each is the gradient of the other, so both can be differentiated any number of times. Both know the weight's rows and
those of its transpose, because the gradient of a product is a product with the transpose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sddmm import sddmm
from .spmm import row_tasks, spmm


class Rows(NamedTuple):
    """Where the kept entries of a matrix are, row by row. A weight has two: its own, and those of its transpose.

    Attributes:
        offsets: Where each row begins, int32 ``[rows + 1]``.
        columns: Column of each entry, ascending within a row, int16 or int32 ``[nnz]``.
        order: Row by row, the entries are ``values[order]``, int32 ``[nnz]``; None if the values are in this order.
        tasks: What the kernel does in which order, `row_tasks`.
    """

    offsets: Tensor
    columns: Tensor
    order: Tensor | None
    tasks: Tensor


def make_rows(row_offsets: Tensor, columns: Tensor, num_columns: int, *, order: Tensor | None = None) -> Rows:
    """Returns the rows of a matrix with so many columns. Make them once for each pattern, not for each product."""
    return Rows(row_offsets, columns, order, row_tasks(row_offsets, columns, num_columns))


def csr_spmm(values: Tensor, x: Tensor, rows: Rows, t_rows: Rows) -> Tensor:
    """Multiplies a sparse weight [M, K] by activations [K, N]; differentiable in both.

    Under autocast both are converted to its type.

    Args:
        values: Kept entries, float32, float16 or bfloat16 [nnz].
        x: Activations [K, N], of the type of `values`.
        rows: Rows of the weight; those of its transpose give the product with the transpose.
        t_rows: Rows of the transpose. The values are in the order of one of the two, whose `order` is None.

    Returns:
        The product [M, N], of the type of `values`.

    Raises:
        ValueError: Not exactly one of the two has an `order`, or x has not as many rows as the transpose.
    """
    if (rows.order is None) == (t_rows.order is None):
        raise ValueError(
            f"csr_spmm expects an order in one of rows and t_rows, got it in {_with_order(rows, t_rows)}; make the "
            "rows that the values are in with order=None, the others with the places of their entries among the values."
        )
    _check_rows("csr_spmm", x, t_rows)
    product: Tensor = _spmm_op(values, x, *rows, *t_rows)
    return product


def csr_sddmm(g: Tensor, x: Tensor, rows: Rows, t_rows: Rows) -> Tensor:
    """Returns ``g[i] @ x[j]`` for each kept entry (i, j), in the order of `rows` [nnz]; differentiable in both.

    Under autocast both are converted to its type.

    Args:
        g: Matrix [M, N], float32, float16 or bfloat16.
        x: Matrix [K, N], of the type of `g`.
        rows: Rows of the weight [M, K], whose `order` is None.
        t_rows: Rows of its transpose.

    Raises:
        ValueError: The order is not in `t_rows` alone, or a matrix has not as many rows as there are.
    """
    if rows.order is not None or t_rows.order is None:
        raise ValueError(
            f"csr_sddmm expects an order in t_rows alone, got it in {_with_order(rows, t_rows)}; make rows with "
            "order=None, and t_rows with the places of the transpose's entries among those of the rows."
        )
    _check_rows("csr_sddmm", g, rows)
    _check_rows("csr_sddmm", x, t_rows)
    products: Tensor = _sddmm_op(g, x, *rows, *t_rows)
    return products


def _check_rows(op: str, matrix: Tensor, rows: Rows) -> None:
    if matrix.dim() != 2 or matrix.shape[0] != rows.offsets.numel() - 1:
        raise ValueError(
            f"{op} expects a matrix of {rows.offsets.numel() - 1} rows, one for each of the weight's or its "
            f"transpose's, got shape {list(matrix.shape)}; pass activations with features first, such as x.t()."
        )


def _with_order(rows: Rows, t_rows: Rows) -> str:
    names = [name for name, side in (("rows", rows), ("t_rows", t_rows)) if side.order is not None]
    return " and ".join(names) or "neither"


@torch.library.custom_op("lightning_dynmo::csr_spmm", mutates_args=())
def _spmm_op(
    values: Tensor,
    x: Tensor,
    offsets: Tensor,
    columns: Tensor,
    order: Tensor | None,
    tasks: Tensor,
    t_offsets: Tensor,
    t_columns: Tensor,
    t_order: Tensor | None,
    t_tasks: Tensor,
) -> Tensor:
    return spmm(values, offsets, columns, x, offsets.numel() - 1, order=order, tasks=tasks)


@torch.library.custom_op("lightning_dynmo::csr_sddmm", mutates_args=())
def _sddmm_op(
    g: Tensor,
    x: Tensor,
    offsets: Tensor,
    columns: Tensor,
    order: Tensor | None,
    tasks: Tensor,
    t_offsets: Tensor,
    t_columns: Tensor,
    t_order: Tensor | None,
    t_tasks: Tensor,
) -> Tensor:
    return sddmm(offsets, columns, g, x)


@_spmm_op.register_fake
def _(values: Tensor, x: Tensor, offsets: Tensor, *_: Tensor | None) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1, x.shape[1])


@_sddmm_op.register_fake
def _(g: Tensor, x: Tensor, offsets: Tensor, columns: Tensor, *_: Tensor | None) -> Tensor:
    return g.new_empty(columns.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, x, *indices = ctx.saved_tensors
    rows, t_rows = Rows(*indices[:4]), Rows(*indices[4:])
    values_grad = x_grad = None
    if ctx.needs_input_grad[0]:
        # The gradient has the order of the values.
        in_order = rows.order is None
        values_grad = csr_sddmm(grad, x, rows, t_rows) if in_order else csr_sddmm(x, grad, t_rows, rows)
    if ctx.needs_input_grad[1]:
        x_grad = csr_spmm(values, grad, t_rows, rows)
    return values_grad, x_grad, *[None] * 8


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    g, x, *indices = ctx.saved_tensors
    rows, t_rows = Rows(*indices[:4]), Rows(*indices[4:])
    g_grad = csr_spmm(grad, x, rows, t_rows) if ctx.needs_input_grad[0] else None
    x_grad = csr_spmm(grad, g, t_rows, rows) if ctx.needs_input_grad[1] else None
    return g_grad, x_grad, *[None] * 8


_spmm_op.register_autograd(_spmm_backward, setup_context=_save)
_sddmm_op.register_autograd(_sddmm_backward, setup_context=_save)

_library = torch.library.Library("lightning_dynmo", "FRAGMENT")


def _register_autocast(op: Any, name: str, device_type: str) -> None:
    # `register_autocast` of torch converts to a type that is fixed when it is registered, whatever autocast's is.
    def convert(first: Tensor, second: Tensor, *indices: Tensor | None) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            result: Tensor = op(first.to(dtype), second.to(dtype), *indices)
            return result

    _library.impl(name, convert, f"Autocast{device_type.upper()}")


for _device_type in ("cuda", "cpu"):
    _register_autocast(_spmm_op, "csr_spmm", _device_type)
    _register_autocast(_sddmm_op, "csr_sddmm", _device_type)
