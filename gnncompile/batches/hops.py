"""Hop prefixes of a sampled mini-batch: the seeds, then the sources of their edges, and so on hop by hop.

A sampler numbers nodes in the order in which it finds them, and edges are sorted by destination. So a layer whose
first `n` output rows are read needs only a prefix of the edges and a prefix of the sources. Both prefixes grow with
each earlier layer. PyG's ``trim_to_layer`` trims by the same idea.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 4
"""The most hop prefixes that are found; at most this many layers skip rows that nothing reads."""


class HopPrefix(NamedTuple):
    """The first `nodes` nodes are the destinations of the first `edges` edges, whose sources are all among the first
    `sources` nodes.
    """

    nodes: int
    edges: int
    sources: int


def hop_prefixes(edge_index: Tensor, seeds: int, num_nodes: int) -> tuple[HopPrefix, ...]:
    """Returns the hop prefixes, seeds first. The nodes of each hop prefix are the sources of the previous hop prefix.

    Args:
        edge_index: ``[2, num_edges]``, sorted by destination.
        seeds: The number of seed nodes, which come first.
        num_nodes: The number of all nodes.
    """
    row, col = edge_index
    found: list[HopPrefix] = []
    nodes = seeds
    while len(found) < MOST and nodes < num_nodes:
        edges = int(torch.searchsorted(col, nodes))
        sources = max(nodes, int(row[:edges].max()) + 1 if edges else 0)
        if sources == nodes:
            break
        found.append(HopPrefix(nodes, edges, sources))
        nodes = sources
    return tuple(found)
