"""Triton functions for float32 products with weights on tensor cores, in two parts of 16 bits.

They take three products of parts, half as many as :mod:`gnncompile.codegen.gemm.parts`.

A float32 number is a sum of two float16 numbers, up to its last bit: ``x = high + low / 2^11``. The high part is the
float16 number nearest to `x`, the low part the one nearest to 2^11 times the remainder. The product of two such sums
has four terms, and the three largest are computed. The fourth is about as large as the rounding of a float32 product.

float16 has few exponents. So a row of the left matrix is divided by a power of two first, by which its largest number
comes close to the largest float16 number. The weights have one power for all of them. Numbers of a row that are up to
2^27 times smaller than the largest are as exact as the largest. The error of smaller ones is at most 2^-50 of the
largest. On an H200, errors against float64 are a half to three quarters of those of the library's float32 products,
with weights of 64 and 128 rows.

The low part of an infinity is infinite, and its high part is not. So an infinity meets only the high part of the other
factor, and the result is the same infinity. It is NaN if the high part is 0, which it also is if the other number is
more than 2^39 times smaller than the largest.

Sums over many rows, which are the gradients of weights, stay in three parts: each of their steps would need a power for
each column, which all threads of a program have to agree on.

Source: H. Ootomo, R. Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
theoretical peak performance" (IJHPCA 2022), https://arxiv.org/abs/2203.03341.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.gemm.parts import INTERPRETED, dot, finite_or_zero

SPLIT = tl.constexpr(
    """{
    .reg .b16 one, other;
    .reg .f32 rest, other_rest;
    cvt.rn.satfinite.f16x2.f32 $0, $3, $2;
    mov.b32 {one, other}, $0;
    cvt.f32.f16 rest, one;
    cvt.f32.f16 other_rest, other;
    sub.rn.f32 rest, $2, rest;
    sub.rn.f32 other_rest, $3, other_rest;
    mul.rn.f32 rest, rest, 0f45000000;
    mul.rn.f32 other_rest, other_rest, 0f45000000;
    cvt.rn.f16x2.f32 $1, other_rest, rest;
    }"""
)
"""Splits two numbers at a time. A GPU rounds two numbers to float16 by one instruction, in a fraction of the time that
it takes for two single ones. An infinity becomes the largest float16 number (satfinite). 0f45000000 is 2^11."""

HIGH, WIDE = tl.constexpr(64), tl.constexpr(64)
"""The block of a matrix that is read at a time to find the largest number."""


@triton.jit
def powers(largest):
    """A power of two for numbers up to `largest`, and its reciprocal.

    Divided by it, the largest is at least 2^14 and below 2^15. Infinity counts as the largest float32 number. Numbers
    below 2^-112 count as 2^-112, so that the power is a normal float32 number.
    """
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 15 << 23), 254 << 23)
    power = (exponent - (14 << 23)).to(tl.float32, bitcast=True)
    return power, ((253 << 23) - exponent + (15 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def two_parts(x):
    """The high and the low part of a float32 tensor of numbers below 2^15, or of infinities."""
    tl.static_assert(x.dtype == tl.float32, "numbers of another type would be read as float32 numbers")
    if not INTERPRETED:
        types: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(SPLIT, "=&r,=&r,f,f", [x], dtype=types, is_pure=True, pack=2)
    high = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    return high, ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def power_of_parts(start, size):
    """The power of two that divided weights in parts of `size` numbers: :func:`split` writes it behind both parts."""
    return tl.load((start + 2 * size).to(tl.pointer_type(tl.float32)))


@triton.jit
def scaled_product(x, y_high, y_low, y_power):
    """``x @ y`` in float32, smallest terms first, of float32 rows and weights in parts."""
    x_power, reciprocal = powers(tl.max(tl.abs(x), 1, keep_dims=True))
    x_high, x_low = two_parts(x * reciprocal)
    small = dot(x_low, y_high, tl.zeros((x.shape[0], y_high.shape[1]), tl.float32))
    small = dot(x_high, y_low, small)
    total = dot(x_high, y_high, small * (1 / 2048))
    # Their product may be no float32 number, though the result is.
    return total * tl.minimum(x_power, y_power) * tl.maximum(x_power, y_power)


@triton.jit
def largest_of_stripe(matrix_ptr, first, outer, inner, pitch):
    """The largest finite number, without its sign, of HIGH rows of a matrix, or of columns if these lie together.

    Infinities do not count: they would make zeros of all other numbers.
    """
    i, j = first + tl.arange(0, HIGH)[:, None], tl.arange(0, WIDE)[None, :]
    largest = tl.zeros((HIGH, WIDE), tl.float32)
    for start in range(0, inner, WIDE):
        place = i.to(tl.int64) * pitch + start + j
        x = tl.load(matrix_ptr + place, mask=(i < outer) & (start + j < inner), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, finite_or_zero(tl.abs(x)))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit(do_not_specialize=["depth", "columns", "pitch", "padded_depth", "padded_columns"])
def find_largest(matrix_ptr, parts_ptr, depth, columns, pitch, padded_depth, padded_columns, TRANSPOSED: tl.constexpr):
    """Writes the largest number of each stripe of a matrix where :func:`split` looks for it, one program for each."""
    outer, inner = (columns, depth) if TRANSPOSED else (depth, columns)
    found = largest_of_stripe(matrix_ptr, tl.program_id(0) * HIGH, outer, inner, pitch)
    behind = (parts_ptr + 2 * padded_depth * padded_columns).to(tl.pointer_type(tl.float32))
    tl.store(behind + 1 + tl.program_id(0), found)


@triton.jit(do_not_specialize=["depth", "columns", "pitch", "padded_depth", "padded_columns"])
def split(
    matrix_ptr,
    parts_ptr,
    depth,
    columns,
    pitch,
    padded_depth,
    padded_columns,
    TRANSPOSED: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a matrix ``[depth, columns]`` in two parts, ``[2, padded_depth, padded_columns]``, with zeros around it.

    Behind them it writes the power of two by which all numbers were divided, in float32. FOUND: behind that are the
    largest numbers of all stripes. Otherwise each program reads the whole matrix to find the largest number. If the
    matrix is small, this takes less time than another launch.
    Pitch is the distance of two rows in memory. TRANSPOSED: columns lie together, and pitch is the distance of two.
    """
    outer, inner = (columns, depth) if TRANSPOSED else (depth, columns)
    size = padded_depth * padded_columns
    behind = (parts_ptr + 2 * size).to(tl.pointer_type(tl.float32))
    largest = 0.0
    for first in range(0, outer, HIGH):
        if FOUND:
            largest = tl.maximum(largest, tl.load(behind + 1 + first // HIGH))
        else:
            largest = tl.maximum(largest, largest_of_stripe(matrix_ptr, first, outer, inner, pitch))
    power, reciprocal = powers(largest)

    begin = tl.program_id(0) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    row, column = at // padded_columns, at % padded_columns
    source = column.to(tl.int64) * pitch + row if TRANSPOSED else row.to(tl.int64) * pitch + column
    x = tl.load(matrix_ptr + source, mask=(row < depth) & (column < columns), other=0.0).to(tl.float32)
    high, low = two_parts(x * reciprocal)
    tl.store(parts_ptr + at, high, mask=at < size)
    tl.store(parts_ptr + size + at, low, mask=at < size)
    if begin == 0:
        tl.store(behind, power)
