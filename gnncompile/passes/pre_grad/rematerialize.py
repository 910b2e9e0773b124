"""Rows per edge that are cheap arithmetic on gathered rows are recomputed in the backward.

Before: the forward keeps ``h = region([a, b], ..., "relu(a_i + b_j) per edge")`` for the gradient of ``linear(h, w)``
After:  the forward keeps `a` and `b`, which it has anyway, and the backward runs the region again
Why it pays: tensors that stay on the edges (the second layer of an `EdgeConv`) are as wide as the messages, and several
live at once. The gather takes a fraction of the time of the layer that reads its rows.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile.ir.region import Region, parse
from gnncompile.passes.analysis import own
from gnncompile.passes.context import Context

WIDE = 16
"""The least number of elements per edge for which saving memory matters."""


def run(ctx: Context) -> None:
    """Marks nodes to be recomputed by the partitioner of AOTAutograd. The graph stays as it is."""
    calls = ctx.graph.find_nodes(op="call_function", target=own.region.default)
    for k, call in enumerate(calls):
        if call in ctx.needs_grad and _cheap(parse(call.args[2])):
            for node in (call, *call.users):
                _mark(node, k)


def _cheap(region: Region) -> bool:
    """Whether a region computes only wide rows per edge, without a reduction or softmax."""
    if region.reductions or region.softmaxes:
        return False
    shapes = [region.nodes[out.node].shape for out in region.outputs]
    return all(map(region.per_edge, region.outputs)) and max(h * c for h, c in shapes) >= WIDE


def _mark(node: fx.Node, block: int) -> None:
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = block
