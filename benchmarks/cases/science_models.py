"""Models of meshes, molecules and materials as their authors write them: layers and states on the edges.

Each is a stack of equal layers without an encoder and a decoder. All of them work on tensors; none has a loop over
edges. `forward` gives one tensor, with a row per node.
"""

import math

import torch
import torch.nn.functional as F
from gnncompile.models.mesh_graph_net import GraphNetBlock
from torch import Tensor, nn
from torch_geometric import nn as pyg

from benchmarks.cases.inputs import EDGE_DIM

NUM_RELATIONS = 474
"""Relations of :class:`RelationalConvolution`, as many as knowledge graphs such as FB15k-237 have with inverses."""


def _sum(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Returns sums of rows by index, `[num_rows, ...]`."""
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_add(0, index, rows)


class Processor(nn.Module):
    """The steps of a MeshGraphNet (https://arxiv.org/abs/2010.03409), without its encoder and decoder."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GraphNetBlock(channels) for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `edge_index` `[2, edges]`, and edge states `[edges, channels]`."""
        for block in self.blocks:
            x, edge_attr = block(x, edge_attr, edge_index)
        return torch.cat([x, _sum(edge_attr, edge_index[1], x.size(0))], dim=-1)


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
        received = _sum(message, destination, x.size(0))
        return x + self.node_mlp(torch.cat([x, received], dim=-1)), pos + 0.1 * _sum(step, destination, x.size(0))


def radial_basis(distance: Tensor, num_functions: int, cutoff: float) -> Tensor:
    """Returns Gaussians of distances `[edges]` around equally spaced centres: `[edges, num_functions]`."""
    centres = torch.linspace(0, cutoff, num_functions, device=distance.device, dtype=distance.dtype)
    return torch.exp(-((distance.unsqueeze(-1) - centres) ** 2) * (num_functions / cutoff) ** 2 / 2)


def cosine_cutoff(distance: Tensor, cutoff: float) -> Tensor:
    """Returns a weight that falls from 1 at distance 0 to 0 at the cutoff."""
    return 0.5 * (torch.cos(distance * (math.pi / cutoff)) + 1) * (distance < cutoff)


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
            x = x + after(_sum(message, destination, x.size(0)))
        return x


class PaiNN(nn.Module):
    """Messages of scalars and vectors (https://arxiv.org/abs/2102.03150)."""

    def __init__(self, channels: int, num_layers: int, num_functions: int = 20, cutoff: float = 5.0) -> None:
        super().__init__()
        self.num_functions, self.cutoff = num_functions, cutoff
        self.layers = nn.ModuleList(_VectorLayer(channels, num_functions) for _ in range(num_layers))

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


class _VectorLayer(nn.Module):
    def __init__(self, channels: int, num_functions: int) -> None:
        super().__init__()
        self.channels = channels
        self.message = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, 3 * channels))
        self.filter = nn.Linear(num_functions, 3 * channels)
        self.mix = nn.Linear(channels, 2 * channels, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * channels, channels), nn.SiLU(), nn.Linear(channels, 3 * channels))

    def forward(
        self, x: Tensor, vectors: Tensor, edge_index: Tensor, basis: Tensor, weight: Tensor, unit: Tensor
    ) -> tuple[Tensor, Tensor]:
        source, destination = edge_index
        message = self.message(x)[source] * (self.filter(basis) * weight)
        scalar, along, between = message.split(self.channels, dim=-1)
        moved = unit.unsqueeze(-1) * along.unsqueeze(1) + vectors[source] * between.unsqueeze(1)
        x = x + _sum(scalar, destination, x.size(0))
        vectors = vectors + _sum(moved, destination, x.size(0))
        left, right = self.mix(vectors).split(self.channels, dim=-1)
        length = right.square().sum(1).add(1e-6).sqrt()
        scale, inner, more = self.update(torch.cat([x, length], dim=-1)).split(self.channels, dim=-1)
        return x + more + inner * (left * right).sum(1), vectors + left * scale.unsqueeze(1)


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
            received = _sum(state, destination, x.size(0))
            state = (first + self.step(received[source] - state[reverse])).relu()
        out: Tensor = self.out(torch.cat([x, _sum(state, destination, x.size(0))], dim=-1)).relu()
        return out


class GatedGCN(nn.Module):
    """Gated convolutions with a state on every edge and batch norms (https://arxiv.org/abs/1711.07553)."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_GatedLayer(channels) for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `edge_index` `[2, edges]`, and edge states `[edges, channels]`."""
        for layer in self.layers:
            x, edge_attr = layer(x, edge_index, edge_attr)
        return torch.cat([x, _sum(edge_attr, edge_index[1], x.size(0))], dim=-1)


class _GatedLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.gate_i, self.gate_j = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.gate_e = nn.Linear(channels, channels)
        self.norm_x, self.norm_e = nn.BatchNorm1d(channels), nn.BatchNorm1d(channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        source, destination = edge_index
        raw = self.gate_i(x)[destination] + self.gate_j(x)[source] + self.gate_e(edge_attr)
        gate = raw.sigmoid()
        weighted = _sum(gate * self.other(x)[source], destination, x.size(0))
        out = self.own(x) + weighted / (_sum(gate, destination, x.size(0)) + 1e-6)
        return x + self.norm_x(out).relu(), edge_attr + self.norm_e(raw).relu()


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
            received = _sum(x[source] * relation[edge_type].unsqueeze(1), destination, x.size(0))
            x = x + layer(torch.cat([x, received], dim=-1)).relu()
        return x


class Stacked(nn.Module):
    """A stack of one of PyG's layers, with ReLU in between."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, and the further arguments of the layer."""
        for layer in self.layers:
            x = F.relu(layer(x, *more))
        return x


def cgcnn(channels: int, num_layers: int) -> nn.Module:
    """Crystal graph convolutions (https://arxiv.org/abs/1710.10324) with edge features."""
    return Stacked([pyg.CGConv(channels, dim=channels, batch_norm=True) for _ in range(num_layers)])


def edge_conv(channels: int, num_layers: int) -> nn.Module:
    """Edge convolutions (https://arxiv.org/abs/1801.07829) with two linear layers."""
    return Stacked(
        [
            pyg.EdgeConv(nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels)))
            for _ in range(num_layers)
        ]
    )


def nn_conv(channels: int, num_layers: int) -> nn.Module:
    """Layers whose weight is a function of the edge (https://arxiv.org/abs/1704.01212)."""

    def layer() -> nn.Module:
        weights = nn.Sequential(nn.Linear(EDGE_DIM, 32), nn.ReLU(), nn.Linear(32, channels * channels))
        made: nn.Module = pyg.NNConv(channels, channels, weights)
        return made

    return Stacked([layer() for _ in range(num_layers)])


def point_transformer(channels: int, num_layers: int) -> nn.Module:
    """Vector attention on points (https://arxiv.org/abs/2012.09164)."""

    def mlp(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, channels), nn.ReLU(), nn.Linear(channels, channels))

    return Stacked([pyg.PointTransformerConv(channels, channels, mlp(3), mlp(channels)) for _ in range(num_layers)])
