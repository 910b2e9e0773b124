"""Gradients of the pointwise operations and the activations spelled in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gnncompile.ir.builder import Builder

Rule = Callable[[Builder, Sequence[int], int, int], "tuple[int | None, ...]"]
"""(builder, arguments, result, cotangent of the result) -> cotangent of each argument, None where there is none."""


def _div(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    left = b.op("div", g, x[1])
    return left, b.op("neg", b.op("mul", left, out))


def _abs(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    zero = b.const(0)
    sign = b.op("sub", b.op("float", b.op("gt", x[0], zero)), b.op("float", b.op("lt", x[0], zero)))
    return (b.op("mul", g, sign),)


def _sigmoid(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    return (b.op("mul", g, b.op("mul", out, b.op("sub", b.const(1), out))),)


def _tanh(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    return (b.op("mul", g, b.op("sub", b.const(1), b.op("mul", out, out))),)


def _erf(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    bell = b.op("exp", b.op("neg", b.op("mul", x[0], x[0])))
    return (b.op("mul", g, b.op("mul", b.const(2 / math.sqrt(math.pi)), bell)),)


def _where(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    zero = b.const(0)
    return None, b.op("where", x[0], g, zero), b.op("where", x[0], zero, g)


GRADIENTS: dict[str, Rule] = {
    "add": lambda b, x, out, g: (g, g),
    "sub": lambda b, x, out, g: (g, b.op("neg", g)),
    "mul": lambda b, x, out, g: (b.op("mul", g, x[1]), b.op("mul", g, x[0])),
    "div": _div,
    "neg": lambda b, x, out, g: (b.op("neg", g),),
    "abs": _abs,
    "exp": lambda b, x, out, g: (b.op("mul", g, out),),
    "log": lambda b, x, out, g: (b.op("div", g, x[0]),),
    "sqrt": lambda b, x, out, g: (b.op("div", g, b.op("mul", b.const(2), out)),),
    "sin": lambda b, x, out, g: (b.op("mul", g, b.op("cos", x[0])),),
    "cos": lambda b, x, out, g: (b.op("neg", b.op("mul", g, b.op("sin", x[0]))),),
    "erf": _erf,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "where": _where,
    "on_edges": lambda b, x, out, g: (g,),
    "float": lambda b, x, out, g: (None,),
}
"""Operations that are not here (comparisons, logic) have no gradient."""


def relu(b: Builder, x: int) -> int:
    """max(x, 0), NaN kept."""
    return leaky_relu(b, x, 0.0)


def leaky_relu(b: Builder, x: int, slope: float = 0.01) -> int:
    """X where x > 0, else slope * x."""
    zero = b.const(0)
    if slope == 0.0:
        return b.op("where", b.op("le", x, zero), zero, x)
    return b.op("where", b.op("gt", x, zero), x, b.op("mul", x, b.const(slope)))


def elu(b: Builder, x: int, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> int:
    """X where x > 0, else alpha * (exp(x) - 1), with torch's scales."""
    zero = b.const(0)
    # exp never sees a positive number, so that the branch not taken cannot overflow and poison the gradient.
    low = b.op("where", b.op("gt", x, zero), zero, x)
    decay = b.op("sub", b.op("exp", b.op("mul", low, b.const(input_scale))), b.const(1))
    negative = b.op("mul", decay, b.const(alpha * scale))
    return b.op("where", b.op("gt", x, zero), b.op("mul", x, b.const(scale)), negative)


def silu(b: Builder, x: int) -> int:
    """X * sigmoid(x)."""
    return b.op("mul", x, b.op("sigmoid", x))


def gelu(b: Builder, x: int, approximate: str = "none") -> int:
    """X * Phi(x), exact or by tanh (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415)."""
    half = b.op("mul", x, b.const(0.5))
    if approximate == "tanh":
        cube = b.op("mul", b.op("mul", x, x), x)
        inner = b.op("mul", b.op("add", x, b.op("mul", cube, b.const(0.044715))), b.const(math.sqrt(2 / math.pi)))
        return b.op("mul", half, b.op("add", b.op("tanh", inner), b.const(1)))
    phi = b.op("erf", b.op("mul", x, b.const(math.sqrt(0.5))))
    return b.op("mul", half, b.op("add", phi, b.const(1)))


def softplus(b: Builder, x: int, beta: float = 1.0, threshold: float = 20.0) -> int:
    """log(1 + exp(beta * x)) / beta, and x itself above the threshold."""
    scaled = b.op("mul", x, b.const(beta))
    large = b.op("gt", scaled, b.const(threshold))
    safe = b.op("where", large, b.const(0), scaled)
    soft = b.op("div", b.op("log", b.op("add", b.op("exp", safe), b.const(1))), b.const(beta))
    return b.op("where", large, x, soft)


def clamp(b: Builder, x: int, low: float | None = None, high: float | None = None) -> int:
    """X between two numbers, NaN kept."""
    if low is not None:
        x = b.op("where", b.op("lt", x, b.const(low)), b.const(low), x)
    if high is not None:
        x = b.op("where", b.op("gt", x, b.const(high)), b.const(high), x)
    return x


def power(b: Builder, x: int, exponent: float) -> int | None:
    """X ** exponent for the exponents that need no logarithm, else None."""
    if exponent == 0.5:
        return b.op("sqrt", x)
    if exponent == -0.5:
        return b.op("div", b.const(1), b.op("sqrt", x))
    if exponent not in (1, 2, 3, 4, -1, -2):
        return None
    result = x
    for _ in range(int(abs(exponent)) - 1):
        result = b.op("mul", result, x)
    return result if exponent > 0 else b.op("div", b.const(1), result)
