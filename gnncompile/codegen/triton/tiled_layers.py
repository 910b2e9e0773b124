"""Shapes and types of the layers of a tiled region."""

from __future__ import annotations

from gnncompile.ir.region import BITS, Node, Region, Space

WIDE = 32
"""Fewest channels of a row that counts as wide."""


def matrix(region: Region, node: Node) -> tuple[int, int]:
    """Returns the rows and columns of the weights of a layer, or of the sum of an ``outer``."""
    nodes = region.nodes
    if node.op == "transposed":
        return node.shape[1], nodes[node.args[1]].shape[1]
    return nodes[node.args[0]].shape[1], node.shape[1]


def is_product(region: Region, node: Node) -> bool:
    """Whether a layer has several features and several channels. Others are sums or products of vectors."""
    return min(matrix(region, node)) > 1


def is_layer(region: Region, node: Node) -> bool:
    """Whether a node is the product of a value per edge and a matrix of weights."""
    return node.op in ("linear", "transposed") and is_product(region, node)


def is_wide_row(node: Node) -> bool:
    """Whether a value that is read from memory is a wide row for each edge."""
    return node.space not in (Space.PARAMETER, Space.FEATURE) and node.shape[1] >= WIDE and node.dtype != BITS
