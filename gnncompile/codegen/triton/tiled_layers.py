"""Shapes and types of the layers of a tiled region."""

from __future__ import annotations

from collections.abc import Iterable

from gnncompile.codegen.triton.tile import padded
from gnncompile.ir.region import BITS, Node, Region, Space

WIDE = 32
"""Fewest channels of a row that counts as wide. Several threads may load a number of a narrower row."""


def matrix(region: Region, node: Node) -> tuple[int, int]:
    """Returns the rows and columns of the weights of a layer, or of the sum of an ``outer``."""
    nodes = region.nodes
    if node.op == "transposed":
        return node.shape[1], nodes[node.args[1]].shape[1]
    return nodes[node.args[0]].shape[1], node.shape[1]


def padded_matrix(size: tuple[int, int]) -> tuple[int, int]:
    """Returns the rows and columns of a block that is multiplied and holds a matrix of weights."""
    return padded(size[0]), padded(size[1])


def is_product(region: Region, node: Node) -> bool:
    """Whether a layer has several features and several channels. Others are sums or products of vectors."""
    return min(matrix(region, node)) > 1


def is_layer(region: Region, node: Node) -> bool:
    """Whether a node is the product of a value per edge and a matrix of weights."""
    return node.op in ("linear", "transposed") and is_product(region, node)


def counts_edges(region: Region, i: int) -> bool:
    """Whether a value is 1 for each edge, so that a sum over all edges weighted by it is a plain sum."""
    node = region.nodes[i]
    return node.op == "on_edges" and region.nodes[node.args[0]].is_one


def layers_of_summed(region: Region, i: int, computed: Iterable[int]) -> list[int]:
    """Returns the layers that read the value which a plain sum over all edges adds up, if a product may add it up.

    These layers have brought the value into shared memory, where a product with ones adds it up as well. Any other sum
    moves numbers between the threads of all rows. A product rounds the value to the type of factors, which is
    bfloat16: float16 would lose gradients that are very small.

    Args:
        region: The tiled region.
        i: The sum, a node ``outer``.
        computed: The nodes of one walk, or of all walks.
    """
    features, value = region.nodes[i].args
    if region.factor != "bfloat16" or not counts_edges(region, features):
        return []
    if region.nodes[value].space in (Space.PARAMETER, Space.FEATURE):
        return []
    nodes = region.nodes
    return [n for n in computed if is_layer(region, nodes[n]) and nodes[n].args[0] == value]


def is_wide_row(node: Node) -> bool:
    """Whether a value that is read from memory is a wide row for each edge."""
    return node.space not in (Space.PARAMETER, Space.FEATURE) and node.shape[1] >= WIDE and node.dtype != BITS
