"""Hop prefixes of a sampled mini-batch: the seeds, the sources of their edges, the sources of edges to those, ...

Samplers number nodes in the order in which they find them, and edges are sorted by destination. A layer that computes
the first nodes needs only the first edges and the first of their sources: more of them for each earlier layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 4
"""The most hop prefixes that are followed: so many layers leave out rows that nothing reads."""


class HopPrefix(NamedTuple):
    """The first `nodes` nodes: their `edges` edges come first, and come from the first `sources` nodes."""

    nodes: int
    edges: int
    sources: int


def hop_prefixes(edge_index: Tensor, seeds: int, num_nodes: int) -> tuple[HopPrefix, ...]:
    """The hop prefixes that begin with the seeds: the nodes of each are the sources of the one before.

    Args:
        edge_index: ``[2, num_edges]``, sorted by destination.
        seeds: The number of seeds, which are the first nodes.
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
