"""Lengths, directions and cutoffs of edges are computed once, and regions read them: eager's numbers and gradients."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, fx, nn

import gnncompile
from gnncompile.ir.region import Region, Space, parse
from gnncompile.passes.analysis import own
from tests.graphs import EDGE_LISTS
from tests.harness import light, look_at_graphs, same_gradients

which = triton_regions.which

CHANNELS = 40
FULL = "unsorted, duplicates, hub"


class Filters(nn.Module):
    """Sums rows of neighbours, scaled by a cutoff of their distance, and vectors towards them.

    Args:
        kind: What the rows are scaled by.
        learned: Whether positions are a parameter, so that distances have a gradient.
    """

    def __init__(self, kind: str, learned: bool = False) -> None:
        super().__init__()
        pos = torch.randn(5, 3)
        if learned:
            self.pos = nn.Parameter(pos)
        else:
            self.register_buffer("pos", pos)
        self.layer, self.kind = nn.Linear(CHANNELS, CHANNELS), kind

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, destination = edge_index
        away = self.pos[source] - self.pos[destination]
        distance = away.square().sum(-1).add(1e-6).sqrt()
        rows = self.layer(x)[source]
        if self.kind == "cutoff":
            weight = 0.5 * ((distance * (math.pi / 3)).cos() + 1) * (distance < 3).to(x.dtype)
            rows = rows * weight.unsqueeze(-1)
        elif self.kind == "direction":
            rows = rows.unsqueeze(1) * (away / distance.unsqueeze(-1)).unsqueeze(-1)
        elif self.kind == "written in place":
            weight = distance.cos() * (-distance).exp()
            weight.mul_(2)
            rows = rows * weight.view(-1, 1)
        elif self.kind == "dot product":
            rows = rows * (x[source] * x[destination]).sum(-1, keepdim=True).cos().exp().tanh()
        else:
            rows = rows * distance.view(-1, 1)
        return x.new_zeros(x.size(0), *rows.shape[1:]).index_add(0, destination, rows)


def narrow_inputs(region: Region) -> list[tuple[int, int]]:
    """Returns the shapes of the values of a few numbers per edge that a region reads."""
    return [n.shape for n in region.inputs if n.space is Space.EDGE and math.prod(n.shape) <= 4]


@triton_regions.INTERPRETED
@pytest.mark.parametrize("edges", EDGE_LISTS)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("kind", ["cutoff", "direction", "distance", "dot product", "written in place"])
def test_gradients(kind: str, learned: bool, edges: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(0)
    model = Filters(kind, learned).to(device, torch.float64)
    x = torch.randn(5, CHANNELS, dtype=torch.float64, device=device)
    other = copy.deepcopy(model)
    same_gradients(model, (other, gnncompile.compile(other)), x, EDGE_LISTS[edges].to(device))


@pytest.mark.parametrize(
    "kind, learned, read",
    [
        ("cutoff", False, [(1, 1)]),
        ("direction", False, [(3, 1)]),
        ("distance", False, []),  # a walk computes it while it waits for rows
        ("cutoff", True, []),  # its gradient would be stored as well
        ("dot product", False, []),  # a walk reads the rows of both ends in any case
    ],
)
@pytest.mark.parametrize("trains", [False, True])
def test_what_regions_read(
    kind: str, learned: bool, read: list[tuple[int, int]], trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def regions(graph: fx.Graph) -> list[Region]:
        return [parse(node.args[2]) for node in graph.find_nodes(op="call_function", target=own.region.default)]

    found = look_at_graphs(monkeypatch, regions)
    torch.manual_seed(0)
    with light(), torch.set_grad_enabled(trains):
        gnncompile.compile(Filters(kind, learned))(torch.randn(5, CHANNELS), EDGE_LISTS[FULL])
    assert found
    read = read if trains or not learned else [(1, 1)]
    assert [shape for region in found for shape in narrow_inputs(region)] == read
