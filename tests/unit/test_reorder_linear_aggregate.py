"""Linear layers and sums over edges change places where that makes rows narrower: the same numbers and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, GraphConv, SAGEConv, SGConv
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.ir.region import Space, parse
from gnncompile.passes.analysis import aten, own
from tests.graphs import EDGE_LISTS
from tests.harness import launched, light, look_at_graphs, needs_interpreter

NODES = 5
FULL = "unsorted, duplicates, hub"
HUB = EDGE_LISTS[FULL]

LAYERS: dict[str, tuple[Callable[[int, int], nn.Module], bool]] = {
    "GCN": (GCNConv, True),
    "GIN": (lambda i, o: GINConv(nn.Linear(i, o), train_eps=True), False),
    "SAGE": (SAGEConv, False),
    "GraphConv with weights": (GraphConv, False),
    "SGC": (lambda i, o: SGConv(i, o, K=2), False),
}
"""How to make a layer, and whether it applies its weight before it sums."""


def run(model: nn.Module, x: Tensor, edge_index: Tensor, *rest: Tensor) -> list[Tensor | None]:
    """The output and all gradients."""
    out = model(x, edge_index, *rest)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    leaves = [a for a in (x, *rest, *model.parameters()) if a.requires_grad]
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def compare(model: nn.Module, x: Tensor, edge_index: Tensor, *rest: Tensor) -> list[str]:
    """Compares with eager in float64; the regions that ran."""
    compiled = gnncompile.compile(model, fullgraph=True)
    with launched() as specs:
        found = run(compiled, x, edge_index, *rest)
    wide = [a.detach().double().requires_grad_(a.requires_grad) for a in (x, *rest)]
    expected = run(copy.deepcopy(model).double(), wide[0], edge_index, *wide[1:])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    return specs


def widths(specs: list[str]) -> set[int]:
    """How many features the rows have that regions gather."""
    regions = [parse(spec) for spec in specs]
    return {n.shape[1] for r in regions for n in r.inputs if n.space is r.by.opposite} - {1}


@pytest.mark.parametrize("edges, sizes", [*((e, (6, 3)) for e in EDGE_LISTS), (FULL, (3, 6)), (FULL, (4, 4))])
@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, x_grad: bool, sizes: tuple[int, int], edges: str):
    make, layer_first = LAYERS[name]
    edge_index, (before, after) = EDGE_LISTS[edges], sizes
    torch.manual_seed(0)
    model, x = make(before, after), torch.randn(NODES, before, requires_grad=x_grad)
    rest = [torch.rand(edge_index.size(1)) + 0.5] if "weights" in name else []
    with light():
        specs = compare(model, x, edge_index, *rest)
    layer_last_cost, layer_first_cost = before * (2 if x_grad else 1), after * 2
    first = layer_first if layer_last_cost == layer_first_cost else layer_first_cost < layer_last_cost
    assert widths(specs) == {after if first else before}
    if not x_grad and not first:
        assert all(parse(spec).by is Space.DESTINATION for spec in specs)  # nothing is walked for a gradient


@pytest.mark.parametrize("which", ["cpp", "triton"])
def test_kernels(which: str):
    needs_interpreter(which)
    torch.manual_seed(0)
    with light(which):
        compare(SAGEConv(6, 3), torch.randn(NODES, 6, requires_grad=True), HUB)


def test_weights_of_edges_with_a_gradient():
    torch.manual_seed(0)
    weight = (torch.rand(HUB.size(1)) + 0.5).requires_grad_()
    with light():
        assert widths(compare(GraphConv(6, 3), torch.randn(NODES, 6), HUB, weight)) == {3}


class _Layer(nn.Module):
    """A layer, what is done with its rows, and a reduction."""

    def __init__(self, message: Callable[[Tensor], Tensor], reduce: str = "sum", bias: bool = False) -> None:
        super().__init__()
        self.layer, self.message, self.reduce = nn.Linear(3, 6, bias=bias), message, reduce

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return scatter(self.message(h[edge_index[0]]), edge_index[1], 0, x.size(0), self.reduce)


class _UsedTwice(_Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h + scatter(h[edge_index[0]], edge_index[1], 0, x.size(0))


class _ScaledInPlace(_Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        h.mul_(2.0)
        return scatter(h[edge_index[0]], edge_index[1], 0, x.size(0))


def _same(rows: Tensor) -> Tensor:
    return rows


def _scaled(rows: Tensor) -> Tensor:
    return 3.0 * rows / torch.arange(1.0, rows.size(0) + 1).to(rows.dtype).view(-1, 1)


def _by_feature(rows: Tensor) -> Tensor:
    return rows * torch.arange(1.0, 7.0).to(rows.dtype)


@pytest.mark.parametrize(
    "model, width",
    [
        (lambda: _Layer(_same), 3),
        (lambda: _Layer(_scaled, "mean"), 3),
        (lambda: _Layer(_same, "max"), 6),
        (lambda: _Layer(torch.relu), 6),
        (lambda: _Layer(_by_feature), 6),
        (lambda: _Layer(_same, bias=True), 6),
        (lambda: _UsedTwice(_same), 6),
        (lambda: _ScaledInPlace(_same), 3),
    ],
    ids=["sum", "scaled", "max", "relu", "by feature", "bias", "used twice", "scaled in place"],
)
def test_what_is_linear(model: Callable[[], nn.Module], width: int):
    torch.manual_seed(0)
    with light():
        assert widths(compare(model(), torch.randn(NODES, 3, requires_grad=True), HUB)) == {width}


def test_sources_apart_from_destinations_stay():
    """In front of the sums the layer would run on all sources, which is most of the work in a sampled batch."""
    torch.manual_seed(0)
    model, x = SAGEConv(6, 3), (torch.randn(NODES + 2, 6), torch.randn(NODES, 6))
    with light(), launched() as specs:
        torch.testing.assert_close(gnncompile.compile(model, fullgraph=True)(x, HUB), model(x, HUB))
    assert widths(specs) == {6}


class _SumOfEdges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.layer(scatter(edge_attr, edge_index[1], 0, x.size(0)))
        return x + out


def test_a_layer_of_sums_of_edge_features_stays():
    torch.manual_seed(0)
    edge_attr = torch.randn(HUB.size(1), 6, requires_grad=True)
    with light():
        specs = compare(_SumOfEdges(), torch.randn(NODES, 3, requires_grad=True), HUB, edge_attr)
    read = {n.shape for spec in specs for n in parse(spec).inputs if n.space is Space.EDGE}
    assert read == {(1, 6)}


def test_without_gradients_equal_widths_stay(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, x = GCNConv(4, 4), torch.randn(NODES, 4)
    graphs = look_at_graphs(monkeypatch, lambda graph: [graph])
    with light(), torch.no_grad():
        torch.testing.assert_close(gnncompile.compile(model, fullgraph=True)(x, HUB), model(x, HUB))
    targets = [n.target for n in graphs[0].nodes]
    assert targets.index(aten.linear.default) < targets.index(own.region.default)


def test_it_can_be_turned_off():
    torch.manual_seed(0)
    x = torch.randn(NODES, 6)
    with light(), launched() as specs:
        gnncompile.compile(SAGEConv(6, 3), options={"narrower": False})(x, HUB)
    assert widths(specs) == {6}
