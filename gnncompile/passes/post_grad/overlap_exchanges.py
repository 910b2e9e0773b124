"""Each exchange is split into its start and its end, and work that does not read its rows runs between them.

Before: ``dy = region(...); g = halo_return(dy, ...); dx = g @ w; dw = x.T @ y``
After:  ``dy = halo_rows(...); started = return_start(dy, ...); own_rows(dy, ...); dw = x.T @ y;``
        ``g = return_wait(dy, started, ...); dx = g @ w``
Why it pays: rows travel while the device computes. A region first computes the rows that leave, then its own rows, each
        row as before. Other work moves over one exchange at most, so few results live longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from gnncompile.ir.region import parse
from gnncompile.ops.exchange import splits_by_rows
from gnncompile.ops.gemm import only_follows
from gnncompile.passes.analysis import depends_on_chance, own, value, views_rows

_STARTS: dict[Any, Any] = {
    own.halo_exchange.default: own.exchange_start.default,
    own.halo_return.default: own.return_start.default,
}


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    waits = [_split(graph, node) for node in list(graph.nodes) if node.target in _STARTS]
    for wait in waits:
        _put_work_before(wait)
    for region in list(graph.find_nodes(op="call_function", target=own.region.default)):
        _send_first(graph, region)


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
            wait = graph.call_function(own.return_wait.default, (rows, start, send, halo, group, []))
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


def _send_first(graph: fx.Graph, region: fx.Node) -> None:
    """Splits a region whose results are exchanged gradients: it computes the halo rows before the own rows."""
    *_, spec = region.args
    outputs: list[Any] = sorted(region.users, key=lambda item: item.args[1])
    if [item.args[1] for item in outputs] != list(range(len(parse(str(spec)).outputs))):
        return  # own_rows takes all outputs, in their order
    ends = [end for out in outputs for end in _ends(out)]
    starts = [end for end in ends if end.target is own.return_start.default]
    waits = [end for end in ends if end.target is own.return_wait.default]
    if not starts or len(starts) + len(waits) != len(ends) or not splits_by_rows(str(spec)):
        return
    halo: Any = starts[0].args[2]
    if any(one.args[2] is not halo for one in starts) or max(starts) > min(waits):
        return
    with graph.inserting_after(max(starts)):
        rest = graph.call_function(own.own_rows.default, (outputs, *region.args, halo))
    rest.meta["val"] = value(outputs[0]).new_empty(0)
    region.target, region.args = own.halo_rows.default, (*region.args, halo)
    for wait in waits:
        wait.args = (*wait.args[:-1], [rest])


def _ends(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read the rows of a result, also through views."""
    for user in node.users:
        if views_rows(user):
            yield from _ends(user)
        elif not only_follows(user, node):
            yield user


def _window(wait: fx.Node) -> Iterator[fx.Node]:
    """The nodes after the end of an exchange, up to one that must keep its place."""
    node = wait.next
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        if depends_on_chance(node) or (schema is not None and schema.is_mutable):
            return
        yield node
        node = node.next
