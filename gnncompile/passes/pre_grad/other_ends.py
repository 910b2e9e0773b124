"""Finds the indices that may be the other end of a region's edges, where messages gather by several indices.

Such messages also read the states of reverse edges, embeddings of the edges' types, or rows of their graphs.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, is_tensor, needed_for, own, same_size, value
from gnncompile.passes.context import Context


def other_ends(ctx: Context, index: fx.Node) -> frozenset[fx.Node]:
    """Returns the indices that may be the other end of the edges whose rows are reduced by `index`.

    These come from the other row of the same edge list. None are returned if messages gather by one index: that is the
    other end, whatever it comes from.
    """
    found = _gathered_by(ctx, index)
    if len(found) < 2:
        return frozenset()
    own_row = _given(index)
    pairs = {other for pair in ctx.edge_lists if own_row & set(pair) for other in pair}
    return frozenset(one for one in found if own_row | pairs >= (given := _given(one)) > given & own_row)


def _gathered_by(ctx: Context, index: fx.Node) -> list[fx.Node]:
    """Returns the other indices by which messages of the reductions by `index` gather rows, in order."""
    reductions = ctx.graph.find_nodes(op="call_function", target=own.segment_reduce.default)
    edges, seen = value(index).shape[0], set[fx.Node]()
    todo: list[fx.Node] = [node for node in reductions if node.args[1] is index]
    found: dict[fx.Node, None] = {}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten.index_select.default and node.args[1] == 0:
            by: Any = node.args[2]
            found |= {by: None} if by is not index else {}
        else:
            todo += [n for n in node.all_input_nodes if _has_rows(n, edges)]
    return sorted(found)


def _has_rows(node: fx.Node, rows: Any) -> bool:
    shape: Any = getattr(node.meta.get("val"), "shape", ())
    return len(shape) > 0 and same_size(shape[0], rows)


def _given(index: fx.Node) -> set[fx.Node]:
    """Returns the tensors given to the graph that an index is computed from."""
    return {n for n in needed_for([index]) if n.op == "placeholder" and is_tensor(n)}
