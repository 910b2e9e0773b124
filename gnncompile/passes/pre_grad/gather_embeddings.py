"""Embeddings of edges become gathers, if messages alone read them.

Before: ``segment_reduce(relu(index_select(x, 0, src) + embedding(weight, bond_type)), dst, n, "sum")``
After:  ``segment_reduce(relu(index_select(x, 0, src) + index_select(weight, 0, bond_type)), dst, n, "sum")``
Why it pays: a region reads the rows of the few types where it needs them, and nothing is stored per edge. The gradient
is a walk over the edges of each type, instead of additions with atomics to a few rows.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gnncompile.passes.analysis import aten, value
from gnncompile.passes.context import Context
from gnncompile.passes.pre_grad import wrap_negative_indices
from gnncompile.passes.pre_grad.message import makes_messages


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not ctx.is_plain:
        return
    for node in list(ctx.graph.find_nodes(op="call_function", target=aten.embedding.default)):
        if not _is_gather(node) or node in ctx.written or ctx.written.intersection(node.all_input_nodes):
            continue
        if makes_messages(node):
            given: Any = node.args
            weight, index = given[:2]
            with ctx.graph.inserting_before(node):
                wrap_negative_indices.note(node, index)
                node.replace_all_uses_with(ctx.call(aten.index_select.default, weight, 0, index, like=node))
            ctx.graph.erase_node(node)


def _is_gather(node: fx.Node) -> bool:
    """Whether an embedding does what a gather does: it leaves no row out of the gradient, and scales none.

    Without a padding index, the traced operation has -1.
    """
    defaults: list[Any] = [-1, False, False]
    given: list[Any] = [*node.args, *defaults[len(node.args) - 2 :]]
    index, padding, *more = given[1:]
    return padding == -1 and not any(more) and value(index).dim() == 1
