"""The reference models: same weights and numbers as PyG's; compiled, one fused graph for all sizes."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool
from torch_geometric.nn import models as pyg

from gnncompile.capture.compile import callable_of
from gnncompile.support.case import CHANNELS, EDGE_CHANNELS, LADDER, TYPES, degrees
from tests.harness import light
from tests.ladder import climb

models = pytest.importorskip("gnncompile.models")

PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}
NODE_LEVEL = {
    "GCN": ({}, {}),
    "GraphSAGE": ({}, {}),
    "GAT": ({}, {}),
    "GATv2": ({}, {"v2": True}),
    "PNA": ({"deg": degrees()}, PNA),
    "EdgeCNN": ({}, {}),
}
"""Arguments of both, and of PyG's alone."""


@pytest.fixture
def graph():
    torch.manual_seed(0)
    return torch.randn(20, 6), torch.randint(20, (2, 80))


@pytest.mark.parametrize("name", NODE_LEVEL)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_same_state_and_output_as_pyg(name, num_layers, graph):
    both, alone = NODE_LEVEL[name]
    ours = getattr(models, name)(6, 8, num_layers, 4, **both)
    theirs = getattr(pyg, name.removesuffix("v2"))(6, 8, num_layers, 4, **both, **alone)
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


@pytest.mark.parametrize("name", ["GAT", "GATv2", "GraphTransformer"])
def test_attention_names_the_argument_that_does_not_fit(name):
    with pytest.raises(ValueError, match=r"hidden_channels: got 10, expected a multiple of heads=4"):
        getattr(models, name)(6, 10, 2, 4, heads=4)


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


@pytest.mark.parametrize("name", [*NODE_LEVEL, "GIN", "RGCN", "GraphTransformer", "DeepGCN"])
def test_dropout_acts_in_training_only(name, graph):
    more = {"PNA": {"deg": degrees()}, "RGCN": {"num_relations": 3}}.get(name, {})
    model = getattr(models, name)(6, 8, 2, 4, dropout=0.5, **more)
    others = {"GIN": (torch.zeros(20, dtype=torch.long), 1), "RGCN": (torch.arange(80) % 3,)}
    arguments = (*graph, *others.get(name, ()))
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


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs, self.readout = models.GraphSAGE(CHANNELS, 6, 1, 4), models.Readout("sum", "mean", "max")
        self.lin = nn.Linear(12, 3)

    def forward(self, x, edge_index, batch, batch_size):
        return self.lin(self.readout(self.convs(x, edge_index), batch, batch_size))


SIZES = (CHANNELS, 6, 2, 5)
COMPILED = {
    "GCN": (lambda: models.GCN(*SIZES), lambda g: (g.x, g.edge_index, g.edge_weight)),
    "GraphSAGE": (lambda: models.GraphSAGE(*SIZES), lambda g: (g.x, g.edge_index)),
    "GIN": (lambda: models.GIN(*SIZES), lambda g: (g.x, g.batch_edge_index, g.batch, 3)),
    "GAT": (lambda: models.GAT(*SIZES, heads=2), lambda g: (g.x, g.edge_index)),
    "GATv2": (lambda: models.GATv2(*SIZES, heads=2), lambda g: (g.x, g.edge_index)),
    "PNA": (lambda: models.PNA(*SIZES, deg=degrees()), lambda g: (g.x, g.edge_index)),
    "EdgeCNN": (lambda: models.EdgeCNN(*SIZES), lambda g: (g.x, g.edge_index)),
    "RGCN": (lambda: models.RGCN(*SIZES, num_relations=TYPES), lambda g: (g.x, g.edge_index, g.edge_type)),
    "RGCN, bases": (
        lambda: models.RGCN(*SIZES, num_relations=TYPES, num_bases=2),
        lambda g: (g.x, g.edge_index, g.edge_type),
    ),
    "GraphTransformer": (
        lambda: models.GraphTransformer(*SIZES, heads=2, edge_dim=EDGE_CHANNELS),
        lambda g: (g.x, g.edge_index, g.edge_attr),
    ),
    "DeepGCN": (
        lambda: models.DeepGCN(*SIZES, edge_dim=EDGE_CHANNELS),
        lambda g: (g.x, g.edge_index, g.edge_attr),
    ),
    "MeshGraphNet": (
        lambda: models.MeshGraphNet(CHANNELS, EDGE_CHANNELS, 6, 2, 5),
        lambda g: (g.x, g.edge_index, g.edge_attr),
    ),
    "Readout": (Pooled, lambda g: (g.x, g.batch_edge_index, g.batch, 3)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole_and_fused_for_all_sizes(name):
    with light():
        compiled = climb(*COMPILED[name], sizes=(*LADDER, (1, 0)))
        (captured,) = callable_of(compiled).backend.captured
        assert len(captured.log.regions) >= 2  # one for each layer, or for the layer and the readout


def test_readout_concatenates_and_gives_zeros_to_empty_graphs():
    x, batch = torch.tensor([[1.0, -1.0], [3.0, -5.0], [-2.0, 7.0]]), torch.tensor([0, 0, 2])
    out = models.Readout("sum", "mean", "max")(x, batch, 3)
    assert out.tolist() == [[4, -6, 2, -3, 3, -1], [0] * 6, [-2, 7] * 3]
    assert repr(models.Readout("sum", "max")) == "Readout(sum, max)"
    for wrong in ((), ("mean", "median")):
        with pytest.raises(ValueError, match=r"reduce: got \(.*expected one or more of"):
            models.Readout(*wrong)
