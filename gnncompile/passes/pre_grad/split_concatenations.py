"""A linear layer of a concatenation becomes a sum of layers of its parts, if kernels of our own multiply them.

Before: ``linear(cat([x, received], 1), w, b)``
After:  ``linear(x, w[:, :k], b) + linear(received, w[:, k:])``
Why it pays: the wide rows are not written, not read again, and not kept for the backward. One kernel adds up both
products. The gradients of the parts are written one by one, so no kernel copies them out of wide rows, and a part
without a gradient takes no time.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import fx

from gnncompile.device import Device, device_of
from gnncompile.passes.analysis import aten, drop_unused, is_packed, known_size, same_size, value
from gnncompile.passes.context import Context


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not (ctx.options.products and ctx.runs_post_grad):
        return  # the library multiplies
    for node in list(ctx.graph.find_nodes(op="call_function", target=aten.linear.default)):
        parts = _parts(ctx, node)
        if parts is not None and _pays(node, parts):
            with ctx.graph.inserting_before(node):
                node.replace_all_uses_with(_split(ctx, node, parts))
    drop_unused(ctx.graph)


def _parts(ctx: Context, node: fx.Node) -> list[fx.Node] | None:
    """Returns the matrices that are concatenated for a layer alone; None if the layer reads no such rows."""
    rows: Any = node.args[0]
    if rows.target is not aten.cat.default or len(rows.users) > 1 or not ctx.same_mode(rows, node):
        return None
    parts, dim = (*rows.args, 0)[:2]
    if dim not in (1, -1) or len(parts) != 2 or ctx.written.intersection([node, rows, *parts]):
        return None  # one kernel adds up two products
    alike = all(value(part).dim() == 2 and same_size(value(part).shape[0], value(rows).shape[0]) for part in parts)
    return list(parts) if alike else None


def _pays(node: fx.Node, parts: list[fx.Node]) -> bool:
    """Whether kernels of our own multiply each part. The library's would write the sum once for each of them."""
    weight: Any = node.args[1]
    columns, dtype, device = value(node).shape[1], value(node).dtype, device_of(value(node).device)
    if not device.runs_triton or any(value(one).dtype != dtype for one in (*parts, weight)):
        return False
    return all(_is_ours(device, value(part), columns) for part in parts)


def _is_ours(device: Device, rows: torch.Tensor, columns: int) -> bool:
    """Whether a kernel of our own multiplies these rows with a weight of so many columns."""
    depth: Any = rows.shape[1]
    if not isinstance(depth, int) or not is_packed(rows):
        return False
    enough = device.has_enough_rows(known_size(rows.shape[0]), depth, columns)
    return enough and device.computes_product(rows.dtype, depth, columns)


def _split(ctx: Context, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
    """Adds the sum of the layers of all parts, at the current insertion point."""
    _, weight, *bias = node.args
    widths = [value(part).shape[1] for part in parts]
    layers: list[fx.Node] = []
    for part, width, stop in zip(parts, widths, accumulate(widths), strict=True):
        columns = ctx.call(aten.slice.Tensor, weight, 1, stop - width, stop, like=node)
        layers.append(ctx.call(aten.linear.default, part, columns, *(() if layers else bias), like=node))
    total: fx.Node = ctx.added(layers, like=node)
    return total
