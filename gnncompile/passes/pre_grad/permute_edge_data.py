"""Values per edge are stored in the order in which a region walks the edges.

Before: ``region([x, norm], csr(dst, src) + csr(src, dst), "sum of x * norm")``
After:  ``region([x, norm_by_dst, norm_by_src], ...)`` with ``norm_by_dst = index_select(norm, 0, edges_by_dst)``
Why it pays: a walk reads values in sequence instead of from random addresses, and reads no edge indices. Values that
depend on structure alone are permuted once per graph, outside the step. On a GPU, features of edges without a gradient
are permuted once per step if layers of several regions read them by the same walks: a walk reads them one by one, and a
part of each line of memory. Graphs over parts keep them as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import fx

from gnncompile import tuning
from gnncompile.device import device_of
from gnncompile.ir.region import INDEX, Node, Region, Space, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import aten, drop_unused, own, structural_nodes, value
from gnncompile.passes.context import Context
from gnncompile.passes.log import user_line

WIDEST = 8
"""The most values per edge of a structural tensor that is stored in three orders."""

_FEWEST_READERS = 2
"""Fewest regions of the same walks whose layers read features of edges that are permuted in each step."""


def run(ctx: Context) -> None:
    """Rewrites the graph in place."""
    if not ctx.options.hoist:
        return  # structural values would be permuted again in every step
    structural = structural_nodes(ctx.graph, ctx.written)
    features = _features(ctx)
    orders: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for call in ctx.graph.find_nodes(op="call_function", target=own.region.default):
        region: Region = parse(call.args[2])
        tensors: list[fx.Node] = list(call.args[0])
        moved = [n.positions[0] for n in region.inputs if _fits(n) and structural.get(tensors[n.positions[0]])]
        moved += [at for at in _read_by_layers(region) if (tensors[at], _walks(call)[0]) in features]
        if moved and call not in structural:
            _replace(ctx, call, region, moved, orders)
    drop_unused(ctx.graph)


def _fits(node: Node) -> bool:
    return _is_in_edge_order(node) and node.shape[0] * node.shape[1] <= WIDEST


def _is_in_edge_order(node: Node) -> bool:
    return node.op == "input" and node.space is Space.EDGE and node.dtype != INDEX and not node.through_index


def _features(ctx: Context) -> set[tuple[fx.Node, fx.Node]]:
    """Returns features of edges without a gradient that layers of several regions on a GPU read, with their order."""
    readers: Counter[tuple[fx.Node, fx.Node]] = Counter()
    for call in ctx.graph.find_nodes(op="call_function", target=own.region.default):
        tensors: list[fx.Node] = list(call.args[0])
        readers.update({(tensors[at], _walks(call)[0]) for at in _read_by_layers(parse(call.args[2]))})
    left = ctx.needs_grad | ctx.written
    several = {key for key, count in readers.items() if count >= _FEWEST_READERS and key[0] not in left}
    return {key for key in several if ctx.parts is None and device_of(value(key[0]).device).runs_triton}


def _walks(call: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns the edges of a region in the order of its rows, and of the other end where a gradient needs that."""
    layout: list[fx.Node] = list(call.args[1])  # type: ignore[arg-type]
    return layout[2], layout[-1]


def _read_by_layers(region: Region) -> list[int]:
    """Returns the positions of the features that a walk row by row multiplies by weights, one after the other."""
    layers = [] if region.tiled else [node for node in region.nodes if node.op == "linear"]
    read = [region.nodes[layer.args[0]] for layer in layers]
    few = [node for node in read if _is_in_edge_order(node) and node.shape[1] <= tuning.TILES.layer_features]
    return sorted({node.positions[0] for node in few})


def _replace(
    ctx: Context, call: fx.Node, region: Region, moved: list[int], orders: dict[tuple[fx.Node, fx.Node], fx.Node]
) -> None:
    """Passes the tensors at the indices `moved` to the region in both orders."""
    layout: list[fx.Node] = list(call.args[1])  # type: ignore[arg-type]
    walks = _walks(call)
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
