"""Transforms that renumber nodes: the same graph, results that map back, batches that come apart, inputs that stay."""

import copy
import importlib.util

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.data.datapipes import DatasetAdapter
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import Compose, ToSparseTensor
from torch_geometric.utils import to_networkx

from gnncompile import testing

transforms = pytest.importorskip("gnncompile.transforms")
orders = pytest.importorskip("gnncompile.transforms.orders")
RemoveIsolated, Reorder, restore_order = transforms.RemoveIsolated, transforms.Reorder, transforms.restore_order

GRAPHS = {name: data for name, data in testing.awkward(channels=3).items() if name != "bipartite"}
METHODS = ["rcm", "bfs", "degree"]
METHODS += ["metis"] if importlib.util.find_spec("pymetis") else []


def same(one, other):
    assert set(one.keys()) == set(other.keys())
    for mine, theirs in zip(one.stores, other.stores, strict=True):
        for key, value in theirs.items():
            equal = torch.equal(mine[key], value) if isinstance(value, torch.Tensor) else mine[key] == value
            assert equal, key


def labelled(data):
    data = data.clone()
    data.y, data.edge_number = torch.arange(data.num_nodes), torch.arange(data.num_edges)
    data.name = "graph"
    return data


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GRAPHS)
def test_reordered_graph_is_the_same_graph(name, method):
    data = labelled(GRAPHS[name])
    before = copy.deepcopy(data)
    out = Reorder(method)(data)
    same(data, before)
    assert out.validate() and out.node_order.sort().values.tolist() == list(range(data.num_nodes))
    assert torch.equal(out.y, out.node_order) and torch.equal(out.x, data.x[out.node_order])
    assert torch.equal(out.node_order[out.edge_index], data.edge_index) and torch.equal(
        out.edge_number, data.edge_number
    )
    assert torch.equal(restore_order(out.x, out), data.x) and out.name == "graph"


@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_and_gradients_map_back(name):
    torch.manual_seed(0)
    data, conv = GRAPHS[name].clone(), GCNConv(3, 4)
    data.x.requires_grad_()
    expected = conv(data.x, data.edge_index)
    out = Compose([RemoveIsolated(), Reorder("bfs"), Reorder("degree")])(data)
    found = restore_order(conv(out.x, out.edge_index), out)
    touched = torch.zeros(data.num_nodes, dtype=torch.bool)
    touched[data.edge_index.flatten()] = True
    assert out.num_nodes == int(touched.sum())
    torch.testing.assert_close(found[touched], expected[touched])
    assert not bool(found[~touched].any())
    (one,) = torch.autograd.grad(found.cos().sum(), data.x)
    (other,) = torch.autograd.grad(expected[touched].cos().sum(), data.x)
    torch.testing.assert_close(one, other)


def shuffled_grid():
    data = testing.grid(20, 20, channels=None)
    perm = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    return Data(edge_index=perm[data.edge_index], num_nodes=400)


def spread(data):
    return float((data.edge_index[0] - data.edge_index[1]).abs().float().mean())


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("degree", "metis")])
@pytest.mark.parametrize("scipy", [True, False])
def test_neighbours_get_near_each_other(method, scipy, monkeypatch):
    if scipy:
        pytest.importorskip("scipy")
    monkeypatch.setattr(orders, "_has_scipy", lambda: scipy)
    data = shuffled_grid()
    out = Reorder(method)(data)
    assert out.num_nodes == 400 and spread(out) < 0.2 * spread(data)
    back = torch.stack([out.node_order[out.edge_index[0]], out.node_order[out.edge_index[1]]])
    assert torch.equal(back, data.edge_index)


def test_breadth_first_is_one_order_with_scipy_and_without(monkeypatch):
    pytest.importorskip("scipy")
    for data in (*GRAPHS.values(), testing.uniform(60, 70, seed=1), shuffled_grid()):
        found = orders.breadth_first(data.edge_index, data.num_nodes)
        with monkeypatch.context() as patch:
            patch.setattr(orders, "_has_scipy", lambda: False)
            assert torch.equal(orders.breadth_first(data.edge_index, data.num_nodes), found)
    path = torch.tensor([[0, 3, 1, 2], [3, 1, 2, 2]])
    assert orders.breadth_first(path, 5).tolist() == [0, 3, 1, 2, 4]


