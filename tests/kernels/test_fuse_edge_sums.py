"""Gradients of edge states that a residual adds to are added in the walks that make them."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space, parse
from gnncompile.passes.post_grad import fuse_edge_sums
from tests.edge_layers import compare, double, run
from tests.harness import kernels, launched
from tests.triton_regions import GENERATORS, home

pytestmark = triton_regions.INTERPRETED

CHANNELS, OPS = 16, torch.ops.gnncompile
GRAPHS = {
    "random": torch.tensor([[0, 3, 1, 4, 2, 0, 3, 3], [1, 0, 2, 2, 4, 4, 1, 1]]),  # an edge twice
    "hub": torch.stack([torch.arange(30) % 5, torch.full((30,), 2)]),
    "one edge": torch.tensor([[4], [0]]),
    "no edge": torch.empty(2, 0, dtype=torch.int64),
}


class _Gated(nn.Module):
    """Layers with a state per edge, to which each adds a normed value; the mean of its last state is read as well."""

    def __init__(self, channels: int = CHANNELS, layers: int = 2) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(channels, channels) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, destination = edge_index
        for gate, norm in zip(self.gates, self.norms, strict=True):
            raw = x[source] - x[destination] + gate(edge_attr)
            x = x + torch.zeros_like(x).index_add(0, destination, raw.sigmoid() * x[source])
            edge_attr = edge_attr + norm(raw).relu()
        return torch.zeros_like(x).index_add(0, destination, edge_attr) + x


def _added(regions: list[Region]) -> list[int]:
    """How many outputs per edge of each region are sums with an input per edge that has no other use."""
    return [
        sum(
            region.per_edge(out)
            and region.nodes[out.node].op == "add"
            and any(
                region.nodes[a].op == "input" and region.nodes[a].space is Space.EDGE
                for a in region.nodes[out.node].args
            )
            for out in region.outputs
        )
        for region in regions
    ]


@pytest.mark.parametrize("which", GENERATORS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_gradients(graph: str, which: str):
    torch.manual_seed(0)
    device, edge_index = home(which), GRAPHS[graph].to(home(which))
    x, attr = ((torch.randn(n, CHANNELS, device=device) / 4).requires_grad_() for n in (5, edge_index.size(1)))
    model = _Gated().to(device)
    with kernels(which):
        regions = compare(model, x, edge_index, attr)
    assert any(_added(regions))


@pytest.mark.parametrize("which", GENERATORS)
def test_in_16_bits(which: str):
    """Sums are rounded once, so errors are no larger than those of eager."""
    torch.manual_seed(0)
    device, edge_index = home(which), GRAPHS["random"].to(home(which))
    model = _Gated().to(device, torch.bfloat16)
    x, attr = (torch.randn(n, CHANNELS, device=device).bfloat16().requires_grad_() for n in (5, edge_index.size(1)))
    exact = run(copy.deepcopy(model).double(), double(x), edge_index, double(attr))
    eager = run(model, x, edge_index, attr)
    with kernels(which), launched() as specs:
        found = run(gnncompile.compile(model), x, edge_index, attr)
    assert any(_added([parse(spec) for spec in specs])) == (which == "triton"), (
        "C++ leaves 16-bit layers to the library"
    )
    for a, b, right in zip(found, eager, exact, strict=True):
        off, usual = (float((one.double() - right).norm()) for one in (a, b))
        assert off <= 1.5 * usual + 1e-2 * float(right.norm())


def _graph(unmasked: bool, dtype: torch.dtype, channels: int, stored: bool) -> fx.Graph:
    """A region that gives the exponential of a value per edge, and a sum of that with another value per edge."""
    name = str(dtype).removeprefix("torch.")
    builder = Builder(Space.DESTINATION, unmasked=unmasked)
    result = builder.op("exp", builder.input(0, Space.EDGE, (1, channels), name))
    region = builder.finish([Output(result, name, (channels,))])
    graph, rows = fx.Graph(), torch.empty(6, channels, dtype=dtype)

    def made(node: fx.Node, val: Any) -> fx.Node:
        node.meta["val"] = val
        return node

    attr, dy, layout = (made(graph.placeholder(name), rows) for name in ("attr", "dy", "layout"))
    if not stored:
        dy = made(graph.call_function(torch.ops.aten.sin.default, (dy,)), rows)
    call = made(graph.call_function(OPS.region.default, ([attr], [layout] * 3, region.spec)), [rows])
    taken = made(graph.call_function(operator.getitem, (call, 0)), rows)
    graph.output(made(graph.call_function(torch.ops.aten.add.Tensor, (dy, taken)), rows))
    return graph


@pytest.mark.parametrize(
    ("unmasked", "dtype", "channels", "stored", "fused"),
    [
        (True, torch.float32, 16, True, True),
        (False, torch.float32, 16, True, False),  # a walk leaves masked edges out, so it can't write their sums
        (True, torch.float32, 4, True, False),
        (True, torch.bfloat16, 16, True, True),
        (True, torch.float32, 16, False, False),
    ],
)
def test_what_regions_add(unmasked: bool, dtype: torch.dtype, channels: int, stored: bool, fused: bool):
    graph = _graph(unmasked, dtype, channels, stored)
    fuse_edge_sums.run(graph)
    graph.lint()
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)) == (not fused)
    (call,) = graph.find_nodes(op="call_function", target=OPS.region.default)
    assert len(call.args[0]) == 1 + fused
    assert _added([parse(call.args[2])]) == [int(fused)]
