"""Which entries of a sparse weight are kept, in compressed rows, and the same for its transpose."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST_INT16 = 32_767


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
    """

    shape: tuple[int, int]
    row_offsets: Tensor
    columns: Tensor
    t_row_offsets: Tensor
    t_columns: Tensor
    t_order: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> CSRPattern:
        """Returns the pattern of a mask, bool ``[M, K]``, which is true for what is kept."""
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
        """
        num_rows, num_columns = shape
        counts = row_offsets.diff().long()
        rows = torch.repeat_interleave(torch.arange(num_rows, device=columns.device), counts)
        # Stable, so that the columns of the transpose ascend too.
        order = torch.argsort(columns.long(), stable=True)
        return cls(
            shape=(num_rows, num_columns),
            row_offsets=row_offsets.to(torch.int32),
            columns=columns.to(_index_type(num_columns)),
            t_row_offsets=_offsets(columns.long(), num_columns),
            t_columns=rows[order].to(_index_type(num_rows)),
            t_order=order.to(torch.int32),
        )

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
        return sum(tensor.nbytes for tensor in indices)

    def gather(self, dense: Tensor) -> Tensor:
        """Returns the kept entries of a tensor ``[M, K]``, ``[nnz]``."""
        return dense[self._rows(), self.columns.long()]

    def scatter(self, values: Tensor) -> Tensor:
        """Returns a tensor ``[M, K]`` with the values ``[nnz]`` in their places, and zeros elsewhere."""
        dense = values.new_zeros(self.shape)
        dense[self._rows(), self.columns.long()] = values
        return dense

    def mask(self) -> Tensor:
        """Returns what is kept, bool ``[M, K]``."""
        return self.scatter(torch.ones(self.nnz, dtype=torch.bool, device=self.columns.device))

    def _rows(self) -> Tensor:
        counts = self.row_offsets.diff().long()
        return torch.repeat_interleave(torch.arange(self.shape[0], device=self.columns.device), counts)


def _offsets(rows: Tensor, num_rows: int) -> Tensor:
    counts = torch.bincount(rows, minlength=num_rows)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _index_type(size: int) -> torch.dtype:
    return torch.int16 if size <= _LARGEST_INT16 else torch.int32
