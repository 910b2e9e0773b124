"""Self loops join a layout after its edges are sorted, so layers with and without self loops share one sort."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.utils import add_self_loops, scatter

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.passes.analysis import own
from tests.graphs import EDGE_LISTS
from tests.harness import same_gradients

which, pytestmark = triton_regions.which, triton_regions.INTERPRETED
NODES, CHANNELS = 5, 4


class Layers(nn.Module):
    """The sum of layers over the same edges."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return sum((layer(x, edge_index) for layer in self.layers), x)


class Looped(nn.Module):
    """A sum over edges and loops, with a weight for each."""

    def __init__(self, loops: Callable[..., tuple[Tensor, Tensor | None]], size: int | None = None) -> None:
        super().__init__()
        self.loops, self.size, self.layer = loops, size, nn.Linear(CHANNELS, CHANNELS).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = (edge_index[0] + 1).to(x.dtype)
        edges, weight = self.loops(edge_index, weight, num_nodes=self.size or x.size(0))
        assert weight is not None
        return scatter(self.layer(x)[edges[0]] * weight[:, None], edges[1], 0, x.size(0), "sum")


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "with and without loops": (lambda: Layers(GATConv(CHANNELS, CHANNELS), SAGEConv(CHANNELS, CHANNELS)), (2, 2)),
    "the other order": (lambda: Layers(SAGEConv(CHANNELS, CHANNELS), GATConv(CHANNELS, CHANNELS)), (2, 2)),
    "several layers": (lambda: Layers(*(layer(CHANNELS, CHANNELS) for layer in (GATConv, GCNConv, GATConv))), (2, 2)),
    "beside other loops": (lambda: Looped(add_self_loops), (2, 2)),
    "loops of some nodes": (lambda: Looped(add_self_loops, 3), (2, 0)),
}


@pytest.mark.parametrize("graph", EDGE_LISTS)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_self_loops(name: str, graph: str, which: str) -> None:
    make, numbers = MODELS[name]
    torch.manual_seed(0)
    model, edges = make(), EDGE_LISTS[graph]
    mine = copy.deepcopy(model)
    compiled = gnncompile.compile(mine, options={"inductor": False})
    x = torch.randn(NODES, CHANNELS, dtype=torch.float64)
    same_gradients(model, (mine, compiled), x, edges % 3 if name == "loops of some nodes" else edges)
    for captured in callable_of(compiled).backend.captured:
        assert captured.structure is not None
        graph_of = captured.structure.program.module.graph
        ops = (own.csr.default, own.csr_with_loops.default)
        assert tuple(len(graph_of.find_nodes(op="call_function", target=op)) for op in ops) == numbers
