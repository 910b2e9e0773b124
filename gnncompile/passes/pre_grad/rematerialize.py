"""Rows per edge that are made of gathered rows by arithmetic alone are made again in the backward.

Before: the forward keeps ``h = region([a, b], ..., "relu(a_i + b_j) per edge")`` for the gradient of ``linear(h, w)``
After:  the forward keeps `a` and `b`, which it has anyway, and the backward runs the region again
Why it pays: what stays on the edges (the second layer of an `EdgeConv`) is as wide as the messages, several of it live
at once, and gathering takes a fraction of the time of the layer that reads it.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile.ir.region import Region, parse
from gnncompile.passes.analysis import own
from gnncompile.passes.context import Context

WIDE = 16
"""Elements per edge from which on memory matters."""


def run(ctx: Context) -> None:
    """Marks nodes for the partitioner of torch's autograd, which keeps or recomputes; the graph stays as it is."""
    calls = ctx.graph.find_nodes(op="call_function", target=own.region.default)
    for k, call in enumerate(calls):
        if call in ctx.needs_grad and _cheap(parse(call.args[2])):
            for node in (call, *call.users):
                _mark(node, k)


def _cheap(region: Region) -> bool:
    """Whether a region computes nothing but wide rows per edge."""
    if region.reductions or region.softmaxes:
        return False
    shapes = [region.nodes[out.node].shape for out in region.outputs]
    return all(map(region.per_edge, region.outputs)) and max(h * c for h, c in shapes) >= WIDE


def _mark(node: fx.Node, block: int) -> None:
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = block
