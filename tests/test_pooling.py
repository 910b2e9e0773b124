"""PyG's pooling beyond top-k: whole, once for all sizes, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, avg_pool, global_add_pool, max_pool
from torch_geometric.transforms import Cartesian

import gnncompile
from gnncompile import _compat
from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import Graph
from tests.ladder import climb, results

POOLS = pytest.mark.parametrize("pool", [max_pool, avg_pool])


def superpixels(graph: Graph) -> Data:
    """Nodes with positions, edges with features that take a gradient."""
    return Data(
        x=graph.x, edge_index=graph.batch_edge_index, edge_attr=graph.edge_attr, pos=graph.pos, batch=graph.batch
    )


def clusters(graph: Graph) -> Tensor:
    """Unsorted, some numbers never used, within a graph of the batch."""
    return graph.batch * 1000 + graph.integers(3, graph.nodes, seed=21) * 7


# -- max_pool, avg_pool -------------------------------------------------------------------------------------------


@POOLS
def test_all_that_a_data_holds_is_pooled(pool: Callable[..., Any]):
    climb(lambda: pool, lambda g: (clusters(g), superpixels(g)))


@POOLS
def test_a_data_without_batch_or_positions(pool: Callable[..., Any]):
    climb(lambda: pool, lambda g: (clusters(g), Data(x=g.x, edge_index=g.edge_index)))


class Superpixels(nn.Module):
    """Convolutions around a pooling, as PyG's own example has them, with its transform."""

    def __init__(self, pool: Callable[..., Any]) -> None:
        super().__init__()
        self.pool, self.transform = pool, Cartesian(norm=False, cat=False)
        self.first, self.second = GCNConv(C, C), GCNConv(C, C)

    def forward(self, data: Data, cluster: Tensor) -> tuple[Tensor, Tensor]:
        data.x = self.first(data.x, data.edge_index).relu()
        data = self.pool(cluster, data, transform=self.transform)
        data.x = self.second(data.x, data.edge_index, data.edge_attr.sum(1).sigmoid())
        return global_add_pool(data.x, data.batch), data.edge_attr


@POOLS
def test_a_pooled_batch_within_a_model(pool: Callable[..., Any]):
    climb(lambda: Superpixels(pool), lambda g: (superpixels(g), clusters(g)))


def test_what_is_made_is_a_batch():
    graph = Graph(12, 40)
    args = clusters(graph), superpixels(graph)
    found, expected = gnncompile.compile(max_pool, options={"inductor": False})(*args), max_pool(*args)
    assert type(found) is type(expected) and isinstance(found, Batch) and found.keys() == expected.keys()
    assert (found.num_graphs, found.num_nodes) == (expected.num_graphs, expected.num_nodes)
    found.extra = found.x  # an object like any other
    assert "extra" in found.clone()


def test_a_cluster_that_the_model_learns():
    """Its size has to be asked for in every step: of nodes, and of the edges between clusters."""

    def fn(x: Tensor, data: Data) -> Any:
        return max_pool((x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long(), data)

    compiled = gnncompile.compile(fn, options={"inductor": False})
    for size in ((12, 40), (7, 0), (1, 1)):
        ours, theirs = (results(f, (Graph(*size).x, superpixels(Graph(*size)))) for f in (compiled, fn))
        torch.testing.assert_close([t for t in ours if t is not None], [t for t in theirs if t is not None])


def test_a_batch_of_objects_is_made_outside_of_the_graph():
    def fn(x: Tensor, edge_index: Tensor) -> Batch:
        one = Data(x=x * 2, edge_index=edge_index)
        return Batch.from_data_list([one, one])

    graph, before = Graph(12, 40), _compat.graph_breaks()
    found = gnncompile.compile(fn, options={"inductor": False})(graph.x, graph.edge_index)
    expected = fn(graph.x, graph.edge_index)
    assert found.num_graphs == 2 and torch.equal(found.x, expected.x)
    assert torch.equal(found.edge_index, expected.edge_index) and _compat.graph_breaks() > before
