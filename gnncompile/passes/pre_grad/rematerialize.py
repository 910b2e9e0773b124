"""Rows per edge that are cheap arithmetic on gathered rows are recomputed in the backward.

Before: the forward keeps ``h = region([a, b], ..., "relu(a_i + b_j) per edge")`` for the gradient of ``linear(h, w)``
After:  the forward keeps `a` and `b`, which it has anyway, and the backward runs the region again
Why it pays: tensors that stay on the edges (the second layer of an `EdgeConv`) are as wide as the messages, and several
live at once. The gather takes a fraction of the time of the layer that reads its rows. Rows that would be kept for the
recomputation alone must be narrower than what it saves.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gnncompile.ir.region import Region, Space, parse
from gnncompile.ir.residuals import tensors_read
from gnncompile.passes.analysis import own
from gnncompile.passes.context import Context

WIDE = 16
"""The least number of elements per edge for which saving memory matters."""


def run(ctx: Context) -> None:
    """Marks nodes to be recomputed by the partitioner of AOTAutograd. The graph stays as it is."""
    calls = ctx.graph.find_nodes(op="call_function", target=own.region.default)
    for k, call in enumerate(calls):
        region = parse(call.args[2])
        if call in ctx.needs_grad and _cheap(region) and _kept_alone(ctx, call, region) < _width(region):
            for node in (call, *call.users):
                _mark(node, k)


def _cheap(region: Region) -> bool:
    """Whether a region computes only wide rows per edge, without a reduction or softmax."""
    if region.reductions or region.softmaxes:
        return False
    return all(map(region.per_edge, region.outputs)) and _width(region) >= WIDE


def _width(region: Region) -> int:
    """Returns the elements per edge of the widest result."""
    return max(prod(region.nodes[out.node].shape) for out in region.outputs)


def _kept_alone(ctx: Context, call: fx.Node, region: Region) -> int:
    """Returns the elements per edge that the recomputation reads, but neither the gradient nor the caller keeps."""
    tensors: Any = call.args[0]
    wanted = tuple(t in ctx.needs_grad for t in tensors)
    read = tensors_read(region, wanted, "input")
    alone = {
        int(n.value or 0): prod(n.shape)
        for n in region.inputs
        if n.space is Space.EDGE and tensors[int(n.value or 0)].op != "placeholder"
    }
    return sum(width for k, width in alone.items() if k not in read)


def _mark(node: fx.Node, block: int) -> None:
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = block
