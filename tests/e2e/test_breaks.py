"""Behind a graph break: the user's own tensors, and all that is remembered of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_max_pool
from torch_geometric.utils import add_self_loops, degree

import gnncompile
from gnncompile import testing
from tests.harness import light

NODES = 30


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    with light():
        yield


def graph_break() -> None:
    torch._dynamo.graph_break()


class Checked(nn.Module):
    """Its break is a question to the data."""

    def __init__(self, layer: Callable[[int, int], nn.Module] = SAGEConv) -> None:
        super().__init__()
        self.first, self.second = layer(4, 4), layer(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert not torch.isnan(x).any()
        return self.second(self.first(x, edge_index).relu(), edge_index)  # type: ignore[no-any-return]


class Between(Checked):
    """It breaks between two layers."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        graph_break()
        return self.second(x, edge_index)  # type: ignore[no-any-return]


def unpacked(x: Tensor, edge_index: Tensor) -> Tensor:
    row, col = edge_index
    y = x.relu()
    graph_break()
    return torch.zeros_like(x).index_add(0, col, y[row])


def with_loops(x: Tensor, edge_index: Tensor) -> Tensor:
    """What it hands on is made of the edges."""
    edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
    norm = degree(edge_index[1], x.size(0)).rsqrt()
    graph_break()
    out = torch.zeros_like(x).index_add(0, edge_index[1], (x * norm.view(-1, 1))[edge_index[0]])
    graph_break()
    return out.index_add(0, edge_index[0], out[edge_index[1]])


def pooled(x: Tensor, edge_index: Tensor) -> Tensor:
    batch = edge_index[1].sort()[0]
    graph_break()
    return global_max_pool(x[edge_index[0]], batch)


MODELS: dict[str, Callable[[], Any]] = {
    "checked": Checked,
    "checked GCN": lambda: Checked(GCNConv),
    "checked GAT": lambda: Checked(GATConv),
    "between": Between,
    "unpacked": lambda: unpacked,
    "with loops": lambda: with_loops,
    "pooled": lambda: pooled,
}


def compare(model: Any, compiled: Any, x: Tensor, *args: Any) -> None:
    """Results and the gradient of x."""
    found = []
    for run in (model, compiled):
        leaf = x.clone().requires_grad_()
        out = run(leaf, *args)
        found.append([out, torch.autograd.grad(out.square().sum(), leaf)[0]])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", MODELS)
