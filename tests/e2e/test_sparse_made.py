"""Sparse matrices that a model makes of its edges are message passing, whole; other uses break the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import (
    spmm,
    to_edge_index,
    to_torch_coo_tensor,
    to_torch_csc_tensor,
    to_torch_csr_tensor,
    to_torch_sparse_tensor,
)

import gnncompile
from gnncompile import _compat
from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import Graph
from tests.ladder import climb, results

MAKERS = pytest.mark.parametrize("make", [to_torch_coo_tensor, to_torch_csr_tensor, to_torch_csc_tensor])


@MAKERS
def test_products_with_a_matrix(make: Callable[..., Tensor]):
    """Duplicates add up."""

    def fn(x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        adj, rows = make(edge_index.flip(0), weight, x.size(0)), 2 * x.size(0)
        wide = make(edge_index, weight * 2, (rows, x.size(0)))
        return adj @ x, torch.mm(wide, x), wide.size(0) * x.sum()

    climb(lambda: fn, lambda g: (g.x, g.edge_index, g.edge_weight))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_reductions_over_a_matrix(reduce: str):
    def fn(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return spmm(to_torch_csr_tensor(edge_index, weight.detach(), x.size(0)), x, reduce)

    climb(lambda: fn, lambda g: (g.x, g.edge_index, g.edge_weight))


@MAKERS
def test_edges_of_a_matrix_are_in_its_order(make: Callable[..., Tensor]):
    def fn(x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        found, values = to_edge_index(make(edge_index, weight.detach(), x.size(0)))
        ones = to_edge_index(make(edge_index, size=(x.size(0), x.size(0))))[1]
        return found, values * x.sum(), ones

    climb(lambda: fn, lambda g: (g.x, g.edge_index, g.edge_weight))


class Model(nn.Module):
    """A layer that is handed a matrix, made without a size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        edge_index = torch.cat([edge_index, torch.arange(x.size(0)).expand(2, -1)], dim=1)
        weight = torch.cat([weight, weight.new_ones(x.size(0))])
        adj = to_torch_sparse_tensor(edge_index.flip(0), weight.detach(), layout=torch.sparse_csr)
        return self.conv(x, adj).relu()


def test_a_layer_on_a_matrix():
    climb(Model, lambda g: (g.x, g.edge_index, g.edge_weight), sizes=((12, 40), (30, 100), (1, 0)))


OTHER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dense": lambda adj, x: adj.to_dense() @ x,
    "transposed": lambda adj, x: adj.t() @ x,
    "squared": lambda adj, x: (adj @ adj) @ x,
    "returned": lambda adj, x: (adj @ x, adj),
    "across a break": lambda adj, x: (torch._dynamo.graph_break(), adj @ x)[1],
    "layout": lambda adj, x: adj.crow_indices() if adj.layout == torch.sparse_csr else adj.indices() * x.sum(),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_uses_of_a_matrix_stay_right(name: str):
    def fn(x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        found = OTHER[name](to_torch_coo_tensor(edge_index, weight.detach(), x.size(0)), x)
        return [t.to_dense() if t.is_sparse else t for t in (found if isinstance(found, tuple) else [found])]

    compiled = gnncompile.compile(fn, options={"inductor": False})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in ((12, 40), (7, 0)):
            graph = Graph(*size)
            args = graph.x, graph.edge_index, graph.edge_weight
            ours, theirs = results(compiled, args), results(fn, args)
            torch.testing.assert_close([t for t in ours if t is not None], [t for t in theirs if t is not None])


def test_a_matrix_beside_one_that_is_an_argument():
    """The latter has a use of its own that only it has: calls run uncompiled, with a warning that says why."""

    def fn(x: Tensor, edge_index: Tensor, adj: Tensor) -> Tensor:
        return to_torch_coo_tensor(edge_index, size=x.size(0)).to(x.dtype) @ x + adj.t() @ x

    graph = Graph(12, 40)
    adj = to_torch_coo_tensor(graph.other_edge_index, size=12).double()
    compiled = gnncompile.compile(fn, options={"inductor": False})
    with pytest.warns(UserWarning, match="run uncompiled"):
        found = compiled(graph.x, graph.edge_index, adj)
    torch.testing.assert_close(found, fn(graph.x, graph.edge_index, adj))


def test_the_backend_alone_makes_no_matrices():
    """Nobody could trace again for it."""

    def fn(x: Tensor, edge_index: Tensor) -> Tensor:
        return to_torch_coo_tensor(edge_index, x[:, 0].detach()[edge_index[0]], x.size(0)).t() @ x

    graph, before = Graph(12, 40), _compat.graph_breaks()
    found = torch.compile(fn, backend="gnncompile")(graph.x, graph.edge_index)
    torch.testing.assert_close(found, fn(graph.x, graph.edge_index))
    assert _compat.graph_breaks() > before
