"""A sum of values per edge that one region reads is added up where it is read. Runs after differentiation.

Before: ``g = add(add(a, b), c); dx = region([g], ...)[0]``
After:  ``dx = region([a, b, c], ...)[0]``
Why it pays: the sum is not written and not read again, and there is a launch less. A gradient of a state of edges that
several layers read is such a sum. In 16 bits it is rounded less often.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Node, Region, parse
from gnncompile.passes.analysis import alike, aten, drop_unused, is_packed, own, value
from gnncompile.passes.edge_inputs import reads_per_edge, replace_input

MOST_SUMMANDS = 3
"""The most tensors that are read in place of a sum. A walk may read each several times."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for reader in graph.find_nodes(op="call_function", target=own.region.default):
        region: Region = parse(reader.args[2])
        # A maximum is found again by its bits, which a sum has only as it is stored.
        if region.exact or region.softmaxes:
            continue
        for rows in list(reader.args[0]):
            summands = _summands(rows)
            if 1 < len(summands) <= MOST_SUMMANDS and len(rows.users) == 1 and reads_per_edge(reader, rows):
                replace_input(reader, rows, summands, _added)
    drop_unused(graph)


def _summands(rows: fx.Node) -> list[fx.Node]:
    """Returns the different tensors whose sum a node is, from left to right; the node itself if it is no such sum."""
    given: Any = rows.args
    is_sum = rows.target is aten.add.Tensor and not rows.kwargs and all(_is_summand(one, rows) for one in given)
    if not is_sum or given[0] is given[1]:
        return [rows]
    found = [term for one in given for term in (_summands(one) if len(one.users) == 1 else [one])]
    return found if len(set(found)) == len(found) else [rows]


def _is_summand(one: Any, total: fx.Node) -> bool:
    return isinstance(one, fx.Node) and alike(one, total) and is_packed(value(one))


def _added(b: Builder, node: Node, places: list[int]) -> int:
    total, *others = (b.input(place, node.space, node.shape, node.dtype) for place in places)
    for other in others:
        total = b.op("add", total, other)
    return total
