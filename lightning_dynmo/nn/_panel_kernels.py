# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-call, misc"
"""Sparse products on panels of 64 tokens, compiled by numba for this machine; needs the extra ``sparse``.

[Note: panels]
Activations come as ``[P, F, 64]``: 64 tokens side by side, feature by feature. So each kept entry of a weight meets 64
numbers in one place, a handful of vector registers, whatever its column is. The compiler is not left to find that: the
type `Lanes` is such a row, and the functions below are written in terms of it. Shared by all: `begin` and `end` are the
rows (or features) to work on, so that threads share no result and their number changes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.extending import models, register_model

WIDTH = 64
_TOGETHER = 4  # dot products that are summed up at once
_FEATURES = 32  # turned at once between token by token and feature by feature: whole cache lines on both sides
_ROWS = 512  # whose values and results stay in the cache while the panels pass
_NARROW, _WIDE = 128, 1024  # columns of which a panel's part fits into the first level of the cache, or the second
_FEWEST = 16  # kept entries per row and narrow part below which passing through parts costs more than it saves

_inline: Callable[[Any], Any] = (
    extending.intrinsic
)  # its calls lack the first argument of what it decorates, which no type says


class Lanes(types.Type):
    """One feature of a panel: 64 numbers in vector registers."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.dtype).get_data_type(), WIDTH))


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Returns a pointer to ``panels[panel, feature]``."""
    kind = signature.args[0]
    panels = context.make_array(kind)(context, builder, args[0])
    row = builder.add(builder.mul(args[1], builder.extract_value(panels.shape, 1)), args[2])
    first = builder.gep(panels.data, [builder.mul(row, row.type(WIDTH))])
    return builder.bitcast(first, ir.VectorType(first.type.pointee, WIDTH).as_pointer())


@_inline
def load(typing: Any, panels: Any, panel: Any, feature: Any) -> Any:
    """``panels[panel, feature]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_place(context, builder, signature, args), align=panels.dtype.bitwidth // 8)

    return Lanes(panels.dtype)(panels, types.intp, types.intp), generate


@_inline
def at(typing: Any, array: Any, index: Any) -> Any:
    """``array[index]`` without a look whether the index is negative."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]]))

    return array.dtype(array, types.intp), generate


@_inline
def store(typing: Any, panels: Any, panel: Any, feature: Any, lanes: Any) -> Any:
    """``panels[panel, feature] = lanes``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[3], _place(context, builder, signature, args), align=panels.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(panels, types.intp, types.intp, lanes), generate


@_inline
def zeros(typing: Any, panels: Any) -> Any:
    """Zeros of the panels' type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(signature.return_type), [0.0] * WIDTH)

    return Lanes(panels.dtype)(panels), generate


@_inline
def add(typing: Any, left: Any, right: Any) -> Any:
    """``left + right``."""
    return left(left, right), lambda context, builder, signature, args: builder.fadd(*args)


@_inline
def add_scaled(typing: Any, total: Any, factor: Any, lanes: Any) -> Any:
    """``total + factor * lanes``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, index = args[0].type, ir.IntType(32)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), args[1], index(0))
        factors = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(index, WIDTH), [0] * WIDTH))
        product = builder.fmul(factors, args[2], flags=["contract"])
        return builder.fadd(args[0], product, flags=["contract"])

    return total(total, total.dtype, lanes), generate


@_inline
def add_dot(typing: Any, out: Any, index: Any, left: Any, right: Any) -> Any:
    """``out[index] += sum(left * right)``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _add_dots(context, builder, signature.args[0], args[0], args[1], args[2], args[3:])
        return context.get_dummy_value()

    return types.void(out, types.intp, left, right), generate


@_inline
def add_dots(typing: Any, out: Any, index: Any, left: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Adds to ``out[index:index + 4]`` the products of one row with four others."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _add_dots(context, builder, signature.args[0], args[0], args[1], args[2], args[3:])
        return context.get_dummy_value()

    return types.void(out, types.intp, left, left, left, left, left), generate


def _add_dots(context: Any, builder: Any, kind: Any, out: Any, index: Any, left: Any, rights: Any) -> None:
    """Sums all products in the same steps, each of which halves what is left of every one."""
    parts = [builder.fmul(left, right, flags=["contract"]) for right in rights]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_pick(builder, one, other, range(2 * one.type.count)) for one, other in pairs]
    (total,) = parts
    group = WIDTH
    while group > 1:
        places = range(total.type.count)
        low = _pick(builder, total, total, [place for place in places if place % group < group // 2])
        high = _pick(builder, total, total, [place for place in places if place % group >= group // 2])
        total = builder.fadd(low, high, flags=["contract"])
        group //= 2
    first = builder.gep(context.make_array(kind)(context, builder, out).data, [index])
    where = builder.bitcast(first, total.type.as_pointer())
    align = kind.dtype.bitwidth // 8
    builder.store(builder.fadd(builder.load(where, align=align), total), where, align=align)


def _pick(builder: Any, one: Any, other: Any, places: Any) -> Any:
    mask = list(places)
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), len(mask)), mask))


def _compile(function: Any) -> Any:
    """Compiles at the first call, once per machine where there is a folder to keep the code in."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return njit(**options)(function)


