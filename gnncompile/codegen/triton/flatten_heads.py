"""Reads rows of several heads as rows of one, and takes them apart in registers.

Heads and channels of a row stand side by side in memory, which Triton 3.6 does not see: it gives the edges of a step to
the lanes of a warp that would have other heads, so that to add them up takes shuffles. The kernels of a GAT layer (4
heads of 32 channels, compiled for an H200) come to 121 registers and 73 shuffles like that, and to 80 and 11 so; Triton
3.7 writes the latter either way. Where rows are asked for a step ahead, they pass through shared memory, and are
written as they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnncompile.codegen.triton.plan import edgewise
from gnncompile.ir.region import BITS, Node

if TYPE_CHECKING:
    from gnncompile.codegen.triton.values import ValueWriter


def is_flat(w: ValueWriter, node: Node) -> bool:
    """Whether an input is read like that: a wide value per edge, of which a program has all."""
    if node.op != "input" or node.dtype == BITS or not edgewise(w.region, node):
        return False
    extents = [w.extent(axis, length) for axis, length in zip(("head", "channel"), node.shape, strict=True)]
    return w.tile.stages == 1 and min(node.shape) > 1 and extents == list(node.shape)


def axis(w: ValueWriter, width: int) -> str:
    """The elements of a row."""
    return f"tl.arange(0, {width})[{'None, ' * _edge_axes(w)}:]"


def expand(w: ValueWriter, name: str) -> str:
    """What there is per edge, beside the elements of a row."""
    return f"{name}[{':, ' * _edge_axes(w)}None]"


def load(w: ValueWriter, node: Node) -> str:
    """The tile of an input."""
    width = node.shape[0] * node.shape[1]
    rows = f"tl.load(t{node.value} + flat_{w.index(node)} * {width} + element{width}, mask=flat_alive, other=0)"
    return f"tl.reshape({rows}, {w.tile_shape(node.shape, w.tile.edges)})"


def _edge_axes(w: ValueWriter) -> int:
    return 2 if w.tile.rows > 1 else 1
