"""Triton functions for products of tiles on tensor cores, in float32 without the tensor cores' loss of accuracy.

Tensor cores multiply 16-bit numbers as they are, and add them up in float32. A float32 number is a sum of three
bfloat16 numbers, up to half of its last bit: ``x = high + middle + low``. Each part is the bfloat16 number nearest to
the remainder that the earlier parts leave. The product of two such sums has nine terms, and the six largest are
computed. The other three are smaller than the rounding of a float32 product.

A product of two bfloat16 numbers is exact. Tensor cores round their sums towards zero, so sums of the largest terms are
kept short and added up in float32 after every few columns. Against float64, errors are a half to a quarter of those of
a product computed in float32.

Sums over rows, and products of few rows, are computed this way. Rows that meet a weight are split into two parts, in
:mod:`gnncompile.codegen.gemm.scaled`.

Source: G. Henry, P. T. P. Tang, A. Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (ARITH 2019), https://arxiv.org/abs/1904.06376.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels. It multiplies bfloat16 numbers as if their bits were integers."""

SPLIT = tl.constexpr(
    """{
    .reg .b32 one, other;
    .reg .f32 rest, other_rest, last, other_last;
    cvt.rn.bf16x2.f32 $0, $4, $3;
    shl.b32 one, $0, 16;
    and.b32 other, $0, 0xffff0000;
    mov.b32 rest, one;
    mov.b32 other_rest, other;
    sub.rn.f32 rest, $3, rest;
    sub.rn.f32 other_rest, $4, other_rest;
    cvt.rn.bf16x2.f32 $1, other_rest, rest;
    shl.b32 one, $1, 16;
    and.b32 other, $1, 0xffff0000;
    mov.b32 last, one;
    mov.b32 other_last, other;
    sub.rn.f32 last, rest, last;
    sub.rn.f32 other_last, other_rest, other_last;
    cvt.rn.bf16x2.f32 $2, other_last, last;
    }"""
)
"""Splits two numbers at a time. A GPU rounds two numbers to bfloat16 by one instruction, in a fraction of the time that
it takes for two single ones."""


@triton.jit
def parts(x):
    """Three bfloat16 tensors that add up to a float32 one."""
    tl.static_assert(x.dtype == tl.float32, "numbers of another type would be read as float32 numbers")
    if not INTERPRETED:
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(SPLIT, "=&r,=&r,=&r,f,f", [x], dtype=types, is_pure=True, pack=2)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot(a, b, total):
    """``total + a @ b`` of matrices of 16 bits, in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def once(x):
    """`x`, which a compiled kernel then computes in one layout only, and joins with nothing.

    A product wants its factor in another layout than a store. Triton would rather load and compute all that `x` is made
    of again, in that layout, than move `x` through shared memory. The instruction here, which does nothing, is one that
    it must not repeat. In the gradient of GatedGCN's layer with 64 channels in float32, that leaves 1,003 of 1,725
    instructions and no spills.
    """
    if INTERPRETED or x.dtype == tl.float64:
        return x
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def plus_parts(total, small, a_high, a_middle, a_low, b_high, b_middle, b_low):
    """Sums to which a product of float32 matrices in parts is added; :func:`sum_of_terms` is their result.

    This is for sums of many products. :func:`product_of_parts` is for single ones, and needs no second sum.
    The largest term goes to `total`, in float32. The others, at most 2^-8 of it, go to `small`, on the tensor cores.
    Without :func:`once`, Triton would add the largest there as well.
    """
    small = dot(a_low, b_high, small)
    small = dot(a_middle, b_middle, small)
    small = dot(a_high, b_low, small)
    small = dot(a_middle, b_high, small)
    small = dot(a_high, b_middle, small)
    total += once(dot(a_high, b_high, tl.zeros_like(total)))
    return total, small


@triton.jit
def finite_or_zero(x):
    """`x`, with zeros in place of infinities and NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def sum_of_terms(total, small):
    """The sum of :func:`plus_parts`.

    Small terms of an infinity are no numbers, and those of sums above the largest float32 number may be infinities of
    the other sign. Without them, the largest terms say what the sum is.
    """
    return total + finite_or_zero(small)


@triton.jit
def plus_product(total, a, b):
    """``total + a @ b`` in float32, of matrices of 16 bits or of float32."""
    if a.dtype == tl.float32:
        a_high, a_middle, a_low = parts(a)
        b_high, b_middle, b_low = parts(b)
        total += product_of_parts(a_high, a_middle, a_low, b_high, b_middle, b_low)
    else:
        total = dot(a, b, total)
    return total


@triton.jit
def product_of_parts(a_high, a_middle, a_low, b_high, b_middle, b_low):
    """The product of two float32 matrices in parts, smallest terms first.

    The sum of the small terms also keeps Triton from adding what follows on the tensor cores, as it does where a
    product that begins with zeros is added to something.
    """
    total = tl.zeros((a_high.shape[0], b_high.shape[1]), tl.float32)
    total = dot(a_low, b_high, total)
    total = dot(a_middle, b_middle, total)
    total = dot(a_high, b_low, total)
    total = dot(a_middle, b_high, total)
    total = dot(a_high, b_middle, total)
    # As in sum_of_terms, the first terms say what the sum is if these are not finite.
    return dot(a_high, b_high, finite_or_zero(total))
