"""Elementary functions of float32 numbers in few instructions, which generated kernels call. Imports Triton.

A GPU has one instruction each for ``2**x`` and ``1 / x``. Triton's own functions add four to six instructions, so that
results below 2**-126 keep digits, and the same for divisors above 2**126. The functions here are for places where
neither matters, as ``1 + exp(x)`` is at least 1. They are accurate to a few units in the last place, up to the error
of ``x * log2(e)``, which Triton's ``exp`` has as well. Coefficients without a named source are minimax fits of the
relative error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.gemm.parts import INTERPRETED


@triton.jit
def exp2_or_zero(x):
    """``2**x`` within 2 units in the last place; results below 2**-126 are 0."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp_or_zero(x):
    """``exp(x)``; results below 2**-126 are 0."""
    return exp2_or_zero(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    """``1 / x`` within one unit in the last place; 0 for numbers above 2**126, infinity for numbers below 2**-126."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return reciprocal(1.0 + exp2_or_zero(x * -1.4426950408889634))


@triton.jit
def softplus(x):
    """``log(1 + exp(x))`` without overflow, as ``max(x, 0) + log(1 + exp(-|x|))``."""
    u = exp2_or_zero(tl.abs(x) * -1.4426950408889634)
    q = u * 5.2326931e-3 - 2.9505240e-2
    q = q * u + 7.8225955e-2
    q = q * u - 1.3663246e-1
    q = q * u + 1.9106007e-1
    q = q * u - 2.4842982e-1
    q = q * u + 3.3319098e-1
    q = q * u - 4.9999493e-1
    q = q * u + 9.9999994e-1
    return tl.maximum(x, 0.0) + u * q


@triton.jit
def expm1(x):
    """``exp(x) - 1``, near 0 by its Taylor series."""
    q = x * (1.0 / 40320.0) + 1.0 / 5040.0
    q = q * x + 1.0 / 720.0
    q = q * x + 1.0 / 120.0
    q = q * x + 1.0 / 24.0
    q = q * x + 1.0 / 6.0
    q = q * x + 0.5
    return tl.where(tl.abs(x) < 0.5, x * (q * x + 1.0), exp_or_zero(x) - 1.0)


@triton.jit
def tanh(x):
    """The hyperbolic tangent, near 0 by the polynomial of Cephes tanhf."""
    z = x * x
    q = z * -5.70498872745e-3 + 2.06390887954e-2
    q = q * z - 5.37397155531e-2
    q = q * z + 1.33314422036e-1
    q = q * z - 3.33332819422e-1
    size = tl.abs(x)
    far = 1.0 - 2.0 * reciprocal(exp_or_zero(2.0 * size) + 1.0)
    return tl.where(size < 0.625, x * (q * z + 1.0), tl.where(x < 0.0, -far, far))
