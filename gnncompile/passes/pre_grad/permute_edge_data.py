"""Structural values per edge are stored in the order in which a region walks the edges.

Before: ``region([x, norm], csr(dst, src) + csr(src, dst), "sum of x * norm")``
After:  ``region([x, norm_by_dst, norm_by_src], ...)`` with ``norm_by_dst = index_select(norm, 0, edges_by_dst)``
Why it pays: a walk reads values in sequence instead of from random addresses, and reads no edge indices. Values that
depend on structure alone are permuted once per graph, outside the step.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from gnncompile.ir.region import INDEX, Node, Region, Space, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import aten, drop_unused, own, structural_nodes
from gnncompile.passes.context import Context
from gnncompile.passes.log import user_line

WIDEST = 8
"""The most values per edge of a tensor that is stored in three orders."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not ctx.options.hoist:
        return  # the values would be permuted again in every step
    structural = structural_nodes(ctx.graph, ctx.written)
    orders: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for call in ctx.graph.find_nodes(op="call_function", target=own.region.default):
        region: Region = parse(call.args[2])
        tensors: list[fx.Node] = list(call.args[0])
        read = [n for n in region.inputs if _fits(n) and structural.get(tensors[n.positions[0]])]
        if read and call not in structural:
            _replace(ctx, call, region, [n.positions[0] for n in read], orders)
    drop_unused(ctx.graph)


def _fits(node: Node) -> bool:
    in_order = node.space is Space.EDGE and node.dtype != INDEX and not node.through_index
    return in_order and node.shape[0] * node.shape[1] <= WIDEST


def _replace(
    ctx: Context, call: fx.Node, region: Region, moved: list[int], orders: dict[tuple[fx.Node, fx.Node], fx.Node]
) -> None:
    """Passes the tensors at the indices `moved` to the region in both orders."""
    layout: list[fx.Node] = list(call.args[1])  # type: ignore[arg-type]
    walks = layout[2], layout[-1]  # by the region's rows, and by the other end where a gradient needs it
    tensors: list[fx.Node] = []
    place = {}
    for old, tensor in enumerate(call.args[0]):  # type: ignore[arg-type]
        place[old] = len(tensors)
        tensors += [_ordered(ctx, tensor, edge, orders) for edge in walks] if old in moved else [tensor]
    nodes = [_moved(n, place, moved) if n.op == "input" else n for n in region.nodes]
    made = replace(region, nodes=tuple(nodes))
    verify(made)
    at = ctx.log.position(call.args[2], user_line(call))  # type: ignore[arg-type]
    ctx.log.regions[at] = replace(ctx.log.regions[at], spec=made.spec)
    call.args = (tensors, layout, made.spec)


def _moved(node: Node, place: dict[int, int], moved: list[int]) -> Node:
    old = node.positions[0]
    return replace(node, value=place[old], space=Space.ORDERED if old in moved else node.space)


def _ordered(ctx: Context, tensor: fx.Node, edge: fx.Node, orders: dict[tuple[fx.Node, fx.Node], fx.Node]) -> fx.Node:
    if (tensor, edge) not in orders:
        with ctx.graph.inserting_after(max(tensor, edge)):
            orders[tensor, edge] = ctx.call(aten.index_select.default, tensor, 0, edge)
    return orders[tensor, edge]