def test_layouts_are_remembered(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model = model.double() if isinstance(model, nn.Module) else model
    compiled = gnncompile.compile(model)
    graph = testing.uniform(NODES, 90)
    x = torch.randn(NODES, 4, dtype=torch.float64)
    compare(model, compiled, x, graph.edge_index)
    compare(model, compiled, x, graph.edge_index)
    misses = gnncompile.cache_info().misses
    for _ in range(3):
        compare(model, compiled, torch.randn_like(x), graph.edge_index)
    assert gnncompile.cache_info().misses == misses
    graph.edge_index[:, :5] = graph.edge_index[:, 5:10].flip(0)
    compare(model, compiled, x, graph.edge_index)
    assert gnncompile.cache_info().misses > misses


@pytest.mark.parametrize("name", ["checked", "checked GCN", "with loops"])
def test_other_graphs(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    model = model.double() if isinstance(model, nn.Module) else model
    compiled = gnncompile.compile(model)
    for kind, graph in testing.awkward(channels=4).items():
        if kind != "bipartite":
            compare(model, compiled, graph.x.double(), graph.edge_index)


def test_what_writes_to_edges_behind_a_break_writes_to_the_callers() -> None:
    def model(x: Tensor, edge_index: Tensor) -> Tensor:
        row = edge_index[0]
        graph_break()
        edge_index[1, 0] = 3
        row[1] = 2
        return torch.zeros_like(x).index_add(0, edge_index[1], x[row])

    edges = torch.randint(NODES, (2, 40))
    mine, theirs, x = edges.clone(), edges.clone(), torch.randn(NODES, 4)
    compiled = gnncompile.compile(model)
    for _ in range(3):
        assert torch.equal(compiled(x, mine), model(x, theirs))
        assert torch.equal(mine, theirs)
        mine[:, :4], theirs[:, :4] = 5, 5


def test_what_writes_to_edges_as_a_whole_writes_to_the_callers() -> None:
    def model(x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index.clamp_(max=3)
        return x[edge_index[0]]

    mine, x = torch.randint(NODES, (2, 40)), torch.randn(NODES, 4)
    theirs = mine.clone()
    assert torch.equal(gnncompile.compile(model)(x, mine), model(x, theirs))
    assert torch.equal(mine, theirs)


def test_copies_of_structure_are_the_users_to_write_to() -> None:
    def model(x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        graph_break()
        found = x[edge_index[0]].sum(0)
        edge_index.zero_()
        return found + x[edge_index[0]].sum(0)

    compiled, edges, x = gnncompile.compile(model), torch.randint(NODES, (2, 40)), torch.randn(NODES, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, edges), model(x, edges))


def test_results_are_the_callers_tensors() -> None:
    """As in eager, where a model hands on what it was given; what it stacks itself is its own."""

    def model(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.relu(), edge_index, torch.stack([edge_index[0], edge_index[1]])

    compiled, edges = gnncompile.compile(model), torch.randint(NODES, (2, 40))
    for given in (edges, edges.t().contiguous().t()):
        for _ in range(3):
            _, same, own = compiled(torch.randn(NODES, 4), given)
            assert same is given
            assert torch.equal(own, given) and own.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("make", [lambda edges: Data(edge_index=edges), lambda edges: {"edge_index": edges}])
def test_inside_of_objects(make: Callable[[Tensor], Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(4, 4)

        def forward(self, x: Tensor, data: Any) -> Tensor:
            graph_break()
            return self.conv(x, data["edge_index"])  # type: ignore[no-any-return]

    model = Net().double()
    compiled, data = gnncompile.compile(model), make(torch.randint(NODES, (2, 40)))
    x = torch.randn(NODES, 4, dtype=torch.float64)
    compare(model, compiled, x, data)
    misses = gnncompile.cache_info().misses
    compare(model, compiled, x, data)
    assert gnncompile.cache_info().misses == misses


def test_sizes_behind_a_break_are_read_once() -> None:
    """The number of graphs that only the data knows."""

    def model(x: Tensor, batch: Tensor) -> Tensor:
        graph_break()
        return global_max_pool(x.relu(), batch)

    batch = torch.arange(NODES) // 4
    report = gnncompile.explain(model, torch.randn(NODES, 4), batch)
    assert report.graph_breaks and report.regions and report.host_syncs == 0
    compare(model, gnncompile.compile(model), torch.randn(NODES, 4, dtype=torch.float64), batch)


def test_the_model_runs_once_where_it_breaks() -> None:
    """A question behind a break is not asked of the caller, which would run the model again from the beginning."""
    seen = []

    def model(x: Tensor, batch: Tensor) -> Tensor:
        seen.append(len(x))
        graph_break()
        return global_max_pool(x, batch)

    gnncompile.compile(model)(torch.randn(NODES, 4), torch.arange(NODES) // 4)
    assert seen == [NODES]


def test_breaks_are_explained() -> None:
    """Once each, with its reason and the user's line, though Dynamo counts one for each frame around it."""

    def inner(x: Tensor) -> Tensor:
        y = x.relu()
        graph_break()
        return y * 2

    def model(x: Tensor, edge_index: Tensor) -> Tensor:
        x = inner(x)
        assert not torch.isnan(x).any()
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])

    report = gnncompile.explain(model, torch.randn(NODES, 4), torch.randint(NODES, (2, 40)))
    first, second = report.breaks
    assert "graph_break()" in first.reason and "torch._dynamo.graph_break()" in first.line
    assert "ata-dependent" in second.reason and "assert not torch.isnan(x).any()" in second.line
    for one in report.breaks:
        assert "e2e/test_breaks.py:" in one.line and one.line in str(report)


def test_without_breaks_none_are_told() -> None:
    def model(x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])

    report = gnncompile.explain(model, torch.randn(NODES, 4), torch.randint(NODES, (2, 40)))
    assert report.breaks == () and "graph break at" not in str(report)


def test_results_of_different_inputs_beside_structure() -> None:
    """What leaves a graph beside copies of structure has the gradients that it has in eager."""

    def model(x: Tensor, y: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        a, (edges, _), b = x * 2, add_self_loops(edge_index, num_nodes=x.size(0)), y * 3
        graph_break()
        return a[edges[0]].sum(0), b[edges[1]].relu()

    compiled, edges = gnncompile.compile(model), torch.randint(NODES, (2, 40))
    for _ in range(3):
        x, y = (torch.randn(NODES, 4, requires_grad=True) for _ in range(2))
        found, expected = compiled(x, y, edges), model(x, y, edges)
        torch.testing.assert_close(found, expected)
        for out, right in zip(found, expected, strict=True):
            ours = torch.autograd.grad(out.sum(), (x, y), allow_unused=True, retain_graph=True)
            theirs = torch.autograd.grad(right.sum(), (x, y), allow_unused=True)
            assert [g is None for g in ours] == [g is None for g in theirs]
            torch.testing.assert_close([g for g in ours if g is not None], [g for g in theirs if g is not None])
