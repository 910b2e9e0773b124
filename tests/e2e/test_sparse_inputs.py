"""``torch.sparse`` matrices as adjacency: eager's numbers, one captured graph; what can't be captured runs as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csc_tensor, to_torch_csr_tensor

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.support.case import CHANNELS, Graph
from tests.harness import light
from tests.ladder import climb
from tests.sparse_layers import LAYERS, OfData


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


MAKERS: dict[str, Any] = {"coo": to_torch_coo_tensor, "csr": to_torch_csr_tensor, "csc": to_torch_csc_tensor}


def matrix(g: Graph, layout: str, rows: int | None = None) -> Tensor:
    """Rows are destinations; self loops included, every entry with a weight of its own."""
    edges = torch.unique(g.edge_index.flip(0), dim=1) if g.edges else g.edge_index
    weight = torch.linspace(0.5, 2, edges.size(1), dtype=torch.double)
    return MAKERS[layout](edges, weight, size=(rows or g.nodes, g.nodes))


NOT_CSC = {"GCN", "GCN improved", "GAT", "GATv2", "Transformer"}
"""Layers that PyG itself does not run on CSC."""


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("layout", MAKERS)
def test_layers(layout: str, layer: str):
    if layout == "csc" and layer in NOT_CSC:
        pytest.skip("PyG does not take CSC here")
    climb(LAYERS[layer], lambda g: (g.x, matrix(g, layout)))


@pytest.mark.parametrize("layout", MAKERS)
def test_products(layout: str):
    climb(lambda: lambda x, adj: (adj @ x).relu() + torch.mm(adj, x), lambda g: (g.x, matrix(g, layout)))


def test_two_kinds_of_nodes():
    climb(
        lambda: SAGEConv((CHANNELS, CHANNELS), 4, root_weight=False),
        lambda g: ((g.x, None), matrix(g, "csr", g.nodes + 2)),
    )


def test_in_data():
    climb(OfData, lambda g: (Data(x=g.x, adj_t=matrix(g, "csr")),))


@pytest.mark.parametrize("layout", MAKERS)
def test_values_that_change_are_noticed(layout: str):
    g = Graph(12, 40)
    model = GCNConv(CHANNELS, 4, normalize=layout == "csr").double()
    compiled = gnncompile.compile(model, options={"inductor": False})
    adj = matrix(g, layout)
    for _ in range(3):
        torch.testing.assert_close(compiled(g.x, adj), model(g.x, adj))
        adj.values().mul_(2) if layout != "coo" else adj._values().mul_(2)


# -- what runs as it is -------------------------------------------------------------------------------------------


def _transposed(x: Tensor, adj: Tensor) -> Tensor:
    return adj.t() @ x


def _dense(x: Tensor, adj: Tensor) -> Tensor:
    return adj.to_dense() @ x


def _pointers(x: Tensor, adj: Tensor) -> Tensor:
    return x.sum() * adj.crow_indices()


def _scaled(x: Tensor, adj: Tensor) -> Tensor:
    return (adj * 2) @ x


def _returned(x: Tensor, adj: Tensor) -> Any:
    return x * 2, adj


def _mean_with_loops(x: Tensor, adj: Tensor) -> Tensor:
    torch.manual_seed(0)
    return MEAN(x, adj)


MEAN = GCNConv(CHANNELS, 4, aggr="mean").double()


@pytest.mark.parametrize("fn", [_transposed, _dense, _pointers, _scaled, _returned, _mean_with_loops])
def test_other_uses_run_uncompiled(fn: Callable[..., Any]):
    g = Graph(12, 40)
    adj = matrix(g, "csr")
    compiled = gnncompile.compile(fn)
    with pytest.warns(UserWarning, match="calls with such inputs run uncompiled. Pass a plain edge_index"):
        found = compiled(g.x, adj)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = fn(g.x, adj)
    if isinstance(found, tuple):
        assert found[1] is adj
        found, expected = found[0], expected[0]
    torch.testing.assert_close(found, expected)
    assert any("torch.sparse_csr" in note.reason for note in callable_of(compiled).backend.notes)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["gradient", "uncoalesced entries"])
def test_matrices_that_are_not_taken_apart(kind: str):
    g = Graph(12, 40)
    model = SAGEConv(CHANNELS, 4, aggr="add").double()
    if kind == "gradient":
        adj = matrix(g, "csr").requires_grad_()
    else:
        adj = torch.sparse_coo_tensor(g.edge_index, torch.ones(40, dtype=torch.double), (12, 12))
    compiled = gnncompile.compile(model, options={"inductor": False})
    with pytest.warns(UserWarning, match=f"`{kind}` of an input"):
        found = compiled(g.x, adj)
    torch.testing.assert_close(found, model(g.x, adj))
    plain = g.x, g.edge_index
    torch.testing.assert_close(compiled(*plain), model(*plain))
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


def test_layout_without_a_way():
    adj = torch.eye(4).to_sparse_bsr((2, 2))
    with pytest.raises(TypeError, match=r"args\[1\]: found a tensor of layout torch.sparse_bsr.*\.to_sparse_csr\(\)"):
        gnncompile.compile(GCNConv(2, 2))(torch.ones(4, 2), adj)
