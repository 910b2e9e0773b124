"""Energies and forces of molecules, from messages of scalars and vectors."""

import math

import torch
from torch import Tensor, nn


def _sum(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Returns sums of rows by index, `[num_rows, ...]`."""
    return rows.new_zeros(num_rows, *rows.shape[1:]).index_add(0, index, rows)


class PaiNNLayer(nn.Module):
    r"""One interaction of a :class:`PaiNN`: a message with equivariant filters, and an update per atom.

    With the unit vector :math:`\hat{\mathbf{r}}_{ij}` and the filter :math:`\mathbf{w}_{ij}` of an edge, the message
    is, for three parts of :math:`\mathbf{m}_{ij} = \mathrm{MLP}(\mathbf{x}_j) \odot \mathbf{w}_{ij}`,

    .. math::
        \mathbf{x}^{\prime}_i &= \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \mathbf{m}^{(1)}_{ij}

        \vec{\mathbf{v}}^{\,\prime}_i &= \vec{\mathbf{v}}_i + \sum_{j \in \mathcal{N}(i)} \left(
        \hat{\mathbf{r}}_{ij} \, \mathbf{m}^{(2)}_{ij} + \vec{\mathbf{v}}_j \odot \mathbf{m}^{(3)}_{ij} \right)

    Args:
        channels: width of the scalars and of the vectors.
        num_radial: width of the radial basis.
    """

    def __init__(self, channels: int, num_radial: int) -> None:
        super().__init__()
        self.channels = channels
        self.message = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, 3 * channels))
        self.filter = nn.Linear(num_radial, 3 * channels)
        self.mix = nn.Linear(channels, 2 * channels, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * channels, channels), nn.SiLU(), nn.Linear(channels, 3 * channels))

    def forward(
        self, x: Tensor, vectors: Tensor, edge_index: Tensor, basis: Tensor, weight: Tensor, unit: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the next scalars and vectors.

        Args:
            x: scalars, `[num_nodes, channels]`.
            vectors: vectors, `[num_nodes, 3, channels]`.
            edge_index: sources and destinations, `[2, num_edges]`, int64.
            basis: radial basis of the distance, `[num_edges, num_radial]`.
            weight: weight of the edge, 0 from the cutoff on, `[num_edges, 1]`.
            unit: unit vector along the edge, `[num_edges, 3]`.

        Returns:
            The next scalars and vectors, of the same shapes.
        """
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


class PaiNN(nn.Module):
    r"""The network of `"Equivariant Message Passing for the Prediction of Tensorial Properties and Molecular Spectra"
    <https://arxiv.org/abs/2102.03150>`_ (Schütt et al., 2021), for energies and forces.

    The energy is a sum over atoms. The forces are its negative gradient, taken inside of `forward`:

    .. math::
        \mathbf{F}_i = -\frac{\partial E}{\partial \mathbf{r}_i}

    In training mode the forces may be part of the loss. In eval mode energies and forces have no history, so that
    they are computed in less memory; `torch.no_grad` around the call does no harm.

    Args:
        hidden_channels: width of the scalars and of the vectors.
        num_layers: number of interactions.
        num_radial: number of radial functions.
        cutoff: distance from which on two atoms do not interact, in units of the positions.
        num_elements: the largest atomic number plus one.
    """

    frequencies: Tensor

    def __init__(
        self,
        hidden_channels: int,
        num_layers: int,
        num_radial: int = 20,
        cutoff: float = 5.0,
        num_elements: int = 100,
    ) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.embedding = nn.Embedding(num_elements, hidden_channels)
        self.layers = nn.ModuleList(PaiNNLayer(hidden_channels, num_radial) for _ in range(num_layers))
        self.out = nn.Sequential(nn.Linear(hidden_channels, hidden_channels), nn.SiLU(), nn.Linear(hidden_channels, 1))
        self.register_buffer("frequencies", torch.arange(1, num_radial + 1) * (math.pi / cutoff))

    def forward(
        self, z: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Computes the energy of each molecule and the force on each atom.

        Args:
            z: atomic numbers, `[num_nodes]`, int64.
            pos: positions, `[num_nodes, 3]`. They are detached: no gradient of a loss reaches them.
            edge_index: sources and destinations, `[2, num_edges]`, int64, such as all pairs closer than the cutoff.
            batch: the molecule of each atom, `[num_nodes]`, int64.
            batch_size: number of molecules.

        Returns:
            Energies, `[batch_size]`, and forces, `[num_nodes, 3]`.
        """
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            energy = self.energy(z, pos, edge_index, batch, batch_size)
            (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy if self.training else energy.detach(), -gradient

    def energy(self, z: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        """Returns the energies, `[batch_size]`. The arguments are those of `forward`."""
        away = pos[edge_index[0]] - pos[edge_index[1]]
        distance = away.square().sum(-1, keepdim=True).add(1e-6).sqrt()  # no square root of 0, whose slope is infinite
        unit, basis = away / distance, torch.sin(distance * self.frequencies) / distance
        weight = 0.5 * (torch.cos(distance * (math.pi / self.cutoff)) + 1) * (distance < self.cutoff)
        x = self.embedding(z)
        vectors = x.new_zeros(x.size(0), 3, x.size(1))
        for layer in self.layers:
            x, vectors = layer(x, vectors, edge_index, basis, weight, unit)
        return _sum(self.out(x).squeeze(-1), batch, batch_size)
