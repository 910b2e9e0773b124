"""Linear layers, reshapes and slices of gathered rows are computed once per node, before the gather.

Before: ``linear(cat([x[dst], x[src] - x[dst], e], 1), w, b)``; ``x[src].view(-1, heads, channels)``
After:  ``linear(x, w1 - w2, b)[dst] + linear(x, w2)[src] + linear(e, w3)``; ``x.view(-1, heads, channels)[src]``
Why it pays: a graph has several times more edges than nodes, and the concatenation is never written. The remaining
message is a sum of gathered rows that a region reads. A bias that is added to every edge is left to the region as well
(``linear(e, w) + b``): the library would copy the bias to all rows first, and its gradient would read all rows again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.passes.analysis import alike, aten, drop_unused, same_size, value
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad.edge_linears import VIEWS
from gnncompile.passes.pre_grad.message import makes_messages
from gnncompile.passes.pre_grad.normalize_sizes import Symbols

Source = tuple[fx.Node, "fx.Node | None", tuple[int, ...]]
"""A table, the index that gathers its rows (None: the table has a row per edge), and indices selected on axis 1."""


_PICKS = (aten.slice.Tensor, aten.select.int)
"""Operations that take a part of the features, if their axis is not the row axis."""


@dataclass(frozen=True)
class _Part:
    """Columns ``start`` to ``stop`` of the weight, times a factor, applied to a table."""

    source: Source
    start: int
    stop: int
    factor: float


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    symbols = Symbols(ctx)
    for node in list(ctx.graph.nodes):
        if node.target is aten.linear.default and value(node.args[0]).dim() == 2:
            with ctx.graph.inserting_before(node):
                new = _rewrite(ctx, node)
            if new is None:
                new = _bias_behind(ctx, node)
            if new is not None:
                node.replace_all_uses_with(new)
        elif node.target in (aten.view.default, aten.reshape.default, *_PICKS):
            with ctx.graph.inserting_before(node):
                new = _before_gather(ctx, symbols, node)
            if new is not None:
                node.replace_all_uses_with(new)
        elif node.target is aten.stack.default and len(node.args[0]) == 1:
            with ctx.graph.inserting_before(node):
                dim = node.args[1] if len(node.args) > 1 else 0
                node.replace_all_uses_with(ctx.call(aten.unsqueeze.default, node.args[0][0], dim, like=node))
    drop_unused(ctx.graph)


def _rewrite(ctx: Context, node: fx.Node) -> fx.Node | None:
    rows, weight = node.args[0], node.args[1]
    bias = node.args[2] if len(node.args) > 2 else None
    if not isinstance(weight, fx.Node) or not isinstance(rows, fx.Node) or node in ctx.written:
        return None
    parts = list(_parts(ctx, rows, node, (), 0, 1.0))
    gathered = [part for part in parts if part.source[1] is not None]
    if not gathered:
        return None
    if not _pays(node, parts):
        ctx.skip("linear layer of gathered rows", "a product for each of its terms would be more work than one", node)
        return None
    total: fx.Node | None = None
    # Gathered terms come first, so that the bias is added once per node.
    for source in dict.fromkeys(part.source for part in (*gathered, *parts)):
        columns = _weight(ctx, weight, [part for part in parts if part.source == source], like=node)
        product = ctx.call(aten.linear.default, _picked(ctx, source), columns, *([bias] if bias else []), like=node)
        bias = None
        if source[1] is not None:
            product = ctx.call(aten.index_select.default, product, 0, source[1], like=node)
        total = product if total is None else ctx.call(aten.add.Tensor, total, product, like=node)
    assert total is not None
    # Under autocast the terms may have another dtype than the layer.
    return total if value(total).dtype == value(node).dtype else None


_EDGES_PER_NODE = 4
"""The assumed number of gathered rows for each row of a table with symbolic size."""


def _pays(layer: fx.Node, parts: list[_Part]) -> bool:
    """Whether the products of the parts are less work than the product of the layer.

    If only messages read the rows of the layer, regions do the gathers. Then a product may have as many rows as before.
    """
    rows: Any = layer.args[0]
    widths = {part.source: 0.0 for part in parts}
    for start, stop, source in {(part.start, part.stop, part.source) for part in parts}:
        widths[source] = max(widths[source], stop - start)
    there = sum(width for (_, index, _), width in widths.items() if index is None)
    gathered = sum(width * _share(source, rows) for source, width in widths.items() if source[1] is not None)
    return there + gathered < _width(rows) or (there <= _width(rows) and makes_messages(layer))


def _share(source: Source, rows: fx.Node) -> float:
    """Returns the rows of a table divided by the rows that are gathered from it, at most 1."""
    number, now = value(source[0]).shape[0], _compat.size_now(value(rows).shape[0])
    if isinstance(number, torch.SymInt) or not now:
        return 1 / _EDGES_PER_NODE
    return min(1.0, int(number) / now)


def _bias_behind(ctx: Context, node: fx.Node) -> fx.Node | None:
    """Returns a layer without bias and an addition of the bias, if only messages read its rows. Else None."""
    rows, weight, *bias = node.args
    if not bias or bias[0] is None or node in ctx.written or not makes_messages(node):
        return None
    if any(user.target in VIEWS for user in node.users):
        return None
    with ctx.graph.inserting_before(node):
        product = ctx.call(aten.linear.default, rows, weight, like=node)
        total = ctx.call(aten.add.Tensor, product, bias[0], like=node)
    return total if value(total).dtype == value(node).dtype else None


def _before_gather(ctx: Context, symbols: Symbols, node: fx.Node) -> fx.Node | None:
    """Returns a gather from the reshaped or sliced table, for a reshape or slice of gathered rows. Else None."""
    rows: Any = node.args[0]
    if rows.target is not aten.index_select.default or rows.args[1] != 0 or rows in ctx.written:
        return None
    if node in ctx.written or not _transparent(ctx, rows, node):
        return None
    table, _, index = rows.args
    args: list[Any] = list(node.args[1:])
    if node.target in _PICKS:
        if (args or [0])[0] % value(rows).dim() == 0:
            return None
    else:
        after, count = value(node).shape, symbols.node(value(table).shape[0])
        if len(after) < 2 or not same_size(after[0], value(rows).shape[0]) or count is None:
            return None
        if any(isinstance(size, torch.SymInt) for size in after[1:]):
            return None
        args = [[count, *after[1:]]]
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    return ctx.call(aten.index_select.default, ctx.call(target, table, *args, like=node), 0, index, like=node)


def _has_fewer_rows(table: fx.Node, gathered: fx.Node) -> bool:
    """Whether a table has fewer rows than are gathered from it. A table of symbolic size is assumed to have fewer."""
    number = value(table).shape[0]
    now = _compat.size_now(value(gathered).shape[0])
    return isinstance(number, torch.SymInt) or now is None or int(number) < now


def _parts(
    ctx: Context, node: fx.Node, layer: fx.Node, picked: tuple[int, ...], start: int, factor: float
) -> Iterator[_Part]:
    """Yields the parts of which a tensor with a row per edge is a linear combination."""
    args: Any = node.args
    if not _transparent(ctx, node, layer):
        yield _part(node, None, picked, start, factor)
    elif node.target is aten.index_select.default and args[1] == 0 and _has_fewer_rows(args[0], node):
        yield _part(args[0], args[2], picked, start, factor)
    elif node.target is aten.cat.default and _joins_features(node):
        for piece in args[0]:
            yield from _parts(ctx, piece, layer, picked, start, factor)
            start += _width(piece)
    elif node.target is aten.select.int and args[1] == 1 and value(args[0]).dim() == 3:
        yield from _parts(ctx, args[0], layer, (args[2], *picked), start, factor)
    elif node.target is aten.slice.Tensor and alike(node, args[0]):
        yield from _parts(ctx, args[0], layer, picked, start, factor)
    elif node.target is aten.neg.default:
        yield from _parts(ctx, args[0], layer, picked, start, -factor)
    elif node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs and _adds_exactly(node, layer):
        sign = 1.0 if node.target is aten.add.Tensor else -1.0
        parts = [*_parts(ctx, args[0], layer, picked, start, factor)]
        parts += _parts(ctx, args[1], layer, picked, start, sign * factor)
        gathers = any(part.source[1] is not None for part in parts)
        yield from parts if gathers else [_part(node, None, picked, start, factor)]
    else:
        yield _part(node, None, picked, start, factor)


def _adds_exactly(node: fx.Node, layer: fx.Node) -> bool:
    """Whether a layer of a sum is as exact as the sum of layers of its terms.

    Autocast rounds what a layer reads. Large terms may have a small difference, which the layer has to read.
    """
    args: Any = node.args
    return alike(*args) and value(node).dtype == value(layer).dtype


def _joins_features(node: fx.Node) -> bool:
    """Whether tensors of one type are joined along the last axis."""
    args: Any = node.args
    last = value(node).dim() - 1
    same = all(value(piece).dtype == value(node).dtype for piece in args[0])
    return same and len(args) > 1 and args[1] % (last + 1) == last


def _part(table: fx.Node, index: fx.Node | None, picked: tuple[int, ...], start: int, factor: float) -> _Part:
    return _Part((table, index, picked), start, start + _width(table), factor)


def _transparent(ctx: Context, node: fx.Node, layer: fx.Node) -> bool:
    """Whether a node may be rewritten: nothing writes to it, and it runs in the modes of the layer."""
    return node.op == "call_function" and node not in ctx.written and ctx.same_mode(node, layer)


def _width(node: fx.Node) -> int:
    return int(value(node).shape[-1])  # widths are static: a symbolic one is specialised here


def _picked(ctx: Context, source: Source) -> fx.Node:
    table, _, picked = source
    for entry in picked:
        table = ctx.call(aten.select.int, table, 1, entry)
    return table


def _weight(ctx: Context, weight: fx.Node, parts: list[_Part], like: fx.Node) -> fx.Node:
    """Returns the sum of the columns of the weight that multiply one table."""
    total: fx.Node | None = None
    for part in parts:
        columns = ctx.call(aten.slice.Tensor, weight, 1, part.start, part.stop, like=like)
        if part.factor != 1.0:
            columns = ctx.call(aten.mul.Tensor, columns, part.factor, like=like)
        total = columns if total is None else ctx.call(aten.add.Tensor, total, columns, like=like)
    assert total is not None
    return total
