"""What stays on the edges is kept once for the backward, and made again where that is cheap."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.ir.region import Space, parse
from tests.graphs import EDGE_LISTS
from tests.harness import launched, light, look_at_graphs

NODES, WIDTH, HIDDEN = 5, 4, 24
WIDE = 192
"""So wide that the bits of a comparison are stored, instead of comparing rows again."""


def model(aggr: str = "max") -> nn.Module:
    torch.manual_seed(0)
    return EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)), aggr=aggr)


def step(model: nn.Module, x: Tensor, edges: Tensor) -> tuple[list[Tensor], int]:
    """The output with all gradients, and how many wide rows per edge the backward was left."""
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if (
            type(tensor) is Tensor
            and tensor.dim() == 2
            and tensor.size(0) == edges.size(1)
            and tensor.size(1) >= HIDDEN
        ):
            kept.add(tensor.data_ptr())
        return tensor

    model(x, edges)  # compiles it: nothing may look at what is saved meanwhile
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = model(x, edges)
    return [out.detach(), *torch.autograd.grad(out.cos().sum(), [x, *model.parameters()])], len(kept)


@pytest.mark.parametrize("edges", EDGE_LISTS)
def test_edge_conv(edges: str):
    layer, x = model(), torch.randn(NODES, WIDTH, requires_grad=True)
    found, kept = step(gnncompile.compile(layer, fullgraph=True), x, EDGE_LISTS[edges])
    wide = x.detach().double().requires_grad_()
    expected, _ = step(copy.deepcopy(layer).double(), wide, EDGE_LISTS[edges])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert kept <= 1


def test_no_addition_with_atomics():
    """The gradient of rows that a layer reads per edge is summed by walks over both ends of the edges."""
    x, edges = torch.randn(NODES, WIDTH, requires_grad=True), EDGE_LISTS["unsorted, duplicates, hub"]
    out = gnncompile.compile(model(), fullgraph=True)(x, edges)
    with launched() as backward:
        out.sum().backward()
    summed = {r.by for r in map(parse, backward) if r.reductions}
    assert summed == {Space.SOURCE, Space.DESTINATION}


def test_it_is_made_again_in_the_backward_alone():
    x, edges = torch.randn(NODES, WIDTH, requires_grad=True), EDGE_LISTS["unsorted, duplicates, hub"]
    # A region with layers makes its rows again by itself.
    compiled = gnncompile.compile(model(), fullgraph=True, options={"edge_layers": False})
    with launched() as forward:
        out = compiled(x, edges)
    with launched() as backward:
        out.sum().backward()
    again = set(forward) & set(backward)
    assert len(again) == 1 and len(forward) == len(set(forward))


class Rows(nn.Module):
    """A layer on rows of edges, made from gathered rows and from rows that an earlier layer has made."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.before, self.after = kind, nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, destination = edge_index
        rows = x[source] + x[destination]
        if self.kind == "plus a layer":
            rows = rows + self.before(edge_attr)
        elif self.kind == "times a layer":
            rows = rows * self.before(edge_attr)
        elif self.kind == "plus an input":
            rows = rows + edge_attr
        return scatter(self.after(rows.relu()), destination, 0, x.size(0), "max")


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        ("gathered rows", True),
        ("plus an input", True),  # the caller keeps it
        ("times a layer", True),  # the gradient of the product reads it
        ("plus a layer", False),  # nothing else keeps it, and it is as wide as the result
    ],
)
def test_rows_that_only_the_recomputation_would_keep(kind: str, again: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    region = torch.ops.gnncompile.region.default
    marks = look_at_graphs(
        monkeypatch,
        lambda graph: [
            "recompute" in node.meta
            for node in graph.find_nodes(op="call_function", target=region)
            if not parse(node.args[2]).reductions  # type: ignore[arg-type]
        ],
    )
    layer = Rows(kind)
    with light():
        compiled = gnncompile.compile(copy.deepcopy(layer), options={"edge_layers": False})
        for edges in EDGE_LISTS.values():
            given = torch.randn(NODES, WIDE), torch.randn(edges.size(1), WIDE)
            found = []
            for run in (layer, compiled):
                x, edge_attr = (t.clone().requires_grad_() for t in given)
                out = run(x, edges, edge_attr)
                parameters = run.after.parameters()
                found.append([out, *torch.autograd.grad(out.cos().sum(), [x, *parameters])])
            torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert set(marks) == {again}
