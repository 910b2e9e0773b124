"""The reference models: same weights and numbers as PyG's, one graph under Dynamo where the layer allows it."""

import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool
from torch_geometric.nn import models as pyg

models = pytest.importorskip("gnncompile.models")


@pytest.fixture
def graph():
    torch.manual_seed(0)
    return torch.randn(20, 6), torch.randint(20, (2, 80))


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_same_state_and_output_as_pyg(name, num_layers, graph):
    ours = getattr(models, name)(6, 8, num_layers, 4)
    theirs = getattr(pyg, name)(6, 8, num_layers, 4)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(*graph), theirs(*graph))


def test_options_reach_the_layers(graph):
    ours, theirs = models.GAT(6, 8, 2, 4, heads=2), pyg.GAT(6, 8, 2, 4, heads=2)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(*graph), theirs(*graph))
    assert models.GraphSAGE(6, 8, 2, 4, aggr="max").convs[0].aggr == "max"
    weight = torch.rand(80)
    ours, theirs = models.GCN(6, 8, 2, 4), pyg.GCN(6, 8, 2, 4)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(*graph, weight), theirs(*graph, weight))


def test_gat_names_the_argument_that_does_not_fit():
    with pytest.raises(ValueError, match=r"hidden_channels: got 10, expected a multiple of heads=4"):
        models.GAT(6, 10, 2, 4, heads=4)


def test_gin_is_pyg_with_a_readout():
    torch.manual_seed(0)
    graphs = [Data(x=torch.randn(n, 6), edge_index=torch.randint(n, (2, 3 * n))) for n in (4, 7, 2)]
    batch = Batch.from_data_list(graphs)
    ours, theirs = models.GIN(6, 8, 3, 5), pyg.GIN(6, 8, 3)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing == ["lin.weight", "lin.bias"] and not unexpected
    out = ours(batch.x, batch.edge_index, batch.batch, batch.num_graphs)
    expected = ours.lin(global_add_pool(theirs(batch.x, batch.edge_index), batch.batch))
    assert out.shape == (3, 5)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT", "GIN"])
def test_dropout_acts_in_training_only(name, graph):
    model = getattr(models, name)(6, 8, 2, 4, dropout=0.5)
    arguments = (*graph, torch.zeros(20, dtype=torch.long), 1) if name == "GIN" else graph
    assert not torch.equal(model(*arguments), model(*arguments))
    model.eval()
    assert torch.equal(model(*arguments), model(*arguments))


@pytest.mark.parametrize("name", ["GraphSAGE", "GIN"])
def test_one_graph_under_plain_torch_compile(name, graph):
    torch._dynamo.reset()
    model = getattr(models, name)(6, 8, 2, 4)
    arguments = (*graph, torch.zeros(20, dtype=torch.long), 1) if name == "GIN" else graph
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), model(*arguments))
