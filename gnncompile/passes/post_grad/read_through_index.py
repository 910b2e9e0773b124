"""Rows that an index chooses for each edge are read where they are used, instead of being stored in between.

Before: ``h = region([x, row], ..., "row of x per edge")[0]; y = region([h, z], ..., "sum of h * z")``
After:  ``y = region([x, z, row], ..., "sum of x[row] * z")``
Why it pays: the rows are not written, and not read again, and there is one launch less. Such are the states of reverse
edges, embeddings of bond or relation types, and rows of a graph for each of its edges. Before differentiation it would
be harmful: the gradient of `x` is a walk of its own, which sums the gradients of the rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Node, Output, Region, parse
from gnncompile.passes.analysis import drop_unused, own, value
from gnncompile.passes.edge_inputs import reads_per_edge, replace_input

SECTOR = 32
"""The bytes that a GPU reads at once. To gather narrower rows reads more than to store them and to read them in
sequence, so several regions read them as they are stored."""


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
    if (len(readers) > 1 and _bytes(item) < SECTOR) or not all(reads_per_edge(reader, item) for reader in readers):
        return
    tensors: Any = call.args[0]
    position = _row(region, region.outputs[item.args[1]])  # type: ignore[index]
    assert position is not None
    for reader in readers:
        replace_input(reader, item, [tensors[position], tensors[-1]], _through_index)


def _bytes(rows: fx.Node) -> int:
    """Returns the bytes of a row. Its sizes are numbers, as those of all results of a region."""
    fake: torch.Tensor = value(rows)
    return math.prod(fake.shape[1:]) * fake.dtype.itemsize


def _through_index(b: Builder, node: Node, places: list[int]) -> int:
    table, index = places
    return b.through_index(table, index, node.shape, node.dtype)
