"""The parts of the suite's models that a formula or a symmetry determines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.cases.graphs import uniform
from benchmarks.cases.science_models import MACE, DimeNetPlusPlus, TensorNet, triplets
from benchmarks.cases.science_models.radial import polynomial_cutoff, sine_basis
from benchmarks.cases.science_models.tensors import spherical_harmonics
from benchmarks.cases.science_models.triplets import legendre


def directions(number: int) -> Tensor:
    """Random unit vectors, `[number, 3]`, float64."""
    torch.manual_seed(0)
    return torch.nn.functional.normalize(torch.randn(number, 3, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("num_edges", [0, 1, 40])
def test_triplets_are_all_pairs_of_edges_that_meet(num_edges: int) -> None:
    edge_index = uniform(7, num_edges)
    source, destination = edge_index.tolist()
    wanted = [
        (kj, ji)
        for ji in range(num_edges)
        for kj in range(num_edges)
        if destination[kj] == source[ji] and source[kj] != destination[ji]
    ]
    idx_kj, idx_ji = triplets(edge_index, 7)
    assert sorted(zip(idx_kj.tolist(), idx_ji.tolist(), strict=True)) == sorted(wanted)
    assert torch.equal(idx_ji, idx_ji.sort().values)


def test_radial_functions() -> None:
    x = torch.linspace(0.01, 1, 50, dtype=torch.float64)
    torch.testing.assert_close(polynomial_cutoff(5 * x, 5.0), 1 - 28 * x**6 + 48 * x**7 - 21 * x**8)
    assert polynomial_cutoff(torch.tensor([5.0, 7.0]), 5.0).tolist() == [0, 0]
    distance = torch.linspace(0, 5, 20_001, dtype=torch.float64)[1:]
    basis = sine_basis(distance, 4, 5.0) * distance.unsqueeze(-1)  # orthonormal, with the square of the distance
    torch.testing.assert_close(basis.t() @ basis * 5 / 20_000, torch.eye(4, dtype=torch.float64))


def test_legendre() -> None:
    x = torch.linspace(-1, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(legendre(x, 7), torch.from_numpy(np.polynomial.legendre.legvander(x.numpy(), 6)))


def test_spherical_harmonics_add_up_to_legendre_polynomials() -> None:
    """The addition theorem: it fails if one component has a wrong factor, or occurs twice."""
    first, second = directions(40).split(20)
    products = spherical_harmonics(first) * spherical_harmonics(second)
    found = torch.stack([part.sum(-1) for part in products.split([1, 3, 5, 7], dim=-1)], dim=-1)
    torch.testing.assert_close(found, legendre((first * second).sum(-1), 4) * torch.tensor([1, 3, 5, 7]))


@pytest.mark.parametrize("kind", [TensorNet, MACE, DimeNetPlusPlus])
def test_outputs_do_not_change_when_all_is_turned(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind(4, 2).double()
    x, pos, edge_index = torch.randn(9, 4).double(), 2 * torch.rand(9, 3).double(), uniform(9, 40)
    turn = torch.linalg.qr(torch.randn(3, 3).double()).Q
    more = triplets(edge_index, 9) if kind is DimeNetPlusPlus else ()
    out = model(x, pos, edge_index, *more)
    torch.testing.assert_close(model(x, pos @ turn, edge_index, *more), out)
    assert not torch.allclose(model(x, pos * torch.tensor([1, 1, 2]), edge_index, *more), out)
