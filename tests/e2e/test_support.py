"""The table of support, and what it led to: sizes that only the data knows, dense batches, recurrent cells."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric import nn as pyg
from torch_geometric.utils import to_dense_adj, to_dense_batch
from torch_geometric.utils.num_nodes import maybe_num_nodes

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.passes.pre_grad import lower_unfused
from gnncompile.support.case import Absent, Case, Graph
from gnncompile.support.check import Result, check
from gnncompile.support.options import options_of
from gnncompile.support.table import SECTIONS, exported, option_row, package, row, rows_of
from tests.harness import light

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


@pytest.fixture(autouse=True, scope="module")
def _light():
    with light():
        yield


# -- the table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_every_exported_name_is_in_the_table(section: str):
    names = set(importlib.import_module(package(section)).__all__)
    assert exported(SECTIONS[section]) == names
    assert names <= {name.split(" [")[0] for name in rows_of(PAGE.read_text(encoding="utf-8"))}


QUICK = [
    "GCNConv [weights]", "SAGEConv [several]", "GatedGraphConv", "DNAConv", "PPFConv", "HypergraphConv",
    "ClusterGCNConv", "GINEConv", "MultiAggregation", "Set2Set", "MLPAggregation", "InstanceNorm", "GraphNorm",
    "global_mean_pool", "JumpingKnowledge [lstm]", "MetaLayer",
]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_the_table_is_what_is_found(name: str):
    """A part of it: all of it takes minutes."""
    found, inference = check(case_of(name)), check(case_of(name), inference=True)
    assert found.passes and inference.passes
    assert row(found, inference) == rows_of(PAGE.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("name", ["GroupAddRev", "EquilibriumAggregation"])
def test_what_breaks_the_graph_is_right(name: str):
    """A layer that frees its inputs; gradients of gradients."""
    found = check(case_of(name))
    assert found.breaks and not found.wrong


def case_of(name: str) -> Case:
    (case,) = [c for cases in SECTIONS.values() for c in cases if c.name == name]
    assert isinstance(case, Case)
    return case


def test_a_difference_and_an_error_are_found():
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (2 if torch.compiler.is_compiling() else 1)

    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no way")

    assert "result 0 is off" in check(Case("wrong", Wrong, ("x",))).wrong
    found = check(Case("refuses", Refuses, ("x",)))
    assert found == Result("refuses", "12 nodes, 40 edges: RuntimeError: no way") and not found.passes
    assert row(found, found) == "| refuses | | | | | | | eager: 12 nodes, 40 edges: RuntimeError: no way |"
    assert option_row(found, found) == "| refuses |  |  | eager: 12 nodes, 40 edges: RuntimeError: no way |"


OPTIONS = {
    "conv": ["GATv2Conv [concat=False]", "GATConv [edge_dim=3]", "SAGEConv [aggr=var]", "GeneralConv [aggr=max]"],
    "models": ["GIN [jk=cat]"],
}  # fmt: skip


@pytest.mark.parametrize(("section", "name"), [(section, name) for section, names in OPTIONS.items() for name in names])
def test_options(section: str, name: str):
    """A part of them: all take hours."""
    (case,) = [c for c in options_of(section, SECTIONS[section], name) if c.name == name]
    assert check(case).passes and check(case, inference=True).passes


def test_options_are_read_from_signatures():
    names = [case.name for case in options_of("conv", SECTIONS["conv"], "GATConv")]
    wanted = ["heads=1", "concat=False", "edge_dim=3", "in_channels=(8, 8)", "residual=True", "with size"]
    assert {f"GATConv [{option}]" for option in wanted} <= set(names) and len(names) == len(set(names))
    for section, cases in SECTIONS.items():
        with_options = {case.name.split(" [")[0] for case in options_of(section, cases)}
        assert with_options <= exported(cases)


def test_an_option_is_changed():
    cases = options_of("conv", SECTIONS["conv"], "GATConv")
    (changed,) = [case for case in cases if case.name == "GATConv [heads=4]"]
    assert changed.make().heads == 4 and case_of("GATConv").make().heads == 2
    (dropped,) = [case for case in cases if case.name == "GATConv [dropout=0.5]"]
    assert dropped.drawn and not changed.drawn
    (both,) = [case for case in cases if case.name == "GATConv [in_channels=(8, 8)]"]
    assert len(both.arguments(Graph(12, 40))[0][0]) == 2


def test_an_option_that_a_layer_can_not_be_made_with():
    def make() -> nn.Module:
        raise TypeError("no such option")

    found = check(Case("nope", make, ("x",)))
    assert found == Result("nope", "when it is made: TypeError: no such option") and not found.runs


def test_inference_has_no_gradients_and_no_training():
    class Modes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                seen.add((self.training, torch.is_grad_enabled()))
            return 2 * x

    for inference in (False, True):
        seen: set[tuple[bool, bool]] = set()
        assert check(Case("modes", Modes, ("x",)), inference).passes and seen == {(not inference, not inference)}


def test_absent_names_have_a_reason():
    assert all(c.why for cases in SECTIONS.values() for c in cases if isinstance(c, Absent))


def test_inputs_are_as_they_are_described():
    graph = Graph(30, 100)
    loops = graph.edge_index[0][graph.edge_index[0] == graph.edge_index[1]]
    assert loops.numel() == loops.unique().numel() == 2
    within = graph.batch_edge_index
    assert torch.equal(graph.batch[within[0]], graph.batch[within[1]]) and within.shape == (2, 100)
    assert bool((graph.sorted_index.diff() >= 0).all())


# -- sizes that only the data knows -------------------------------------------------------------------------------


def one_graph_for(model: nn.Module, calls: list[tuple[Tensor, ...]]) -> None:
    """Compares with eager; one captured graph, and no sync once an index was seen."""
    compiled = gnncompile.compile(model)
    for args in calls:
        torch.testing.assert_close(compiled(*args), model(*args))
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1
    report = gnncompile.explain(model, *calls[0])
    assert (report.graph_breaks, report.host_syncs) == (0, 0)


class LargestPlusOne(nn.Module):
    """As users write it: of an input, and of a row of an edge list."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        graphs = int(batch.max()) + 1
        targets = edge_index[1].max().item() + 1
        pooled = x.new_zeros(graphs, x.size(1)).index_add(0, batch, x)
        sums = x.new_zeros(targets, x.size(1)).index_add(0, edge_index[1], x[edge_index[0]])
        return torch.cat([pooled, sums])


