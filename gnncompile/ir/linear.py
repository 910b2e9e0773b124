"""Moves factors out of sums over edges, if all edges of a row share them: cotangents, and dot products with rows.

``sum_e r s_e`` equals ``r sum_e s_e``. If `r` is a cotangent, the forward can often keep the sum that is left. The two
sides differ where `r` is infinite or NaN. So a plain sum gives up only cotangents: another row value may be infinite
where the row has no edge, or where a ``where`` does not choose it.

A dot product with a row is moved out as well, together with the other row factors. The result of a row without edges
is then set to 0 if a factor may be infinite or NaN there. Only inputs inside the dot product, which are node features,
are assumed finite.

The gradient of attention is full of sums such as ``sum_e s_e <r, x_e>``: `r` is a row of the walked side, and `x_e` is
gathered. On a GPU a dot product per edge costs one shuffle per level of a warp, and keeps the row in one program.
``<r, sum_e s_e x_e>`` is the same number by linearity, and its walk only accumulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from functools import reduce
from operator import and_

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Space, behind

Term = tuple[int, ...]
"""The factors of a product."""


def sum_over_edges(b: Builder, value: int, cotangents: Set[int] = frozenset(), finite: Set[int] = frozenset()) -> int:
    """Adds the sum of a value over the edges of each row; takes dot products with rows after the sum where possible.

    Args:
        b: The builder; its region walks the rows.
        value: The value to sum, per edge.
        cotangents: Row values that multiply the sum instead of each edge, if they are factors of the value.
        finite: Other row values that are finite even in rows without edges.

    Returns:
        A value per row, with the shape of `value`. Its rounding differs from that of the plain sum.
    """
    terms = _terms(b, value) if _hides_dot(b, value) else None
    if terms is None:
        factors = _factors(b, value, cotangents)
        outside, inside = [f for f in factors if f in cotangents], [f for f in factors if f not in cotangents]
        return _times(b, outside, inside) if outside and inside else b.reduce("sum", value)
    sums = [_sum(b, term, cotangents | finite) for term in terms]
    if any(s is None for s in sums):
        return b.reduce("sum", value)
    return reduce(lambda x, y: b.op("add", x, y), [s for s in sums if s is not None])


def _terms(b: Builder, value: int) -> list[Term] | None:
    """Returns the value as a sum of products, expanded only where it contains a dot product with a row.

    Returns None if an operation around the dot product can't be expanded.
    """
    if _is_dot(b, value):
        return [(value,)]
    if not _hides_dot(b, value):
        return [tuple(_factors(b, value))]
    node = b.nodes[value]
    if node.op not in ("add", "sub", "neg", "mul"):
        return None
    parts = [_terms(b, a) for a in node.args]
    if any(p is None for p in parts):
        return None
    first, last = parts[0] or [], parts[-1] or []
    if node.op == "mul":
        return [(*x, *y) for x in first for y in last]
    minus = [(*t, b.const(-1)) for t in last]
    return {"add": first + last, "sub": first + minus, "neg": minus}[node.op]


def _sum(b: Builder, term: Term, finite: Set[int]) -> int | None:
    """Adds the sum of a product over edges, with row factors outside; None if a dot product can't be moved out."""
    dots = [f for f in term if _is_dot(b, f)]
    rows = [f for f in term if _is_row(b, f)]
    weights = [f for f in term if f not in dots and f not in rows]
    doubtful = [f for f in rows if f not in finite]
    if not dots:
        if not rows or not weights:
            return b.reduce("sum", _product(b, term))
        return _where_edges_are(b, _times(b, rows, weights), doubtful)
    if len(dots) > 1:
        return None
    inner = _factors(b, b.nodes[dots[0]].args[0])
    outside = [f for f in inner if _is_row(b, f)]
    inside = [f for f in inner if not _is_row(b, f)]
    heads = b.nodes[dots[0]].shape[0]
    if any(b.nodes[w].shape[1] > 1 or b.nodes[w].shape[0] not in (1, heads) for w in weights):
        return None
    total = b.sum_axis(_times(b, outside, weights + inside), 1)
    doubtful += [f for f in outside if b.nodes[f].op != "input"]
    return _where_edges_are(b, _product(b, [*rows, total]), doubtful)


def _where_edges_are(b: Builder, total: int, doubtful: Sequence[int]) -> int:
    """Returns the total per row, set to 0 in rows without edges if a doubtful factor may be infinite or NaN there."""
    if all(b.nodes[f].space is Space.PARAMETER for f in doubtful):
        return total
    degree = b.reduce("sum", b.const(1))
    return b.op("where", b.op("gt", degree, b.const(0)), total, b.const(0))


def _times(b: Builder, rows: list[int], weights: list[int]) -> int:
    return _product(b, [*rows, b.reduce("sum", _product(b, weights))])


def _product(b: Builder, factors: Sequence[int]) -> int:
    return reduce(lambda x, y: b.op("mul", x, y), factors) if factors else b.const(1)


def _factors(b: Builder, value: int, cotangents: Set[int] = frozenset()) -> list[int]:
    """Returns the factors of a value.

    A cotangent is also a factor of a sum, a difference or a ``where`` whose operands all have that factor.
    """
    node = b.nodes[value]
    if node.op == "mul":
        return [f for a in node.args for f in _factors(b, a, cotangents)]
    if not cotangents:
        return [value]
    if node.op == "neg":
        return [b.const(-1), *_factors(b, node.args[0], cotangents)]
    at = _LINEAR.get(node.op, ())
    parts = {k: _factors(b, node.args[k], cotangents) for k in at if b.constant(node.args[k]) != 0}
    common = [f for f in _in_all(list(parts.values())) if f in cotangents]
    if not common:
        return [value]
    rest = {k: _product(b, _without(factors, common)) for k, factors in parts.items()}
    return [*common, b.op(node.op, *(rest.get(k, a) for k, a in enumerate(node.args)))]


_LINEAR = {"add": (0, 1), "sub": (0, 1), "where": (1, 2), "div": (0,)}
"""For each operation, the arguments that can be multiplied by a factor in place of the result."""


def _in_all(parts: list[list[int]]) -> list[int]:
    """Returns the factors that all products have in common, each as often as in every product."""
    common: Counter[int] = reduce(and_, map(Counter, parts)) if parts else Counter()
    return list(common.elements())


def _without(factors: list[int], common: list[int]) -> list[int]:
    return list((Counter(factors) - Counter(common)).elements())


def _is_row(b: Builder, value: int) -> bool:
    return b.nodes[value].space in (b.by, Space.PARAMETER)


def _is_dot(b: Builder, value: int) -> bool:
    """Whether a value per edge is the dot product of a row value and a value per edge."""
    node = b.nodes[value]
    if node.op != "sum_channels" or _is_row(b, value):
        return False
    heads = node.shape[0]
    factors = _factors(b, node.args[0])
    wide = [f for f in factors if b.nodes[f].shape == (heads, b.nodes[node.args[0]].shape[1])]
    return any(_is_row(b, f) for f in wide) and any(not _is_row(b, f) for f in wide)


def _hides_dot(b: Builder, value: int) -> bool:
    return any(_is_dot(b, at) for at in behind(b.nodes, [value]))
