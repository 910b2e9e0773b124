"""Rows that are repeated for each of their edges are read where they are used, instead of being stored per edge.

Before: ``g = region([dy], ..., "dy per edge")[0]; de = region([g, z], ..., "g * z")[0]``
After:  ``de = region([dy, z], ..., "dy * z")[0]``
Why it pays: a matrix with a row per edge is not written, and not read again, and it is not alive where most memory is
needed. The gradient of a sum of states of edges is such a row, which the last layer's region reads. Runs after
differentiation.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.merge import Part, merge
from gnncompile.ir.region import Node, Output, Region, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import drop_unused, own, value
from gnncompile.passes.edge_inputs import reads_per_edge, replace_input, set_region


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for call in graph.find_nodes(op="call_function", target=own.region.default):
        moved = {item for item in list(call.users) if _move(call, item)}
        if moved:
            _drop(call, moved)
    drop_unused(graph)


def _move(call: fx.Node, item: fx.Node) -> bool:
    """Lets the readers of a result read the row that the result repeats, if all of them can."""
    given: Any = call.args
    tensors, layout, spec = given
    region: Region = parse(spec)
    row = _row(region, region.outputs[item.args[1]])  # type: ignore[index]
    if row is None or not region.unmasked or not item.users or len(tensors) != region.count:
        return False
    if not all(reads_per_edge(reader, item) and _walks_alike(reader, region, layout) for reader in item.users):
        return False
    for reader in list(item.users):
        replace_input(reader, item, [tensors[int(row.value or 0)]], lambda b, node, places: _repeated(b, row, places))
    return True


def _row(region: Region, out: Output) -> Node | None:
    """Returns the input whose rows an output repeats for each edge, or None."""
    node = region.nodes[out.node]
    read = region.nodes[node.args[0]] if node.op == "on_edges" else None
    is_plain = read is not None and read.op == "input" and read.space is region.by and read.dtype == out.dtype
    return read if is_plain else None


def _walks_alike(reader: fx.Node, region: Region, layout: list[fx.Node]) -> bool:
    """Whether a region walks the edges of the same rows in the same order."""
    given: Any = reader.args
    other: Region = parse(given[2])
    return other.by is region.by and other.unmasked and list(given[1][:3]) == list(layout[:3])


def _repeated(b: Builder, row: Node, places: list[int]) -> int:
    """Adds a row, for each of its edges, to a region. Returns its node."""
    return b.on_edges(b.input(places[0], row.space, row.shape, row.dtype))


def _drop(call: fx.Node, items: set[fx.Node]) -> None:
    """Takes results that nobody reads any more out of a region."""
    for item in items:
        call.graph.erase_node(item)
    kept = tuple(sorted({item.args[1] for item in call.users}))  # type: ignore[type-var]
    if not kept:
        return
    given: Any = call.args
    made = merge([Part(parse(given[2]), given[0], kept)])  # type: ignore[arg-type]
    verify(made.region)
    set_region(call, [*made.tensors], made.region)  # type: ignore[list-item]
    (places,) = made.outputs
    call.meta["val"] = [value(call)[kept[places.index(k)]] for k in range(len(made.region.outputs))]
    for item in list(call.users):
        item.args = (call, places[kept.index(item.args[1])])
