"""What the model asks about sizes must have the answer that it has without padding: ``if x.size(0) > 100: ...``."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]

from gnncompile import _compat
from gnncompile.layout import batch_metadata
from gnncompile.layout.batch_metadata import ENOUGH
from gnncompile.passes.padded.graph import PaddedGraph


def check(p: PaddedGraph) -> None:
    """Notes how many things there must be for the answers to be the same.

    Raises:
        NotPadded: For some mini-batches they are not.
    """
    for expr in _compat.guards_on(p.ctx.fake_mode, p.known.sizes):
        _check(p, expr)


def _check(p: PaddedGraph, expr: Any) -> None:
    kinds = {size: sympy.Symbol(f"number_of_{kind}", integer=True) for size, kind in p.known.sizes.items()}
    if expr.subs(kinds) == sympy.true:
        return  # of things of one kind there are as many wherever they are counted
    one, other = expr.args if isinstance(expr, sympy.core.relational.Relational) else (expr, expr)
    if isinstance(expr, sympy.Ne) and other in p.known.sizes:
        one, other = other, one
    if isinstance(expr, sympy.Ne) and one in p.known.sizes and other.is_Integer and other < ENOUGH:
        return
    if isinstance(expr, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)):
        least, most = (expr.lts, expr.gts)
        strict = isinstance(expr, (sympy.Gt, sympy.Lt))
        if not strict and p.known.is_hop_prefix(p.known.sizes.get(least), p.known.sizes.get(most)):
            return
        if least in p.known.sizes and (most.is_Integer or _is_other(p, most)):
            return  # there are fewer without the padding
        if most in p.known.sizes and _holds(p, least, p.known.sizes[most], strict):
            return
    raise p.refuse(f"asks for a size of the mini-batch ({expr})")


def _is_other(p: PaddedGraph, size: Any) -> bool:
    return bool(size.is_Symbol) and size not in p.known.sizes


def _holds(p: PaddedGraph, least: Any, kind: int, strict: bool) -> bool:
    """Whether there are at least so many (more, if `strict`), now and wherever what is noted here holds."""
    if not least.is_Integer:
        return _is_other(p, least) and not strict and (kind, None) in p.ctx.log.least
    number, batch = int(least) + strict, batch_metadata.current()
    if number > ENOUGH:
        p.ctx.log.least.append((kind, number))
    return batch is not None and batch.counts[kind] >= number
