"""The data transforms: what they change, what they keep, and that their input stays as it was."""

import copy
import doctest

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import Compose, ToUndirected

sort_module = pytest.importorskip("gnncompile.transforms.sort_by_destination")
SortByDestination = sort_module.SortByDestination


def make_data(num_nodes=10, num_edges=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(num_nodes, 3, generator=generator),
        edge_index=torch.randint(num_nodes, (2, num_edges), generator=generator),
        edge_attr=torch.arange(num_edges * 2.0).view(num_edges, 2),
        edge_weight=torch.arange(float(num_edges)),
        y=torch.arange(num_nodes),
    )


def test_edges_are_sorted_stably_with_their_attributes():
    data = make_data()
    out = SortByDestination()(data)
    expected = sorted(range(40), key=lambda e: int(data.edge_index[1, e]))  # Python's sort is stable
    assert out.edge_weight.tolist() == expected
    assert torch.equal(out.edge_index, data.edge_index[:, expected])
    assert torch.equal(out.edge_attr, data.edge_attr[expected])
    assert torch.equal(out.x, data.x) and torch.equal(out.y, data.y)


def test_input_is_not_changed():
    data = make_data()
    before = copy.deepcopy(data)
    SortByDestination()(data)
    for key in before.keys():  # noqa: SIM118 (Data iterates over pairs)
        assert torch.equal(data[key], before[key])


@pytest.mark.parametrize("num_edges", [0, 1, 10])
def test_small_graphs_and_as_many_edges_as_nodes(num_edges):
    data = make_data(num_nodes=10, num_edges=num_edges)
    out = SortByDestination()(data)
    assert out.edge_index.shape == (2, num_edges)
    assert bool((out.edge_index[1].diff() >= 0).all())
    assert torch.equal(data.edge_index[:, out.edge_weight.long()], out.edge_index)
    assert torch.equal(out.x, data.x)


def test_other_containers_of_edge_attributes():
    data = Data(edge_index=torch.tensor([[0, 1, 2], [2, 0, 1]]), num_nodes=4)
    data.edge_name = ["a", "b", "c"]
    data.edge_array = torch.tensor([1, 2, 3]).numpy()
    out = SortByDestination()(data)
    assert out.edge_name == ["b", "c", "a"]
    assert out.edge_array.tolist() == [2, 3, 1]


def test_heterogeneous_graph():
    data = HeteroData()
    data["paper"].x = torch.randn(5, 2)
    data["author"].x = torch.randn(3, 2)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2, 0], [4, 0, 4, 2]])
    data["author", "writes", "paper"].edge_attr = torch.arange(4.0)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [3, 2]])
    out = SortByDestination()(data)
    assert out["author", "writes", "paper"].edge_index.tolist() == [[1, 0, 0, 2], [0, 2, 4, 4]]
    assert out["author", "writes", "paper"].edge_attr.tolist() == [1, 3, 0, 2]
    assert out["paper", "cites", "paper"].edge_index.tolist() == [[1, 0], [2, 3]]
    assert data["author", "writes", "paper"].edge_attr.tolist() == [0, 1, 2, 3]


def test_batch_can_still_be_taken_apart():
    graphs = [make_data(seed=seed, num_nodes=5 + seed, num_edges=20 + seed) for seed in range(3)]
    out = SortByDestination()(Batch.from_data_list(graphs))
    for graph, again in zip(graphs, out.to_data_list(), strict=True):
        alone = SortByDestination()(graph)
        assert torch.equal(again.edge_index, alone.edge_index)
        assert torch.equal(again.edge_attr, alone.edge_attr)


def test_edge_index_class_keeps_its_size_and_learns_its_order():
    plain = torch.tensor([[0, 1, 2], [2, 0, 1]])
    data = Data(edge_index=EdgeIndex(plain, sparse_size=(3, 3)), num_nodes=3, edge_weight=torch.arange(3.0))
    out = SortByDestination()(data)
    assert isinstance(out.edge_index, EdgeIndex)
    assert out.edge_index.is_sorted_by_col and out.edge_index.sparse_size() == (3, 3)
    assert out.edge_index.as_tensor().tolist() == [[1, 2, 0], [0, 1, 2]]
    assert out.edge_weight.tolist() == [1, 2, 0]


def test_graph_without_edge_index_is_left_alone():
    assert SortByDestination()(Data(x=torch.ones(2, 1))).x.shape == (2, 1)


def test_composes_and_has_its_functional_name():
    out = Compose([ToUndirected(), SortByDestination()])(make_data())
    assert bool((out.edge_index[1].diff() >= 0).all())
    assert repr(SortByDestination()) == "SortByDestination()"
    datapipes = pytest.importorskip("torch_geometric.data.datapipes")
    assert datapipes.DatasetAdapter.functions["sort_by_destination"] is not None


def test_docstring():
    names = {"Data": Data, "torch": torch, "SortByDestination": SortByDestination}
    (test,) = doctest.DocTestFinder(recurse=False).find(SortByDestination, "SortByDestination", globs=names)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.attempted == 3 and result.failed == 0
