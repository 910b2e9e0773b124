"""Sums over edges with what is the same for all edges of a row taken out of them: cotangents, and dot products.

``sum_e r s_e`` is ``r sum_e s_e``, and where `r` is a cotangent, what is left is often a sum that the forward could
have kept. The two differ where `r` is infinite or NaN, so nothing but cotangents is taken out: other rows may be
infinite where they have no edge, or where a choice leaves them out.

Dot products with rows are moved out all the same, and what else is a factor of them; there a row without edges is 0,
whatever its factors are. Only of inputs that the dot product itself is with, the features of nodes, it is taken for
granted that they are numbers.

The gradient of attention is full of sums such as ``sum_e s_e <r, x_e>``, where `r` is a row of the side that is walked
and `x_e` is gathered. A dot product per edge costs a GPU as many shuffles as a warp has levels, and keeps the row in
one program. Since everything is linear, ``<r, sum_e s_e x_e>`` is the same number: the walk only accumulates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from functools import reduce
from operator import and_

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Space, behind

Term = tuple[int, ...]
"""Values whose product is meant."""


def sum_over_edges(b: Builder, value: int, cotangents: Set[int] = frozenset(), finite: Set[int] = frozenset()) -> int:
    """The sum of a value over the edges of each row, its dot products with rows taken after the sum where possible.

    Args:
        b: A builder whose rows are walked.
        value: What to sum, per edge.
        cotangents: Rows that are to be multiplied with the sum instead, as far as they are factors of the value.
        finite: Other rows that are numbers where there is no edge as well.

    Returns:
        A value per row, of the shape of `value`; rounded otherwise than the plain sum.
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
    """The value as a sum of products, taken apart only where a dot product hides; None if it hides too well."""
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
    """The sum of a product over edges, row factors outside; None where a dot product can't be moved out."""
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
    """A total per row, and 0 in rows without edges if a factor of it may be infinite or NaN there."""
    if all(b.nodes[f].space is Space.PARAMETER for f in doubtful):
        return total
    degree = b.reduce("sum", b.const(1))
    return b.op("where", b.op("gt", degree, b.const(0)), total, b.const(0))


def _times(b: Builder, rows: list[int], weights: list[int]) -> int:
    return _product(b, [*rows, b.reduce("sum", _product(b, weights))])


def _product(b: Builder, factors: Sequence[int]) -> int:
    return reduce(lambda x, y: b.op("mul", x, y), factors) if factors else b.const(1)


def _factors(b: Builder, value: int, cotangents: Set[int] = frozenset()) -> list[int]:
    """Factors of a value; cotangents are found in sums and choices as well, if all their parts have them."""
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
"""Which arguments of an operation may be multiplied by a factor instead of its result; 0 stays as it is."""


def _in_all(parts: list[list[int]]) -> list[int]:
    """The factors that all products have, as often as they do."""
    common: Counter[int] = reduce(and_, map(Counter, parts)) if parts else Counter()
    return list(common.elements())


def _without(factors: list[int], common: list[int]) -> list[int]:
    return list((Counter(factors) - Counter(common)).elements())


def _is_row(b: Builder, value: int) -> bool:
    return b.nodes[value].space in (b.by, Space.PARAMETER)


def _is_dot(b: Builder, value: int) -> bool:
    """Whether a value per edge is the dot product of a row and something else."""
    node = b.nodes[value]
    if node.op != "sum_channels" or _is_row(b, value):
        return False
    heads = node.shape[0]
    factors = _factors(b, node.args[0])
    wide = [f for f in factors if b.nodes[f].shape == (heads, b.nodes[node.args[0]].shape[1])]
    return any(_is_row(b, f) for f in wide) and any(not _is_row(b, f) for f in wide)


def _hides_dot(b: Builder, value: int) -> bool:
    return any(_is_dot(b, at) for at in behind(b.nodes, [value]))
