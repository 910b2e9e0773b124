"""Arithmetic on values per edge that one region reads is computed where it is read. Runs after differentiation.

Before: ``g = where(mask, 0, add(a, b)); dx = region([g], ...)[0]``
After:  ``dx = region([a, b, mask], ...)[0]``
Why it pays: the result is not written and not read again, and there is a launch less. Such are the gradient of a state
of edges that several layers read, which is a sum, and the gradient of a batch norm of edges, whose operands the region
often reads anyway. In 16 bits it is rounded less often.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Node, Region, Shape, Space, behind, parse
from gnncompile.passes.analysis import drop_unused, is_tensor, own, value
from gnncompile.passes.edge_inputs import MOST_READ, reads_per_edge, set_region, with_input_replaced
from gnncompile.passes.pointwise import NotFusable, Slots
from gnncompile.passes.row_arithmetic import number_of
from gnncompile.passes.stored_arithmetic import StoredArithmetic


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for reader in graph.find_nodes(op="call_function", target=own.region.default):
        region: Region = parse(reader.args[2])
        # A maximum is found again by its bits, which a result has only as it is stored.
        if region.exact or region.softmaxes:
            continue
        for rows in list(reader.args[0]):
            if len(rows.users) == 1 and reads_per_edge(reader, rows):
                _compute(reader, rows)
    drop_unused(graph)


def _compute(reader: fx.Node, rows: fx.Node) -> None:
    """Lets a region compute rows that are arithmetic, if it can."""
    given: Any = reader.args
    tensors, region = given[0], parse(given[2])
    shape, *others = {node.shape for node in region.inputs if any(tensors[at] is rows for at in node.positions)}
    edges = EdgeArithmetic(value(rows), shape, region.by, set(tensors) - {rows})
    if others or not edges.computable(rows):
        return
    with suppress(NotFusable):
        at = edges.compute(rows)
        if edges.fills_rows(at):
            make = partial(_copied, edges.builder.nodes, at)
            read, made = with_input_replaced(reader, rows, edges.tensors, make)
            if region.rounds_like(made):
                set_region(reader, read, made)


class EdgeArithmetic(StoredArithmetic):
    """Arithmetic on values per edge, as nodes of a region that reads such values.

    A result that several nodes read may be read as well, if its type is no wider than that of the rows: Inductor writes
    it in a kernel that has it in registers.

    Args:
        like: A tensor with a row per edge, ``[num_edges, ...]``.
        shape: The feature shape of a row.
        by: The end of the edges by which the region walks them.
        known: The other tensors that the region reads.
    """

    def __init__(self, like: torch.Tensor, shape: Shape, by: Space, known: Collection[fx.Node]) -> None:
        super().__init__(Builder(by), like, shape, MOST_READ)
        self.by, self.known = Space.EDGE, known
        self.double, self.dtype = like.dtype == torch.float64, like.dtype

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """Returns the region node of an operand. What is the same for all edges is not computed for each, but read."""
        if is_tensor(arg) and not self.has_rows(arg) and number_of(arg) is None:
            return self.input(arg)
        return super().operand(arg, of, slots, strict)

    def lies(self, node: fx.Node) -> bool:
        """Whether a tensor may be read: it lies in memory in any case, or takes no more to write than the rows."""
        if not self.has_rows(node) or super().lies(node):
            return True
        return len(node.users) > 1 and value(node).dtype.itemsize <= self.dtype.itemsize

    def counts(self, node: fx.Node) -> bool:
        """Whether a tensor is one more with a row per edge that the region reads."""
        return self.has_rows(node) and node not in self.known


def _copied(nodes: list[Node], result: int, b: Builder, _: Node, places: list[int]) -> int:
    """Adds a result, and what it is computed from, to a region whose tensors are at these places. Returns its index."""
    copies = dict[int, int]()
    for at in sorted(behind(nodes, [result])):
        node = nodes[at]
        if node.op == "input":
            copies[at] = b.input(places[int(node.value or 0)], node.space, node.shape, node.dtype)
        else:
            copies[at] = b.emit(replace(node, args=tuple(copies[a] for a in node.args)))
    return copies[result]
