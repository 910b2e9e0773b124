"""Products of sparse matrices within a model: GraphUNet and ASAPooling, whole, against eager and against dense ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import ASAPooling, GraphConv, GraphUNet
from torch_geometric.utils import sort_edge_index, to_dense_adj

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.substitutes.nn.sparse_products import Entries, product
from gnncompile.support.case import CHANNELS as C
from gnncompile.support.case import Graph
from tests.ladder import results


def same(fn: Any, compiled: Any, args: tuple[Any, ...]) -> None:
    ours, theirs = results(compiled, args), results(fn, args)
    zeros = [torch.zeros_like(o) if t is None else t for o, t in zip(ours, theirs, strict=True) if o is not None]
    torch.testing.assert_close([o for o in ours if o is not None], zeros, rtol=1e-8, atol=1e-8)


def whole(compiled: Any) -> bool:
    program = callable_of(compiled)
    assert program is not None
    return len(program.backend.captured) == 1


# -- the product --------------------------------------------------------------------------------------------------


def dense(edges: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
    return torch.zeros(rows, columns, dtype=values.dtype).index_put((edges[0], edges[1]), values, accumulate=True)


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_product_of_matrices_that_are_not_square(diagonal: bool, masked: bool):
    """Several entries at one place, a row that meets nothing, nothing at all."""

    def ours(a: Tensor, va: Tensor, b: Tensor, vb: Tensor, sizes: tuple[Tensor, Tensor]) -> Tensor:
        dead = (a[0] != 1, b[1] != 0) if masked else (None, None)
        inner, columns = sizes[0].size(0), sizes[1].size(0)
        one, other = Entries(a[0], a[1], va, dead[0]), Entries(b[0], b[1], vb, dead[1])
        found = product(one, other, inner, columns, diagonal)
        edges = torch.stack([found.row, found.col])
        return torch.cat([edges.to(va.dtype), found.values.unsqueeze(0)])  # type: ignore[union-attr]

    def theirs(a: Tensor, va: Tensor, b: Tensor, vb: Tensor, sizes: tuple[Tensor, Tensor]) -> Tensor:
        if masked:
            a, va, b, vb = a[:, a[0] != 1], va[a[0] != 1], b[:, b[1] != 0], vb[b[1] != 0]
        rows, inner, columns = 6, sizes[0].size(0), sizes[1].size(0)
        met = (dense(a, torch.ones_like(va), rows, inner) @ dense(b, torch.ones_like(vb), inner, columns)) > 0
        edges = (met if diagonal else met & ~torch.eye(rows, columns, dtype=torch.bool)).nonzero().t()
        values = (dense(a, va, rows, inner) @ dense(b, vb, inner, columns))[edges[0], edges[1]]
        return torch.cat([edges.to(va.dtype), values.unsqueeze(0)])

    compiled = gnncompile.compile(ours, options={"inductor": False})
    for n, m, inner, columns in ((20, 15, 5, 4), (9, 40, 7, 7), (0, 5, 3, 3), (5, 0, 3, 4), (1, 1, 1, 1)):
        random = torch.Generator().manual_seed(n)
        a = torch.stack([torch.randint(high, (n,), generator=random) for high in (6, inner)])
        b = torch.stack([torch.randint(high, (m,), generator=random) for high in (inner, columns)])
        va, vb = (torch.randn(k, generator=random, dtype=torch.float64).requires_grad_() for k in (n, m))
        same(theirs, compiled, (a, va, b, vb, (torch.empty(inner, 0), torch.empty(columns, 0))))
    assert whole(compiled)


def test_product_in_inductor():
    """Of what a model learned: nothing of its size is known ahead."""

    def fn(x: Tensor, edge_index: Tensor) -> Tensor:
        kept = (x[edge_index[0], 0] > 0).nonzero().view(-1)
        edges, nodes = edge_index.index_select(1, kept), x.size(0)
        matrix = Entries(edges[0], edges[1], x[:, 1].index_select(0, edges[1]))
        found = product(matrix, matrix, nodes, nodes)
        return torch.zeros_like(x).index_add(0, found.row, x[found.col] * found.values.unsqueeze(1))  # type: ignore[union-attr]

    compiled = gnncompile.compile(fn)
    for size in ((12, 40), (7, 0), (17, 61)):
        graph = Graph(*size)
        same(fn, compiled, (graph.x, graph.edge_index))
    assert whole(compiled)


# -- the models ---------------------------------------------------------------------------------------------------


def test_graph_u_net():
    torch.manual_seed(0)
    model = GraphUNet(C, C, C, 2, pool_ratios=[0.8, 3]).double()
    compiled, before = gnncompile.compile(model, options={"inductor": False}), _compat.graph_breaks()
    for size in ((12, 40), (1, 1), (17, 61), (1, 0)):
        graph = Graph(*size)
        same(model, compiled, (graph.x, graph.edge_index, graph.batch, graph.edge_weight))
    assert whole(compiled) and _compat.graph_breaks() == before


def ordered(pooling: ASAPooling) -> Any:
    """The order of the edges in eager is that of the library of sparse products, which has no gradient of weights."""

    def fn(x: Tensor, edge_index: Tensor, weight: Tensor | None, batch: Tensor) -> Any:
        x, edges, weight, batch, perm = pooling(x, edge_index, weight, batch)
        weight = None if weight is None else weight.detach()
        return x, sort_edge_index(edges, weight, num_nodes=x.size(0)), batch, perm

    return fn


@pytest.mark.parametrize(("weights", "loops"), [(False, False), (True, True)])
def test_asap(weights: bool, loops: bool):
    torch.manual_seed(0)
    model = ASAPooling(C, 0.7, GNN=GraphConv if weights else None, add_self_loops=loops)
    fn = ordered(model.double() if weights else model)
    compiled, before = gnncompile.compile(fn, options={"inductor": False}), _compat.graph_breaks()
    for size in ((12, 40), (7, 0), (1, 1), (30, 100)):
        graph = Graph(*size, torch.float64 if weights else torch.float32)
        edges = graph.edge_index if weights else graph.batch_edge_index  # no two loops of a node, whose weights count
        args = graph.x, edges, graph.edge_weight if weights else None, graph.batch
        ours, theirs = results(compiled, args), results(fn, args)
        exact = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None]
        for one, other in exact:
            torch.testing.assert_close(one, other, rtol=1e-4 if not weights else 1e-8, atol=1e-5)
    assert whole(compiled) and _compat.graph_breaks() == before


def test_gradient_of_the_weights_between_clusters():
    """Against dense matrices, as eager has none."""
    torch.manual_seed(0)
    model, graph = ASAPooling(C).double(), Graph(12, 40)

    def expected(x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        loops = torch.arange(x.size(0))
        kept = edge_index[0] != edge_index[1]
        edges = torch.cat([edge_index[:, kept], torch.stack([loops, loops])], 1)
        own = torch.ones(x.size(0), dtype=x.dtype).index_put((edge_index[0][~kept],), weight[~kept])
        found = model.lin(x.new_zeros(x.shape).scatter_reduce(
            0, edges[1].view(-1, 1).expand(-1, C), x[edges[0]], "amax", include_self=False
        ))[edges[1]]  # fmt: skip
        score = torch.nn.functional.leaky_relu(model.att(torch.cat([found, x[edges[0]]], -1)).view(-1), 0.2).exp()
        score = score / x.new_zeros(x.size(0)).index_add(0, edges[1], score)[edges[1]]
        x = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * score.view(-1, 1))
        perm = model.select(model.gnn_score(x, edges).sigmoid().view(-1), torch.zeros_like(loops)).node_index
        a = to_dense_adj(edges, edge_attr=torch.cat([weight[kept], own]), max_num_nodes=x.size(0))[0]
        s = to_dense_adj(edges, edge_attr=score, max_num_nodes=x.size(0))[0][:, perm]
        return (s.t() @ a @ s).fill_diagonal_(0)

    def found(x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        _, edges, values, _, perm = model(x, edge_index, weight)
        return to_dense_adj(edges, edge_attr=values, max_num_nodes=perm.size(0))[0]

    args = graph.x, graph.edge_index, graph.edge_weight
    same(expected, gnncompile.compile(found, options={"inductor": False}), args)


@pytest.mark.parametrize("by_row", [True, False])
def test_edges_of_nodes_that_were_kept_are_sorted(by_row: bool):
    """How many nodes there are is asked for, and nothing of that number."""

    def fn(x: Tensor, edge_index: Tensor) -> Any:
        kept = x[x[:, 0] > -9].size(0)
        place = torch.arange(edge_index.size(1))
        edges, (ordered, again) = sort_edge_index(edge_index, [place, x[edge_index[0]]], kept, by_row)
        return edges, ordered, again, sort_edge_index(edge_index, sort_by_row=by_row), sort_edge_index(edges, None)[0]

    compiled = gnncompile.compile(fn, options={"inductor": False})
    for size in ((12, 40), (7, 0)):
        graph = Graph(*size)
        edges = graph.other_edge_index.unique(dim=1) if size[1] else graph.edge_index
        same(fn, compiled, (graph.x, edges[:, torch.randperm(edges.size(1))]))
    assert whole(compiled)
