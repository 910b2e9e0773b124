"""The registry of substitutes: they take the arguments of what they stand for, and others are traced as written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv
from torch_geometric.utils import degree

import gnncompile
from gnncompile.substitutes import install, registry


def test_all_substitutes_fit_this_release_of_pyg():
    install.install()
    assert registry.MISMATCHED == [] and len(registry.METHODS) > 30 and len(registry.FUNCTIONS) > 20


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("METHODS", {}), ("FUNCTIONS", {}), ("MISMATCHED", [])):
        monkeypatch.setattr(registry, name, value)


def test_methods_and_functions_are_told_apart(empty: None):
    @registry.substitute(GCNConv.forward)
    def gcn_forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
        return x

    @registry.substitute(degree)
    def own_degree(index: Any, num_nodes: Any = None, dtype: Any = None) -> Any:
        return index

    assert {GCNConv.forward: gcn_forward} == registry.METHODS
    assert {degree: own_degree} == registry.FUNCTIONS and registry.MISMATCHED == []


def test_what_takes_other_arguments_has_no_substitute(empty: None, caplog: pytest.LogCaptureFixture):
    @registry.substitute(GCNConv.forward, GATConv.forward)
    def forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
        return x

    assert list(registry.METHODS) == [GCNConv.forward] and registry.MISMATCHED == ["GATConv.forward"]
    assert "GATConv.forward takes other arguments than forward" in caplog.text


def test_what_takes_any_arguments_fits_everything(empty: None):
    @registry.substitute(GCNConv.forward, GATConv.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    assert set(registry.METHODS) == {GCNConv.forward, GATConv.forward}


def test_arguments_may_be_given_by_name():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.GRUCell(4, 4)

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return self.cell(input=x, hx=hidden)

    torch._dynamo.reset()
    model = Model()
    x, hidden = torch.randn(5, 4), torch.randn(5, 4)
    torch.testing.assert_close(gnncompile.compile(model, fullgraph=True)(x, hidden), model(x, hidden))
