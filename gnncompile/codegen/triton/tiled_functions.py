"""Triton functions that the kernels of tiled regions call: products of a tile of edges and the weights of a layer."""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.gemm.parts import dot
from gnncompile.codegen.gemm.scaled import power_of_parts, scaled_product

BLOCK = tl.constexpr(128)
"""Most inputs of a layer whose weights are read at a time."""


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
def add_rows(x, total):
    """`total` of 16 rows, plus the sum over the rows of a 16-bit matrix in each of its rows."""
    return dot(tl.full((total.shape[0], x.shape[0]), 1.0, tl.float32).to(x.dtype), x, total)


@triton.jit
def weights(
    start,
    INPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The weights of INPUTS inputs, of which DEPTH exist, as :func:`layer` reads them."""
    k, c = tl.arange(0, INPUTS)[:, None], tl.arange(0, WIDTH)[None, :]
    at = start + k * DOWN + c * ACROSS
    if INPUTS <= DEPTH and COLUMNS == WIDTH:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(k < DEPTH) & (c < COLUMNS), other=0.0)
    return found


@triton.jit
def weights_of_part(
    start,
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One float16 part of the weights of INPUTS inputs, as :func:`layer_of_parts` reads them."""
    return tl.load(start + tl.arange(0, INPUTS)[:, None] * DOWN + tl.arange(0, WIDTH)[None, :] * ACROSS)


@triton.jit
def layer(
    x,
    start,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The product of a tile and weights, in float32 or float64; padded columns are 0.

    The weight of input k and column c is at the pointer `start` plus ``k * DOWN + c * ACROSS``. There are DEPTH inputs,
    and COLUMNS columns, padded to WIDTH. Weights are read in blocks of a few inputs, to save registers.
    """
    if x.shape[1] > BLOCK:
        left, right = halves(x)
        total = layer(left, start, DEPTH, COLUMNS, DOWN, ACROSS, WIDTH)
        further = start + x.shape[1] // 2 * DOWN
        total += layer(right, further, DEPTH - x.shape[1] // 2, COLUMNS, DOWN, ACROSS, WIDTH)
    else:
        y = weights(start, x.shape[1], DEPTH, COLUMNS, DOWN, ACROSS, WIDTH)
        total = product(x, y.to(x.dtype))
    return total


@triton.jit
def layer_of_parts(x, start, PART: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr):
    """``x @ weights`` of float32 values, as :func:`layer`.

    Weights are padded with zeros, in two float16 parts of PART numbers each.
    """
    return blocks_of_parts(x, start, power_of_parts(start, PART), PART, DOWN, ACROSS, WIDTH)


@triton.jit
def blocks_of_parts(x, start, power, PART: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, WIDTH: tl.constexpr):
    """Like :func:`layer_of_parts`, for a block of inputs.

    `start` points to their first weight, and `power` is the power of two that divided all weights.
    """
    if x.shape[1] > BLOCK:
        left, right = halves(x)
        total = blocks_of_parts(left, start, power, PART, DOWN, ACROSS, WIDTH)
        total += blocks_of_parts(right, start + x.shape[1] // 2 * DOWN, power, PART, DOWN, ACROSS, WIDTH)
    else:
        high = weights_of_part(start, x.shape[1], PART, DOWN, ACROSS, WIDTH)
        low = weights_of_part(start + PART, x.shape[1], PART, DOWN, ACROSS, WIDTH)
        total = scaled_product(x, high, low, power)
    return total
