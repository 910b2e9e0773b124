"""Self loops and normalisation before the model: equal to what layers do, sorted, batches come apart, inputs stay."""

import copy

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, HeteroData
from torch_geometric.data.datapipes import DatasetAdapter
from torch_geometric.nn import ChebConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import Compose, LaplacianLambdaMax, ToSparseTensor, ToUndirected
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, is_sparse, remove_self_loops, to_dense_adj

from gnncompile import testing

transforms = pytest.importorskip("gnncompile.transforms")
AddSelfLoops, GCNNorm, ChebNorm = transforms.AddSelfLoops, transforms.GCNNorm, transforms.ChebNorm

GRAPHS = {name: data for name, data in testing.awkward(channels=3).items() if name != "bipartite"}
EACH = [AddSelfLoops(), GCNNorm(), ChebNorm()]


def weighted(name="self loops"):
    """An awkward graph with weights and features of edges; of two self loops at a node both have the same."""
    data = GRAPHS[name].clone()
    row, col = data.edge_index
    data.edge_weight = 0.5 + torch.arange(data.num_edges) % 3 + (row == col) * row
    data.edge_weight[row == col] = 2.0 + row[row == col]
    data.edge_attr = torch.stack([data.edge_weight, -data.edge_weight], dim=1)
    return data


def dense(data, weight):
    return to_dense_adj(data.edge_index, edge_attr=weight, max_num_nodes=data.num_nodes)[0]


def is_sorted(data):
    return bool((data.edge_index[1].diff() >= 0).all())