@_compile
def pack(tokens: Any, panels: Any, begin: int, end: int) -> None:
    """Turns ``[T, F]`` into panels; the last one ends with zeros."""
    for panel in range(panels.shape[0]):
        start = panel * WIDTH
        count = min(WIDTH, tokens.shape[0] - start)
        for first in range(begin, end, _FEATURES):
            last = min(first + _FEATURES, end)
            for lane in range(count):
                for feature in range(first, last):
                    panels[panel, feature, lane] = tokens[start + lane, feature]
            for feature in range(first, last):
                panels[panel, feature, count:] = 0


@_compile
def _unpack(rows: Any, bias: Any, tokens: Any, start: int, first: int, last: int) -> None:
    """Turns rows ``[1, last - first, 64]`` into features of tokens from `start` on; adds their bias, if not ``[0]``."""
    count = min(WIDTH, tokens.shape[0] - start)
    for begin in range(first, last, _FEATURES):
        end = min(begin + _FEATURES, last)
        for lane in range(count):
            if bias.size:
                for feature in range(begin, end):
                    tokens[start + lane, feature] = rows[0, feature - first, lane] + bias[feature]
            else:
                for feature in range(begin, end):
                    tokens[start + lane, feature] = rows[0, feature - first, lane]


@_compile
def _ordered(values: Any, order: Any, start: int, stop: int) -> Any:
    """Returns ``values[order[start:stop]]``, or ``values[start:stop]`` where there is no order ``[0]``."""
    if not order.size:
        return values[start:stop]
    found = np.empty(stop - start, values.dtype)
    for index in range(stop - start):
        found[index] = at(values, at(order, start + index))
    return found


@_compile
def _parts(offsets: Any, columns: Any, num_columns: int, first: int, last: int) -> Any:
    """Returns where each row's entries of each part of the columns begin, ``[parts + 1, last - first]``."""
    # Decided for all rows alike: parts change the order of sums, which must not depend on who computes which rows.
    narrow = offsets[-1] * _NARROW >= _FEWEST * num_columns * (len(offsets) - 1)
    width = _NARROW if narrow else _WIDE
    num_parts = -(-num_columns // width)
    starts = np.empty((num_parts + 1, last - first), np.int32)
    for row in range(first, last):
        entry, stop = offsets[row], offsets[row + 1]
        for part in range(num_parts):
            starts[part, row - first] = entry
            if part < num_parts - 1:
                while entry < stop and columns[entry] < (part + 1) * width:
                    entry += 1
        starts[num_parts, row - first] = stop
    return starts


@_compile
def multiply(
    values: Any,
    order: Any,
    offsets: Any,
    columns: Any,
    panels: Any,
    bias: Any,
    tokens: Any,
    begin: int,
    end: int,
) -> None:
    """Multiplies rows of a sparse matrix ``[M, K]`` with panels of K features: features of tokens ``[T, M]``.

    The matrix' values are ``values[order]``, or `values` where there is no order ``[0]``; so it is with a bias ``[M]``.
    """
    base = offsets[begin]
    own = _ordered(values, order, base, offsets[end])
    out = np.empty((1, min(_ROWS, end - begin), WIDTH), panels.dtype)
    for first in range(begin, end, _ROWS):
        last = min(first + _ROWS, end)
        starts = _parts(offsets, columns, panels.shape[1], first, last)
        for panel in range(panels.shape[0]):
            for part in range(len(starts) - 1):
                for row in range(last - first):
                    start, stop = starts[part, row], starts[part + 1, row]
                    # Two sums, since each addition has to wait for the one before it.
                    even, odd = load(out, 0, row) if part else zeros(out), zeros(out)
                    for entry in range(start, stop - 1, 2):
                        even = add_scaled(even, at(own, entry - base), load(panels, panel, at(columns, entry)))
                        odd = add_scaled(odd, at(own, entry + 1 - base), load(panels, panel, at(columns, entry + 1)))
                    if (stop - start) % 2:
                        even = add_scaled(even, at(own, stop - 1 - base), load(panels, panel, at(columns, stop - 1)))
                    store(out, 0, row, add(even, odd))
            _unpack(out, bias, tokens, panel * WIDTH, first, last)


@_compile
def sample(offsets: Any, columns: Any, left: Any, right: Any, out: Any, begin: int, end: int) -> None:
    """Sums over all tokens the products of row i of `left` and row j of `right`, for each kept entry (i, j)."""
    out[offsets[begin] : offsets[end]] = 0
    for first in range(begin, end, _ROWS):
        last = min(first + _ROWS, end)
        starts = _parts(offsets, columns, right.shape[1], first, last)
        for panel in range(right.shape[0]):
            for part in range(len(starts) - 1):
                for row in range(first, last):
                    start, stop = starts[part, row - first], starts[part + 1, row - first]
                    mine = load(left, panel, row)
                    for entry in range(start, stop - _TOGETHER + 1, _TOGETHER):
                        add_dots(
                            out,
                            entry,
                            mine,
                            load(right, panel, at(columns, entry)),
                            load(right, panel, at(columns, entry + 1)),
                            load(right, panel, at(columns, entry + 2)),
                            load(right, panel, at(columns, entry + 3)),
                        )
                    for entry in range(stop - (stop - start) % _TOGETHER, stop):
                        add_dot(out, entry, mine, load(right, panel, at(columns, entry)))
