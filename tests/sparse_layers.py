"""Layers that take the adjacency as a sparse matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    TransformerConv,
)

from gnncompile.support.case import CHANNELS

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(CHANNELS, 4),
    "GCN improved": lambda: GCNConv(CHANNELS, 4, improved=True),
    "GCN as it is": lambda: GCNConv(CHANNELS, 4, normalize=False),
    "SAGE mean": lambda: SAGEConv(CHANNELS, 4),
    "SAGE max": lambda: SAGEConv(CHANNELS, 4, aggr="max"),
    "SAGE min": lambda: SAGEConv(CHANNELS, 4, aggr="min"),
    "GIN": lambda: GINConv(nn.Linear(CHANNELS, 4)),
    "GAT": lambda: GATConv(CHANNELS, 4, heads=2),
    "GATv2": lambda: GATv2Conv(CHANNELS, 4),
    "Graph": lambda: GraphConv(CHANNELS, 4),
    "Transformer": lambda: TransformerConv(CHANNELS, 4),
}


class OfData(nn.Module):
    """A model that reads the adjacency matrix from a ``Data``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(CHANNELS, 4)

    def forward(self, data: Any) -> Tensor:
        return self.conv(data.x, data.adj_t)
