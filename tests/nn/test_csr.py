"""The pattern of a sparse weight: there and back, its transpose, and what it refuses."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dynmo.nn.csr import CSRPattern


@st.composite
def masks(draw: st.DrawFn) -> Tensor:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))) < share
    if draw(st.booleans()):
        mask[draw(st.integers(0, rows - 1))] = False
    if draw(st.booleans()):
        mask[:, draw(st.integers(0, columns - 1))] = False
    return mask


def transpose_of(pattern: CSRPattern, values: Tensor) -> Tensor:
    """Makes the transpose from its own indices alone."""
    dense = torch.zeros(pattern.shape[1], pattern.shape[0])
    for row in range(pattern.shape[1]):
        for entry in range(int(pattern.t_row_offsets[row]), int(pattern.t_row_offsets[row + 1])):
            dense[row, int(pattern.t_columns[entry])] = values[int(pattern.t_order[entry])]
    return dense


@given(masks())
def test_there_and_back(mask: Tensor) -> None:
    pattern = CSRPattern.from_mask(mask)
    dense = torch.arange(1.0, mask.numel() + 1).reshape(mask.shape)
    values = pattern.gather(dense)

    assert pattern.shape == tuple(mask.shape)
    assert pattern.nnz == int(mask.sum())
    assert pattern.density == pytest.approx(mask.float().mean().item())
    assert torch.equal(pattern.mask(), mask)
    assert torch.equal(values, dense[mask])
    assert torch.equal(pattern.scatter(values), dense * mask)
    assert torch.equal(pattern.gather(pattern.scatter(values)), values)
    assert torch.equal(transpose_of(pattern, values), (dense * mask).t())


@given(masks())
def test_offsets_and_columns_give_the_same_pattern(mask: Tensor) -> None:
    pattern = CSRPattern.from_mask(mask)
    again = CSRPattern.from_offsets(pattern.shape, pattern.row_offsets.long(), pattern.columns)
    for name in ("row_offsets", "columns", "t_row_offsets", "t_columns", "t_order"):
        one, other = getattr(pattern, name), getattr(again, name)
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


@given(masks())
def test_rows_of_the_transpose_ascend(mask: Tensor) -> None:
    pattern = CSRPattern.from_mask(mask)
    transpose = CSRPattern.from_offsets(pattern.shape[::-1], pattern.t_row_offsets, pattern.t_columns)
    assert torch.equal(transpose.mask(), mask.t())


def test_all_shapes_that_have_one_entry_or_none() -> None:
    for kept in (True, False):
        pattern = CSRPattern.from_mask(torch.tensor([[kept]]))
        assert pattern.nnz == int(kept)
        assert pattern.row_offsets.tolist() == pattern.t_row_offsets.tolist() == [0, int(kept)]


@pytest.mark.parametrize(("size", "dtype"), [(32_767, torch.int16), (32_768, torch.int32)])
def test_columns_take_two_bytes_where_they_fit(size: int, dtype: torch.dtype) -> None:
    mask = torch.zeros(2, size, dtype=torch.bool)
    mask[1, [0, size - 1]] = True
    wide, tall = CSRPattern.from_mask(mask), CSRPattern.from_mask(mask.t())
    assert wide.columns.dtype == tall.t_columns.dtype == dtype
    assert wide.t_columns.dtype == tall.columns.dtype == torch.int16
    assert wide.columns.tolist() == tall.t_columns.tolist() == [0, size - 1]
    assert torch.equal(wide.mask(), mask)
    assert torch.equal(tall.mask(), mask.t())
    width = torch.iinfo(dtype).bits // 8
    assert wide.nbytes == 4 * 3 + 2 * width + 4 * (size + 1) + 2 * 2 + 2 * 4


def test_copies_and_pickles() -> None:
    pattern = CSRPattern.from_mask(torch.eye(3, dtype=torch.bool))
    for again in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert torch.equal(again.mask(), pattern.mask())
        assert again.columns is not pattern.columns


def test_scatter_and_gather_are_differentiable() -> None:
    pattern = CSRPattern.from_mask(torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) < 0.5)
    values = torch.randn(pattern.nnz, dtype=torch.double, requires_grad=True)
    dense = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(pattern.scatter, values)
    assert torch.autograd.gradcheck(pattern.gather, dense)


@pytest.mark.parametrize(
    ("offsets", "columns", "text"),
    [
        ([0, 1], [0], r"row offsets of integers \[3\].*got \[2\]"),
        ([0.0, 1.0, 1.0], [0], r"got \[3\] of torch.float32"),
        ([1, 1, 1], [0], "from 0 to the number of columns given, 1, got 1 to 1"),
        ([0, 1, 1], [0, 1], "got 0 to 1"),
        ([0, 2, 1], [0], "never fall, got 1 after 2 at row 1"),
        ([0, 1, 2], [0.0, 1.0], "columns of integers in one dim"),
        ([0, 1, 2], [0, 3], "from 0 to 2, got 3 in row 1"),
        ([0, 1, 2], [-1, 0], "from 0 to 2, got -1 in row 0"),
        ([0, 2, 2], [1, 0], "ascend within each row, got 0 after 1 in row 0"),
        ([0, 2, 2], [1, 1], "ascend within each row, got 1 after 1 in row 0"),
    ],
)
def test_refuses_what_is_no_pattern(offsets: list[Any], columns: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CSRPattern.from_offsets((2, 3), torch.tensor(offsets), torch.tensor(columns))


def test_columns_may_fall_from_row_to_row() -> None:
    assert CSRPattern.from_offsets((2, 3), torch.tensor([0, 2, 4]), torch.tensor([1, 2, 0, 2])).nnz == 4


@pytest.mark.parametrize("mask", [torch.ones(3, dtype=torch.bool), torch.ones(2, 3)])
def test_refuses_what_is_no_mask(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=r"two dims and type torch.bool, got .*weight != 0"):
        CSRPattern.from_mask(mask)
