"""Gradients of the pointwise operations, and activations composed of these operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gnncompile.ir.builder import Builder

Rule = Callable[[Builder, Sequence[int], int, int], "tuple[int | None, ...]"]
"""(builder, arguments, result, cotangent of the result) -> cotangent of each argument, or None without a gradient."""


def _div(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    left = b.op("div", g, x[1])
    return left, b.op("neg", b.op("mul", left, out))


def _abs(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    return (b.op("mul", g, b.op("sign", x[0])),)


def _pow(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    base, exponent = x
    zero, one = b.const(0), b.const(1)
    slope = b.op("mul", exponent, b.op("pow", base, b.op("sub", exponent, one)))
    by_base = b.op("where", b.op("eq", exponent, zero), zero, b.op("mul", g, slope))
    flat = b.op("and", b.op("eq", base, zero), b.op("ge", exponent, zero))
    return by_base, b.op("where", flat, zero, b.op("mul", g, b.op("mul", out, b.op("log", base))))


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


def _flat(b: Builder, x: Sequence[int], out: int, g: int) -> tuple[int | None, ...]:
    return (b.const(0),)  # zeros rather than None, as in torch


GRADIENTS: dict[str, Rule] = {
    "add": lambda b, x, out, g: (g, g),
    "sub": lambda b, x, out, g: (g, b.op("neg", g)),
    "mul": lambda b, x, out, g: (b.op("mul", g, x[1]), b.op("mul", g, x[0])),
    "div": _div,
    "neg": lambda b, x, out, g: (b.op("neg", g),),
    "abs": _abs,
    "exp": lambda b, x, out, g: (b.op("mul", g, out),),
    "expm1": lambda b, x, out, g: (b.op("mul", g, b.op("add", out, b.const(1))),),
    "exp2": lambda b, x, out, g: (b.op("mul", g, b.op("mul", out, b.const(math.log(2)))),),
    "log": lambda b, x, out, g: (b.op("div", g, x[0]),),
    "pow": _pow,
    "sign": _flat,
    "floor": _flat,
    "ceil": _flat,
    "log1p": lambda b, x, out, g: (b.op("div", g, b.op("add", x[0], b.const(1))),),
    "sqrt": lambda b, x, out, g: (b.op("div", g, b.op("mul", b.const(2), out)),),
    "sin": lambda b, x, out, g: (b.op("mul", g, b.op("cos", x[0])),),
    "cos": lambda b, x, out, g: (b.op("neg", b.op("mul", g, b.op("sin", x[0]))),),
    "erf": _erf,
    "sigmoid": _sigmoid,
    "softplus": lambda b, x, out, g: (b.op("mul", g, b.op("sigmoid", x[0])),),
    "tanh": _tanh,
    "where": _where,
    "on_edges": lambda b, x, out, g: (g,),
    "float": lambda b, x, out, g: (None,),
}
"""The gradient rule of each operation. Operations that are missing here (comparisons, logic) have no gradient."""


_SOFT = 18
"""Above it, log(1 + exp(x)) and its slope differ from x and 1 by less than float32 rounds: by exp(-18) = 1.5e-8."""


def relu(b: Builder, x: int) -> int:
    """max(x, 0); a NaN stays NaN."""
    zero = b.const(0)
    return b.op("where", b.op("le", x, zero), zero, x)


def leaky_relu(b: Builder, x: int, slope: float = 0.01) -> int:
    """X where x > 0, else slope * x. Written as a product, so that its gradient is a product too (see
    :mod:`gnncompile.ir.linear`).
    """
    return b.op("mul", x, b.op("where", b.op("gt", x, b.const(0)), b.const(1), b.const(slope)))


def silu(b: Builder, x: int) -> int:
    """X * sigmoid(x)."""
    return b.op("mul", x, b.op("sigmoid", x))


def softplus(b: Builder, x: int, beta: float = 1, threshold: float = 20) -> int:
    """log(1 + exp(beta * x)) / beta, and x itself where beta * x > threshold."""
    scaled = b.op("mul", x, b.const(beta))
    soft = b.op("div", b.op("softplus", scaled), b.const(beta))
    if beta == 1 and threshold >= _SOFT and not b.double:
        return soft  # above the threshold, float32 numbers are the same without it
    return b.op("where", b.op("gt", scaled, b.const(threshold)), x, soft)


def gelu(b: Builder, x: int, approximate: str = "none") -> int:
    """X * Phi(x), exact or by tanh (Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415)."""
    half = b.op("mul", x, b.const(0.5))
    if approximate == "tanh":
        cube = b.op("mul", b.op("mul", x, x), x)
        inner = b.op("mul", b.op("add", x, b.op("mul", cube, b.const(0.044715))), b.const(math.sqrt(2 / math.pi)))
        return b.op("mul", half, b.op("add", b.op("tanh", inner), b.const(1)))
    phi = b.op("erf", b.op("mul", x, b.const(math.sqrt(0.5))))
    return b.op("mul", half, b.op("add", phi, b.const(1)))


def clamp(b: Builder, x: int, low: float | None = None, high: float | None = None) -> int:
    """X limited to [low, high]; a NaN stays NaN."""
    if low is not None:
        x = b.op("where", b.op("lt", x, b.const(low)), b.const(low), x)
    if high is not None:
        x = b.op("where", b.op("gt", x, b.const(high)), b.const(high), x)
    return x


def hardtanh(b: Builder, x: int, low: float = -1.0, high: float = 1.0) -> int:
    """X limited to [low, high] like :func:`clamp`, but with gradient 0 at x = low and x = high, as in torch."""
    x = b.op("where", b.op("le", x, b.const(low)), b.const(low), x)
    return b.op("where", b.op("ge", x, b.const(high)), b.const(high), x)


def power(b: Builder, x: int, exponent: float) -> int:
    """X ** exponent; small whole exponents become products, and 0.5 and -0.5 a square root."""
    if exponent == 0.5:
        return b.op("sqrt", x)
    if exponent == -0.5:
        return b.op("div", b.const(1), b.op("sqrt", x))
    if exponent not in (1, 2, 3, 4, -1, -2):
        return b.op("pow", x, b.const(exponent))
    result = x
    for _ in range(int(abs(exponent)) - 1):
        result = b.op("mul", result, x)
    return result if exponent > 0 else b.op("div", b.const(1), result)


def elu(b: Builder, x: int, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> int:
    """Scale * x where x > 0, else scale * alpha * (exp(input_scale * x) - 1)."""
    below = b.op("le", x, b.const(0))
    # The branch that is not chosen must not overflow either: its gradient would be NaN.
    bent = b.op("expm1", b.op("mul", b.op("where", below, x, b.const(0)), b.const(input_scale)))
    return b.op("where", below, b.op("mul", bent, b.const(alpha * scale)), b.op("mul", x, b.const(scale)))


def selu(b: Builder, x: int) -> int:
    """ELU with the constants of Klambauer et al. (https://arxiv.org/abs/1706.02515)."""
    return elu(b, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def celu(b: Builder, x: int, alpha: float = 1.0) -> int:
    """X where x > 0, else alpha * (exp(x / alpha) - 1)."""
    return elu(b, x, alpha, 1.0, 1.0 / alpha)


def hardsigmoid(b: Builder, x: int) -> int:
    """(x + 3) / 6, limited to [0, 1]."""
    return b.op("div", hardtanh(b, b.op("add", x, b.const(3)), 0.0, 6.0), b.const(6))


def hardswish(b: Builder, x: int) -> int:
    """X * hardsigmoid(x)."""
    return b.op("div", b.op("mul", x, hardtanh(b, b.op("add", x, b.const(3)), 0.0, 6.0)), b.const(6))


def mish(b: Builder, x: int) -> int:
    """X * tanh(softplus(x))."""
    return b.op("mul", x, b.op("tanh", softplus(b, x)))


def log_sigmoid(b: Builder, x: int) -> int:
    """log(sigmoid(x)), accurate even where sigmoid(x) rounds to 0."""
    return b.op("sub", b.const(0), softplus(b, b.op("neg", x), threshold=40))


def softshrink(b: Builder, x: int, bound: float = 0.5) -> int:
    """X moved towards 0 by `bound`; 0 where -bound <= x <= bound."""
    moved = b.op("where", b.op("gt", x, b.const(0)), b.op("sub", x, b.const(bound)), b.op("add", x, b.const(bound)))
    return b.op("where", _within(b, x, bound), b.const(0), moved)


def hardshrink(b: Builder, x: int, bound: float = 0.5) -> int:
    """X; 0 where -bound <= x <= bound."""
    return b.op("where", _within(b, x, bound), b.const(0), x)


def _within(b: Builder, x: int, bound: float) -> int:
    return b.op("and", b.op("ge", x, b.const(-bound)), b.op("le", x, b.const(bound)))


def threshold(b: Builder, x: int, limit: float, value: float) -> int:
    """X where x > limit, else `value`."""
    return b.op("where", b.op("le", x, b.const(limit)), b.const(value), x)


def trunc(b: Builder, x: int) -> int:
    """X rounded towards 0."""
    return b.op("where", b.op("lt", x, b.const(0)), b.op("ceil", x), b.op("floor", x))
