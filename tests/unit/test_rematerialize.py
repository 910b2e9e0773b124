"""What stays on the edges is kept once for the backward, and made again where that is cheap."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import EdgeConv

import gnncompile
from gnncompile.ir.region import Space, parse
from tests.graphs import EDGE_LISTS
from tests.harness import launched

NODES, WIDTH, HIDDEN = 5, 4, 24


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
