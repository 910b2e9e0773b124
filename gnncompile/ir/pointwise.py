"""The pointwise operations of a region, each written in torch, Triton and C++.

The table is short on purpose. An activation (relu, silu, ...) is composed of these operations, so a new activation
needs neither a kernel template nor a gradient (see :mod:`gnncompile.ir.rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gnncompile.ir.region import BOOL, COMPUTE


@dataclass(frozen=True)
class Pointwise:
    """One operation. `triton` and `cpp` are format strings over ``{0}``, ``{1}``, ...; ``T`` is the compute type."""

    arity: int
    torch: Callable[..., torch.Tensor]
    triton: str
    cpp: str
    result: str = COMPUTE
    bare: bool = True
    """Whether a constant operand may be a bare literal in Triton code. Functions such as ``tl.abs`` take no literal."""
    triton_float32: str = ""
    """The Triton code for float32 numbers, if it differs.

    The functions that it calls are those of :mod:`gnncompile.codegen.triton.elementary`.
    """


def _comparison(fn: Callable[..., torch.Tensor], symbol: str) -> Pointwise:
    return Pointwise(2, fn, f"({{0}} {symbol} {{1}})", f"({{0}} {symbol} {{1}})", BOOL)


def _expm1(x: str) -> str:
    """Returns Triton code for exp(x) - 1 near 0, a Taylor series. The difference itself would lose the digits of x."""
    series = "1"
    for k in range(15, 1, -1):
        series = f"(1 + {x} * (1 / {k}) * {series})"
    return f"({x} * {series})"


def _log1p(x: str) -> str:
    """Returns Triton code for log(1 + x).

    Source: Goldberg, What Every Computer Scientist Should Know About Floating-Point Arithmetic, theorem 4.
    """
    return f'tl.where((1 + {x} == 1) | ({x} == float("inf")), {x}, tl.log(1 + {x}) * ({x} / ((1 + {x}) - 1)))'


POINTWISE: dict[str, Pointwise] = {
    "add": Pointwise(2, torch.add, "({0} + {1})", "({0} + {1})"),
    "sub": Pointwise(2, torch.sub, "({0} - {1})", "({0} - {1})"),
    "mul": Pointwise(2, torch.mul, "({0} * {1})", "({0} * {1})"),
    "div": Pointwise(2, torch.div, "({0} / {1})", "({0} / {1})"),
    # Triton computes -x as 0 - x, which never gives a negative zero.
    "neg": Pointwise(1, torch.neg, "({0} * -1.0)", "(-{0})"),
    "abs": Pointwise(1, torch.abs, "tl.abs({0})", "std::abs({0})"),
    "exp": Pointwise(1, torch.exp, "tl.exp({0})", "std::exp({0})"),
    "expm1": Pointwise(
        1,
        torch.expm1,
        f"tl.where(tl.abs({{0}}) < 0.5, {_expm1('{0}')}, tl.exp({{0}}) - 1)",
        "std::expm1({0})",
        triton_float32="expm1({0})",
    ),
    "exp2": Pointwise(1, torch.exp2, "tl.exp2({0})", "std::exp2({0})"),
    "log": Pointwise(1, torch.log, "tl.log({0})", "std::log({0})"),
    "log1p": Pointwise(
        1,
        torch.log1p,
        _log1p("{0}"),
        "std::log1p({0})",
    ),
    # tl.sqrt treats subnormal float32 numbers as 0.
    "sqrt": Pointwise(1, torch.sqrt, "tl.sqrt({0})", "std::sqrt({0})", triton_float32="tl.sqrt_rn({0})"),
    "sin": Pointwise(1, torch.sin, "tl.sin({0})", "std::sin({0})"),
    "cos": Pointwise(1, torch.cos, "tl.cos({0})", "std::cos({0})"),
    "erf": Pointwise(1, torch.erf, "tl.erf({0})", "std::erf({0})"),
    "sigmoid": Pointwise(
        1,
        torch.sigmoid,
        "(1 / (1 + tl.exp(-({0}))))",
        "(T(1) / (T(1) + std::exp(-({0}))))",
        triton_float32="sigmoid({0})",
    ),
    # log(1 + exp(x)). As max(x, 0) + log(1 + exp(-|x|)) it does not overflow.
    "softplus": Pointwise(
        1,
        lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        f"(tl.maximum({{0}}, 0.0) + {_log1p('tl.exp(-tl.abs({0}))')})",
        "std::softplus({0})",
        bare=False,
        triton_float32="softplus({0})",
    ),
    "tanh": Pointwise(
        1,
        torch.tanh,
        # 1 - 2 / (exp(2x) + 1) is exact at both infinities and keeps NaN; near 0 it would lose the digits of x.
        f"tl.where(tl.abs({{0}}) < 0.25, {_expm1('(2 * {0})')} / ({_expm1('(2 * {0})')} + 2), "
        "1 - 2 / (tl.exp(2 * {0}) + 1))",
        "std::tanh({0})",
        triton_float32="tanh({0})",
    ),
    "sign": Pointwise(1, torch.sign, "(({0} > 0).to(T) - ({0} < 0).to(T))", "(T({0} > 0) - T({0} < 0))"),
    "floor": Pointwise(1, torch.floor, "tl.floor({0})", "std::floor({0})"),
    "ceil": Pointwise(1, torch.ceil, "tl.ceil({0})", "std::ceil({0})"),
    "pow": Pointwise(
        2,
        torch.pow,
        # A negative number has powers of whole exponents only, and they are negative where the exponent is odd. A
        # negative zero counts as negative; its inverse shows the sign. The exponent may be one number for a whole tile,
        # and Triton's interpreter can't join a condition on one number with a condition on a tile.
        "tl.where({1} == 0, 1.0, "
        'tl.where(({0} < 0) & (tl.abs({0}) < float("inf")), tl.where(tl.floor({1}) != {1}, float("nan"), 1.0), 1.0) '
        "* tl.where(({0} < 0) | (1 / {0} < 0), tl.where(tl.floor({1}) == {1}, "
        "tl.where(tl.floor({1} * 0.5) * 2 != {1}, -1.0, 1.0), 1.0), 1.0) "
        "* tl.where(tl.abs({0}) == 1, 1.0, tl.exp({1} * tl.log(tl.abs({0})))))",
        "std::pow({0}, {1})",
        bare=False,
    ),
    "eq": _comparison(torch.eq, "=="),
    "ne": _comparison(torch.ne, "!="),
    "lt": _comparison(torch.lt, "<"),
    "le": _comparison(torch.le, "<="),
    "gt": _comparison(torch.gt, ">"),
    "ge": _comparison(torch.ge, ">="),
    "and": Pointwise(2, torch.logical_and, "({0} & {1})", "({0} && {1})", BOOL),
    "or": Pointwise(2, torch.logical_or, "({0} | {1})", "({0} || {1})", BOOL),
    "not": Pointwise(1, torch.logical_not, "({0} == 0)", "(!({0}))", BOOL),
    "where": Pointwise(3, torch.where, "tl.where({0}, {1}, {2})", "({0} ? {1} : {2})"),
    "on_edges": Pointwise(1, lambda x: x, "{0}", "{0}"),
    "float": Pointwise(1, lambda x: x.to(torch.get_default_dtype()), "{0}.to(T)", "T({0})"),
}
"""``on_edges`` expands a row value to a row per edge; ``float`` turns a bool into 0 or 1 of the compute type ``T``."""
