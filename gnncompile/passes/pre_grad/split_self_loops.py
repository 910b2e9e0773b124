"""Self loops are added to a layout of the edges, not sorted with them.

Before: ``csr(cat([dst, arange(n)]), cat([src, arange(n)]), n, n, cat([dst != src, ones]))``
After:  ``csr_with_loops(*csr(dst, src, n, n), dst, dst != src)``
Why it pays: a new graph takes fewer operations, layers with and without self loops share one sort, and a layout that a
loader has built serves both.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, own, same_size, value
from gnncompile.passes.context import Context

_AGAIN = (aten.select.int, aten.repeat.default, aten.expand.default, aten.view.default, aten.unsqueeze.default)
"""Operations that leave the last dimension as it is, if its length stays the same."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not (ctx.options.hoist or ctx.layouts):
        return  # a package for a GPU has no kernel that adds loops
    looped: dict[tuple[Any, ...], fx.Node] = {}
    for node in ctx.graph.find_nodes(op="call_function", target=own.csr.default):
        of = _before_loops_of(node)
        if of is None:
            continue
        ends, others, kept = of
        sizes, wraps = node.args[2:4], node.args[5:]
        key = (*of, *sizes, wraps)
        if key in looped:
            node.replace_all_uses_with(looped[key])
            ctx.graph.erase_node(node)
            continue
        with ctx.graph.inserting_before(node):
            plain = ctx.call(own.csr.default, ends, others, *sizes, None, *wraps, like=ends)
            parts = [ctx.call(operator.getitem, plain, k) for k in range(3)]
        node.target, node.args, looped[key] = own.csr_with_loops.default, (*parts, ends, kept), node
    _share(ctx)


def _share(ctx: Context) -> None:
    """Lets layouts of the same edges be one."""
    firsts: dict[tuple[Any, ...], fx.Node] = {}
    for node in ctx.graph.find_nodes(op="call_function", target=own.csr.default):
        first = firsts.setdefault(node.args, node)
        if first is not node:
            node.replace_all_uses_with(first)
            ctx.graph.erase_node(node)


def _before_loops_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Returns both ends of the edges of a layout and their mask, if self loops of all rows follow them. Else None."""
    index, other, num_rows, _, alive = node.args[:5]
    ends, others, kept = _before_loops(index, num_rows), _before_loops(other, num_rows), _before_ones(alive)
    if ends is None or others is None or (kept is None and alive is not None):
        return None
    return ends, others, kept


def _before_loops(index: Any, num_rows: Any) -> fx.Node | None:
    """Returns the ends of edges, if they are followed by a self loop for each row. Else None."""
    parts = _joined(index)
    return parts[0] if parts is not None and _counts_rows(parts[1], num_rows) else None


def _before_ones(alive: Any) -> fx.Node | None:
    """Returns the mask of kept edges, if all self loops after them are kept. Else None."""
    parts = _joined(alive)
    return parts[0] if parts is not None and parts[1].target is aten.full.default and parts[1].args[1] is True else None


def _joined(node: Any) -> list[Any] | None:
    """Returns the two parts of a concatenation of two 1-D tensors, or None."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default or value(node).dim() != 1:
        return None
    parts: Any = node.args[0]
    return list(parts) if len(parts) == 2 else None


def _counts_rows(node: fx.Node, num_rows: Any) -> bool:
    """Whether a tensor holds all row indices in order. PyG repeats them for both ends of its self loops."""
    rows = value(num_rows) if isinstance(num_rows, fx.Node) else num_rows
    while node.target in _AGAIN and same_size(value(node).shape[-1], rows):
        node = node.args[0]  # type: ignore[assignment]
    starts = node.target is aten.arange.default or (node.target is aten.arange.start and node.args[0] == 0)
    return bool(starts) and same_size(value(node).shape[-1], rows)
