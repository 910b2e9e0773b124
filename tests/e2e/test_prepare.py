"""`prepare`: what layers do to the edges moves before the model, results stay, nothing is left in the step."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Batch, HeteroData
from torch_geometric.nn import (
    APPNP,
    AGNNConv,
    ARMAConv,
    ChebConv,
    DirGNNConv,
    DNAConv,
    FeaStConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    HeteroConv,
    LGConv,
    MessagePassing,
    MixHopConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
    to_hetero,
)
from torch_geometric.nn import models as pyg
from torch_geometric.transforms import Compose, ToUndirected

import gnncompile
from gnncompile import testing
from gnncompile.capture.compile import callable_of
from tests.harness import light

transforms = pytest.importorskip("gnncompile.transforms")
prepare = transforms.prepare
call_by_names = pytest.importorskip("gnncompile.transforms.same_results").call_by_names

C = 6


def graph(weights=True, seed=0):
    """Unsorted, with duplicates, self loops (one at a node) and isolated nodes."""
    data = testing.uniform(25, 60, channels=C, seed=seed)
    row, col = data.edge_index
    row[:] = torch.where(row == col, (row + 1) % 20, row)
    data.edge_index[:, :3], data.edge_index[:, 3] = torch.tensor([[20, 21, 20], [20, 21, 3]]), data.edge_index[:, 4]
    if weights:
        data.edge_weight = torch.rand(60, generator=torch.Generator().manual_seed(seed)) + 0.5
    return data


class Weighted(nn.Module):
    """A layer whose forward takes more, or in another order, than data has."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index, edge_weight=None):
        if isinstance(self.conv, DNAConv):
            return self.conv(torch.stack([x, 2 * x], dim=1), edge_index, edge_weight)
        if isinstance(self.conv, GCN2Conv):
            return self.conv(x, x.cos(), edge_index, edge_weight)
        return self.conv(x, edge_index, edge_weight)


MODELS = {
    "GCN": lambda: pyg.GCN(C, 8, 3, 4),
    "GCN, improved": lambda: pyg.GCN(C, 8, 2, 4, improved=True),
    "GCN, cached": lambda: pyg.GCN(C, 8, 2, 4, cached=True),
    "GCN, no self loops, from target to source": lambda: pyg.GCN(
        C, 8, 2, 4, add_self_loops=False, flow="target_to_source"
    ),
    "GAT": lambda: pyg.GAT(C, 8, 3, 4, heads=2, dropout=0.5),
    "GATv2": lambda: pyg.GAT(C, 8, 2, 4, v2=True),
    "SGConv": lambda: SGConv(C, 4, 3),
    "APPNP": lambda: APPNP(3, 0.1),
    "ChebConv": lambda: ChebConv(C, 4, 3),
    "ChebConv, rw": lambda: ChebConv(C, 4, 2, "rw"),
    "ChebConv, none": lambda: ChebConv(C, 4, 2, None),
    "SSGConv": lambda: SSGConv(C, 4, 0.2, 2),
    "MixHopConv": lambda: MixHopConv(C, 4),
    "ARMAConv": lambda: ARMAConv(C, 4, 2, 2),
    "TAGConv": lambda: TAGConv(C, 4, 2),
    "LGConv": LGConv,
    "GCN2Conv": lambda: Weighted(GCN2Conv(C, 0.1)),
    "DNAConv": lambda: Weighted(DNAConv(C)),
    "AGNNConv": AGNNConv,
    "FeaStConv": lambda: FeaStConv(C, 4, 2),
}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_results_stay(name, weights):
    torch.manual_seed(0)
    model, data = MODELS[name](), graph(weights)
    before, given, state = copy.deepcopy(model), copy.deepcopy(data), model.training
    new, transform, report = prepare(model, data)
    convs = [m for m in model.modules() if isinstance(m, MessagePassing)]
    assert len(report.moved) == len(convs) and not report.left and new.training == state
    assert max(report.outputs_differ, report.gradients_differ) < 1e-5
    assert repr(model) == repr(before) and list(new.state_dict()) == list(model.state_dict())
    for key in given.keys():  # noqa: SIM118 (Data iterates over pairs)
        assert torch.equal(given[key], data[key])
    # On a graph that prepare has not seen, and after a way through a file.
    other = graph(weights, seed=1)
    out, new = transform(other), pickle.loads(pickle.dumps(new))
    assert bool((out.edge_index[1].diff() >= 0).all()) or not report.moved[0].what.startswith("self loops")
    model.eval(), new.eval()
    for module in model.modules():
        if isinstance(module, GCNConv):
            module._cached_edge_index = None
    theirs, ours = call_by_names(model, other), call_by_names(new, out)
    torch.testing.assert_close(ours, theirs)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func._schema.name)
        return func(*args, **(kwargs or {}))


