"""Sums over rows are launched after a long kernel. Runs after differentiation, on each graph.

Before: ``b = sum(dy, 0); dx = region([dy], ...)[0]``
After:  ``dx = region([dy], ...)[0]; b = sums_over_rows(dy, dx)``, launched after the kernel that makes `dx`
Why it pays: a GPU runs one kernel while the host launches the next. A backward begins with the sums for biases. Each
takes a few microseconds, and the host needs longer to launch it. During a long walk over the edges the host launches
the sums in time. The order has to be part of the graph, since Inductor reorders operations that are independent.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from gnncompile.device import device_of
from gnncompile.passes.analysis import aten, is_packed, own, sums_rows, value

_LONG = (own.region.default, own.product.default, own.sum_of_products.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten.squeeze.dim)


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        (rows,) = node.all_input_nodes
        if _is_sum_of_rows(node, rows):
            made = (_result(user) for user in rows.users if user.target in _LONG and user > node)
            behind = min((one for one in made if one is not None), default=None)
            if behind is not None:
                _put_behind(graph, node, rows, behind)


def _is_sum_of_rows(node: fx.Node, rows: fx.Node) -> bool:
    """Whether a node sums rows that are stored in memory anyway, so Inductor has no producer to fuse the sum with."""
    matrix = value(rows)
    if not sums_rows(node) or matrix.dtype != torch.float32 or not is_packed(matrix):
        return False
    if not (rows.op == "placeholder" or rows.target in _LONG or _is_result(rows)):
        return False
    columns = matrix.shape[1]
    return isinstance(columns, int) and columns % 4 == 0 and device_of(matrix.device).runs_triton


def _is_result(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0].target is own.region.default  # type: ignore[union-attr]


def _result(call: fx.Node) -> fx.Node | None:
    """Returns a tensor that a call makes, or None if no node reads a result of the call."""
    return call if call.target is not own.region.default else min(call.users, default=None)


def _put_behind(graph: fx.Graph, node: fx.Node, rows: fx.Node, behind: fx.Node) -> None:
    early = [user for user in node.users if user < behind]
    if not all(view.target in _VIEWS and all(user > behind for user in view.users) for view in early):
        return
    with graph.inserting_after(behind):
        made = graph.call_function(own.sums_over_rows.default, (rows, behind))
    with graph.inserting_after(made):
        shaped = graph.call_function(aten.reshape.default, (made, list(value(node).shape)))
    made.meta["val"], shaped.meta = value(node).reshape(-1), node.meta
    node.replace_all_uses_with(shaped)
    graph.erase_node(node)
    for view in early:
        shaped.append(view)
