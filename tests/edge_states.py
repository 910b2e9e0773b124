"""Models with a state on every edge, for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHANNELS = 40


def total(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Sums rows by index."""
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_add(0, index, rows)


class Centred(nn.Module):
    """States of edges that grow by what a layer, centred over all edges, makes of them.

    The gradient of a layer needs sums of all edges first. That of a state is the gradient of the next state plus what
    the layer's region gives.
    """

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(CHANNELS) + 0.5)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        for layer in self.layers:
            raw = layer(e) + x[source]
            x = x + total(raw.sigmoid(), destination, x.size(0))
            e = e + ((raw - raw.sum(0) / (raw.size(0) + 1)) * self.scale).relu()
        return torch.cat([x, total(e, destination, x.size(0))], dim=1)
