"""Gradients of edge states that a residual adds to are added in the walks that make them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.ir.region import Region, Space
from tests.edge_layers import compare, double, run
from tests.harness import kernels
from tests.triton_regions import GENERATORS, home

pytestmark = triton_regions.INTERPRETED

CHANNELS = 16
GRAPHS = {
    "random": torch.tensor([[0, 3, 1, 4, 2, 0, 3, 3], [1, 0, 2, 2, 4, 4, 1, 1]]),  # an edge twice
    "hub": torch.stack([torch.arange(30) % 5, torch.full((30,), 2)]),
    "one edge": torch.tensor([[4], [0]]),
    "no edge": torch.empty(2, 0, dtype=torch.int64),
}


class _Gated(nn.Module):
    """Layers with a state per edge, to which each adds a normed value; the mean of its last state is read as well."""

    def __init__(self, channels: int = CHANNELS, layers: int = 2) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(channels, channels) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, destination = edge_index
        for gate, norm in zip(self.gates, self.norms, strict=True):
            raw = x[source] - x[destination] + gate(edge_attr)
            x = x + torch.zeros_like(x).index_add(0, destination, raw.sigmoid() * x[source])
            edge_attr = edge_attr + norm(raw).relu()
        return torch.zeros_like(x).index_add(0, destination, edge_attr) + x


def _added(regions: list[Region]) -> list[int]:
    """How many outputs per edge of each region are sums with an input per edge that has no other use."""
    return [
        sum(
            region.per_edge(out)
            and region.nodes[out.node].op == "add"
            and any(
                region.nodes[a].op == "input" and region.nodes[a].space is Space.EDGE
                for a in region.nodes[out.node].args
            )
            for out in region.outputs
        )
        for region in regions
    ]


@pytest.mark.parametrize("which", GENERATORS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_gradients(graph: str, which: str):
    torch.manual_seed(0)
    device, edge_index = home(which), GRAPHS[graph].to(home(which))
    x, attr = ((torch.randn(n, CHANNELS, device=device) / 4).requires_grad_() for n in (5, edge_index.size(1)))
    model = _Gated().to(device)
    with kernels(which):
        regions = compare(model, x, edge_index, attr)
    assert any(_added(regions))


@pytest.mark.parametrize("which", GENERATORS)
def test_in_16_bits(which: str):
    """Sums are rounded once, so errors are no larger than those of eager."""
    torch.manual_seed(0)
    device, edge_index = home(which), GRAPHS["random"].to(home(which))
    model = _Gated().to(device, torch.bfloat16)
    x, attr = (torch.randn(n, CHANNELS, device=device).bfloat16().requires_grad_() for n in (5, edge_index.size(1)))
    exact = run(copy.deepcopy(model).double(), double(x), edge_index, double(attr))
    eager = run(model, x, edge_index, attr)
    with kernels(which):
        found = run(gnncompile.compile(model), x, edge_index, attr)
    for a, b, right in zip(found, eager, exact, strict=True):
        off, usual = (float((one.double() - right).norm()) for one in (a, b))
        assert off <= 1.5 * usual + 1e-2 * float(right.norm())


class _Looped(nn.Module):
    """Edges of nodes with themselves are masked out of the messages; their states still have gradients."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, destination = edge_index
        alive = (source != destination).unsqueeze(-1).to(x.dtype)
        messages = (edge_attr * 2).tanh() * x[source] * alive
        out = torch.zeros_like(x).index_add(0, destination, messages)
        return out + torch.zeros_like(x).index_add(0, source, edge_attr.sin())


@pytest.mark.parametrize("which", GENERATORS)
def test_states_of_edges_without_messages(which: str):
    device = home(which)
    edge_index = torch.tensor([[0, 1, 1, 2, 3, 3], [0, 1, 2, 3, 3, 1]], device=device)
    x, attr = (torch.randn(n, CHANNELS, device=device, requires_grad=True) for n in (5, 6))
    with kernels(which):
        compare(_Looped().to(device), x, edge_index, attr)
