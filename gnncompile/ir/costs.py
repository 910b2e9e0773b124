"""Estimates the cost of a backward."""

from __future__ import annotations

import math

from gnncompile.ir import bits
from gnncompile.ir.region import BITS, LAYERS, Node, Region, Space
from gnncompile.ir.stages import Backward

READ = 256
"""Cost of reading the bits of an edge, in bytes of a gathered row that take as long. A row of 512 bytes takes about 240
us; bits in the order of the edge list take 120 us to read (H200, 2.3M edges)."""

PRODUCT = 12
"""A linear layer of this number of edge features costs about as much as gathering a row as wide as its result (GINE on
the same machine)."""


def bytes_read(plan: Backward) -> float:
    """Returns the bytes that the walks of a backward read per edge. Linear layers count as bytes too."""
    total = 0.0
    for region in (stage.region for stage in plan.stages):
        for at, node in enumerate(region.nodes):
            if node.op == "input" and node.space in (region.by.opposite, Space.EDGE):
                total += row_bytes(node)
            elif node.op in LAYERS:
                total += 4 * _multiplications(region, at) / PRODUCT
    return total


def multiplications(plan: Backward) -> int:
    """Returns how many multiplications the linear layers of a backward take per edge."""
    regions = [stage.region for stage in plan.stages]
    layers = [(region, at) for region in regions for at, node in enumerate(region.nodes) if node.op in LAYERS]
    return sum(_multiplications(region, at) for region, at in layers)


def _multiplications(region: Region, layer: int) -> int:
    node = region.nodes[layer]
    heads, channels = region.nodes[node.args[1]].shape if node.op == "transposed" else node.shape
    return heads * channels * region.features(layer)


def row_bytes(node: Node) -> int:
    """Returns the bytes of one row of a value. Packed bits count as what takes as long to read."""
    if node.dtype == BITS:
        return READ
    return math.prod(node.shape) * bits.tensor_type(node.dtype).itemsize
