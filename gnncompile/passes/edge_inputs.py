"""Finds and replaces the inputs with which a region of a differentiated graph reads a tensor with a row per edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import LAYERS, Node, Region, Space, parse
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import own, value

MOST_READ = 3
"""The most tensors with a row per edge that a region reads for arithmetic that was outside of it, besides those that it
reads anyway. A walk may read each several times."""


def reads_per_edge(reader: fx.Node, rows: fx.Node) -> bool:
    """Whether a node is a region that reads rows as values per edge, which it could also compute."""
    if reader.target is not own.region.default:
        return False
    given: Any = reader.args
    tensors, layout, spec = given
    region = parse(spec)
    if rows in layout or len(tensors) != region.count:
        return False
    dtype = storage_type(value(rows).dtype)
    from_memory = ("outer",) if region.tiled else LAYERS
    for k, node in enumerate(region.nodes):
        if node.op == "input" and any(tensors[at] is rows for at in node.positions):
            plain = node.space is Space.EDGE and not node.through_index and node.dtype == dtype
            if not plain or any(n.op in from_memory and k in n.args for n in region.nodes):
                return False
    return True


def replace_input(
    reader: fx.Node, rows: fx.Node, instead: list[fx.Node], make: Callable[[Builder, Node, list[int]], int]
) -> None:
    """Lets a region read other tensors instead of some rows. See `with_input_replaced`."""
    tensors, region = with_input_replaced(reader, rows, instead, make)
    set_region(reader, tensors, region)


def set_region(reader: fx.Node, tensors: list[fx.Node], region: Region) -> None:
    """Puts another region in the place of a node's, which reads these tensors."""
    reader.args = (tensors, reader.args[1], region.spec)


def with_input_replaced(
    reader: fx.Node, rows: fx.Node, instead: list[fx.Node], make: Callable[[Builder, Node, list[int]], int]
) -> tuple[list[fx.Node], Region]:
    """Returns the tensors and the region of a node that reads other tensors instead of some rows.

    Args:
        reader: The node, which reads the rows as values per edge.
        rows: The rows.
        instead: The tensors to read. Those that the region does not read yet come after its other tensors.
        make: Makes the value per edge of an input node, of its shape, from the positions of these tensors.
    """
    given: Any = reader.args
    before, _, spec = given
    tensors = [tensor for tensor in before if tensor is not rows]
    others = [at for at, tensor in enumerate(before) if tensor is not rows]
    places = [_place(tensors, tensor) for tensor in instead]
    region: Region = parse(spec)
    b, copies = Builder(region.by, region.unmasked, region.tiled), dict[int, int]()
    for at, node in enumerate(region.nodes):
        if node.op == "input" and before[int(node.value or 0)] is rows:
            copies[at] = make(b, node, places)
        else:
            position = others.index(int(node.value or 0)) if node.op == "input" else node.value
            copies[at] = b.emit(replace(node, args=tuple(copies[a] for a in node.args), value=position))
    made = b.finish([replace(out, node=copies[out.node]) for out in region.outputs])
    verify(made)
    return tensors, made


def _place(tensors: list[fx.Node], tensor: fx.Node) -> int:
    """Returns the position of a tensor, which is added if it has none."""
    if tensor not in tensors:
        tensors.append(tensor)
    return tensors.index(tensor)
