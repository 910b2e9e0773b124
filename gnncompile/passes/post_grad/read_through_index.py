"""Rows that an index chooses for each edge are read where they are used, instead of being stored in between.

Before: ``h = region([x, row], ..., "row of x per edge")[0]; y = region([h, z], ..., "sum of h * z")``
After:  ``y = region([x, z, row], ..., "sum of x[row] * z")``
Why it pays: the rows are not written, and not read again, and there is one launch less. Such are the states of reverse
edges, embeddings of bond or relation types, and rows of a graph for each of its edges. Before differentiation it would
be harmful: the gradient of `x` is a walk of its own, which sums the gradients of the rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import LAYERS, Output, Region, Space, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import drop_unused, own, value

SECTOR = 32
"""The bytes that a GPU reads at once. Narrower rows are gathered by one region at most, others by any number."""


def run(graph: fx.Graph) -> None:
    """Rewrites the graph in place."""
    for call in graph.find_nodes(op="call_function", target=own.region.default):
        region: Region = parse(call.args[2])
        if _gathers(call, region):
            for item in list(call.users):
                _move(call, region, item)
    drop_unused(graph)


def _gathers(call: fx.Node, region: Region) -> bool:
    """Whether a region stores rows of an index, which is its last tensor, and does nothing else."""
    given = len(call.args[0]) == region.count + 1  # type: ignore[arg-type]
    return given and region.unmasked and all(_row(region, out) is not None for out in region.outputs)


def _row(region: Region, out: Output) -> int | None:
    """Returns the position of the tensor whose rows an output holds as they are, or None."""
    node = region.nodes[out.node]
    read = region.nodes[node.args[0]] if node.op == "on_edges" else node
    plain = read.op == "input" and read.space is region.by and read.dtype == out.dtype
    return int(read.value or 0) if plain else None


def _move(call: fx.Node, region: Region, item: fx.Node) -> None:
    """Lets the readers of some rows gather them, if all of them can."""
    readers = list(item.users)
    if (len(readers) > 1 and _bytes(item) < SECTOR) or not all(_can_gather(reader, item) for reader in readers):
        return
    tensors: Any = call.args[0]
    position = _row(region, region.outputs[item.args[1]])  # type: ignore[index]
    assert position is not None
    for reader in readers:
        _gather(reader, item, tensors[position], tensors[-1])


def _bytes(rows: fx.Node) -> int:
    """Returns the bytes of a row. Its sizes are numbers, as those of all results of a region."""
    fake: torch.Tensor = value(rows)
    return math.prod(fake.shape[1:]) * fake.dtype.itemsize


def _can_gather(reader: fx.Node, rows: fx.Node) -> bool:
    """Whether a node is a region that reads the rows as values per edge."""
    if reader.target is not own.region.default or rows in reader.args[1]:  # type: ignore[operator]
        return False
    tensors, _, spec = reader.args
    region = parse(spec)  # type: ignore[arg-type]
    if len(tensors) != region.count:  # type: ignore[arg-type]
        return False
    dtype = str(value(rows).dtype).removeprefix("torch.")
    kinds = ("outer",) if region.tiled else LAYERS  # these read features of edges from memory
    for at, tensor in enumerate(tensors):  # type: ignore[arg-type]
        nodes = [k for k, n in enumerate(region.nodes) if n.op == "input" and at in n.positions and tensor is rows]
        features = any(n.op in kinds and k in n.args for k in nodes for n in region.nodes)
        if features or any(region.nodes[k].space is not Space.EDGE or region.nodes[k].dtype != dtype for k in nodes):
            return False
    return True


def _gather(reader: fx.Node, rows: fx.Node, table: fx.Node, index: fx.Node) -> None:
    """Lets a region read rows of a table through an index."""
    tensors, layout, spec = reader.args
    given: list[Any] = list(tensors)  # type: ignore[arg-type]
    moved = {at for at, tensor in enumerate(given) if tensor is rows}
    given = [table if tensor is rows else tensor for tensor in given]
    place = given.index(index) if index in given else len(given)
    given += [index] if place == len(given) else []
    region = _indexed(parse(spec), moved, place)  # type: ignore[arg-type]
    verify(region)
    reader.args = (given, layout, region.spec)


def _indexed(region: Region, moved: set[int], index: int) -> Region:
    """Returns the region with the inputs at the positions `moved` gathered through the tensor at position `index`."""
    b, copies = Builder(region.by, region.unmasked, region.tiled), dict[int, int]()
    for at, node in enumerate(region.nodes):
        if node.op == "input" and node.value in moved:
            copies[at] = b.through_index(int(node.value or 0), index, node.shape, node.dtype)
        else:
            copies[at] = b.emit(replace(node, args=tuple(copies[a] for a in node.args)))
    return b.finish([replace(out, node=copies[out.node]) for out in region.outputs])
