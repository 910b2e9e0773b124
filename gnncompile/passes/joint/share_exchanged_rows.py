"""The backward reads own rows from the result of their exchange, if it keeps the result anyway or few rows arrive.

Before: ``j = halo_exchange(x); y = region([j], ...); dj = region([j, dy], ...); dw = mul(dy, x)``
After:  ``j = halo_exchange(x); y = region([j], ...); dj = region([j, dy], ...); dw = mul(dy, slice(j, 0, 0, rows))``
Why it pays: `j` begins with the rows of `x`, so `x` is not kept beside it. Then no kernel copies the rows either: what
        makes `x` writes into `j`, which it can't if `x` is a result of the forward. Whether few rows arrive may differ
        between processes. They must not run different exchanges, so `j` is then kept and never computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile import _compat
from gnncompile.passes.analysis import aten, backward_of, own, readers, value, views_rows

FEW = 4
"""Few rows arrive if there are more own rows than this many times the halo rows."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph of a forward and its backward in place."""
    exchanges = graph.find_nodes(op="call_function", target=own.halo_exchange.default)
    late = backward_of(graph) if exchanges else set()
    for exchange in exchanges:
        rows: Any = exchange.args[0]
        while _views(rows):
            rows = rows.all_input_nodes[0]
        if exchange in late or rows.op != "call_function":
            continue
        found = [(user, read) for user, read in readers(rows, _views) if user in late]
        behind = [(user, read) for user, read in found if user > exchange]
        if any(user in late for user, _ in readers(exchange, _views)):
            _read_from(exchange, behind)
        elif found == behind and _adds_little(exchange, rows):
            exchange.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            _read_from(exchange, behind)


def _adds_little(exchange: fx.Node, rows: fx.Node) -> bool:
    """Whether the backward may keep the exchanged rows instead of own rows, and they take little more memory.

    It may not where a checkpoint says what is kept, or where own rows are a result that the caller keeps.
    """
    if "recompute" in exchange.meta or "recompute" in rows.meta:
        return False
    if any(user.op == "output" for user, _ in readers(rows, _views)):
        return False
    given, _, halo, *_ = exchange.all_input_nodes
    present, arriving = (_compat.size_now(value(one).shape[0]) for one in (given, halo))
    return present is not None and arriving is not None and FEW * arriving < present


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
