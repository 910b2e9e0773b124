"""Models with messages between edges: two edges that meet at a node are a triplet of nodes."""

import torch
from torch import Tensor, nn

from benchmarks.cases.science_models.edge_states import GatedLayer
from benchmarks.cases.science_models.radial import polynomial_cutoff, sine_basis
from benchmarks.cases.science_models.row_sums import sum_rows

NUM_RADIAL, NUM_SPHERICAL = 6, 7
"""Functions of the distance, and of the angle, of :class:`DimeNetPlusPlus`."""

BASIS_CHANNELS = 8
"""Width between the two linear layers of a basis of :class:`DimeNetPlusPlus`."""


def triplets(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns pairs of edges that meet: for each edge from j to i, all edges from a node k other than i to j.

    Args:
        edge_index: sources and destinations, `[2, num_edges]`, int64.
        num_nodes: the number of nodes.

    Returns:
        `idx_kj` and `idx_ji`, `[num_triplets]`, int64: the indices of the first and of the second edge. `idx_ji` is
        sorted.
    """
    source, destination = edge_index
    by_destination = destination.argsort(stable=True)
    degree = torch.bincount(destination, minlength=num_nodes)
    start = degree.cumsum(0) - degree
    count = degree[source]
    idx_ji = torch.arange(source.numel()).repeat_interleave(count)
    position = torch.arange(idx_ji.numel()) - (count.cumsum(0) - count)[idx_ji]
    idx_kj = by_destination[start[source][idx_ji] + position]
    kept = source[idx_kj] != destination[idx_ji]
    return idx_kj[kept], idx_ji[kept]


class DimeNetPlusPlus(nn.Module):
    """Messages between directed edges, by distances and angles (https://arxiv.org/abs/2011.14115).

    Each angle's basis is a product of Legendre polynomials and spherical Bessel functions of order 0. The paper
    (https://arxiv.org/abs/2003.03123) has Bessel functions of the polynomial's order there, at the same cost per layer.
    """

    def __init__(self, channels: int, num_layers: int, cutoff: float = 5.0) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.start = nn.Sequential(nn.Linear(2 * channels + NUM_RADIAL, channels), nn.SiLU())
        self.layers = nn.ModuleList(_Interaction(channels) for _ in range(num_layers))
        self.weight = nn.Linear(NUM_RADIAL, channels, bias=False)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, idx_kj: Tensor, idx_ji: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `pos` `[nodes, 3]`, `edge_index` and :func:`triplets`."""
        source, destination = edge_index
        away = pos[source] - pos[destination]
        distance = away.square().sum(-1).add(1e-6).sqrt()
        radial = sine_basis(distance, NUM_RADIAL, self.cutoff)
        radial = radial * polynomial_cutoff(distance, self.cutoff).unsqueeze(-1)
        unit = away / distance.unsqueeze(-1)
        cosine = -(unit[idx_kj] * unit[idx_ji]).sum(-1)
        spherical = (legendre(cosine, NUM_SPHERICAL).unsqueeze(2) * radial[idx_kj].unsqueeze(1)).flatten(1)
        message = self.start(torch.cat([x[destination], x[source], radial], dim=-1))
        for layer in self.layers:
            message = layer(message, radial, spherical, idx_kj, idx_ji)
        return sum_rows(message * self.weight(radial), destination, x.size(0))


def legendre(cosine: Tensor, num_orders: int) -> Tensor:
    """Returns the Legendre polynomials of orders 0 to `num_orders - 1`, at least 2: `[triplets, num_orders]`."""
    found = [torch.ones_like(cosine), cosine]
    for order in range(2, num_orders):
        found.append(((2 * order - 1) * cosine * found[-1] - (order - 1) * found[-2]) / order)
    return torch.stack(found, dim=-1)


class _Interaction(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()

        def dense(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(inputs, outputs), nn.SiLU())

        def basis(functions: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(functions, BASIS_CHANNELS, bias=False), nn.Linear(BASIS_CHANNELS, outputs, bias=False)
            )

        self.own, self.other = dense(channels, channels), dense(channels, channels)
        self.down, self.up = dense(channels, channels // 2), dense(channels // 2, channels)
        self.radial = basis(NUM_RADIAL, channels)
        self.spherical = basis(NUM_RADIAL * NUM_SPHERICAL, channels // 2)
        self.join = dense(channels, channels)
        self.residuals = nn.ModuleList(
            nn.Sequential(dense(channels, channels), dense(channels, channels)) for _ in range(3)
        )

    def forward(self, message: Tensor, radial: Tensor, spherical: Tensor, idx_kj: Tensor, idx_ji: Tensor) -> Tensor:
        other = self.down(self.other(message) * self.radial(radial))
        met = sum_rows(other[idx_kj] * self.spherical(spherical), idx_ji, message.size(0))
        new = self.own(message) + self.up(met)
        new = new + self.residuals[0](new)
        message = message + self.join(new)
        for residual in self.residuals[1:]:
            message = message + residual(message)
        return message


class ALIGNN(nn.Module):
    """Gated convolutions on a line graph and on its graph (https://arxiv.org/abs/2106.01829).

    The nodes of the line graph are the edges of the graph, and its edges are the graph's triplets, with a state each.
    """

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.bonds = nn.ModuleList(GatedLayer(channels, nn.SiLU()) for _ in range(num_layers))
        self.atoms = nn.ModuleList(GatedLayer(channels, nn.SiLU()) for _ in range(num_layers))

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, line_index: Tensor, angle_attr: Tensor
    ) -> Tensor:
        """Returns the next states of the nodes and the sums of their edges' states, `[nodes, 2 * channels]`.

        Args:
            x: states of the nodes, `[nodes, channels]`.
            edge_index: sources and destinations, `[2, edges]`, int64.
            edge_attr: states of the edges, `[edges, channels]`.
            line_index: pairs of edges, `[2, triplets]`, int64, such as :func:`triplets` gives.
            angle_attr: states of the triplets, `[triplets, channels]`.
        """
        for bonds, atoms in zip(self.bonds, self.atoms, strict=True):
            edge_attr, angle_attr = bonds(edge_attr, line_index, angle_attr)
            x, edge_attr = atoms(x, edge_index, edge_attr)
        met = sum_rows(angle_attr, line_index[1], edge_attr.size(0))
        return torch.cat([x, sum_rows(edge_attr + met, edge_index[1], x.size(0))], dim=-1)
