"""Checks that guards on padded sizes hold for the valid sizes as well: ``if x.size(0) > 100: ...``."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]

from gnncompile import _compat
from gnncompile.passes.padded.graph import PaddedGraph


def check(p: PaddedGraph) -> None:
    """Checks each guard on a padded size, and notes the numbers of valid rows for which the guards hold.

    Raises:
        Recapture: A guard may have another answer for the valid sizes.
    """
    if _compat.empty_is_special():  # the capture took sizes for larger than 1, without a guard
        for kind in p.known.sizes.values():
            p.limit(kind, 2)
    for expr in _compat.guards_on(p.ctx.fake_mode, p.known.sizes):
        _check(p, expr)


def _check(p: PaddedGraph, expr: Any) -> None:
    kinds = {size: sympy.Symbol(f"number_of_{kind}", integer=True) for size, kind in p.known.sizes.items()}
    if expr.subs(kinds) == sympy.true:
        return  # true for all sizes, if equal row types have equal numbers of rows
    one, other = expr.args if isinstance(expr, sympy.core.relational.Relational) else (expr, expr)
    if isinstance(expr, sympy.Ne) and other in p.known.sizes:
        one, other = other, one
    if isinstance(expr, sympy.Ne) and one in p.known.sizes and other.is_Integer:
        p.limit(p.known.sizes[one], int(other), is_excluded=True)
        return
    if isinstance(expr, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)):
        least, most = (expr.lts, expr.gts)
        strict = isinstance(expr, (sympy.Gt, sympy.Lt))
        if not strict and p.known.is_hop_prefix(p.known.sizes.get(least), p.known.sizes.get(most)):
            return
        if least in p.known.sizes and (most.is_Integer or _is_other(p, most)):
            return  # without padding the size is smaller, so the guard holds as well
        if most in p.known.sizes and _holds(p, least, p.known.sizes[most], strict):
            return
    raise p.refuse(f"asks for a size of the mini-batch ({expr})")


def _is_other(p: PaddedGraph, size: Any) -> bool:
    return bool(size.is_Symbol) and size not in p.known.sizes


def _holds(p: PaddedGraph, least: Any, kind: int, strict: bool) -> bool:
    """Whether the batch has at least `least` valid rows of a type, or more if `strict`. Notes the limit in the log."""
    if not least.is_Integer:
        known = any(one.kind == kind and one.number is None for one in p.ctx.log.limits)
        return _is_other(p, least) and not strict and known
    if int(least) + strict > 0:
        p.limit(kind, int(least) + strict)
    return True
