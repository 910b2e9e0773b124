"""Triton functions that the kernels of tiled regions call: products of a tile, and reductions of a tile's rows.

A tile has some consecutive edges, which belong to one or several rows of the graph. ``local`` counts these rows: it is
0 for the edges of the tile's first row, 1 for those of the next row, and so on. ``count`` is the number of rows. A
reduction of ``[edges, channels]`` gives a block of the same shape, whose row ``r`` is the result of local row ``r``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.gemm.kernels import dot, parts
from gnncompile.codegen.gemm.kernels import product_of_parts as gemm_of_parts

BLOCK = tl.constexpr(64)
"""Most inputs of a layer whose weights are read at a time, and most rows of a sum of products at a time."""


@triton.jit
def halves(x):
    """The left and the right half of the columns of a matrix. In the layout of a product, no number is moved."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def product(x, y):
    """``x @ y`` of matrices of one type, in float32, or in float64 for float64 matrices."""
    if x.dtype == tl.float64:
        total = tl.dot(x, y, input_precision="ieee", out_dtype=tl.float64)
    else:
        total = dot(x, y, tl.zeros((x.shape[0], y.shape[1]), tl.float32))
    return total


@triton.jit
def layer(
    x,
    weights,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The product of a tile and weights, in float32 or float64; padded columns are 0.

    The weight of input k and column c is at the pointer ``weights`` plus ``k * DOWN + c * ACROSS``. There are DEPTH
    inputs, and COLUMNS columns, padded to WIDTH. Weights are read in blocks of a few inputs, to save registers.
    """
    if x.shape[1] > BLOCK:
        left, right = halves(x)
        total = layer(left, weights, DEPTH, COLUMNS, DOWN, ACROSS, WIDTH)
        further = weights + x.shape[1] // 2 * DOWN
        total += layer(right, further, DEPTH - x.shape[1] // 2, COLUMNS, DOWN, ACROSS, WIDTH)
    else:
        k, c = tl.arange(0, x.shape[1])[:, None], tl.arange(0, WIDTH)[None, :]
        at = weights + k * DOWN + c * ACROSS
        if x.shape[1] <= DEPTH and COLUMNS == WIDTH:
            y = tl.load(at)
        else:
            y = tl.load(at, mask=(k < DEPTH) & (c < COLUMNS), other=0.0)
        total = product(x, y.to(x.dtype))
    return total


@triton.jit
def layer_of_parts(x, weights, PART: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr):
    """The same in float32. Weights are padded with zeros, in three bfloat16 parts at a distance of PART."""
    if x.shape[1] > BLOCK:
        left, right = halves(x)
        total = layer_of_parts(left, weights, PART, DOWN, ACROSS, WIDTH)
        total += layer_of_parts(right, weights + x.shape[1] // 2 * DOWN, PART, DOWN, ACROSS, WIDTH)
    else:
        at = weights + tl.arange(0, x.shape[1])[:, None] * DOWN + tl.arange(0, WIDTH)[None, :] * ACROSS
        total = product_of_parts(x, tl.load(at), tl.load(at + PART), tl.load(at + 2 * PART))
    return total


@triton.jit
def product_of_parts(x, y_high, y_middle, y_low):
    """``x @ y`` in float32. The right matrix is given in three bfloat16 parts."""
    high, middle, low = parts(x)
    return gemm_of_parts(high, middle, low, y_high, y_middle, y_low)


@triton.jit
def outer(x, y):
    """``x.T @ y``: the sum over the edges of a tile. Matrices of float32 are multiplied in parts."""
    if x.dtype == tl.float32:
        high, middle, low = parts(y)
        total = product_of_parts(tl.trans(x), high, middle, low)
    else:
        total = product(tl.trans(x), y)
    return total


@triton.jit
def add_outer(sums, x, y, is_known, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds ``x.T @ y`` to a matrix ``[ROWS, COLUMNS]`` in memory, a block of rows at a time.

    The matrix counts as 0 unless ``is_known``.
    """
    if x.dtype == tl.float32:
        high, middle, low = parts(y)
        _add_rows(sums, x, high, middle, low, is_known, ROWS, COLUMNS, True)
    else:
        _add_rows(sums, x, y, y, y, is_known, ROWS, COLUMNS, False)


@triton.jit
def _add_rows(sums, x, high, middle, low, is_known, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_PARTS: tl.constexpr):
    if x.shape[1] > BLOCK:
        left, right = halves(x)
        _add_rows(sums, left, high, middle, low, is_known, ROWS, COLUMNS, IN_PARTS)
        further = sums + x.shape[1] // 2 * COLUMNS
        _add_rows(further, right, high, middle, low, is_known, ROWS - x.shape[1] // 2, COLUMNS, IN_PARTS)
    else:
        total = product_of_parts(tl.trans(x), high, middle, low) if IN_PARTS else product(tl.trans(x), high)
        row, column = tl.arange(0, x.shape[1])[:, None], tl.arange(0, high.shape[1])[None, :]
        at, inside = sums + row * COLUMNS + column, (row < ROWS) & (column < COLUMNS)
        tl.store(at, tl.load(at, mask=inside & is_known, other=0.0) + total, mask=inside)


@triton.jit
def row_sums(value, local, count, PARTS: tl.constexpr):
    """The sum of each row. ``value`` is 0 for edges that count nowhere.

    A sum is a product with a matrix of zeros and ones, of this number of bfloat16 parts of the value. With 0 parts,
    rows are summed one by one.
    """
    place = tl.arange(0, value.shape[0])
    if value.shape[1] == 1:
        mine = place[:, None] == local[None, :]
        total = tl.sum(tl.where(mine, tl.trans(value), 0.0), 1, keep_dims=True)
    elif PARTS == 0:
        total = _sums_one_by_one(value, local, count)
    else:
        total = _sums_by_product(value, place[:, None] == local[None, :], PARTS)
    return total


@triton.jit
def _sums_by_product(value, mine, PARTS: tl.constexpr):
    # By way of float32: the interpreter takes the bits of a bool for those of a bfloat16 number.
    mine = mine.to(tl.float32).to(tl.bfloat16)
    # In the product, an infinity or NaN would reach other rows. So a product of its own counts them, in three digits.
    finite = tl.abs(value) < float("inf")
    odd = tl.where(value > 0, 1.0, tl.where(value < 0, 256.0, 65536.0))
    total = tl.zeros((value.shape[0], value.shape[1]), tl.float32)
    odds = dot(mine, tl.where(finite, 0.0, odd).to(tl.bfloat16), total)
    high, middle, low = parts(tl.where(finite, value, 0.0))
    if PARTS == 3:
        total = dot(mine, low, total)
    total = dot(mine, middle, total)
    total = dot(mine, high, total)
    return _with_infinities(total, odds)


@triton.jit
def _with_infinities(total, odds):
    """Adds infinities to a sum: as many positive, negative ones and NaN as the digits of ``odds`` say, to base 256."""
    total = tl.where(odds >= 65536, float("nan"), total)
    negative = tl.floor(odds * (1 / 256))
    total = tl.where(negative > 0, total - float("inf"), total)
    return tl.where(odds > negative * 256, total + float("inf"), total)


@triton.jit
def _sums_one_by_one(value, local, count):
    place = tl.arange(0, value.shape[0])[:, None]
    total = tl.zeros((value.shape[0], value.shape[1]), value.dtype)
    for row in range(count):
        one = tl.sum(tl.where((local == row)[:, None], value, 0.0), 0, keep_dims=True)
        total = tl.where(place == row, one, total)
    return total


@triton.jit
def larger(a, b):
    """The maximum; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(value):
    """The maximum over the first axis, which stays with length 1; NaN if any element is NaN."""
    wrong = tl.max(tl.where(value == value, 0, 1), 0, keep_dims=True)
    return tl.where(wrong > 0, float("nan"), tl.max(tl.where(value == value, value, float("-inf")), 0, keep_dims=True))


@triton.jit
def row_maxima(value, local, count):
    """The maximum of each row."""
    place = tl.arange(0, value.shape[0])[:, None]
    total = tl.full((value.shape[0], value.shape[1]), float("-inf"), value.dtype)
    for row in range(count):
        one = largest(tl.where((local == row)[:, None], value, float("-inf")))
        total = tl.where(place == row, one, total)
    return total


@triton.jit
def row_ties(value, maxima, local, count):
    """The number of edges of each row that reach the row's maximum, from :func:`row_maxima`."""
    place = tl.arange(0, value.shape[0])[:, None]
    total = tl.zeros((value.shape[0], value.shape[1]), value.dtype)
    for row in range(count):
        top = tl.sum(tl.where(place == row, maxima, 0.0), 0, keep_dims=True)
        reaches = (local == row)[:, None] & (value == top)
        total = tl.where(place == row, tl.sum(tl.where(reaches, 1.0, 0.0).to(value.dtype), 0, keep_dims=True), total)
    return total


@triton.jit
def ties_of_both(top, one, ties, other, other_ties):
    """The ties of two parts of a row, whose maxima are ``one`` and ``other`` and whose common maximum is ``top``."""
    return tl.where(one == top, ties, 0.0) + tl.where(other == top, other_ties, 0.0)
