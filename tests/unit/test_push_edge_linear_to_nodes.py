"""Layers of edge features that only dot products and weighted sums read: applied to nodes, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv, MessagePassing, TransformerConv
from torch_geometric.utils import softmax

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.ir.region import Region, Space, parse
from tests.edge_layers import compare, double, run
from tests.graphs import EDGE_LISTS
from tests.harness import launched, light, needs_interpreter

NODES, CHANNELS, COLUMNS, WIDTH = 5, 6, 3, 4
HUB = EDGE_LISTS["unsorted, duplicates, hub"]


class Attention(MessagePassing):
    """Attention whose logits know nothing of the features of edges, which the messages do."""

    def __init__(self, heads: int = 2, bias: bool = False) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.heads = heads
        self.lin, self.att = nn.Linear(CHANNELS, heads * WIDTH), nn.Linear(CHANNELS, heads)
        self.lin_edge = nn.Linear(COLUMNS, heads * WIDTH, bias=bias)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        rows = self.lin(x).view(-1, self.heads, WIDTH)
        return self.propagate(edge_index, x=rows, a=self.att(x), edge_attr=edge_attr).flatten(1)

    def message(self, x_j: Tensor, a_i: Tensor, a_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int) -> Tensor:
        alpha = softmax(F.leaky_relu(a_i + a_j), index, num_nodes=size_i)
        return (x_j + self.lin_edge(edge_attr).view(-1, self.heads, WIDTH)) * alpha.unsqueeze(-1)


class Mean(MessagePassing):
    """Rows without heads, and weights of edges."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin, self.lin_edge = nn.Linear(CHANNELS, WIDTH), nn.Linear(COLUMNS, WIDTH, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return (self.lin_edge(edge_attr) + x_j) * edge_attr[:, :1] / 3


class Flat(Mean):
    """A dot product without heads, by rows of the source."""

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        logits = (x_j * (2 * self.lin_edge(edge_attr))).sum(-1, keepdim=True)
        return x_j * torch.sigmoid(logits)


def transformer(out: int = WIDTH, edge_dim: int = COLUMNS, **options: Any) -> Callable[[], nn.Module]:
    return lambda: TransformerConv(CHANNELS, out, edge_dim=edge_dim, **options)


def with_bias() -> nn.Module:
    model = TransformerConv(CHANNELS, WIDTH, heads=2, edge_dim=COLUMNS)
    model.lin_edge = nn.Linear(COLUMNS, 2 * WIDTH)
    return model


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "one head": transformer(),
    "three heads": transformer(heads=3),
    "beta": transformer(heads=2, beta=True),
    "mean of heads": transformer(heads=2, concat=False),
    "as many columns as channels": transformer(heads=2, edge_dim=WIDTH),
    "one column": transformer(heads=2, edge_dim=1),
    "bias": with_bias,
    "GAT": lambda: GATConv(CHANNELS, WIDTH, heads=2, edge_dim=COLUMNS, add_self_loops=False),
    "GAT, one head": lambda: GATConv(CHANNELS, WIDTH, edge_dim=WIDTH + 1),
    "attention": Attention,
    "attention, one head": lambda: Attention(heads=1),
    "attention, bias": lambda: Attention(bias=True),
    "mean": Mean,
    "flat": Flat,
}


