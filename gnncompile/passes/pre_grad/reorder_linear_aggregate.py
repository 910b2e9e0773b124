"""Linear layers and sums over edges change places if that makes rows narrower, or walks fewer.

Before: ``linear(segment_reduce(x[src], ...), w, b)``, with fewer features after the layer than before it
After:  ``segment_reduce(linear(x, w)[src], ...) + b``
Before: ``segment_reduce(norm * linear(x, w)[src], ...)``, with fewer features before the layer, or no gradient of `x`
After:  ``linear(segment_reduce(norm * x[src], ...), w)``
Why it pays: the time of a walk over the edges grows with the width of its rows, and the gradient of gathered rows takes
another walk. Models are written in one order for all widths. The first layer of a GraphSAGE sums the 602 features of
Reddit and then makes 128 features of each sum. The first layer of a GCN makes 256 features of 100 and then sums them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from gnncompile.passes.analysis import alike, aten, drop_unused, is_tensor, own, per_row, same_size, value
from gnncompile.passes.context import Context

_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    for node in list(ctx.graph.nodes):
        if node.target is aten.linear.default:
            _layer_first(ctx, node)
        elif node.target is own.segment_reduce.default:
            _layer_last(ctx, node)
    drop_unused(ctx.graph)


@dataclass
class _Sums:
    """A tensor as sums over edges of rows of tables. A factor per row may scale the rows.

    Attributes:
        tables: The tensors whose rows are summed; the sums are linear in them.
        factors: The factors that scale rows per edge.
        walks: The number of sums over edges.
    """

    tables: set[fx.Node] = field(default_factory=set)
    factors: list[fx.Node] = field(default_factory=list)
    walks: int = 0


def _layer_first(ctx: Context, layer: fx.Node) -> None:
    """Replaces a layer of sums by sums of the layer's rows, if that pays."""
    rows, weight, *bias = _arguments(layer)
    sums = _Sums()
    if layer not in ctx.written:
        _read(ctx, rows, layer, sums)
    if not sums.walks or len(sums.tables) != 1:
        return
    (table,) = sums.tables
    if not _same_rows(table, layer) or not _pays(ctx, sums, before=[table], after=[table, weight], like=(table, layer)):
        return
    with ctx.graph.inserting_before(layer):
        narrow = ctx.call(aten.linear.default, table, weight, like=layer)
        new = _rebuilt(ctx, rows, table, narrow)
        if bias and bias[0] is not None:
            new = ctx.call(aten.add.Tensor, new, bias[0], like=layer)
        new = ctx.in_dtype_of(new, layer)
    layer.replace_all_uses_with(new)


def _layer_last(ctx: Context, reduction: fx.Node) -> None:
    """Replaces sums of a layer's rows by a layer of sums, if that pays."""
    sums = _Sums()
    _read(ctx, reduction, reduction, sums)
    if not sums.walks or len(sums.tables) != 1:
        return
    (layer,) = sums.tables
    if layer.target is not aten.linear.default or len(layer.users) != 1 or layer in ctx.written:
        return
    table, weight, *bias = _arguments(layer)
    if any(b is not None for b in bias) or not ctx.same_mode(layer, reduction):
        return
    if not _same_rows(table, layer) or not _same_rows(reduction, layer):
        return
    if not _pays(ctx, sums, before=[table, weight], after=[table], like=(layer, table)):
        return
    at, behind = _with_bias(ctx, reduction, layer)
    with ctx.graph.inserting_before(at):
        narrow = _rebuilt(ctx, reduction, layer, table)
        new = ctx.in_dtype_of(ctx.call(aten.linear.default, narrow, weight, *behind, like=layer), at)
    at.replace_all_uses_with(new)


def _arguments(node: fx.Node) -> Any:
    return node.args


def _read(ctx: Context, node: Any, at: fx.Node, sums: _Sums, on_edges: bool = False) -> None:
    """Collects the sums, factors and tables that a tensor is made of in `sums`."""
    args = node.args
    inner = node is at or (len(node.users) == 1 and node not in ctx.written and ctx.same_mode(node, at))
    scaled = _scaled(node) if inner else None
    if inner and node.target is own.segment_reduce.default and args[3] in ("sum", "mean") and value(node).dim() == 2:
        sums.walks += 1
        _read(ctx, args[0], at, sums, on_edges=True)
    elif inner and node.target is aten.index_select.default and args[1] == 0 and value(node).dim() == 2:
        _read(ctx, args[0], at, sums)
    elif inner and node.target is aten.add.Tensor and not node.kwargs and all(alike(a, node) for a in args):
        _read(ctx, args[0], at, sums, on_edges)
        _read(ctx, args[1], at, sums, on_edges)
    elif scaled is not None:
        sums.factors += [args[1 - scaled]] if on_edges else []
        _read(ctx, args[scaled], at, sums, on_edges)
    else:
        sums.tables.add(node)


def _rebuilt(ctx: Context, node: Any, table: fx.Node, other: fx.Node) -> fx.Node:
    """Returns the sums that :func:`_read` has found, with `other` in place of the table."""
    if node is table:
        return other
    args, scaled = list(node.args), _scaled(node)
    changed = (0, 1) if node.target is aten.add.Tensor else (scaled or 0,)
    for k in changed:
        args[k] = _rebuilt(ctx, args[k], table, other)
    return ctx.call(node.target, *args, like=node)


def _scaled(node: Any) -> int | None:
    """Returns the index of the operand that the other operand scales row by row, or None."""
    if node.target not in _PRODUCTS or node.kwargs:
        return None
    for k in (0,) if node.target in (aten.div.Tensor, aten.div.Scalar) else (0, 1):
        if alike(node.args[k], node) and per_row(node.args[1 - k]):
            return k
    return None


def _same_rows(one: Any, other: fx.Node) -> bool:
    """Whether two nodes are matrices of the same dtype and number of rows, so that a layer costs the same on both."""
    if not is_tensor(one):
        return False
    a, b = value(one), value(other)
    return a.dim() == b.dim() == 2 and a.dtype == b.dtype and same_size(a.shape[0], b.shape[0])


def _pays(ctx: Context, sums: _Sums, before: list[Any], after: list[Any], like: tuple[fx.Node, fx.Node]) -> bool:
    """Whether the sums cost less over the second table of `like`. `before` and `after` hold the nodes it depends on."""
    costs = []
    for behind, table in zip((before, after), like, strict=True):
        gradient = any(n in ctx.needs_grad for n in (*behind, *sums.factors))
        costs.append(int(value(table).shape[1]) * (2 if gradient else 1))
    return costs[1] < costs[0]


def _with_bias(ctx: Context, reduction: fx.Node, layer: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Returns the node that adds a bias to the sums, and the bias, so that the layer can add it.

    Without a bias, returns the reduction and an empty list.
    """
    users = list(reduction.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs or users[0] in ctx.written:
        return reduction, []
    (user,) = users
    bias = [a for a in _arguments(user) if a is not reduction]
    if len(bias) != 1 or not is_tensor(bias[0]) or not ctx.same_mode(user, layer):
        return reduction, []
    found, width = value(bias[0]), value(layer).shape[1]
    fits = found.dim() == 1 and found.dtype == value(layer).dtype and same_size(found.shape[0], width)
    return (user, bias) if fits else (reduction, [])
