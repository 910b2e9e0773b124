"""Models of molecules with tensors on the atoms: matrices, and products with spherical harmonics."""

import math

import torch
from torch import Tensor, nn

from benchmarks.cases.science_models.radial import cosine_cutoff, polynomial_cutoff, radial_basis, sine_basis
from benchmarks.cases.science_models.row_sums import sum_rows

NUM_ORDERS = 4
"""Orders of the spherical harmonics of :class:`MACE`: l = 0, 1, 2 and 3, with 2l + 1 components each."""

NUM_BESSEL = 8
"""Radial functions of :class:`MACE`."""

AVERAGE_DEGREE = 30.0
"""Sums over neighbours are divided by this number in :class:`MACE`."""

RADIAL_CHANNELS = 64
"""Width of the hidden layers of the radial network of :class:`MACE`."""


class TensorNet(nn.Module):
    """A matrix per atom and channel (https://arxiv.org/abs/2306.06482), whose parts transform as l = 0, 1 and 2.

    The matrices start as sums over the edges. The output is the squared norm of the three parts of the last ones.
    """

    def __init__(self, channels: int, num_layers: int, num_functions: int = 32, cutoff: float = 5.0) -> None:
        super().__init__()
        self.num_functions, self.cutoff = num_functions, cutoff
        self.start = nn.Linear(num_functions, 3 * channels)
        self.layers = nn.ModuleList(_MatrixLayer(channels, num_functions) for _ in range(num_layers))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `pos` `[nodes, 3]` and `edge_index`; returns `[nodes, 3 * channels]`."""
        source, destination = edge_index
        away = pos[source] - pos[destination]
        distance = away.square().sum(-1).add(1e-6).sqrt()
        basis = radial_basis(distance, self.num_functions, self.cutoff)
        weight = cosine_cutoff(distance, self.cutoff).unsqueeze(-1)
        factors = (self.start(basis) * weight).unflatten(-1, (3, -1))
        parts = _matrices_along(away / distance.unsqueeze(-1))
        matrices = sum_rows(_weighted(parts, factors) * x[source][:, None, None], destination, x.size(0))
        for layer in self.layers:
            matrices = layer(matrices, edge_index, basis, weight)
        return torch.cat([part.square().sum((1, 2)) for part in _decomposed(matrices)], dim=-1)


class _MatrixLayer(nn.Module):
    def __init__(self, channels: int, num_functions: int) -> None:
        super().__init__()
        widths = (num_functions, channels, 2 * channels, 3 * channels)
        linears = [nn.Linear(widths[k], widths[k + 1]) for k in range(3)]
        self.radial = nn.Sequential(*(module for linear in linears for module in (linear, nn.SiLU())))
        self.before = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.after = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(3))

    def forward(self, matrices: Tensor, edge_index: Tensor, basis: Tensor, weight: Tensor) -> Tensor:
        source, destination = edge_index
        matrices = _normalised(matrices)
        parts = [mix(part) for mix, part in zip(self.before, _decomposed(matrices), strict=True)]
        factors = (self.radial(basis) * weight).unflatten(-1, (3, -1))
        message = _weighted([part[source] for part in parts], factors)
        received = sum_rows(message, destination, matrices.size(0))
        own = parts[0] + parts[1] + parts[2]
        products = _normalised(_product(own, received) + _product(received, own))
        parts = [mix(part) for mix, part in zip(self.after, _decomposed(products), strict=True)]
        change = parts[0] + parts[1] + parts[2]
        next_matrices: Tensor = matrices + change + _product(change, change)
        return next_matrices


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the products of the matrices of each channel, `[nodes, 3, 3, channels]`."""
    return torch.einsum("nijc,njkc->nikc", left, right)


def _normalised(matrices: Tensor) -> Tensor:
    """Returns the matrices divided by one plus their squared norm."""
    return matrices / (matrices.square().sum((1, 2), keepdim=True) + 1)