def test_largest_index_plus_one():
    calls = []
    for nodes, edges in ((12, 40), (5, 9), (30, 3)):
        graph = Graph(nodes, edges)
        calls.append((graph.x.detach(), graph.edge_index, graph.batch))
    one_graph_for(LargestPlusOne(), calls)


def test_largest_index_of_an_edge_list():
    calls = []
    for nodes, edges in ((12, 40), (30, 3), (5, 0)):
        graph = Graph(nodes, edges)
        calls.append((graph.x.detach(), graph.edge_index))

    class Largest(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return x.sum() * maybe_num_nodes(edge_index)

    one_graph_for(Largest(), calls)


def test_a_size_that_can_not_be_attached_is_read_in_every_step():
    """Behind a graph break the index is no argument of the model any more."""

    class Breaks(nn.Module):
        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            other = batch * 2
            torch._dynamo.graph_break()
            return x.new_zeros(int(other.max()) + 1, x.size(1)).index_add(0, other, x)

    graph, model = Graph(12, 40), Breaks()
    found = gnncompile.compile(model)(graph.x.detach(), graph.batch)
    torch.testing.assert_close(found, model(graph.x.detach(), graph.batch))


@pytest.mark.parametrize("values", [[-3, -2], [-1, -1], [0], [4, 1]], ids=str)
def test_the_largest_of_integers_that_are_no_index(values: list[int]):
    def fn(x: Tensor, integers: Tensor) -> Tensor:
        return x * int(integers.max()) + int((integers - 7).max())

    x = torch.rand(5)
    torch.testing.assert_close(gnncompile.compile(fn)(x, torch.tensor(values)), fn(x, torch.tensor(values)))


def test_the_largest_float_is_no_size():
    def fn(x: Tensor) -> Tensor:
        return x * float(x.max())

    x = torch.rand(5)
    torch.testing.assert_close(gnncompile.compile(fn)(x), fn(x))


class SignedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = pyg.SignedGCN(8, 8, 2)

    def forward(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return self.model.loss(self.model(x, positive, negative), positive, negative)


def test_negative_targets_are_sampled_in_the_graph():
    """The loss of a signed graph asks NumPy which targets are negative."""
    torch.manual_seed(0)
    loss = SignedLoss()
    compiled = gnncompile.compile(loss, fullgraph=True)
    graph = Graph(12, 40, torch.float32)
    compiled(graph.x, graph.edge_index, graph.other_edge_index).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in loss.parameters())
    targets = torch.ops.gnncompile.negative_targets(graph.edge_index, 12, False)
    pairs = set(map(tuple, graph.edge_index.t().tolist())) | {(n, n) for n in range(12)}
    assert targets.shape == (40,) and not pairs & set(zip(graph.edge_index[0].tolist(), targets.tolist(), strict=True))


# -- dense batches ------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    def __init__(self, **kwargs: object) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        dense, mask = to_dense_batch(x, batch, **self.kwargs)  # type: ignore[arg-type]
        return torch.cat([dense, mask.unsqueeze(-1).to(dense.dtype)], dim=-1)


@pytest.mark.parametrize("kwargs", [{}, {"fill_value": -1.5}, {"max_num_nodes": 2}, {"batch_size": 5}], ids=str)
def test_dense_batches(kwargs: dict[str, object]):
    batches = [[0, 0, 1, 3, 3, 3], [0], [2, 2], [0, 1, 2, 3]]  # graphs without nodes, one node, several
    calls = [(torch.randn(len(b), 3), torch.tensor(b)) for b in batches]
    one_graph_for(Dense(**kwargs), calls)


def test_a_dense_batch_of_integers():
    x, batch = torch.arange(4), torch.tensor([0, 0, 2, 2])
    expected, found = to_dense_batch(x, batch), gnncompile.compile(to_dense_batch)(x, batch)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_gradient_of_a_dense_batch():
    x, batch = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 0, 1, 3, 3, 3])
    model = Dense(max_num_nodes=2)
    weight = torch.randn(4, 2, 4)
    (found,) = torch.autograd.grad((gnncompile.compile(model)(x, batch) * weight).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad((model(x, batch) * weight).sum(), x)[0])
    assert not found[5].any()  # it is one too many


