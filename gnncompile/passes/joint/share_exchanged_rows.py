"""The backward reads own rows where an exchange has put them, if it keeps the exchanged rows anyway or few rows arrive.

Before: ``j = halo_exchange(x); y = region([j], ...); dj = region([j, dy], ...); dw = mul(dy, x)``
After:  ``j = halo_exchange(x); y = region([j], ...); dj = region([j, dy], ...); dw = mul(dy, slice(j, 0, 0, rows))``
Why it pays: `j` begins with the rows of `x`, so `x` is not kept beside it. Then no kernel copies the rows either: what
        makes `x` writes into `j`, which it can't if `x` is a result of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gnncompile import _compat
from gnncompile.ops.own_and_halo_edges import LEAST_HALO
from gnncompile.passes.analysis import aten, own, value, views_rows


def run(graph: fx.Graph) -> None:
    """Rewrites the graph of a forward and its backward in place."""
    late = _backward(graph)
    for exchange in graph.find_nodes(op="call_function", target=own.halo_exchange.default):
        rows: Any = exchange.args[0]
        while _views(rows):
            rows = rows.all_input_nodes[0]
        is_kept = any(user in late for user, _ in _readers(exchange)) or _adds_little(exchange)
        if is_kept and exchange not in late and rows.op == "call_function":
            _read_from(exchange, [(user, read) for user, read in _readers(rows) if user in late])


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a gradient of a result."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and "tangents" in node.name
        if (node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)) or is_gradient:
            found.add(node)
    return found


def _adds_little(exchange: fx.Node) -> bool:
    """Whether few rows arrive, so that exchanged rows take little more memory than own rows."""
    rows, _, halo, *_ = exchange.all_input_nodes
    present, arriving = (_compat.size_now(value(one).shape[0]) for one in (rows, halo))
    return present is not None and arriving is not None and LEAST_HALO * arriving < present


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes that read a tensor or a view of each of its rows, with the node that they read."""
    for user in node.users:
        if _views(user):
            yield from _readers(user)
        else:
            yield user, node


def _views(node: fx.Node) -> bool:
    return node.target is aten.detach.default or views_rows(node)


def _read_from(exchange: fx.Node, readers: list[tuple[fx.Node, fx.Node]]) -> None:
    """Makes nodes read own rows from the result of their exchange."""
    made: dict[fx.Node, fx.Node] = {}
    for user, read in readers:
        if read not in made:
            made[read] = _front(exchange, read)
        user.replace_input_with(read, made[read])


def _front(exchange: fx.Node, like: fx.Node) -> fx.Node:
    """Returns the first rows of an exchange's result, in the shape of a node."""
    graph, sizes = exchange.graph, value(like).shape
    with graph.inserting_before(max(exchange, like).next):
        given = [_size(like, axis) for axis in range(len(sizes))]
        front = graph.call_function(aten.slice.Tensor, (exchange, 0, 0, given[0]))
        view = graph.call_function(aten.view.default, (front, given))
    front.meta["val"] = value(exchange)[: sizes[0]]
    view.meta["val"] = front.meta["val"].view(sizes)
    return view


def _size(node: fx.Node, axis: int) -> Any:
    """Returns a size of a node: a number, or a node that gives it."""
    size = value(node).shape[axis]
    if not isinstance(size, torch.SymInt):
        return size
    found = node.graph.call_function(aten.sym_size.int, (node, axis))
    found.meta["val"] = size
    return found
