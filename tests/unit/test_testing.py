"""Generated graphs: what each promises, the same from the same seed, and the way to networkx and back."""

import networkx as nx
import pytest
import torch
from torch_geometric.data import Batch, HeteroData

from gnncompile import testing

MAKERS = {
    "uniform": lambda **k: testing.uniform(30, 90, **k),
    "power_law": lambda **k: testing.power_law(60, 600, max_degree=60, **k),
    "hub": lambda **k: testing.hub(20, **k),
    "grid": lambda **k: testing.grid(4, 6, **k),
    "bipartite": lambda **k: testing.bipartite(9, 40, 3, **k),
    "typed": lambda **k: testing.typed(50, 400, num_relations=6, **k),
    "molecules": lambda **k: Batch.from_data_list(testing.molecules(5, **k)),
}


def same(one, other):
    return all(
        torch.equal(mine[key], theirs[key])
        for mine, theirs in zip(one.stores, other.stores, strict=True)
        for key in mine
        if isinstance(mine[key], torch.Tensor)
    )


@pytest.mark.parametrize("name", MAKERS)
def test_seed_and_channels(name):
    make = MAKERS[name]
    data = make(seed=3, channels=5)
    assert data.validate() and same(data, make(seed=3, channels=5)) and not same(data, make(seed=4, channels=5))
    for store in data.node_stores:
        assert store.x.shape == (store.num_nodes, 5)
    bare = make(seed=3, channels=None)
    for store, other in zip(bare.node_stores, data.node_stores, strict=True):
        assert "x" not in store and store.num_nodes == other.num_nodes
    for store, other in zip(bare.edge_stores, data.edge_stores, strict=True):
        assert name == "molecules" or torch.equal(store.edge_index, other.edge_index)


def test_power_law_graph_is_symmetric_with_the_hub_asked_for():
    edge_index = testing.power_law(5_000, 60_000, max_degree=900).edge_index
    degree = torch.bincount(edge_index[1], minlength=5_000)
    assert 750 < int(degree.max()) < 1_050
    assert torch.equal(degree, torch.bincount(edge_index[0], minlength=5_000))
    assert int(degree.median()) < 12 and int((degree > 100).sum()) > 10
    assert not bool((edge_index[0] == edge_index[1]).any())
    assert not bool((edge_index[1].diff() >= 0).all())  # random order


@pytest.mark.parametrize("arguments", [(10, 31, 5), (10, 30, 2), (10, 30, 30)])
def test_power_law_refuses_what_cannot_be(arguments):
    with pytest.raises(ValueError, match="got"):
        testing.power_law(*arguments)


def test_typed_edges_lead_from_one_type_to_one_with_popular_relations_and_objects():
    data = testing.typed(400, 5_000, num_relations=8, num_types=3)
    assert not bool((data.node_type.diff() >= 0).all())
    assert data.node_type.bincount().tolist() == [134, 133, 133]
    types = data.node_type[data.edge_index]
    for relation in range(8):
        assert len(types[:, data.edge_type == relation].unique(dim=1).t()) == 1
    shares = data.edge_type.bincount(minlength=8)
    assert shares.argmax() == 0 and shares[0] > 3 * shares[7] > 0
    degree = data.edge_index[1].bincount()
    assert degree.max() > 20 * degree.float().mean()
    hetero = data.to_heterogeneous()
    assert len(hetero.edge_types) == 8 and sum(s.num_edges for s in hetero.edge_stores) == 5_000
    with pytest.raises(ValueError, match="num_nodes: got 2, expected at least num_types=4"):
        testing.typed(2, 5)


def test_molecules_are_connected_with_few_bonds_and_rings():
    graphs = testing.molecules(40, min_atoms=1, max_atoms=25)
    assert min(g.num_nodes for g in graphs) < 5 and max(g.num_nodes for g in graphs) > 20
    rings = 0
    for graph in graphs:
        assert graph.is_undirected() and not graph.has_self_loops()
        found = nx.Graph(testing.to_networkx(graph))
        assert nx.is_connected(found) and max(dict(found.degree()).values()) <= testing.MAX_BONDS
        assert found.number_of_edges() * 2 == graph.num_edges  # no bond twice
        assert graph.edge_attr.shape == (graph.num_edges, 4) and bool((graph.edge_attr.sum(1) == 1).all())
        cycles = nx.cycle_basis(found)
        assert len(cycles) == int(graph.y)
        rings += sum(len(cycle) in (5, 6) for cycle in cycles)
    assert rings > 20
    with pytest.raises(ValueError, match="min_atoms: got 9, expected 1 to max_atoms=4"):
        testing.molecules(2, 9, 4)


def test_grid_and_hub():
    data = testing.grid(3, 4)
    assert data.has_self_loops() and data.is_undirected() and data.pos.shape == (12, 2)
    assert data.edge_index[1].bincount().tolist() == [4, 6, 6, 4, 6, 9, 9, 6, 4, 6, 6, 4]
    star = testing.hub(9).edge_index
    assert star[0].sort().values.tolist() == list(range(9)) and not bool(star[1].any())


def test_awkward_graphs_are_what_they_are_called():
    graphs = testing.awkward(channels=3)
    for name, data in graphs.items():
        assert data.validate() and isinstance(data, HeteroData) == (name == "bipartite")
    assert graphs["no edge"].edge_index.shape == (2, 0) == graphs["one node"].edge_index.shape
    assert graphs["one node"].num_nodes == graphs["one node, self loop"].num_nodes == 1
    assert not graphs["duplicates"].is_coalesced() and graphs["self loops"].has_self_loops()
    assert graphs["isolated nodes"].has_isolated_nodes()
    assert {tuple(s.x.shape) for s in graphs["bipartite"].node_stores} == {(3, 3), (7, 3)}
    assert not bool((graphs["unsorted, duplicates, hub"].edge_index[1].diff() >= 0).all())


@pytest.mark.parametrize("name", [n for n in testing.awkward() if n != "bipartite"])
def test_networkx_and_back(name):
    data = testing.awkward(channels=3)[name]
    data.edge_type = torch.arange(data.num_edges)
    back = testing.from_networkx(testing.to_networkx(data))
    assert torch.equal(back.x, data.x) and back.num_nodes == data.num_nodes
    if data.num_edges:
        assert torch.equal(back.edge_index, data.edge_index[:, back.edge_type])
        assert back.edge_type.sort().values.tolist() == list(range(data.num_edges))
    else:
        assert back.edge_index.shape == (2, 0)


def test_networkx_graph_gets_features():
    data = testing.from_networkx(nx.karate_club_graph(), channels=7, seed=2)
    assert data.x.shape == (34, 7) and data.num_edges == 156 and len(data.club) == 34
    assert torch.equal(data.x, testing.from_networkx(nx.karate_club_graph(), channels=7, seed=2).x)
    assert testing.from_networkx(nx.path_graph(3), channels=None).x is None
    types = nx.get_node_attributes(testing.to_networkx(testing.awkward()["bipartite"]), "type")
    assert list(types.values()) == ["source"] * 3 + ["destination"] * 7
