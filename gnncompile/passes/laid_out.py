"""Layouts that came with the inputs are not built again.

Before: ``rowptr, col, edge = csr(dst, src, n, n)``, where a loader laid the edges out
After:  its own
Why it pays: a mini-batch is seen once; to lay its edges out takes longer than some of its layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.context import Context, aten, guarded_same, own, value


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not ctx.layouts:
        return
    last = ctx.inputs_first()
    for node in ctx.graph.find_nodes(op="call_function", target=own.csr.default):
        found = _layout(ctx, *node.args)
        if found is not None:
            if len(found) == 2:
                found.append(_in_order(ctx, found[1], last))
            for part in list(node.users):
                part.replace_all_uses_with(found[part.args[1]])
                ctx.graph.erase_node(part)
            ctx.graph.erase_node(node)


def _in_order(ctx: Context, col: fx.Node, last: fx.Node) -> fx.Node:
    """The numbers of edges that are in order."""
    with ctx.graph.inserting_after(last):
        size = ctx.call(aten.sym_size.int, col, 0)
    with ctx.graph.inserting_after(size):
        return ctx.call(aten.arange.default, size, dtype=torch.int32, device=value(col).device)


def _layout(
    ctx: Context, index: Any, other: Any, num_rows: Any, num_columns: Any, alive: fx.Node | None
) -> list[fx.Node] | None:
    if alive is not None:
        return None
    found = ctx.layouts.get((index, other))
    if found is None and other is index:  # nothing is gathered at the other ends: any will do
        found = next((layout for ends, layout in ctx.layouts.items() if ends[0] is index), None)
    rows = value(num_rows) if isinstance(num_rows, fx.Node) else num_rows
    return found if found is not None and guarded_same(value(found[0]).shape[0], rows + 1) else None