def _decomposed(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits matrices `[nodes, 3, 3, channels]` into multiples of one, antisymmetric, and symmetric without a trace."""
    eye = torch.eye(3, device=matrices.device, dtype=matrices.dtype).unsqueeze(-1)
    identity = (matrices * eye).sum((1, 2), keepdim=True) / 3 * eye
    transposed = matrices.transpose(1, 2)
    antisymmetric = (matrices - transposed) / 2
    return identity, antisymmetric, (matrices + transposed) / 2 - identity


def _matrices_along(unit: Tensor) -> list[Tensor]:
    """Returns the three parts that unit vectors `[edges, 3]` give: each `[edges or 1, 3, 3, 1]`."""
    eye = torch.eye(3, device=unit.device, dtype=unit.dtype)
    x, y, z = unit.unbind(-1)
    zero = torch.zeros_like(x)
    antisymmetric = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).view(-1, 3, 3)
    outer = unit.unsqueeze(-1) * unit.unsqueeze(-2)
    symmetric = outer - (unit.square().sum(-1) / 3)[:, None, None] * eye
    return [part.unsqueeze(-1) for part in (eye.unsqueeze(0), antisymmetric, symmetric)]


def _weighted(parts: list[Tensor], factors: Tensor) -> Tensor:
    """Returns the sum of three parts, each times its factor: `factors` is `[edges, 3, channels]`."""
    first, second, third = (part * factors[:, k, None, None] for k, part in enumerate(parts))
    return first + second + third


class MACE(nn.Module):
    """Interactions of higher order (https://arxiv.org/abs/2206.07697), in plain torch without e3nn.

    The states of the atoms are scalars, as in MACE's smallest published models. Elements are left out: all atoms share
    their weights. Of the products of third order those are kept whose coupling is a plain sum.
    """

    def __init__(self, channels: int, num_layers: int, cutoff: float = 5.0) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.layers = nn.ModuleList(_HarmonicLayer(channels) for _ in range(num_layers))
        for module in self.modules():
            if isinstance(module, nn.Linear):  # values of unit variance stay so, and products of three do not vanish
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        """Takes `x` `[nodes, channels]`, `pos` `[nodes, 3]` and `edge_index`."""
        away = pos[edge_index[0]] - pos[edge_index[1]]
        distance = away.square().sum(-1).add(1e-6).sqrt()
        harmonics = spherical_harmonics(away / distance.unsqueeze(-1))
        weight = polynomial_cutoff(distance, self.cutoff)
        basis = sine_basis(distance, NUM_BESSEL, self.cutoff) * weight.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, edge_index, basis, harmonics)
        return x


class _HarmonicLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.before, self.skip = nn.Linear(channels, channels, bias=False), nn.Linear(channels, channels, bias=False)
        widths = (NUM_BESSEL, RADIAL_CHANNELS, RADIAL_CHANNELS, RADIAL_CHANNELS)
        hidden = [module for k in range(3) for module in (nn.Linear(widths[k], widths[k + 1], bias=False), nn.SiLU())]
        self.radial = nn.Sequential(*hidden, nn.Linear(RADIAL_CHANNELS, NUM_ORDERS * channels, bias=False))
        self.after = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in range(NUM_ORDERS))
        self.out = nn.Linear((1 + 2 * NUM_ORDERS) * channels, channels, bias=False)
        orders = torch.arange(NUM_ORDERS)
        self.register_buffer("order", orders.repeat_interleave(2 * orders + 1), persistent=False)

    def forward(self, x: Tensor, edge_index: Tensor, basis: Tensor, harmonics: Tensor) -> Tensor:
        source, destination = edge_index
        weights = self.radial(basis).unflatten(-1, (NUM_ORDERS, -1))[:, self.order]
        message = self.before(x)[source].unsqueeze(1) * weights * harmonics.unsqueeze(-1)
        received = sum_rows(message, destination, x.size(0)) / AVERAGE_DEGREE
        orders = received.split([2 * order + 1 for order in range(NUM_ORDERS)], dim=1)
        mixed = [linear(part) for linear, part in zip(self.after, orders, strict=True)]
        first = mixed[0].squeeze(1)
        second = [part.square().sum(1) for part in mixed]
        products = torch.cat([first, *second, *(first * squares for squares in second)], dim=-1)
        out: Tensor = self.skip(x) + self.out(products)
        return out


def spherical_harmonics(unit: Tensor) -> Tensor:
    """Returns the real spherical harmonics of unit vectors `[edges, 3]` for l = 0 to 3: `[edges, 16]`.

    The squares of one order's components sum to 2l + 1.
    """
    x, y, z = unit.unbind(-1)
    xx, yy, zz = x * x, y * y, z * z
    first = [math.sqrt(3) * part for part in (y, z, x)]
    second = [
        math.sqrt(15) * x * y,
        math.sqrt(15) * y * z,
        math.sqrt(5) / 2 * (2 * zz - xx - yy),
        math.sqrt(15) * x * z,
        math.sqrt(15) / 2 * (xx - yy),
    ]
    third = [
        math.sqrt(35 / 8) * y * (3 * xx - yy),
        math.sqrt(105) * x * y * z,
        math.sqrt(21 / 8) * y * (4 * zz - xx - yy),
        math.sqrt(7) / 2 * z * (2 * zz - 3 * xx - 3 * yy),
        math.sqrt(21 / 8) * x * (4 * zz - xx - yy),
        math.sqrt(105) / 2 * z * (xx - yy),
        math.sqrt(35 / 8) * x * (xx - 3 * yy),
    ]
    return torch.stack([torch.ones_like(x), *first, *second, *third], dim=-1)
