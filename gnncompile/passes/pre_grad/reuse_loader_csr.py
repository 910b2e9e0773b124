"""Layouts that came with the inputs are not built again.

Before: ``rowptr, col, edge = csr(dst, src, n, n)``, where the loader has built this layout
After:  the tensors from the loader
Before: ``csr(cat([dst, arange(n)]), cat([src, arange(n)]), n, n, cat([dst != src, ones]))``
After:  ``csr_with_loops(rowptr, col, edge, dst, dst != src)``
Why it pays: a mini-batch is used once, and building its layout takes longer than some of the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import aten, guarded_same, own, same_size, value
from gnncompile.passes.context import Context

_AGAIN = (aten.select.int, aten.repeat.default, aten.expand.default, aten.view.default, aten.unsqueeze.default)
"""Operations that leave the last dimension as it is, if its length stays the same."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not ctx.layouts:
        return
    last = ctx.inputs_first()
    looped: dict[tuple[Any, ...], fx.Node] = {}
    for node in ctx.graph.find_nodes(op="call_function", target=own.csr.default):
        index, other, num_rows, _, alive = node.args[:5]
        found = _layout(ctx, index, other, num_rows, last) if alive is None else None
        if found is not None:
            for part in list(node.users):
                part.replace_all_uses_with(found[part.args[1]])
                ctx.graph.erase_node(part)
            ctx.graph.erase_node(node)
        elif (of := _before_loops_of(ctx, node, last)) is not None:
            if of in looped:
                node.replace_all_uses_with(looped[of])
                ctx.graph.erase_node(node)
            else:
                node.target, node.args, looped[of] = own.csr_with_loops.default, of, node


def _before_loops_of(ctx: Context, node: fx.Node, last: fx.Node) -> tuple[Any, ...] | None:
    """Returns the arguments of ``csr_with_loops``, if the loader has built the layout without self loops. Else None."""
    index, other, num_rows, _, alive = node.args[:5]
    ends, others, kept = _before_loops(index, num_rows), _before_loops(other, num_rows), _before_ones(alive)
    if ends is None or others is None or (kept is None and alive is not None):
        return None
    found = _layout(ctx, ends, others, num_rows, last)
    return None if found is None else (*found, ends, kept)


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