STRUCTURE = {f"aten::{name}" for name in ("ne", "eq", "arange", "pow", "masked_fill", "masked_fill_", "cat", "nonzero")}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("name", ["GCN", "GAT", "SGConv", "APPNP", "ChebConv", "TAGConv"])
def test_no_structure_work_is_left_in_the_forward(name, weights):
    torch.manual_seed(0)
    original, data = MODELS[name](), graph(weights)
    model, transform, report = prepare(original, data)
    assert report.moved
    with Names() as names, torch.no_grad():
        original.eval()(data.x, data.edge_index)
    assert names.found & STRUCTURE
    data = transform(data)
    inputs = (data.x, data.edge_index) if name == "GAT" else (data.x, data.edge_index, data.edge_weight)
    with Names() as names, torch.no_grad():
        model.eval()(*inputs)
    assert not names.found & STRUCTURE
    with light():
        compiled = gnncompile.compile(model, options={"inductor": False})
        compiled(*inputs)
        (captured,) = callable_of(compiled).backend.captured
    program = captured.structure.program.module.graph
    left = {str(node.target) for node in program.nodes if node.op == "call_function"}
    assert left == {"gnncompile.csr.default", "<built-in function getitem>"}
    assert len(captured.log.regions) == {"GCN": 3, "GAT": 3, "SGConv": 3, "APPNP": 3, "ChebConv": 2, "TAGConv": 2}[name]


AWKWARD = {name: data for name, data in testing.awkward(channels=C).items() if name != "bipartite"}


@pytest.mark.parametrize("graph", AWKWARD.values(), ids=AWKWARD)
def test_awkward_graphs(graph):
    torch.manual_seed(0)
    for name in ("GCN", "GAT", "ChebConv", "TAGConv"):
        _, transform, report = prepare(MODELS[name](), graph)
        assert report.moved and max(report.outputs_differ, report.gradients_differ) < 1e-5
        loops = 0 if name == "TAGConv" else graph.num_nodes
        edges = transform(graph).edge_index
        assert int((edges[0] == edges[1]).sum()) == (loops or int((graph.edge_index[0] == graph.edge_index[1]).sum()))


def test_batches_before_and_after_the_transform():
    graphs = [graph(seed=seed) for seed in range(3)]
    batch = Batch.from_data_list(graphs)
    _, transform, report = prepare(pyg.GCN(C, 8, 2, 4, norm="graph_norm"), batch)
    assert len(report.moved) == 2
    one, other = transform(batch), Batch.from_data_list([transform(g) for g in graphs])
    assert torch.equal(one.edge_index, other.edge_index)
    torch.testing.assert_close(one.edge_weight, other.edge_weight)
    composed = Compose([ToUndirected(), transform])(batch)
    assert composed.num_edges > one.num_edges and len(composed.to_data_list()) == 3


def hetero():
    data = HeteroData()
    for kind, size in (("a", 7), ("b", 5)):
        data[kind].x = torch.randn(size, C)
    for source, name, target in (("a", "cites", "a"), ("a", "to", "b"), ("b", "to", "a"), ("b", "knows", "b")):
        edges = [torch.randint(data[kind].num_nodes, (12,)) for kind in (source, target)]
        data[source, name, target].edge_index = torch.stack(edges)
    return data


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            HeteroConv(
                {
                    ("a", "cites", "a"): GCNConv(C, C),
                    ("a", "to", "b"): SAGEConv((C, C), C),
                    ("b", "to", "a"): GATConv((C, C), C, add_self_loops=False),
                    ("b", "knows", "b"): GATConv(C, C),
                }
            )
            for _ in range(2)
        )

    def forward(self, x_dict, edge_index_dict, edge_weight_dict=None):
        for conv in self.convs:
            x_dict = {kind: x.relu() for kind, x in conv(x_dict, edge_index_dict, edge_weight_dict or {}).items()}
        return x_dict


def test_heterogeneous_models():
    torch.manual_seed(0)
    data = hetero()
    _, transform, report = prepare(Mixed(), data)
    assert {(m.kind, m.what) for m in report.moved} == {
        ("GCNConv", "self loops and normalisation"),
        ("GATConv", "self loops"),
    }
    assert len(report.moved) == 4 and not report.left
    out = transform(data)
    assert [e for e in out.edge_types if "edge_weight" in out[e]] == [("a", "cites", "a")]
    sizes = [out[e].edge_index.size(1) for e in data.edge_types]
    assert sizes[1:3] == [12, 12] and sizes[0] > 12 and sizes[3] > 12

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GATv2Conv(C, C)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    same_type = HeteroData()
    same_type["a"].x, same_type["a", "cites", "a"].edge_index = data["a"].x, data["a", "cites", "a"].edge_index
    same_type["a", "likes", "a"].edge_index = same_type["a", "cites", "a"].edge_index.flip(0)
    new, transform, report = prepare(to_hetero(Plain(), same_type.metadata()), same_type)
    assert len(report.moved) == 2 and len(transform.transforms) == 2
    assert all(not m.add_self_loops for m in new.modules() if isinstance(m, GATv2Conv))


