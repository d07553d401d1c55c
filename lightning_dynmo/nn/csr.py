"""Which entries of a sparse weight are kept, in compressed rows, and the same for its transpose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dynmo import _kernels

_LARGEST_INT16, _LARGEST_INT32 = 2**15 - 1, 2**31 - 1
_INTEGERS = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class CSRPattern:
    """The places of the kept entries of a weight ``[M, K]``, row by row; their values are a tensor of their own.

    `from_mask` and `from_offsets` make one.

    Attributes:
        shape: M and K: output and input features.
        row_offsets: Where each row begins among the values, and where the last one ends, int32 ``[M + 1]``.
        columns: Column of each value, ascending within a row, ``[nnz]``; int16 where K allows it, else int32.
        t_row_offsets: Where each row of the transpose begins, int32 ``[K + 1]``.
        t_columns: Column in the transpose of each of its values, ``[nnz]``; int16 where M allows it, else int32.
        t_order: The transpose's values are ``values[t_order]``, int32 ``[nnz]``.
        tasks: How rows are dealt out on a GPU, int32, see `row_tasks` of the kernels; None elsewhere.
        t_tasks: The same for the transpose.
    """

    shape: tuple[int, int]
    row_offsets: Tensor
    columns: Tensor
    t_row_offsets: Tensor
    t_columns: Tensor
    t_order: Tensor
    tasks: Tensor | None = None
    t_tasks: Tensor | None = None

    @classmethod
    def from_mask(cls, mask: Tensor) -> CSRPattern:
        """Returns the pattern of a mask, bool ``[M, K]``, which is true for what is kept.

        Raises:
            ValueError: If it is no matrix of truth values.
        """
        if mask.dim() != 2 or mask.dtype is not torch.bool:
            raise ValueError(
                f"Expected a mask of two dims and type torch.bool, got {list(mask.shape)} of {mask.dtype}. Pass "
                "what is kept of a weight, such as weight != 0."
            )
        num_rows, num_columns = mask.shape
        rows, columns = mask.nonzero(as_tuple=True)
        offsets = _offsets(rows, num_rows)
        return cls.from_offsets((num_rows, num_columns), offsets, columns)

    @classmethod
    def from_offsets(cls, shape: tuple[int, int], row_offsets: Tensor, columns: Tensor) -> CSRPattern:
        """Returns the pattern with these rows.

        Args:
            shape: M and K.
            row_offsets: Integers ``[M + 1]``, from 0 on, never falling.
            columns: Integers in ``[0, K)``, ``[nnz]``, ascending within a row.

        Raises:
            ValueError: If they are not so.
        """
        num_rows, num_columns = shape
        _check_offsets(row_offsets, num_rows, columns.numel())
        rows = _rows(row_offsets)
        _check_columns(columns, rows, num_columns)
        # Stable, so that the columns of the transpose ascend too.
        order = torch.argsort(columns.long(), stable=True)
        forth = row_offsets.to(torch.int32), columns.to(_index_type(num_columns))
        back = _offsets(columns.long(), num_columns), rows[order].to(_index_type(num_rows))
        tasks = t_tasks = None
        if _kernels.available(columns.device):
            tasks, t_tasks = _kernels.row_tasks(*forth, num_columns), _kernels.row_tasks(*back, num_rows)
        return cls((num_rows, num_columns), *forth, *back, order.to(torch.int32), tasks, t_tasks)

    @property
    def nnz(self) -> int:
        """Number of kept entries."""
        return self.columns.numel()

    @property
    def density(self) -> float:
        """Share of the entries that are kept."""
        return self.nnz / max(self.shape[0] * self.shape[1], 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all indices."""
        indices = (self.row_offsets, self.columns, self.t_row_offsets, self.t_columns, self.t_order)
        return sum(tensor.nbytes for tensor in (*indices, self.tasks, self.t_tasks) if tensor is not None)

    def gather(self, dense: Tensor) -> Tensor:
        """Returns the kept entries of a tensor ``[M, K]``, ``[nnz]``.

        Raises:
            ValueError: If it has another shape.
        """
        _check_shape(dense, self.shape)
        return dense[_rows(self.row_offsets), self.columns.long()]

    def scatter(self, values: Tensor) -> Tensor:
        """Returns a tensor ``[M, K]`` with the values ``[nnz]`` in their places, and zeros elsewhere.

        Raises:
            ValueError: If there are more or fewer values.
        """
        _check_shape(values, (self.nnz,))
        dense = values.new_zeros(self.shape)
        dense[_rows(self.row_offsets), self.columns.long()] = values
        return dense

    def mask(self) -> Tensor:
        """Returns what is kept, bool ``[M, K]``."""
        return self.scatter(torch.ones(self.nnz, dtype=torch.bool, device=self.columns.device))


def _check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"Expected a tensor of shape {list(shape)}, got {list(tensor.shape)}. Use the weight's pattern."
        )


def _check_offsets(offsets: Tensor, num_rows: int, nnz: int) -> None:
    if offsets.dtype not in _INTEGERS or offsets.shape != (num_rows + 1,):
        raise ValueError(
            f"Expected row offsets of integers [{num_rows + 1}], one more than there are rows, got "
            f"{list(offsets.shape)} of {offsets.dtype}. Start them with 0, and add the number of entries row by row."
        )
    if offsets[0] != 0 or offsets[-1] != nnz:
        raise ValueError(
            f"Expected row offsets from 0 to the number of columns given, {nnz}, got {int(offsets[0])} to "
            f"{int(offsets[-1])}. Pass one column per kept entry, and offsets that count them."
        )
    falls = offsets.diff() < 0
    if falls.any():
        row = int(falls.nonzero()[0])
        raise ValueError(
            f"Expected row offsets that never fall, got {int(offsets[row + 1])} after {int(offsets[row])} at row "
            f"{row}. Repeat the offset for a row without entries."
        )
    if nnz > _LARGEST_INT32:
        raise ValueError(
            f"Expected at most {_LARGEST_INT32} kept entries, which 32-bit offsets can count, got {nnz}. Keep fewer, "
            "or split the layer in two."
        )


def _check_columns(columns: Tensor, rows: Tensor, num_columns: int) -> None:
    if columns.dtype not in _INTEGERS or columns.dim() != 1:
        raise ValueError(
            f"Expected columns of integers in one dim, got {list(columns.shape)} of {columns.dtype}. Pass one per kept "
            "entry, such as mask.nonzero()[:, 1]."
        )
    outside = (columns < 0) | (columns >= num_columns)
    if outside.any():
        entry = int(outside.nonzero()[0])
        raise ValueError(
            f"Expected columns from 0 to {num_columns - 1}, got {int(columns[entry])} in row {int(rows[entry])}. Check "
            "that shape is [output features, input features]."
        )
    wrong = (rows[1:] == rows[:-1]) & (columns[1:] <= columns[:-1])
    if wrong.any():
        entry = int(wrong.nonzero()[0])
        raise ValueError(
            f"Expected columns that ascend within each row, got {int(columns[entry + 1])} after {int(columns[entry])} "
            f"in row {int(rows[entry])}. Sort each row's columns, and give each of them once."
        )


def _rows(offsets: Tensor) -> Tensor:
    """Returns the row of each entry."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff().long())


def _offsets(rows: Tensor, num_rows: int) -> Tensor:
    counts = torch.bincount(rows, minlength=num_rows)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _index_type(size: int) -> torch.dtype:
    return torch.int16 if size <= _LARGEST_INT16 else torch.int32
