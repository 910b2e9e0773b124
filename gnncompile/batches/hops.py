"""Of a sampled mini-batch, which nodes come first: the seeds, what their edges come from, what that is made of, ...

Samplers number nodes in the order in which they find them, and edges are sorted by destination. So what a layer needs
for the first nodes are a front of the edges, and of the nodes: a larger one for each layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 4
"""Fronts of edges, at most: for as many layers as this rows that nothing reads are left out."""


class Front(NamedTuple):
    """The first `nodes` nodes: their `edges` edges come first, and come from the first `sources` nodes."""

    nodes: int
    edges: int
    sources: int


def fronts(edge_index: Tensor, seeds: int, num_nodes: int) -> tuple[Front, ...]:
    """The fronts around the first nodes, each the sources of the one before.

    Args:
        edge_index: ``[2, num_edges]``, sorted by destination.
        seeds: How many nodes the first front has.
        num_nodes: How many there are.
    """
    row, col = edge_index
    found: list[Front] = []
    nodes = seeds
    while len(found) < MOST and nodes < num_nodes:
        edges = int(torch.searchsorted(col, nodes))
        sources = max(nodes, int(row[:edges].max()) + 1 if edges else 0)
        if sources == nodes:
            break
        found.append(Front(nodes, edges, sources))
        nodes = sources
    return tuple(found)
