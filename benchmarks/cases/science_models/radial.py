"""Functions of distances: radial bases, and weights that end at a cutoff."""

import math

import torch
from torch import Tensor


def radial_basis(distance: Tensor, num_functions: int, cutoff: float) -> Tensor:
    """Returns Gaussians of distances `[edges]` around equally spaced centres: `[edges, num_functions]`."""
    centres = torch.linspace(0, cutoff, num_functions, device=distance.device, dtype=distance.dtype)
    return torch.exp(-((distance.unsqueeze(-1) - centres) ** 2) * (num_functions / cutoff) ** 2 / 2)


def cosine_cutoff(distance: Tensor, cutoff: float) -> Tensor:
    """Returns a weight that falls from 1 at distance 0 to 0 at the cutoff."""
    return 0.5 * (torch.cos(distance * (math.pi / cutoff)) + 1) * (distance < cutoff)


def sine_basis(distance: Tensor, num_functions: int, cutoff: float) -> Tensor:
    r"""Returns spherical Bessel functions of order 0, `[edges, num_functions]` (https://arxiv.org/abs/2003.03123).

    They are :math:`\sqrt{2 / c} \, \sin(n \pi d / c) / d` for a distance :math:`d` and a cutoff :math:`c`.
    """
    frequency = torch.arange(1, num_functions + 1, device=distance.device, dtype=distance.dtype) * (math.pi / cutoff)
    return math.sqrt(2 / cutoff) * torch.sin(distance.unsqueeze(-1) * frequency) / distance.unsqueeze(-1)


def polynomial_cutoff(distance: Tensor, cutoff: float) -> Tensor:
    r"""Returns a weight that falls from 1 at distance 0 to 0 at the cutoff, as smooth as a polynomial of degree 8 is.

    DimeNet's envelope (https://arxiv.org/abs/2003.03123) is :math:`1 - 28 x^6 + 48 x^7 - 21 x^8`. Here it is written
    as :math:`(1 - x)^3 (1 + 3 x + 6 x^2 + 10 x^3 + 15 x^4 + 21 x^5)`, whose terms do not cancel near the cutoff.
    """
    x = distance / cutoff
    rest = 1 + x * (3 + x * (6 + x * (10 + x * (15 + x * 21))))
    return (1 - x).clamp(min=0) ** 3 * rest