@pytest.mark.parametrize("kwargs", [{}, {"max_num_nodes": 2}, {"batch_size": 5, "max_num_nodes": 4}], ids=str)
@pytest.mark.parametrize("features", [None, 2])
def test_dense_adjacencies(kwargs: dict[str, object], features: int | None):
    class Adjacency(nn.Module):
        def forward(self, edge_index: Tensor, batch: Tensor, edge_attr: Tensor | None) -> Tensor:
            return to_dense_adj(edge_index, batch, edge_attr, **kwargs)  # type: ignore[arg-type]

    calls = []
    for nodes, edges in ((12, 40), (5, 9), (7, 0), (3, 1)):
        graph = Graph(nodes, edges)
        weight = torch.randn(edges, features) if features else None
        calls.append((graph.batch_edge_index, graph.batch, weight))
    one_graph_for(Adjacency(), calls)


def test_an_unsorted_index_is_refused_where_rows_are_made_dense():
    model = pyg.MLPAggregation(3, 3, 4, num_layers=1)
    compiled, x = gnncompile.compile(model), torch.randn(4, 3)
    compiled(x, torch.tensor([0, 0, 1, 1]))
    with pytest.raises(ValueError, match="unsorted index"):
        compiled(x, torch.tensor([1, 0, 1, 0]))


# -- layers that are traced as something else ---------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_cell(bias: bool):
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4, bias=bias)
    one_graph_for(cell, [(torch.randn(n, 3), torch.randn(n, 4)) for n in (5, 1, 9)])


@pytest.mark.parametrize("layers", [1, 2])
def test_set2set(layers: int):
    torch.manual_seed(0)
    model = pyg.Set2Set(3, 2, num_layers=layers)
    one_graph_for(model, [(torch.randn(len(b), 3), torch.tensor(b)) for b in ([0, 0, 1, 3], [0], [0, 1, 1])])


# -- which operations keep the rows of edges apart ----------------------------------------------------------------


def safe(fn: object, *shapes: tuple[int, ...]) -> bool:
    """Whether all operations of a function leave the rows of its last argument, which are masked, apart."""
    values = [torch.randn(s) for s in shapes]
    graph = make_fx(fn, tracing_mode="symbolic", pre_dispatch=True)(*values).graph  # type: ignore[arg-type]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    tainted: set[fx.Node] = {inputs[-1]}
    for node in graph.nodes:
        if node.op == "call_function" and any(n in tainted for n in node.all_input_nodes):
            if not lower_unfused._safe(node, tainted):
                return False
            tainted.add(node)
    return True


def test_rows_that_stay_apart():
    assert safe(lambda w, e: e @ w, (3, 4), (7, 3))
    assert safe(lambda w, e: e @ e.transpose(1, 2), (1,), (7, 3, 2))
    assert safe(lambda w, e: torch.linalg.vector_norm(e, dim=-1), (1,), (7, 3))
    assert safe(lambda w, e: torch.atan2(e.sum(dim=1), e.amax(dim=1)), (1,), (7, 3))
    assert safe(lambda w, e: torch.stack([e[:, 0], e[:, 1]], dim=1), (1,), (7, 3))


def test_rows_that_meet():
    assert not safe(lambda w, e: w @ e, (7, 7), (7, 3))
    assert not safe(lambda w, e: e.sum(dim=0), (1,), (7, 3))
    assert not safe(lambda w, e: e.sum(), (1,), (7, 3))
    assert not safe(lambda w, e: e.transpose(0, 1), (1,), (7, 3))
    assert not safe(lambda w, e: torch.atan2(w, e), (7, 7), (7,))
    assert not safe(lambda w, e: torch.stack([e, e]), (1,), (7, 3))
    assert not safe(lambda w, e: e.max(dim=0).values, (1,), (7, 3))
