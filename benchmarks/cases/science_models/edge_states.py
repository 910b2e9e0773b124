"""Models with a state on every edge, and relational convolutions."""

import torch
from torch import Tensor, nn

from benchmarks.cases.science_models.row_sums import sum_rows

NUM_RELATIONS = 474
"""Relations of :class:`RelationalConvolution`, as many as knowledge graphs such as FB15k-237 have with inverses."""


class DMPNN(nn.Module):
    """Messages between directed bonds (https://arxiv.org/abs/1904.01561). Bonds `2k` and `2k + 1` are each other's
    reverse.
    """

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.start, self.step = nn.Linear(2 * channels, channels), nn.Linear(channels, channels)
        self.out = nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Takes `x` `[atoms, channels]`, `edge_index` `[2, bonds]`, and `edge_attr` `[bonds, channels]`."""
        source, destination = edge_index
        reverse = torch.arange(source.size(0), device=x.device) ^ 1
        first = self.start(torch.cat([x[source], edge_attr], dim=-1))
        state = first.relu()
        for _ in range(self.num_layers):
            received = sum_rows(state, destination, x.size(0))
            state = (first + self.step(received[source] - state[reverse])).relu()
        out: Tensor = self.out(torch.cat([x, sum_rows(state, destination, x.size(0))], dim=-1)).relu()
        return out


class GatedGCN(nn.Module):
    """Gated convolutions with a state on every edge and batch norms (https://arxiv.org/abs/1711.07553)."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedLayer(channels, nn.ReLU()) for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `edge_index` `[2, edges]`, and edge states `[edges, channels]`."""
        for layer in self.layers:
            x, edge_attr = layer(x, edge_index, edge_attr)
        return torch.cat([x, sum_rows(edge_attr, edge_index[1], x.size(0))], dim=-1)


class GatedLayer(nn.Module):
    """A gated convolution that updates the states of nodes and of edges.

    Args:
        channels: width of all states.
        activation: runs on both updates, after their batch norms.
    """

    def __init__(self, channels: int, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.own, self.other = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.gate_i, self.gate_j = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.gate_e = nn.Linear(channels, channels)
        self.norm_x, self.norm_e = nn.BatchNorm1d(channels), nn.BatchNorm1d(channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        """Takes `x` `[nodes, channels]`, `edge_index`, and `edge_attr` `[edges, channels]`; returns the next states."""
        source, destination = edge_index
        raw = self.gate_i(x)[destination] + self.gate_j(x)[source] + self.gate_e(edge_attr)
        gate = raw.sigmoid()
        weighted = sum_rows(gate * self.other(x)[source], destination, x.size(0))
        out = self.own(x) + weighted / (sum_rows(gate, destination, x.size(0)) + 1e-6)
        return x + self.activation(self.norm_x(out)), edge_attr + self.activation(self.norm_e(raw))


class RelationalConvolution(nn.Module):
    """Generalised relational convolutions (https://arxiv.org/abs/2106.06935) of many queries at once."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.relations = nn.ParameterList(torch.randn(NUM_RELATIONS, channels) for _ in range(num_layers))
        self.layers = nn.ModuleList(nn.Linear(2 * channels, channels) for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        """Takes `x` `[nodes, queries, channels]`, `edge_index`, and `edge_type` `[edges]`."""
        source, destination = edge_index
        for relation, layer in zip(self.relations, self.layers, strict=True):
            received = sum_rows(x[source] * relation[edge_type].unsqueeze(1), destination, x.size(0))
            x = x + layer(torch.cat([x, received], dim=-1)).relu()
        return x
