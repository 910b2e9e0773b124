"""A region adds another value per edge to one that it gives. Runs after differentiation, on each graph.

Before: ``total = add(dy, region([...])[1])``, where the region gives a value per edge and ``dy`` is stored
After:  ``total = region([..., dy])[1]``
Why it pays: an edge state that a residual adds to has a gradient from each of its two readers. Their sum is read by
several kernels of the layer before. Each of them would read both gradients.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import alike, aten, is_packed, is_stored, own, value

_LEAST_BYTES = 32
"""Least bytes of the features of an edge. A walk reads edges in another order, and memory is read in such pieces."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for call in graph.find_nodes(op="call_function", target=own.region.default):
        region = parse(call.args[2])
        if not region.unmasked or (region.sums_all and not region.tiled):  # no sum is written for masked edges
            continue
        for k, out in enumerate(region.outputs):
            total = _sum(call, k) if region.per_edge(out) else None
            if total is not None:
                region = _add(graph, call, region, k, *total)


def _sum(call: fx.Node, k: int) -> tuple[fx.Node, fx.Node] | None:
    """Returns the sum that alone reads output `k` of a region, and its other term; None if the walk can't add it."""
    taken = [user for user in call.users if user.target is operator.getitem and user.args[1] == k]
    if len(taken) != 1 or len(taken[0].users) != 1:
        return None
    (total,) = taken[0].users
    if total.target is not aten.add.Tensor or total.kwargs or not value(total).is_floating_point():
        return None
    if not alike(*total.args) or not alike(total, taken[0]):
        return None
    others: list[Any] = [term for term in total.args if term is not taken[0]]
    if len(others) != 1 or not others[0] < call or not is_stored(others[0]):
        return None
    fake = value(others[0])
    row = fake[:1].numel() * fake.itemsize if fake.dim() > 1 else 0
    return (total, others[0]) if is_packed(fake) and isinstance(row, int) and row >= _LEAST_BYTES else None


def _add(graph: fx.Graph, call: fx.Node, region: Region, k: int, total: fx.Node, other: fx.Node) -> Region:
    """Adds a term to output `k` of a region, in place of a sum; returns the new region."""
    tensors: Any = call.args[0]
    builder, out = Builder.of(region), region.outputs[k]
    term = builder.input(len(tensors), Space.EDGE, region.nodes[out.node].shape, out.dtype)
    outputs = list(region.outputs)
    outputs[k] = Output(builder.op("add", term, out.node), out.dtype, out.trailing)
    made = builder.finish(outputs)
    verify(made)
    call.args = ([*tensors, other], call.args[1], made.spec)
    (taken,) = (term for term in total.all_input_nodes if term is not other)
    total.replace_all_uses_with(taken)
    graph.erase_node(total)
    return made