class Two(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x, edge_index, edge_weight=None, edge_attr=None):
        return self.other(_run(self.one, x, edge_index, edge_weight, edge_attr).relu(), edge_index)


def _run(conv, x, edge_index, edge_weight, edge_attr):
    if getattr(conv, "edge_dim", None):
        return conv(x, edge_index, edge_attr)
    return conv(x, edge_index) if isinstance(conv, (GATConv, SAGEConv)) else conv(x, edge_index, edge_weight)


class Pruned(Weighted):
    def forward(self, x, edge_index):
        return self.conv(x, edge_index[:, ::2])


class NoWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(C, C)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


def with_types():
    data = graph()
    data.edge_type = torch.arange(60)
    return data


def with_gradient():
    data = graph()
    data.edge_weight.requires_grad_()
    return data


LEFT = {
    "another layer without": (
        lambda: Two(GCNConv(C, C), SAGEConv(C, C)),
        graph,
        "other (SAGEConv) reads the same edges",
    ),
    "without weights": (NoWeight, graph, "forward of the model takes no edge_weight"),
    "two normalisations": (lambda: Two(GCNConv(C, C), GCNConv(C, C, improved=True)), graph, "in different ways"),
    "both directions": (lambda: DirGNNConv(GCNConv(C, C, add_self_loops=False)), graph, "takes no edge_weight"),
    "features of self loops": (
        lambda: Two(GATConv(C, C, edge_dim=1, fill_value=0.5), GATConv(C, C, edge_dim=1)),
        graph,
        "other features",
    ),
    "features and weights": (lambda: Two(GATConv(C, C, edge_dim=1), GCNConv(C, C)), graph, "others give features"),
    "typed edges": (lambda: GATConv(C, C), with_types, "edge_type"),
    "learned weights": (lambda: GCNConv(C, C), with_gradient, "edge_weight takes a gradient"),
    "weights not handed on": (lambda: Two(LGConv(), LGConv()), graph, "results would differ by"),
    "other edges inside": (lambda: Pruned(GATConv(C, C)), graph, "results would differ by"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_move_is_left_and_said(name):
    torch.manual_seed(0)
    make, data, why = LEFT[name]
    model, data = make(), data()
    new, transform, report = prepare(model, data)
    assert not report.moved and report.left and all(why in left.why for left in report.left)
    assert repr(new) == repr(model) and new is not model and transform.transforms == [] and why in str(report)
    assert [getattr(m, "normalize", 0) for m in new.modules()] == [getattr(m, "normalize", 0) for m in model.modules()]


def test_layers_that_agree_move_together():
    data = graph()
    data.edge_attr = torch.randn(60, 2)
    together = Two(GCNConv(C, C), GATConv(C, C))
    _, transform, report = prepare(together, data)
    assert [m.kind for m in report.moved] == ["GCNConv", "GATConv"] and len(transform.transforms) == 1
    attention = Two(GATConv(C, C, edge_dim=2, fill_value="max"), GATConv(C, C))
    _, transform, report = prepare(attention, data)
    assert len(report.moved) == 2 and transform.transforms[0].fill_value == "max"
    text = str(report)
    assert "one (GATConv): self loops moved before the model; now add_self_loops=False" in text
    assert "2 layers rely on the data now, 0 are left" in text and "outputs on the given data differ by" in text


def test_nothing_to_do_and_again():
    _, transform, report = prepare(pyg.GraphSAGE(C, 4, 2), graph())
    assert not report.moved and not report.left and transform.transforms == []
    new, transform, report = prepare(SGConv(C, 4), graph())
    _, _, again = prepare(new, transform(graph()))
    assert report.moved[0].how == "GivenSGConv" and not again.moved and not again.left
    assert not prepare(SGConv(C, 4, cached=True), graph()).report.moved


def test_ways_to_call_a_model():
    class TakesData(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(C, 4)

        def forward(self, data):
            return self.conv(data.x, data.edge_index, data.edge_weight)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(C, 4)

        def forward(self, features, adjacency):
            return {"out": [self.conv(features, *adjacency)]}

    class Anything(Odd):
        def forward(self, *args):
            return self.conv(*args)

    assert prepare(TakesData(), graph(False)).report.moved
    call = lambda model, data: model(data.x, (data.edge_index, data.edge_weight))  # noqa: E731
    assert prepare(Odd(), graph(), call).report.moved
    with pytest.raises(ValueError, match="argument 'features', which data has no attribute for; pass call="):
        prepare(Odd(), graph())
    with pytest.raises(ValueError, match="names no attribute of data; pass call="):
        prepare(Anything(), graph())
    with pytest.raises(ValueError, match="model: got a compiled model"):
        prepare(gnncompile.compile(GCNConv(C, 4)), graph())
    with pytest.raises(ValueError, match="model: got parameters without a shape"):
        prepare(GCNConv(-1, 4), graph())