def test_degree_puts_hubs_first():
    out = Reorder("degree")(testing.hub(9, channels=None))
    assert out.node_order.tolist()[0] == 0
    data = Data(edge_index=torch.tensor([[0, 3, 3], [3, 2, 2]]), num_nodes=5)
    assert Reorder("degree")(data).node_order.tolist() == [3, 2, 0, 1, 4]


def test_metis(monkeypatch):
    pytest.importorskip("pymetis")
    monkeypatch.setattr(orders, "NODES_PER_PART", 50)
    data = shuffled_grid()
    out = Reorder("metis")(data)
    assert spread(out) < 0.5 * spread(data)


def test_metis_that_is_absent_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pymetis", None)
    with pytest.raises(ImportError, match=r"method: got 'metis', which needs pymetis; install it"):
        Reorder("metis")(shuffled_grid())


@pytest.mark.parametrize("transform", [Reorder("rcm"), Reorder("degree"), RemoveIsolated()], ids=str)
def test_batches_come_apart_and_map_back(transform):
    graphs = [labelled(GRAPHS[name]) for name in ("isolated nodes", "one edge", "unsorted, duplicates, hub", "hub")]
    for graph in graphs:
        graph.edge_label_index = graph.edge_index[:, :1].clone()
    batch = Batch.from_data_list(graphs)
    before = copy.deepcopy(batch)
    out = transform(batch)
    same(batch, before)
    for one, other in zip(batch.to_data_list(), graphs, strict=True):
        same(one, other)
    assert out.ptr.tolist() == [0, *torch.bincount(out.batch).cumsum(0).tolist()] and int(out.ptr[-1]) == out.num_nodes
    assert bool((out.batch.diff() >= 0).all()) and torch.equal(out.x, batch.x[before.ptr[out.batch] + out.node_order])
    apart = out.to_data_list()
    for one, other in zip(apart, graphs, strict=True):
        alone = transform(other)
        assert isinstance(transform, RemoveIsolated) or one.num_nodes == other.num_nodes
        assert one.num_nodes == alone.num_nodes and torch.equal(one.x, other.x[one.node_order])
        assert torch.equal(one.node_order[one.edge_index], other.edge_index)
        assert torch.equal(one.node_order[one.edge_label_index], other.edge_label_index)
        assert torch.equal(restore_order(one.y, one, -1)[one.node_order], one.y)
    touched = torch.zeros(batch.num_nodes, dtype=torch.bool)
    touched[out.node_order + before.ptr[out.batch]] = True
    for whole in (out, Batch.from_data_list([transform(g) for g in graphs]), Batch.from_data_list(apart)):
        back = restore_order(whole.x, whole)
        assert torch.equal(back[touched], batch.x[touched]) and not bool(back[~touched].any())
        again = Reorder("bfs")(whole)
        assert torch.equal(restore_order(again.x, again), back)


def test_heterogeneous_graphs_and_their_batches():
    data = testing.typed(30, 25, num_relations=4, num_types=3, channels=2, seed=2).to_heterogeneous()
    assert any(not torch.equal(RemoveIsolated()(data)[t].x, data[t].x) for t in data.node_types)
    batch = Batch.from_data_list([data, testing.typed(30, 25, 4, 3, channels=2, seed=2).to_heterogeneous()])
    for given in (data, batch):
        before = copy.deepcopy(given)
        out = Compose([Reorder("rcm"), RemoveIsolated()])(given)
        same(given, before)
        for kind in given.edge_types:
            ends = out[kind[0]], out[kind[-1]]
            if given is batch:
                ends = [node.node_order + given[t].ptr[node.batch] for node, t in zip(ends, kind[::2], strict=True)]
            else:
                ends = [node.node_order for node in ends]
            back = torch.stack([order[row] for order, row in zip(ends, out[kind].edge_index, strict=True)])
            assert torch.equal(back, given[kind].edge_index)
        for kind in given.node_types:
            back = restore_order(out[kind].x, out[kind])
            kept = back.any(dim=1)
            assert back.shape == given[kind].x.shape and torch.equal(back[kept], given[kind].x[kept])
    alone = Compose([Reorder("rcm"), RemoveIsolated()])(data)
    for graph in out.to_data_list():
        for kind in data.edge_types:
            assert graph[kind].edge_index.shape == alone[kind].edge_index.shape
        for kind in data.node_types:
            assert torch.equal(graph[kind].x, data[kind].x[graph[kind].node_order])


