"""Edge indices of a layout that no walk reads are not kept.

Before: ``region([x], [rowptr, col, edge, rowptr_t, col_t, edge_t], "sum over rows of x")``
After:  ``region([x], [rowptr, col, empty, rowptr_t, col_t, empty], "sum over rows of x")``
Why it pays: a layout is cached as long as its graph is used. The index of each edge in the edge list takes half of its
memory. Only values per edge, and dropout, need these indices.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

from torch import fx

from gnncompile.ir.region import Region, Space, parse
from gnncompile.ir.vjp import vjp
from gnncompile.passes.analysis import aten, drop_unused, own, value
from gnncompile.passes.context import Context

MOST_GRADIENTS = 4
"""The most tensors with a gradient for which all possible backwards are examined."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if ctx.options.double_backward:
        return  # a gradient of a gradient may keep other values
    none: dict[fx.Node, fx.Node] = {}
    for node in ctx.graph.find_nodes(op="call_function", target=own.region.default):
        tensors, layout, spec = node.args
        region, wanted = parse(spec), tuple(tensor in ctx.needs_grad for tensor in tensors)
        read, parts = _numbered(region, wanted), list(layout)
        for first, by in zip(range(0, len(parts), 3), (region.by, region.by.opposite), strict=False):
            if by not in read:
                parts[first + 2] = _nothing(ctx, parts[first], none)
        node.args = (tensors, parts, spec)
    drop_unused(ctx.graph)


def _nothing(ctx: Context, rowptr: Any, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns an empty tensor that takes the place of a layout's edge indices."""
    if rowptr not in made:
        is_given = rowptr.op == "placeholder"
        with ctx.graph.inserting_after(ctx.inputs_first() if is_given else rowptr):
            if is_given:  # made from rowptr, the tensor would be structure of each mini-batch
                kind = {"dtype": value(rowptr).dtype, "device": value(rowptr).device}
                made[rowptr] = ctx.call(aten.empty.memory_format, [0], like=rowptr, **kind)
            else:
                made[rowptr] = ctx.call(aten.new_empty.default, rowptr, [0], like=rowptr)
    return made[rowptr]


@lru_cache(maxsize=1024)
def _numbered(region: Region, wanted: tuple[bool, ...]) -> frozenset[Space]:
    """Returns the ends by which a walk, forward or backward, reads edge indices.

    Every subset of gradients that may be needed counts, and every set of results that may have a cotangent.
    """
    found = {region.by} if region.numbers_edges else set()
    if sum(wanted) > MOST_GRADIENTS:
        return frozenset((region.by, region.by.opposite))
    for some in sorted(product(*((False, True) if one else (False,) for one in wanted)), reverse=True):
        for given in region.cotangents:
            if any(some) and len(found) < 2:
                found |= {stage.region.by for stage in vjp(region, some, given).stages if stage.region.numbers_edges}
    return frozenset(found)
