"""``SparseTensor`` of torch-sparse as adjacency: without values it is message passing, with values it runs as it is."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, MFConv, SAGEConv, SGConv
from torch_geometric.typing import SparseTensor

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.support.case import CHANNELS, LADDER, Graph
from tests.harness import light
from tests.sparse_layers import LAYERS, OfData

INSTALLED = importlib.util.find_spec("torch_sparse") is not None


class _Entries(SparseTensor):
    """What is asked of one, where torch-sparse is not installed and PyG has a placeholder for the class."""

    def __init__(self, row: Tensor, col: Tensor, value: Tensor | None, sizes: tuple[int, int]) -> None:
        self.entries, self.sizes = (row, col, value), sizes

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.entries

    def has_value(self) -> bool:
        return self.entries[2] is not None

    def sparse_sizes(self) -> tuple[int, int]:
        return self.sizes


def adjacency(g: Graph, value: Tensor | None = None) -> Any:
    """Rows are destinations."""
    source, destination = g.edge_index
    if INSTALLED:
        return SparseTensor(row=destination, col=source, value=value, sparse_sizes=(g.nodes, g.nodes))
    return _Entries(destination.clone(), source.clone(), value, (g.nodes, g.nodes))


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


def results(model: nn.Module, x: Tensor, *edges: Any) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = model(x, *edges)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    wanted = [x, *model.parameters()]
    found = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True))]


MODELS = {**LAYERS, "SG": lambda: SGConv(CHANNELS, 4, K=2)}


@pytest.mark.parametrize("layer", MODELS)
def test_without_values(layer: str):
    """The numbers of the edge list, of any size, from one captured graph; also the layer's own of the matrix.

    A matrix has loops of weight 2 in an improved GCN; an edge list needs weights for that.
    """
    torch.manual_seed(0)
    model = MODELS[layer]().double()
    compiled = gnncompile.compile(model)
    for size in LADDER:
        g = Graph(*size)
        found = results(compiled, g.x, adjacency(g))
        edges = [g.edge_index]
        if layer == "GCN improved":
            edges = [g.edge_index[:, g.edge_index[0] != g.edge_index[1]]]
            edges.append(g.x.new_ones(edges[0].size(1)))
        expected = [results(model, g.x, *edges)]
        if INSTALLED:
            expected.append(results(model, g.x, adjacency(g)))
        for other in expected:
            torch.testing.assert_close(found, other)
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1 and program.backend.notes == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_value_has_a_type(dtype: torch.dtype):
    g = Graph(12, 40, dtype)
    model = SAGEConv(CHANNELS, 4).to(dtype)
    found, expected = gnncompile.compile(model)(g.x, adjacency(g)), model(g.x, g.edge_index)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_in_data():
    g, model = Graph(12, 40), OfData().double()
    compiled = gnncompile.compile(model)
    torch.testing.assert_close(compiled(Data(x=g.x, adj_t=adjacency(g))), model.conv(g.x, g.edge_index))
    assert len(callable_of(compiled).backend.captured) == 1  # type: ignore[union-attr]


def uncompiled(compiled: Any, *args: Any) -> tuple[Any, str]:
    """What a call gives that warns that it runs uncompiled, and the reason that is noted."""
    with pytest.warns(UserWarning, match="of an input that is a SparseTensor; calls with such inputs run uncompiled"):
        found = compiled(*args)
    (note,) = callable_of(compiled).backend.notes  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(*args)
    return found, note.reason


def test_with_values():
    """GraphConv weights messages by them, SAGEConv leaves them out."""
    g = Graph(12, 40)
    adj = adjacency(g, torch.linspace(0.5, 2, 40, dtype=torch.double))
    found, reason = uncompiled(gnncompile.compile(lambda x, adj: x * adj.sparse_sizes()[0]), g.x, adj)
    assert "`values`" in reason
    torch.testing.assert_close(found, g.x * 12)
    if INSTALLED:
        for layer in (GraphConv(CHANNELS, 4).double(), SAGEConv(CHANNELS, 4).double()):
            torch.testing.assert_close(uncompiled(gnncompile.compile(layer), g.x, adj)[0], layer(g.x, adj))


def test_other_uses_run_uncompiled():
    """Of what only the class has."""
    g = Graph(12, 40)
    found, reason = uncompiled(gnncompile.compile(lambda x, adj: x * adj.sparse_sizes()[0]), g.x, adjacency(g))
    assert "`sparse_sizes`" in reason
    torch.testing.assert_close(found, g.x * 12)


@pytest.mark.skipif(not INSTALLED, reason="torch-sparse runs the layer uncompiled")
def test_captures_that_fail():
    """A layer of which we trace another form, for edge lists only."""
    g, model = Graph(12, 40), MFConv(CHANNELS, 4).double()
    found, reason = uncompiled(gnncompile.compile(model), g.x, adjacency(g))
    assert "a capture failed" in reason
    torch.testing.assert_close(found, model(g.x, adjacency(g)))
