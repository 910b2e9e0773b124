"""The places of edges in the edge list are kept where a walk asks for them, forward or backward, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINEConv, PNAConv, SAGEConv, TransformerConv
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ops import region as region_op
from gnncompile.passes.pre_grad.drop_edge_ids import _numbered
from gnncompile.testing import awkward

C = 4
GRAPHS = {name: data for name, data in awkward(channels=C).items() if name != "bipartite"}
BOTH, NONE = frozenset((Space.SOURCE, Space.DESTINATION)), frozenset()


def kept(compiled: Any) -> list[int]:
    """Lengths of the int32 tensors that are remembered of a graph."""
    (captured,) = callable_of(compiled).backend.captured
    (entry,) = captured.structure.cache._entries.values()
    return sorted(t.numel() for t in entry.made if t.dtype == torch.int32)


def step(model: Any, tensors: list[Tensor], edge_index: Tensor) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    given = [t.clone().requires_grad_() for t in tensors]
    out = model(given[0], edge_index, *given[1:])
    return [out, *torch.autograd.grad(out.square().sum(), [*given, *parameters], allow_unused=True)]


PNA = {"aggregators": ["mean", "max", "min"], "scalers": ["identity"], "deg": torch.tensor([1, 2, 3])}
LAYERS: dict[str, tuple[Callable[[], nn.Module], bool, bool]] = {
    "sage": (lambda: SAGEConv(C, C), False, False),
    "max": (lambda: SAGEConv(C, C, aggr="max"), False, False),
    "gcn": (lambda: GCNConv(C, C, add_self_loops=False), False, False),
    "pna": (lambda: PNAConv(C, C, **PNA), False, False),
    "learned weights": (lambda: GCNConv(C, C, add_self_loops=False, normalize=False), True, True),
    "edge features": (lambda: GINEConv(nn.Linear(C, C)), True, True),
    "attention": (lambda: TransformerConv(C, C, heads=2), False, True),
    "dropout": (lambda: GATConv(C, C, dropout=0.5, add_self_loops=False), False, True),
}
"""Layers, whether they have values per edge, and whether a walk asks for the places of edges."""


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_kept(name: str) -> None:
    make, has_features, asks = LAYERS[name]
    torch.manual_seed(0)
    model = make().train(name == "dropout")
    edge_index = torch.randint(9, (2, 31))
    tensors = [torch.randn(9, C)] + [torch.rand(31, *(() if name == "learned weights" else (C,)))] * has_features
    compiled = gnncompile.compile(model)
    found = step(compiled, tensors, edge_index)
    if name != "dropout":
        expected = step(copy.deepcopy(model).double(), [t.double() for t in tensors], edge_index)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    lengths = kept(compiled)
    assert lengths.count(31) == (4 if asks else 2) and lengths.count(0) == (0 if asks else 2)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("frozen", ["", "features", "parameters"])
def test_awkward_graphs(graph: str, frozen: str) -> None:
    """Whoever asks for a gradient, of features, parameters or both."""
    data = GRAPHS[graph]
    torch.manual_seed(0)
    sources = torch.cat([data.x, data.x])  # nobody reads the second half
    for conv in (SAGEConv((C, C), C), GATv2Conv((C, C), C, add_self_loops=False)):
        conv.requires_grad_(frozen != "parameters")
        x = tuple(t.clone().requires_grad_(frozen != "features") for t in (sources, data.x))
        results = []
        for model in (gnncompile.compile(conv), conv):
            out = model(x, data.edge_index)
            wanted = [t for t in (*x, *conv.parameters()) if t.requires_grad]
            results.append([out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_of_gradients_keep_them() -> None:
    compiled = gnncompile.compile(SAGEConv(C, C), options={"double_backward": True})
    compiled(torch.randn(9, C), torch.randint(9, (2, 31))).sum().backward()
    assert 0 not in kept(compiled)


@pytest.mark.parametrize("reduce", ["mul", "min", "mean"])
def test_a_region_reads_a_reduction_that_is_none(reduce: str) -> None:
    """Torch's operations compute a product of rows. A gradient flows through them as through a region."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GINEConv(nn.Linear(C, C), edge_dim=C)

        def forward(self, w: Tensor, edge_index: Tensor, nodes: int) -> Tensor:
            return self.conv(scatter(w, edge_index[1], 0, nodes, reduce), edge_index, w)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, edge_index = Model(), torch.randint(9, (2, 31))
    w = torch.randn(31, C, requires_grad=True)
    results = []
    for run in (gnncompile.compile(model, fullgraph=True), model):
        out = run(w, edge_index, 9)
        results.append([out, *torch.autograd.grad(out.square().sum(), [w, *model.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def weighed(shape: tuple[int, int]) -> Region:
    """The sum of rows times values per edge."""
    b = Builder(Space.DESTINATION)
    product = b.op("mul", b.input(0, Space.SOURCE, (1, C), "float32"), b.input(1, Space.EDGE, shape, "float32"))
    return b.finish([Output(b.reduce("sum", product), "float32", (C,))])


def test_any_gradient_that_there_may_be() -> None:
    b = Builder(Space.DESTINATION)
    rows = b.finish([Output(b.reduce("sum", b.input(0, Space.SOURCE, (1, C), "float32")), "float32", (C,))])
    assert _numbered(rows, (True,)) == _numbered(rows, (False,)) == NONE
    assert _numbered(weighed((1, 1)), (True, True)) == BOTH
    assert _numbered(weighed((1, 1)), (False, False)) == {Space.DESTINATION}
    assert _numbered(rows, (True,) * 5) == BOTH  # too many to look at all


def test_a_gradient_that_was_not_foreseen_is_an_error() -> None:
    region, rowptr, col = weighed((1, 1)), torch.tensor([0, 2, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    none, tensors = torch.zeros(0, dtype=torch.int32), [torch.ones(2, C), torch.ones(3, 1)]
    with pytest.raises(RuntimeError, match="asks for the numbers of edges"):
        region_op.backward(region, tensors, [rowptr, col, none] * 2, [None], [torch.ones(2, C)], (True, True))
