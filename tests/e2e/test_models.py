"""The reference models: same weights and numbers as PyG's; compiled, one fused graph for all sizes."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool
from torch_geometric.nn import models as pyg

import gnncompile
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
    "PaiNN": (
        lambda: models.PaiNN(6, 2, num_radial=5),
        lambda g: (g.z, g.pos, g.batch_edge_index, g.batch, 3),
    ),
    "Readout": (Pooled, lambda g: (g.x, g.batch_edge_index, g.batch, 3)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole_and_fused_for_all_sizes(name):
    with light():
        compiled = climb(*COMPILED[name], sizes=(*LADDER, (1, 0)))
        (captured,) = callable_of(compiled).backend.captured
        assert len(captured.log.regions) >= 2  # one for each layer, or for the layer and the readout


@pytest.fixture
def molecule():
    """A PaiNN in float64 and its arguments: two molecules of five atoms, each joined to all others of its molecule."""
    torch.manual_seed(0)
    model = models.PaiNN(6, 2, num_radial=5, cutoff=4.0).double()
    pairs = torch.combinations(torch.arange(5))
    edges = torch.cat([pairs, pairs.flip(1), pairs + 5, pairs.flip(1) + 5]).t()
    return model, (torch.randint(1, 9, (10,)), 2 * torch.rand(10, 3).double(), edges, torch.arange(10) // 5, 2)


def test_forces_are_differences_of_energies(molecule):
    model, (z, pos, *rest) = molecule
    energy, forces = model(z, pos, *rest)
    assert energy.shape == (2,) and forces.shape == (10, 3) and energy.requires_grad and forces.requires_grad
    for atom, axis in ((0, 0), (3, 2), (9, 1)):
        step = torch.zeros_like(pos)
        step[atom, axis] = 1e-5
        slope = (model(z, pos + step, *rest)[0].sum() - model(z, pos - step, *rest)[0].sum()) / 2e-5
        torch.testing.assert_close(forces[atom, axis], -slope, rtol=1e-5, atol=1e-7)


def test_forces_turn_with_the_molecule(molecule):
    model, (z, pos, *rest) = molecule
    turn = torch.linalg.qr(torch.randn(3, 3).double()).Q
    energy, forces = model(z, pos, *rest)
    turned_energy, turned_forces = model(z, pos @ turn + 1, *rest)
    assert forces.abs().max() > 1e-3
    torch.testing.assert_close(turned_energy, energy)
    torch.testing.assert_close(turned_forces, forces @ turn)


def test_no_force_beyond_the_cutoff(molecule):
    model, (z, pos, *rest) = molecule
    pos = torch.cat([pos[:4], pos[4:5] + 10, pos[5:]])
    assert model(z, pos, *rest)[1][4].tolist() == [0, 0, 0]


@pytest.mark.parametrize("grad", [True, False])
def test_forces_in_eval_mode_have_no_history(molecule, grad):
    eager, args = molecule
    wanted = eager(*args)
    eager.eval()
    with light(), torch.set_grad_enabled(grad):
        compiled = gnncompile.compile(copy.deepcopy(eager), fullgraph=True)
        for model in (eager, compiled):
            for found, value in zip(model(*args), wanted, strict=True):
                torch.testing.assert_close(found, value.detach())
                assert not found.requires_grad


def test_readout_concatenates_and_gives_zeros_to_empty_graphs():
    x, batch = torch.tensor([[1.0, -1.0], [3.0, -5.0], [-2.0, 7.0]]), torch.tensor([0, 0, 2])
    out = models.Readout("sum", "mean", "max")(x, batch, 3)
    assert out.tolist() == [[4, -6, 2, -3, 3, -1], [0] * 6, [-2, 7] * 3]
    assert repr(models.Readout("sum", "max")) == "Readout(sum, max)"
    for wrong in ((), ("mean", "median")):
        with pytest.raises(ValueError, match=r"reduce: got \(.*expected one or more of"):
            models.Readout(*wrong)
