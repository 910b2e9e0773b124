"""Models that remove self loops and return a row per edge: one graph for all sizes, and exactly the edges of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric.nn import FAConv, GATConv, GATv2Conv, MessagePassing

import gnncompile
from gnncompile import testing
from gnncompile.capture.compile import callable_of
from gnncompile.report.explain import count_syncs
from gnncompile.support.case import CHANNELS, LADDER, Graph

WIDTH = 3
GRAPHS = {name: graph for name, graph in testing.awkward(CHANNELS).items() if name != "bipartite"}


class Weights(nn.Module):
    """Two layers; the attention of both is returned, and the edges of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GATConv(CHANNELS, WIDTH, heads=2), GATConv(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        x, (_, first) = self.first(x, edge_index, return_attention_weights=True)
        x, (edges, second) = self.second(x.relu(), edge_index, return_attention_weights=True)
        return {"x": x, "edges": edges, "attention": [first.mean(1), second.log()]}


class Last(nn.Module):
    """The attention alone, for each edge of the result of another function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv(CHANNELS, WIDTH, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        edges, attention = self.conv(x, edge_index, return_attention_weights=True)[1]
        return attention[:, 0] * x[edges[0], 0], edges[1]


class Layer(nn.Module):
    """A layer that returns its attention."""

    def __init__(self, layer: MessagePassing, takes: str = "") -> None:
        super().__init__()
        self.layer, self.takes = layer, takes

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        given = {"": (), "x": (x,), "edges": (weight.view(-1, 1),)}[self.takes]
        order = (x, *given, edge_index) if self.takes == "x" else (x, edge_index, *given)
        return self.layer(*order, return_attention_weights=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GAT": lambda: Layer(GATConv(CHANNELS, WIDTH, heads=2)),
    "GAT with edge features": lambda: Layer(GATConv(CHANNELS, WIDTH, edge_dim=1), "edges"),
    "GAT without a node's own loop": lambda: Layer(GATConv(CHANNELS, WIDTH, add_self_loops=False)),
    "GATv2": lambda: Layer(GATv2Conv(CHANNELS, WIDTH, heads=2)),
    "GATv2 with edge features": lambda: Layer(GATv2Conv(CHANNELS, WIDTH, edge_dim=1, fill_value=0.5), "edges"),
    "FA": lambda: Layer(FAConv(CHANNELS), "x"),
    "two layers": Weights,
    "attention alone": Last,
}


def _results(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], Any, list[Tensor]]:
    """The results of a step, their structure, and all gradients."""
    results, structure = pytree.tree_flatten(model(*inputs))
    floats = [one for one in results if isinstance(one, Tensor) and one.is_floating_point()]
    draw = torch.Generator().manual_seed(0)
    loss = sum((one * torch.randn(one.shape, generator=draw, dtype=one.dtype)).sum() for one in floats)
    leaves = [*model.parameters(), *(one for one in inputs if one.requires_grad)]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return results, structure, [torch.zeros(()) if g is None else g for g in gradients]


def _compare(model: nn.Module, compiled: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    results, structure, gradients = _results(compiled, inputs)
    expected, expected_structure, expected_gradients = _results(model, inputs)
    assert structure == expected_structure
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients, expected_gradients)


def _inputs(graph: Any) -> tuple[Tensor, ...]:
    weight = torch.rand(graph.edge_index.size(1), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return graph.x.detach().double().requires_grad_(), graph.edge_index, weight.requires_grad_()


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_edges_left_are_returned(name: str, inductor: bool):
    """One graph serves all sizes, and a steady step waits for nothing: the edges left are found once per graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().double()
    compiled = gnncompile.compile(model, fullgraph=True, options={"inductor": inductor})
    for graph in [Graph(*size) for size in LADDER[: 2 if inductor else None]] + list(GRAPHS.values()):
        _compare(model, compiled, _inputs(graph))
    program = callable_of(compiled)
    assert program is not None
    assert len(program.backend.captured) == 1 and program.backend.notes == []
    inputs = _inputs(Graph(*LADDER[0]))
    compiled(*inputs)
    assert count_syncs(compiled, inputs, {}) == 0


COUNTED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "mean": lambda x, edges, weights: (x, weights.mean()),
    "entropy": lambda x, edges, weights: x - (weights * weights.log()).sum(0).mean(),
    "largest": lambda x, edges, weights: (weights.sort(0, descending=True).values, edges),
    "number": lambda x, edges, weights: (x, weights, edges.size(1)),
    "number alone": lambda x, edges, weights: (x, weights.size(0)),
    "share": lambda x, edges, weights: x.sum(0) / (1 + weights.size(0)),
    "other rows": lambda x, edges, weights: (x, x.new_ones(weights.size(0))),
}


class Counting(nn.Module):
    """Attention weights go into an operation that must not see the self loops that the layer has removed."""

    def __init__(self, count: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.count = GATConv(CHANNELS, WIDTH, heads=2), count

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        x, (edges, weights) = self.conv(x, edge_index, return_attention_weights=True)
        return self.count(x, edges, weights)


@pytest.mark.parametrize("name", COUNTED)
def test_edges_left_are_counted(name: str):
    """The model is captured again with exact sizes, and that one graph serves all sizes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Counting(COUNTED[name]).double()
    compiled = gnncompile.compile(model, fullgraph=True, options={"inductor": False})
    for graph in [Graph(*size) for size in LADDER] + list(GRAPHS.values()):
        _compare(model, compiled, _inputs(graph))
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1
    assert "captured with exact sizes" in program.backend.notes[0].reason


def test_shapes_count_no_edges():
    """A size in the shape of a result needs no exact size, nor does the number of edges before self loops are added."""

    class Shaped(Weights):
        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
            x, (_, weights) = self.first(x, edge_index, return_attention_weights=True)
            return x / (1 + edge_index.size(1)), weights.view(weights.size(0), 1, 2)

    model = Shaped().double()
    compiled = gnncompile.compile(model, fullgraph=True, options={"inductor": False})
    for graph in GRAPHS.values():
        _compare(model, compiled, _inputs(graph))
    program = callable_of(compiled)
    assert program is not None
    assert len(program.backend.captured) == 1 and program.backend.notes == []
