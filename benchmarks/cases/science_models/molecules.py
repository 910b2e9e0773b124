"""Models of molecules from the positions of their atoms: states and vectors on the atoms."""

import torch
from gnncompile.models.painn import PaiNNLayer
from torch import Tensor, nn

from benchmarks.cases.science_models.radial import cosine_cutoff, radial_basis
from benchmarks.cases.science_models.row_sums import sum_rows


class EGNN(nn.Module):
    """Equivariant layers (https://arxiv.org/abs/2102.09844) that move positions as well."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_EquivariantLayer(channels) for _ in range(num_layers))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `pos` `[nodes, 3]` and `edge_index`."""
        for layer in self.layers:
            x, pos = layer(x, pos, edge_index)
        return torch.cat([x, pos], dim=-1)


class _EquivariantLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.edge_mlp = nn.Sequential(
            nn.Linear(2 * channels + 1, channels), nn.SiLU(), nn.Linear(channels, channels), nn.SiLU()
        )
        self.node_mlp = nn.Sequential(nn.Linear(2 * channels, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.move = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, 1, bias=False))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        source, destination = edge_index
        away = pos[destination] - pos[source]
        squared = (away * away).sum(-1, keepdim=True)
        message = self.edge_mlp(torch.cat([x[destination], x[source], squared], dim=-1))
        step = away / (squared + 1).sqrt() * self.move(message)
        received = sum_rows(message, destination, x.size(0))
        return x + self.node_mlp(torch.cat([x, received], dim=-1)), pos + 0.1 * sum_rows(step, destination, x.size(0))


class SchNet(nn.Module):
    """Continuous-filter convolutions (https://arxiv.org/abs/1706.08566); the filters come from distances."""

    def __init__(self, channels: int, num_layers: int, num_functions: int = 50, cutoff: float = 5.0) -> None:
        super().__init__()
        self.num_functions, self.cutoff = num_functions, cutoff
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(num_functions, channels), nn.Softplus(), nn.Linear(channels, channels))
            for _ in range(num_layers)
        )
        self.before = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(num_layers))
        self.after = nn.ModuleList(
            nn.Sequential(nn.Linear(channels, channels), nn.Softplus(), nn.Linear(channels, channels))
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `pos` `[nodes, 3]` and `edge_index`."""
        source, destination = edge_index
        distance = (pos[destination] - pos[source]).square().sum(-1).add(1e-6).sqrt()
        basis, weight = radial_basis(distance, self.num_functions, self.cutoff), cosine_cutoff(distance, self.cutoff)
        for filters, before, after in zip(self.filters, self.before, self.after, strict=True):
            message = before(x)[source] * (filters(basis) * weight.unsqueeze(-1))
            x = x + after(sum_rows(message, destination, x.size(0)))
        return x


class PaiNN(nn.Module):
    """Messages of scalars and vectors (https://arxiv.org/abs/2102.03150)."""

    def __init__(self, channels: int, num_layers: int, num_functions: int = 20, cutoff: float = 5.0) -> None:
        super().__init__()
        self.num_functions, self.cutoff = num_functions, cutoff
        self.layers = nn.ModuleList(PaiNNLayer(channels, num_functions) for _ in range(num_layers))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `pos` `[nodes, 3]` and `edge_index`."""
        away = pos[edge_index[0]] - pos[edge_index[1]]
        distance = away.square().sum(-1).add(1e-6).sqrt()
        unit = away / distance.unsqueeze(-1)
        basis, weight = radial_basis(distance, self.num_functions, self.cutoff), cosine_cutoff(distance, self.cutoff)
        vectors = x.new_zeros(x.size(0), 3, x.size(1))
        for layer in self.layers:
            x, vectors = layer(x, vectors, edge_index, basis, weight.unsqueeze(-1), unit)
        return torch.cat([x, vectors.flatten(1)], dim=-1)