def same(one, other):
    for key in other.keys():  # noqa: SIM118 (Data iterates over pairs)
        assert torch.equal(one[key], other[key]), key
    assert set(one.keys()) == set(other.keys())


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("existing", ["keep", "replace"])
def test_self_loops_are_those_of_the_layers_in_order(name, existing):
    data = weighted(name)
    before = copy.deepcopy(data)
    out = AddSelfLoops("mean", existing)(data)
    same(data, before)
    edges, attr = data.edge_index, data.edge_attr
    if existing == "keep":
        edges, attr = add_remaining_self_loops(edges, attr, "mean", data.num_nodes)
    else:
        edges, attr = add_self_loops(*remove_self_loops(edges, attr), "mean", data.num_nodes)
    perm = torch.argsort(edges[1], stable=True)
    assert torch.equal(out.edge_index, edges[:, perm]) and torch.equal(out.edge_attr, attr[perm])
    assert torch.equal(out.edge_weight, out.edge_attr[:, 0])
    assert int((out.edge_index[0] == out.edge_index[1]).sum()) == data.num_nodes
    same(AddSelfLoops("mean")(out), out)  # nothing is left to do


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("improved", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_gcn_norm_is_that_of_the_layer(name, improved, flow):
    for data in (weighted(name), GRAPHS[name]):
        before = copy.deepcopy(data)
        edges, weight = gcn_norm(data.edge_index, data.edge_weight, data.num_nodes, improved, True, flow, torch.float)
        out = GCNNorm(improved=improved, flow=flow)(data)
        same(data, before)
        assert is_sorted(out) and out.edge_index.size(1) == edges.size(1)
        expected = to_dense_adj(edges, edge_attr=weight, max_num_nodes=data.num_nodes)[0]
        torch.testing.assert_close(dense(out, out.edge_weight), expected)
        assert (out.edge_attr is None) == (data.edge_attr is None)
        edges, weight = gcn_norm(data.edge_index, data.edge_weight, data.num_nodes, False, False, flow, torch.float)
        out = GCNNorm(add_self_loops=False, flow=flow)(data)
        assert torch.equal(out.edge_index, edges) and torch.equal(out.edge_weight, weight)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("normalization", [None, "sym", "rw"])
@pytest.mark.parametrize("lambda_max", [None, 1.7])
def test_cheb_norm_is_that_of_the_layer(name, normalization, lambda_max):
    conv = ChebConv(3, 2, 3, normalization)
    for data in (weighted(name), GRAPHS[name].clone()):
        data.lambda_max = lambda_max
        given = None if lambda_max is None else torch.tensor(lambda_max)
        arguments = data.edge_index, data.num_nodes, data.edge_weight, normalization, given, torch.float, None
        edges, weight = conv.__norm__(*arguments)
        out = ChebNorm(normalization)(data)
        assert is_sorted(out)
        expected = to_dense_adj(edges, edge_attr=weight, max_num_nodes=data.num_nodes)[0]
        # A Laplacian of zeros is not a number in the layer, which divides by its largest entry.
        torch.testing.assert_close(dense(out, out.edge_weight), expected, equal_nan=True)


@pytest.mark.parametrize("transform", EACH, ids=str)
def test_batches_come_apart(transform):
    graphs = [weighted(name) for name in GRAPHS]
    for graph in graphs:
        graph.lambda_max = 2.0
    alone = [transform(graph) for graph in graphs]
    batch = Batch.from_data_list(graphs)
    before = batch.to_data_list()
    for one, expected in zip(transform(batch).to_data_list(), alone, strict=True):
        for key in expected.keys():  # noqa: SIM118
            torch.testing.assert_close(torch.as_tensor(one[key]).flatten(), torch.as_tensor(expected[key]).flatten())
    for one, expected in zip(batch.to_data_list(), before, strict=True):
        same(one, expected)
    without = Batch.from_data_list([GRAPHS[name] for name in GRAPHS])  # weights are new then
    assert [g.num_edges for g in transform(without).to_data_list()] == [g.num_edges for g in alone]


def hetero():
    data = testing.bipartite(3, 7, 2, channels=3)
    data["source", "likes", "source"].edge_index = torch.tensor([[0, 1, 1], [2, 1, 0]])
    data["destination", "likes", "destination"].edge_index = torch.tensor([[6, 0], [5, 0]])
    return data


@pytest.mark.parametrize("transform", EACH, ids=str)
def test_heterogeneous_graphs_and_their_batches(transform):
    data = hetero()
    out = transform(data)
    bipartite = "source", "to", "destination"
    assert torch.equal(out[bipartite].edge_index, data[bipartite].edge_index) and "edge_weight" not in out[bipartite]
    for kind, edges in (("source", 5), ("destination", 8)):
        assert out[kind, "likes", kind].edge_index.shape == (2, edges) and is_sorted(out[kind, "likes", kind])
    assert data["source", "likes", "source"].edge_index.size(1) == 3
    transform = copy.copy(transform)
    transform.edge_types = [("source", "likes", "source")]
    assert transform(data)["destination", "likes", "destination"].edge_index.size(1) == 2
    whole = transform(Batch.from_data_list([data, hetero()]))
    assert isinstance(out, HeteroData)
    for graph in whole.to_data_list():
        assert torch.equal(graph["source", "likes", "source"].edge_index, out["source", "likes", "source"].edge_index)
    for wrong in (bipartite, ("source", "hates", "source")):
        transform.edge_types = [wrong]
        with pytest.raises(ValueError, match="edge_types: got"):
            transform(data)


@pytest.mark.parametrize("transform", EACH, ids=str)
def test_what_cannot_be_is_refused(transform):
    data = weighted("duplicates")
    data.edge_type = torch.arange(5)
    with pytest.raises(ValueError, match=r"fill_value: got none for 'edge_type' \(int64\), expected"):
        transform(data)
    filled = copy.copy(transform)
    filled.fill_value = {"edge_type": 9, "edge_attr": 1.0, "edge_weight": 1.0}
    assert filled(data).edge_type.bincount().tolist() == [1] * 5 + [0] * 4 + [3]
    data.edge_type = list("abcde")
    with pytest.raises(ValueError, match="edge_type: got a list"):
        transform(data)
    with pytest.raises(ValueError, match="adj_t: got edges held as a matrix"):
        transform(ToSparseTensor(layout=torch.sparse_csr)(weighted("one edge")))
    followed = Batch.from_data_list([weighted("one edge")], follow_batch=["edge_index"])
    with pytest.raises(ValueError, match=r"edge_index_ptr: got a batch made with follow_batch=\['edge_index'\]"):
        transform(followed)
    for make in (lambda: AddSelfLoops(existing="add"), lambda: GCNNorm(flow="up"), lambda: ChebNorm("row")):
        with pytest.raises(ValueError, match=r"got .*expected"):
            make()


def test_composes_and_is_named():
    out = Compose([ToUndirected(), GCNNorm(), ToSparseTensor(layout=torch.sparse_csr, attr="edge_weight")])(
        weighted("one edge")
    )
    assert is_sparse(out.adj_t)
    scaled = Compose([LaplacianLambdaMax("sym"), ChebNorm()])(weighted("one edge"))
    assert scaled.edge_weight.abs().max() <= 1 + 1e-6
    assert repr(AddSelfLoops()) == "AddSelfLoops(fill_value=1.0, existing='keep')"
    expected = "GCNNorm(add_self_loops=True, improved=False, flow='source_to_target', fill_value=1.0)"
    assert repr(GCNNorm()) == expected
    assert repr(ChebNorm("rw", edge_types=[("a", "b", "a")])).endswith("edge_types=[('a', 'b', 'a')])")
    for name in ("add_sorted_self_loops", "sorted_gcn_norm", "sorted_cheb_norm", "add_self_loops", "gcn_norm"):
        assert DatasetAdapter.functions[name] is not None


def test_types_of_edges_and_weights():
    data = GRAPHS["duplicates"].clone()
    data.edge_index = EdgeIndex(data.edge_index, sparse_size=(3, 3))
    out = GCNNorm()(data)
    assert isinstance(out.edge_index, EdgeIndex) and out.edge_index.is_sorted_by_col
    assert out.edge_index.sparse_size() == (3, 3) and out.edge_index.validate() is out.edge_index
    data.x = data.x.double()
    assert GCNNorm()(data).edge_weight.dtype == ChebNorm()(data).edge_weight.dtype == torch.float64
    assert GCNNorm()(GRAPHS["one edge"]).edge_weight.dtype == torch.float32