def test_number_of_nodes_alone_and_edge_index_class():
    data = Data(edge_index=EdgeIndex([[4, 1], [1, 4]], sparse_size=(6, 6), is_undirected=True), num_nodes=6)
    out = RemoveIsolated()(data)
    assert out.num_nodes == 2 and isinstance(out.edge_index, EdgeIndex) and out.edge_index.sparse_size() == (2, 2)
    assert out.edge_index.is_undirected and out.edge_index.validate() is out.edge_index
    assert restore_order(torch.ones(2), out).tolist() == [0, 1, 0, 0, 1, 0]
    batch = Batch.from_data_list([Data(edge_index=torch.tensor([[4], [1]]), num_nodes=6) for _ in range(2)])
    out = RemoveIsolated()(batch)
    assert out.num_nodes == 4 and [g.num_nodes for g in out.to_data_list()] == [2, 2] and batch.num_nodes == 12
    assert len(list(to_networkx(out))) == 4
    mesh = Data(
        pos=torch.randn(4, 3), face=torch.tensor([[0], [3], [1]]), edge_index=torch.empty(2, 0, dtype=torch.long)
    )
    assert RemoveIsolated()(mesh).face.tolist() == [[0], [2], [1]]


def test_what_cannot_be_is_refused():
    data = labelled(GRAPHS["hub"])
    with pytest.raises(ValueError, match=r"method: got 'random', expected one of \['bfs', 'degree', 'metis', 'rcm'\]"):
        Reorder("random")
    single = Batch.from_data_list([labelled(GRAPHS["one node"]), labelled(GRAPHS["one node, self loop"])])
    with pytest.raises(ValueError, match=r"batch: got as many nodes as graphs \(2\)"):
        RemoveIsolated()(single)
    matrix = ToSparseTensor(layout=torch.sparse_csr)(GRAPHS["hub"])
    sample = data.clone()
    sample.input_id = torch.arange(2)
    followed = Batch.from_data_list([data], follow_batch=["x"])
    pair = Pair(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [1]]))
    for transform in (Reorder(), RemoveIsolated()):
        for given, message in (
            (matrix, "adj_t: got edges held as a matrix"),
            (sample, "input_id: got a sample of a neighbour loader"),
            (followed, r"x_ptr: got a batch made with follow_batch=\['x'\]"),
            (pair, "edge_index: got nodes of several kinds in one Data"),
        ):
            with pytest.raises(ValueError, match=message):
                transform(given)
    with pytest.raises(ValueError, match="data: got no node_order"):
        restore_order(data.x, data)
    with pytest.raises(ValueError, match="rows: got 3, expected one for each of the 40 nodes"):
        restore_order(torch.ones(3), Reorder()(data))


class Pair(Data):
    def __inc__(self, key, value, *args, **kwargs):
        return torch.tensor([[2], [3]]) if key == "edge_index" else super().__inc__(key, value, *args, **kwargs)


def test_names():
    assert repr(Reorder("bfs")) == "Reorder('bfs')" and repr(RemoveIsolated()) == "RemoveIsolated()"
    for name in ("reorder", "remove_isolated", "remove_isolated_nodes"):
        assert DatasetAdapter.functions[name] is not None