def example(edge_index: Tensor, columns: int = COLUMNS, edge_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    edge_attr = torch.rand(edge_index.size(1), columns) + 0.1
    return torch.randn(NODES, CHANNELS, requires_grad=True), edge_index, edge_attr.requires_grad_(edge_grad)


def columns_of(model: nn.Module) -> int:
    return next(p.shape[1] for name, p in model.named_parameters() if "lin_edge" in name)


def per_edge(regions: Sequence[Region]) -> set[int]:
    """How many elements per edge regions read or write at once, or compute by a linear layer."""
    read = {n.shape for r in regions for n in r.inputs if n.space is Space.EDGE}
    written = {r.nodes[o.node].shape for r in regions for o in r.outputs if r.per_edge(o)}
    layers = {n.shape for r in regions for n in r.nodes if n.op == "linear"}
    return {heads * channels for heads, channels in read | written | layers}


@pytest.mark.parametrize(
    "edges, edge_grad", [("unsorted, duplicates, hub", False), ("unsorted, duplicates, hub", True), ("no edge", False)]
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, edge_grad: bool, edges: str):
    torch.manual_seed(0)
    model = LAYERS[name]()
    with light():
        regions = compare(model, *example(EDGE_LISTS[edges], columns_of(model), edge_grad))
    assert max(per_edge(regions)) <= max(columns_of(model), 2)


@pytest.mark.parametrize("which", ["cpp", "triton"])
@pytest.mark.parametrize("name", ["three heads", "GAT", "attention"])
def test_kernels(name: str, which: str):
    needs_interpreter(which)
    torch.manual_seed(0)
    with light(which):
        compare(LAYERS[name](), *example(HUB))


@pytest.mark.parametrize("heads", [1, 3])
def test_a_transformer_takes_three_walks(heads: int):
    """One of the forward, and one of the gradient by each end, which hands over two numbers per edge and head."""
    torch.manual_seed(0)
    with light():
        regions = compare(transformer(heads=heads)(), *example(HUB))
    assert [r.by for r in regions] == [Space.DESTINATION, Space.DESTINATION, Space.SOURCE]
    written = [r.nodes[o.node].shape for r in regions for o in r.outputs if r.per_edge(o)]
    assert written == [(heads, 1)] * 2
    assert per_edge(regions) == {COLUMNS, heads}


def test_two_sums_weighed_by_one_softmax_share_a_walk():
    torch.manual_seed(0)
    with light():
        regions = compare(Attention(), *example(HUB))
    assert [r.by for r in regions] == [Space.DESTINATION, Space.SOURCE, Space.DESTINATION]


def test_one_graph_for_all_sizes():
    torch.manual_seed(0)
    model = transformer(heads=2)()
    with light("cpp"):
        compiled = gnncompile.compile(model, fullgraph=True)
        for nodes, edges in [(12, 40), (17, 61), (7, 0), (1, 1), (1, 0), (64, 64), (500, 4000)]:
            x = torch.randn(nodes, CHANNELS, requires_grad=True)
            compare(model, x, torch.randint(nodes, (2, edges)), torch.randn(edges, COLUMNS), compiled)
        assert len(callable_of(compiled).backend.captured) == 1


def test_bipartite():
    torch.manual_seed(0)
    model = TransformerConv((CHANNELS, 2), WIDTH, heads=2, edge_dim=COLUMNS)
    x = torch.randn(NODES + 2, CHANNELS, requires_grad=True), torch.randn(NODES, 2, requires_grad=True)
    with light():
        assert max(per_edge(compare(model, x, HUB, torch.randn(HUB.size(1), COLUMNS)))) == COLUMNS


def test_float64():
    torch.manual_seed(0)
    model, (x, _, edge_attr) = transformer(heads=2)().double(), example(HUB)
    with light():
        assert max(per_edge(compare(model, double(x), HUB, double(edge_attr)))) == COLUMNS


def test_dropout_of_a_model_in_eval():
    torch.manual_seed(0)
    with light():
        assert max(per_edge(compare(transformer(heads=2, dropout=0.5)().eval(), *example(HUB)))) == COLUMNS


def test_both_sums_drop_the_same_edges():
    """Values of 1 and edge features of -1 add up to 0, whichever edges are dropped."""
    torch.manual_seed(0)
    model = TransformerConv(CHANNELS, WIDTH, dropout=0.5, edge_dim=WIDTH, root_weight=False)
    nn.init.eye_(model.lin_edge.weight)
    nn.init.zeros_(model.lin_value.weight), nn.init.ones_(model.lin_value.bias)
    x, edge_attr = torch.randn(NODES, CHANNELS), torch.full((HUB.size(1), WIDTH), -1.0)
    with light(), launched() as specs:
        out = gnncompile.compile(model, fullgraph=True)(x, HUB, edge_attr)
    assert [region.drops for region in map(parse, specs)] == [True]
    torch.testing.assert_close(out, torch.zeros_like(out))


def test_autocast():
    torch.manual_seed(0)
    model, given = transformer(heads=2)(), example(HUB)
    with light(), torch.autocast("cpu", torch.bfloat16):
        compiled = gnncompile.compile(model, fullgraph=True)
        with launched() as specs:
            found = run(compiled, *given)
        expected = run(model, *given)
    assert max(per_edge([parse(spec) for spec in specs])) == COLUMNS
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


class _AlsoReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(COLUMNS, CHANNELS, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        e = self.layer(edge_attr)
        return torch.cat([torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] + e), e])


class _WrittenTo(_AlsoReturned):
    """What the layer reads changes behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        rows = edge_attr.clone()
        e = self.layer(rows)
        rows[:, 0] = 7.0
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] + e)


class _Squared(_AlsoReturned):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        e = self.layer(edge_attr)
        return torch.zeros_like(x).index_add(0, edge_index[1], e * (x[edge_index[0]] + e))


class _OtherRows(_AlsoReturned):
    """Every feature is a row of its own, with an edge of its own."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        col = edge_index[1].repeat_interleave(CHANNELS)
        return torch.zeros_like(x[:, :1]).index_add(0, col, self.layer(edge_attr).view(-1, 1) * x[col, :1])


class _OtherMode(_AlsoReturned):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        with torch.no_grad():
            e = self.layer(edge_attr)
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] + e)


class _OtherModeOfRows(_AlsoReturned):
    """Through the logits there is no gradient to `x`, but there is one to the layer."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        with torch.no_grad():
            rows = x[edge_index[1]]
        logits = (rows * self.layer(edge_attr)).sum(-1, keepdim=True)
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] * logits)


@pytest.mark.parametrize(
    "make, width",
    [
        (transformer(heads=2, edge_dim=WIDTH + 1), 2 * WIDTH),
        (_AlsoReturned, CHANNELS),
        (_WrittenTo, CHANNELS),
        (_Squared, CHANNELS),
        (_OtherMode, CHANNELS),
        (_OtherModeOfRows, CHANNELS),
    ],
    ids=["more columns than channels", "also returned", "written to", "squared", "other mode", "other mode of rows"],
)
def test_what_stays(make: Callable[[], nn.Module], width: int):
    torch.manual_seed(0)
    columns = WIDTH + 1 if width == 2 * WIDTH else COLUMNS
    with light():
        assert width in per_edge(compare(make(), *example(HUB, columns)))


def test_rows_made_of_features_stay():
    torch.manual_seed(0)
    with light():
        compare(_OtherRows(), *example(HUB))


def test_it_can_be_turned_off():
    torch.manual_seed(0)
    model, given = transformer(heads=2)(), example(HUB)
    with light():
        compiled = gnncompile.compile(model, options={"per_node": False})
        assert 2 * WIDTH in per_edge(compare(model, *given, compiled))
