"""Layouts that came with the inputs are not built again.

Before: ``rowptr, col, edge = csr(dst, src, n, n)``, where the loader has built this layout
After:  the tensors from the loader
Why it pays: a mini-batch is used once, and building its layout takes longer than some of the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, guarded_same, own, value
from gnncompile.passes.context import Context


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not ctx.layouts:
        return
    last = ctx.inputs_first()
    for node in ctx.graph.find_nodes(op="call_function", target=own.csr.default):
        index, other, num_rows, _, alive = node.args[:5]
        found = _layout(ctx, index, other, num_rows, last) if alive is None else None
        if found is not None:
            for part in list(node.users):
                part.replace_all_uses_with(found[part.args[1]])
                ctx.graph.erase_node(part)
            ctx.graph.erase_node(node)


def _in_order(ctx: Context, col: fx.Node, last: fx.Node) -> fx.Node:
    """Returns the edge indices of edges that are already in order."""
    with ctx.graph.inserting_after(last):
        size = ctx.call(aten.sym_size.int, col, 0)
    with ctx.graph.inserting_after(size):
        return ctx.call(aten.arange.default, size, dtype=torch.int32, device=value(col).device)


def _layout(ctx: Context, index: Any, other: Any, num_rows: Any, last: fx.Node) -> list[fx.Node] | None:
    found = ctx.layouts.get((index, other))
    if found is None and other is index:  # nothing is gathered at the other end, so any layout by the index fits
        found = next((layout for ends, layout in ctx.layouts.items() if ends[0] is index), None)
    rows = value(num_rows) if isinstance(num_rows, fx.Node) else num_rows
    if found is None or not guarded_same(value(found[0]).shape[0], rows + 1):
        return None
    if len(found) == 2:
        found.append(_in_order(ctx, found[1], last))
    return found
