"""PyG's pooling beyond top-k: whole, once for all sizes, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import ClusterPooling, EdgePooling, GCNConv, avg_pool, global_add_pool, max_pool
from torch_geometric.transforms import Cartesian

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.ops.matching import components, matched_edges
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


def whole(fn: Any, arguments: Callable[[Graph], tuple[Any, ...]], inductor: bool = False) -> None:
    """Compares with eager, for code that has to ask for a size in every step."""
    compiled, before = gnncompile.compile(fn, options={"inductor": inductor}), _compat.graph_breaks()
    for size in ((12, 40), (7, 0), (1, 1), (30, 100)):
        ours, theirs = (results(f, arguments(Graph(*size))) for f in (compiled, fn))
        torch.testing.assert_close([t for t in ours if t is not None], [t for t in theirs if t is not None])
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1 and _compat.graph_breaks() == before


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

    whole(fn, lambda g: (g.x, superpixels(g)))


def test_a_batch_of_objects_is_made_outside_of_the_graph():
    def fn(x: Tensor, edge_index: Tensor) -> Batch:
        one = Data(x=x * 2, edge_index=edge_index)
        return Batch.from_data_list([one, one])

    graph, before = Graph(12, 40), _compat.graph_breaks()
    found = gnncompile.compile(fn, options={"inductor": False})(graph.x, graph.edge_index)
    expected = fn(graph.x, graph.edge_index)
    assert found.num_graphs == 2 and torch.equal(found.x, expected.x)
    assert torch.equal(found.edge_index, expected.edge_index) and _compat.graph_breaks() > before


# -- contractions -------------------------------------------------------------------------------------------------


class ThereAndBack(nn.Module):
    """Two levels of pooling with a convolution between them, then the first one undone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.first, self.second, self.conv = EdgePooling(C, **kwargs), EdgePooling(C, **kwargs), GCNConv(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Any:
        x, edge_index, batch, info = self.first(x, edge_index, batch)
        x = self.conv(x, edge_index).relu()
        return self.first.unpool(x, info), self.second(x, edge_index, batch)[:3]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"edge_score_method": EdgePooling.compute_edge_score_tanh, "add_to_edge_score": 0.0}],
    ids=["softmax", "tanh"],
)
def test_edge_pooling(kwargs: dict[str, Any]):
    torch.manual_seed(0)
    whole(ThereAndBack(**kwargs).double(), lambda g: (g.x, g.batch_edge_index, g.batch))


@pytest.mark.parametrize("method", ["tanh", "sigmoid", "log_softmax"])
def test_cluster_pooling(method: str):
    torch.manual_seed(0)

    def arguments(graph: Graph) -> tuple[Any, ...]:
        return graph.x.detach().float().requires_grad_(), graph.batch_edge_index, graph.batch

    threshold = -4.0 if method == "log_softmax" else None
    whole(ClusterPooling(C, method, threshold=threshold), arguments)


def test_edge_pooling_in_inductor():
    torch.manual_seed(0)
    model = EdgePooling(C).double()

    def fn(x: Tensor, edge_index: Tensor, batch: Tensor) -> Any:
        x, edge_index, batch, _ = model(x, edge_index, batch)
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]), batch

    whole(fn, lambda g: (g.x, g.edge_index, g.batch), inductor=True)


def greedy(edge_index: Tensor, score: Tensor) -> list[int]:
    """Edge by edge, the best first."""
    used: set[int] = set()
    chosen = []
    for edge in torch.argsort(score, descending=True).tolist():
        ends = set(edge_index[:, edge].tolist())
        if not ends & used:
            used |= ends
            chosen.append(edge)
    return chosen


@pytest.mark.parametrize(("nodes", "edges"), [(200, 900), (200, 100), (3, 50), (1, 4), (5, 0)])
def test_edges_are_matched_as_one_by_one(nodes: int, edges: int):
    """Equal scores, loops and duplicates; every node has its cluster."""
    random = torch.Generator().manual_seed(edges)
    edge_index = torch.randint(nodes, (2, edges), generator=random)
    score = torch.randint(20, (edges,), generator=random).double()
    cluster, chosen, single = matched_edges(edge_index, score, nodes)
    assert chosen.tolist() == greedy(edge_index, score)
    assert torch.equal(cluster[edge_index[:, chosen]], torch.arange(chosen.numel()).expand(2, -1))
    assert torch.equal(cluster[single], torch.arange(chosen.numel(), chosen.numel() + single.numel()))
    assert torch.equal(single, torch.tensor([n for n in range(nodes) if n not in edge_index[:, chosen]]).long())


def test_a_path_whose_edges_get_better_and_better():
    """One edge at a time is the best of its neighbours."""
    nodes = torch.arange(300)
    path = torch.stack([nodes[:-1], nodes[1:]])
    assert matched_edges(path, path[0].double(), 300)[1].tolist() == list(range(298, -1, -2))


@pytest.mark.parametrize("kind", ["path", "shuffled path", "random", "none"])
def test_components_are_as_scipy_numbers_them(kind: str):
    scipy = pytest.importorskip("scipy.sparse")
    random = torch.Generator().manual_seed(0)
    nodes = 400
    order = torch.randperm(nodes, generator=random) if kind == "shuffled path" else torch.arange(nodes)
    edges = torch.stack([order[1:], order[:-1]])
    if kind in ("random", "none"):
        edges = torch.randint(nodes, (2, 350 if kind == "random" else 0), generator=random)
    alive = torch.rand(edges.size(1), generator=random) < 0.99
    kept = edges[:, alive]
    matrix = scipy.coo_matrix((torch.ones(kept.size(1)).numpy(), tuple(kept.numpy())), (nodes, nodes))
    expected = scipy.csgraph.connected_components(matrix, directed=True, connection="weak")[1]
    cluster, first = components(edges, alive, nodes)
    assert cluster.tolist() == expected.tolist()
    assert torch.equal(cluster[first], torch.arange(first.numel())) and bool((first.diff() > 0).all())
