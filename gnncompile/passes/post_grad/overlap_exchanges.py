"""Each exchange is split into its start and its end, and work that does not read its rows runs between them.

Before: ``g = halo_return(dy, ...); dx = g @ w; dw = x.T @ y``
After:  ``started = return_start(dy, ...); dw = x.T @ y; g = return_wait(dy, started, ...); dx = g @ w``
Why it pays: rows travel while the device computes. Work moves over one exchange at most, so few results live longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from gnncompile.passes.analysis import depends_on_chance, own, value

_STARTS: dict[Any, Any] = {
    own.halo_exchange.default: own.exchange_start.default,
    own.halo_return.default: own.return_start.default,
}


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    waits = [_split(graph, node) for node in list(graph.nodes) if node.target in _STARTS]
    for wait in waits:
        _put_work_before(wait)


def _split(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Replaces an exchange by its start and its end, and returns the end."""
    args: Any = node.args
    rows, send, halo, group, _ = args
    begin = _STARTS[node.target]
    with graph.inserting_before(node):
        start = graph.call_function(begin, args)
        if begin is own.exchange_start.default:
            start.meta["val"] = value(node)
            wait = graph.call_function(own.exchange_wait.default, (start, group))
        else:
            arrived = value(rows)
            start.meta["val"] = arrived.new_empty((value(send).shape[0], *arrived.shape[1:]))
            wait = graph.call_function(own.return_wait.default, (rows, start, send, halo, group))
    wait.meta = dict(node.meta)
    ordered = [user for user in node.users if isinstance(user.args[-1], list) and user.args[-1] == [node]]
    if ordered:
        with graph.inserting_after(start):
            order = graph.call_function(own.exchange_order.default, (start,))
        order.meta["val"] = value(start).new_empty(0)
        for user in ordered:
            user.args = (*user.args[:-1], [order])
    node.replace_all_uses_with(wait)
    graph.erase_node(node)
    return wait


def _put_work_before(wait: fx.Node) -> None:
    """Moves the end of an exchange, and work that needs its rows, after work that does not need them."""
    late: dict[fx.Node, None] = {wait: None}
    last = wait
    for node in _window(wait):
        if any(used in late for used in node.all_input_nodes):
            if node.target in _STARTS.values():
                break  # the others wait for these rows
            late[node] = None
        else:
            last = node
    for node in list(late):
        if node < last:
            last.append(node)
            last = node


def _window(wait: fx.Node) -> Iterator[fx.Node]:
    """The nodes after the end of an exchange, up to one that must keep its place."""
    node = wait.next
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if depends_on_chance(node) or (schema is not None and schema.is_mutable):
            return
        yield node
        node = node.next
