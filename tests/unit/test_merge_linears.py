"""Sums of linear layers of the same rows become one layer: the same numbers and gradients from fewer products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import HeteroConv, SAGEConv

import gnncompile
from gnncompile.passes.analysis import aten
from tests.graphs import EDGE_LISTS
from tests.harness import light, look_at_graphs

WIDTH = 4


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many linear layers every captured graph has."""
    return look_at_graphs(
        monkeypatch, lambda graph: [len(graph.find_nodes(op="call_function", target=aten.linear.default))]
    )


def results(model: nn.Module, x: Tensor, *args: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x, *args)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *model.parameters()])]


def compare(model: nn.Module, x: Tensor, *args: Any) -> None:
    with light():
        found = results(gnncompile.compile(model, fullgraph=True), x, *args)
    for a, b in zip(found, results(copy.deepcopy(model).double(), x.double(), *args), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


class _Relations(nn.Module):
    """Two types of edges among nodes of one type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = HeteroConv({("v", kind, "v"): SAGEConv(WIDTH, WIDTH) for kind in "ab"})

    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self.layer({"v": x}, {("v", "a", "v"): one, ("v", "b", "v"): other})["v"]
        return out


@pytest.mark.parametrize("edges", EDGE_LISTS)
def test_types_of_edges(edges: str, products: list[int]):
    torch.manual_seed(0)
    compare(_Relations(), torch.randn(5, WIDTH), EDGE_LISTS[edges].clone(), EDGE_LISTS["unsorted, duplicates, hub"])
    assert products == [3]


class _Sum(nn.Module):
    def __init__(self, bias: bool = True, dim: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=bias and k != 1) for k in range(3)])
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (layer(x) for layer in self.layers)
        return first + x + second + third.sin() + x


class _Stack(_Sum):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers], self.dim).sum(self.dim)


class _UsedTwice(_Sum):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (layer(x) for layer in self.layers)
        return first * (first + second + third)


class _TwiceTheSame(_Sum):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (layer(x) for layer in self.layers)
        return first + first + (second + third) * 2


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize(
    "model, count",
    [
        (_Sum(), 2),
        (_Sum(bias=False), 2),
        (_Stack(), 1),
        (_Stack(dim=1), 3),
        (_UsedTwice(), 2),
        (_TwiceTheSame(), 2),
    ],
)
def test_sums_of_layers(model: nn.Module, count: int, rows: int, products: list[int]):
    compare(model, torch.randn(rows, WIDTH))
    assert products == [count]
