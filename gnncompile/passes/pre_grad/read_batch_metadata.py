"""Markers of a mini-batch (layouts, padding, hop prefixes) are noted in the context and leave the graph.

Before: ``row, col = laid_out(padded(row, counts, edges, nodes), padded(col, counts, edges, nodes), [rowptr, ...])``
After:  ``row`` and ``col`` themselves
Why it pays: layouts that a loader built need not be built again, and later passes know which inputs are padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.passes.analysis import own, value
from gnncompile.passes.context import Context, HopPrefix, PaddedInputs
from gnncompile.passes.log import not_padded, user_line
from gnncompile.passes.partitioned.parts import Halo


def run(ctx: Context) -> None:
    """Rewrites the graph in place.

    Raises:
        Recapture: The size of a padded input is not a symbol, or is shared by two row types.
    """
    for node in ctx.graph.find_nodes(op="call_function", target=own.padded.default):
        tensor, counts, rows, values = node.args
        if ctx.padded is None:
            ctx.padded = PaddedInputs(counts)
        _note(ctx.padded, tensor, rows, values, user_line(node))
        node.replace_all_uses_with(tensor)
        ctx.graph.erase_node(node)
    for node in ctx.graph.find_nodes(op="call_function", target=own.laid_out.default):
        row, col, layout = _index(node.args[0]), _index(node.args[1]), node.args[2]
        for ends, parts in (((col, row), layout[:3]), ((row, col), layout[3:])):
            if parts:
                ctx.layouts[ends] = list(parts)
        _leave_ends(ctx, node)
    for node in ctx.graph.find_nodes(op="call_function", target=own.partitioned.default):
        assert ctx.parts is not None
        ctx.parts.sources[_index(node.args[0])] = Halo(*node.args[2:4])
        ctx.parts.destinations.add(_index(node.args[1]))
        _leave_ends(ctx, node)
    for node in ctx.graph.find_nodes(op="call_function", target=own.hop_prefix.default):
        assert ctx.padded is not None
        ctx.padded.hop_prefixes.append(_hop_prefix(*node.args))
        _leave_ends(ctx, node)


def _hop_prefix(row: Any, col: Any, nodes: Any, sources: Any, edges: Any) -> HopPrefix:
    return HopPrefix((_index(row), _index(col)), nodes, sources, (edges[0], edges[1]), edges[2], list(edges[3:]))


def _index(node: Any) -> fx.Node:
    """Returns the index itself, without the marker of its number of segments."""
    return node.args[0] if node.target is own.sized.default else node  # type: ignore[no-any-return]


def _leave_ends(ctx: Context, node: fx.Node) -> None:
    """Removes a marker, and makes its users read the marked tensors."""
    for part in list(node.users):
        part.replace_all_uses_with(node.args[part.args[1]])  # type: ignore[index,arg-type]
        ctx.graph.erase_node(part)
    ctx.graph.erase_node(node)


def _note(known: PaddedInputs, tensor: fx.Node, rows: int, values: int, line: str) -> None:
    size = value(tensor).shape[0]
    symbol = size.node.expr if isinstance(size, torch.SymInt) else None
    if symbol is None or not symbol.is_Symbol or known.sizes.setdefault(symbol, rows) != rows:
        raise not_padded("its size is a fixed number, or was taken for that of other things", line)
    known.tensors.add(tensor)
    if values >= 0:
        known.values[tensor] = values
