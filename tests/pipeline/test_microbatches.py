from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dynmo.pipeline import batch_size_of, choose_num_microbatches, merge_outputs, split_batch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    x: Tensor
    names: list[str]
    total: int = field(init=False, default=7)


@dataclass(slots=True)
class Nested:
    pair: Pair
    scale: float


class BatchEncoding(UserDict):
    """As in Hugging Face transformers: a mapping with attributes of its own."""

    def __init__(self, data: dict[str, Any] | None = None, encodings: list[str] | None = None) -> None:
        super().__init__(data)
        self.encodings = encodings


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
NAMES = [f"n{index}" for index in range(6)]


def make_batches() -> dict[str, Any]:
    return {
        "tensor": X,
        "tuple": (X, Y),
        "list": [X, Y],
        "namedtuple": Pair(X, Y),
        "dict": {"x": X, "names": NAMES, "setting": "fast", "scale": torch.tensor(2.0)},
        "ordered dict": OrderedDict(x=X, y=Y),
        "default dict": defaultdict(list, x=X, y=Y),
        "user dict": BatchEncoding({"x": X, "y": Y}, encodings=["kept"]),
        "immutable mapping": MappingProxyType({"x": X}),
        "dataclass": Sample(X, NAMES),
        "nested": {"a": (Nested(Pair(X, Y), 0.5),), "b": None},
        "array": {"x": X, "y": Y.numpy()},
    }


def assert_equal(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, right)
    elif isinstance(left, dict | UserDict | MappingProxyType):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif hasattr(left, "__dataclass_fields__"):
        for name in left.__dataclass_fields__:
            assert_equal(getattr(left, name), getattr(right, name))
    else:
        assert left == right


@pytest.mark.parametrize("kind", make_batches())
def test_every_kind_of_batch_is_cut_and_merged(kind: str) -> None:
    batch = make_batches()[kind]
    assert batch_size_of(batch) == 6
    parts = split_batch(batch, 3)
    assert [batch_size_of(part) for part in parts] == [2, 2, 2]
    assert all(type(part) is type(batch) for part in parts)
    if kind == "list":  # results that are lists are joined, not merged entry by entry
        return assert_equal(parts[1], [X[2:4], Y[2:4]])
    return assert_equal(merge_outputs(parts), batch)


def test_parts_are_in_order_and_share_memory() -> None:
    parts = split_batch({"x": X, "names": NAMES, "setting": "fast", "scale": torch.tensor(2.0)}, 3)
    assert torch.equal(parts[1]["x"], X[2:4])
    assert parts[1]["x"].data_ptr() == X[2:].data_ptr()
    assert parts[2]["names"] == ["n4", "n5"]
    assert all(part["setting"] == "fast" and part["scale"] == 2 for part in parts)
    assert split_batch(NAMES, 1) == [NAMES]


def test_mapping_keeps_what_is_not_an_entry() -> None:
    encoding = split_batch(make_batches()["user dict"], 2)[1]
    assert torch.equal(encoding["x"], X[3:])
    assert encoding.encodings == ["kept"]
    assert split_batch(make_batches()["default dict"], 2)[0]["absent"] == []
    assert split_batch(make_batches()["dataclass"], 2)[1].total == 7


def test_batch_without_samples_is_an_error() -> None:
    for batch in ("text", {"scale": torch.tensor(1.0)}, [], None):
        with pytest.raises(ValueError, match=r"no tensor whose dim 0 counts samples.* or use num_microbatches=1"):
            batch_size_of(batch)


def test_sizes_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match=r"batch\['x'\] has 6, batch\['y'\]\[1\] has 5. Give every tensor"):
        batch_size_of({"x": X, "y": [Y, Y[:5]]})
    with pytest.raises(ValueError, match=r"batch.pair\[0\] has 6, batch.pair\[1\] has 3"):
        split_batch(Nested(Pair(X, Y[:3]), 1.0), 3)


@given(batch_size=st.integers(1, 200), count=st.integers(1, 40))
def test_parts_differ_by_one_sample_at_most(batch_size: int, count: int) -> None:
    batch = torch.arange(batch_size)
    if count > batch_size:
        with pytest.raises(ValueError, match=f"{batch_size} samples cannot be cut into {count} .*={batch_size}"):
            split_batch(batch, count)
        return
    parts = split_batch(batch, count)
    sizes = [len(part) for part in parts]
    assert len(parts) == count
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(parts), batch)


@given(batch_size=st.integers(1, 5000), num_stages=st.integers(1, 64))
def test_chosen_number_gives_equal_parts_where_it_can(batch_size: int, num_stages: int) -> None:
    chosen = choose_num_microbatches(batch_size, num_stages)
    most = min(batch_size, 4 * num_stages)
    equal = [count for count in range(num_stages, most + 1) if batch_size % count == 0]
    assert chosen == (max(equal) if equal else most)


@given(count=st.integers(1, 6), size=st.integers(1, 4))
def test_merging_undoes_cutting(count: int, size: int) -> None:
    batch = (torch.randn(count * size, 3), {"y": torch.arange(count * size)})
    assert_equal(merge_outputs(split_batch(batch, count)), batch)


def test_scalars_are_averaged_with_their_weights() -> None:
    outputs = [{"loss": torch.tensor(float(value)), "count": torch.tensor(value)} for value in (1, 2, 6)]
    assert merge_outputs(outputs)["loss"] == 3
    assert merge_outputs(outputs)["count"].dtype == torch.float32
    weighted = merge_outputs(outputs, weights=[2, 1, 1])
    assert weighted["loss"] == 2.5
    assert weighted["loss"] != merge_outputs(outputs, weights=[1, 1, 2])["loss"]
    half = merge_outputs([torch.tensor(1.0, dtype=torch.bfloat16)] * 3)
    assert half.dtype == torch.bfloat16


def test_results_of_other_kinds_are_merged() -> None:
    assert_equal(
        merge_outputs([Pair(X[:2], torch.tensor(1.0)), Pair(X[2:], torch.tensor(3.0))]), Pair(X, torch.tensor(2.0))
    )
    assert_equal(merge_outputs([np.arange(2), np.arange(2, 5)]), np.arange(5))
    assert merge_outputs([["a"], ["b", "c"]]) == ["a", "b", "c"]
    assert merge_outputs([None, None]) is None
    assert merge_outputs(["same", "same"]) == "same"
    assert merge_outputs([0.5, 1.5]) == [0.5, 1.5]
    assert merge_outputs([(), ()]) == ()
