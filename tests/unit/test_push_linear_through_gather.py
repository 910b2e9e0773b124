"""Linear layers of gathered rows run once per node: the same numbers, and no product with a row per edge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch_geometric.nn import CGConv, EdgeConv, GINEConv, MessagePassing, PNAConv, PointNetConv
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.passes.analysis import aten
from tests.graphs import EDGE_LISTS
from tests.harness import light, look_at_graphs, needs_interpreter

WIDTH = 4
HUB = EDGE_LISTS["unsorted, duplicates, hub"]


def per_edge_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects, per captured graph, how many linear layers still have as many rows as there are edges."""

    def look(graph: fx.Graph) -> list[int]:
        nodes = list(graph.nodes)
        sizes = [n.meta["val"].shape[0] for n in nodes if n.target is aten.linear.default]
        values = [n.meta["val"] for n in nodes if n.op == "placeholder" and isinstance(n.meta["val"], Tensor)]
        edges = {str(v.shape[0]) for v in values if v.dtype == torch.int64 and v.dim() == 1}
        assert edges
        return [sum(str(size) in edges for size in sizes)]

    return look_at_graphs(monkeypatch, look)


def results(model: nn.Module, *args: Any) -> list[Tensor]:
    args = tuple(a.clone().requires_grad_() if a.is_floating_point() else a for a in args)
    out = model(*args)
    leaves = [a for a in args if a.is_floating_point()] + list(model.parameters())
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)]


def compare(model: nn.Module, compiled: nn.Module, *args: Any) -> None:
    double = copy.deepcopy(model).double()
    expected = results(double, *(a.double() if a.is_floating_point() else a for a in args))
    for a, b in zip(results(compiled, *args), expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5)


def data(edge_index: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, WIDTH, generator=generator), torch.randn(edge_index.size(1), 3, generator=generator)


def _pna(**options: Any) -> PNAConv:
    return PNAConv(
        WIDTH, WIDTH, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([1, 2, 3]), **options
    )


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool, int]] = {
    "CGConv": (lambda: CGConv(WIDTH), False, 0),
    "CGConv with edge features": (lambda: CGConv(WIDTH, dim=3), True, 2),
    "EdgeConv": (lambda: EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 6), nn.ReLU(), nn.Linear(6, 3))), False, 1),
    "PNA": (_pna, False, 0),
    "PNA with edge features": (lambda: _pna(edge_dim=3), True, 2),
    "PNA with towers": (lambda: _pna(towers=2, divide_input=True), False, 0),
}
"""How to make a layer, whether it takes edge features, and how many products per edge must stay."""


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, takes_features, stay = LAYERS[name]
    model, products = make(), per_edge_products(monkeypatch)
    with light():
        compiled = gnncompile.compile(model, fullgraph=True)
        for edge_index in EDGE_LISTS.values():
            x, features = data(edge_index)
            compare(model, compiled, x, edge_index, *([features] if takes_features else []))
    assert products == [stay]


class Message(MessagePassing):
    """A sum of `message(layer, x_i, x_j)`."""

    def __init__(self, message: Callable[[nn.Linear, Tensor, Tensor], Tensor], width: int, bias: bool = True) -> None:
        super().__init__(aggr="add")
        self.layer, self.of = nn.Linear(width, 3, bias=bias), message

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.of(self.layer, x_i, x_j).relu()


def _without_gradient(layer: nn.Linear, x_i: Tensor, x_j: Tensor) -> Tensor:
    with torch.no_grad():
        other = -x_j
    return layer(x_i + other)


def _written(layer: nn.Linear, x_i: Tensor, x_j: Tensor) -> Tensor:
    both = torch.cat([x_i, x_j], 1)
    both[:, 0] = 1.0
    return layer(both)


MOVED: dict[str, tuple[Callable[[nn.Linear, Tensor, Tensor], Tensor], int]] = {
    "one end": (lambda layer, x_i, x_j: layer(x_j), WIDTH),
    "a difference": (lambda layer, x_i, x_j: layer(x_j - x_i), WIDTH),
    "the same end twice": (lambda layer, x_i, x_j: layer(torch.cat([x_i, x_j - x_i, -x_i], -1)), 3 * WIDTH),
    "nested": (lambda layer, x_i, x_j: layer(torch.cat([torch.cat([x_j, x_i], 1) + 0, x_j], 1)), 3 * WIDTH),
}
STAY: dict[str, tuple[Callable[[nn.Linear, Tensor, Tensor], Tensor], int]] = {
    "a product": (lambda layer, x_i, x_j: layer(x_i * x_j), WIDTH),
    "another axis": (lambda layer, x_i, x_j: layer(torch.cat([x_i, x_j], 0))[: x_i.size(0)], WIDTH),
    "broadcast": (lambda layer, x_i, x_j: layer((x_i + x_j[:, :1]) * 1), WIDTH),
    "written to": (_written, 2 * WIDTH),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", MOVED)
def test_moved(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, products = Message(*MOVED[name], bias=bias), per_edge_products(monkeypatch)
    with light():
        compiled = gnncompile.compile(model, fullgraph=True)
        for edge_index in EDGE_LISTS.values():
            compare(model, compiled, data(edge_index)[0], edge_index)
    assert products == [0 if name != "nested" else 1]  # adding a number is no addition of rows


@pytest.mark.parametrize("name", STAY)
def test_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Message(*STAY[name])
    with light():
        compare(model, gnncompile.compile(model), data(HUB)[0], HUB)


def test_what_has_no_gradient_gets_none() -> None:
    torch.manual_seed(0)
    model = Message(_without_gradient, WIDTH)
    with light():
        compare(model, gnncompile.compile(model), data(HUB)[0], HUB)


def test_positions_beside_features() -> None:
    torch.manual_seed(0)
    model = PointNetConv(nn.Linear(WIDTH + 3, 6))
    x, pos = data(HUB)[0], torch.randn(5, 3)
    with light():
        compare(model, gnncompile.compile(model, fullgraph=True), x, pos, HUB)


def test_autocast_keeps_its_types() -> None:
    torch.manual_seed(0)
    model = CGConv(WIDTH)
    x = data(HUB)[0]
    with light(), torch.autocast("cpu", torch.bfloat16):
        found, expected = gnncompile.compile(model)(x, HUB), model(x, HUB)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", ["cpp", "triton", "reference"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_softplus(which: str, dtype: torch.dtype) -> None:
    """Exact where it is tiny and where it is linear; its gradient has no NaN where exp would overflow."""
    needs_interpreter(which)
    values = torch.tensor([-80.0, -20.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 9.0, 11.0, 30.0, 500.0], dtype=dtype)

    class Softplus(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return F.softplus(x_j) + F.softplus(x_j, beta=2.0) + 3 * torch.log1p(x_j.abs())

    model, each = Softplus(), torch.arange(len(values)).expand(2, -1).contiguous()
    with light(which):
        compiled = gnncompile.compile(model)
        x = values.view(-1, 1).expand(-1, 3).contiguous()
        for a, b in zip(results(compiled, x, each), results(model, x.double(), each), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=3e-6 if dtype == torch.float32 else 1e-12, atol=0)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arguments each linear layer of the captured graphs has: 3 with a bias."""
    return look_at_graphs(
        monkeypatch, lambda graph: [len(n.args) for n in graph.nodes if n.target is aten.linear.default]
    )


@pytest.mark.parametrize("on", EDGE_LISTS)
def test_biases_of_messages_are_added_in_regions(on: str, arguments: list[int]):
    torch.manual_seed(0)
    x, edge_attr = data(EDGE_LISTS[on])
    model = GINEConv(nn.Linear(WIDTH, 3), edge_dim=3)
    with light():
        compare(model, gnncompile.compile(model, fullgraph=True), x, EDGE_LISTS[on], edge_attr)
    assert arguments == [2, 3]  # of edges, and of nodes behind the sum


def test_biases_of_a_second_layer_are_added_in_regions(arguments: list[int]):
    torch.manual_seed(0)
    model = LAYERS["EdgeConv"][0]()
    with light():
        compare(model, gnncompile.compile(model, fullgraph=True), data(HUB)[0], HUB)
    assert arguments == [3, 2, 2]  # the first layer's two parts run once per node


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.layer(x).relu()
        return h + scatter(h, torch.zeros_like(h[:, 0]).long(), 0, 1)


def test_a_bias_whose_rows_are_read_elsewhere_stays(arguments: list[int]):
    torch.manual_seed(0)
    model = _Pooled()
    with light():
        compare(model, gnncompile.compile(model, fullgraph=True), data(HUB)[0], HUB)
    assert arguments == [3]


class _Table(nn.Module):
    """Nodes of a large graph whose features stay on the device, as for sampled mini-batches."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(rows, WIDTH))
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, nodes: Tensor, edge_index: Tensor) -> Tensor:
        h = self.layer(self.features[nodes])
        return h.relu() + scatter(h[edge_index[0]], edge_index[1], 0, nodes.size(0))


@pytest.mark.parametrize(("rows", "multiplied"), [(1000, 5), (2, 2)])
def test_layers_of_rows_of_a_table_run_on_the_fewer_rows(
    rows: int, multiplied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = _Table(rows)

    def look(graph: fx.Graph) -> list[int]:
        layers = (n for n in graph.nodes if n.target is aten.linear.default)
        return [int(layer.args[0].meta["val"].shape[0]) for layer in layers]

    found = look_at_graphs(monkeypatch, look)
    nodes = torch.randint(rows, (5,))
    with light():
        compare(model, gnncompile.compile(model, fullgraph=True), nodes, HUB)
    assert found == [multiplied]


class OneProduct(nn.Module):
    """A layer of a sum of embeddings, to which each graph adds a row of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, WIDTH) for _ in range(4))
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, virtual: Tensor, kinds: Tensor, batch: Tensor) -> Tensor:
        total = sum(table(kinds[:, k]) for k, table in enumerate(self.tables))
        return self.lin(total + virtual[batch]).relu()  # type: ignore[no-any-return]


def test_a_layer_of_a_sum_stays_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product for each term is more work than one of their sum."""
    products = look_at_graphs(
        monkeypatch, lambda g: [len(g.find_nodes(op="call_function", target=aten.linear.default))]
    )
    model, kinds, batch = OneProduct(), torch.randint(5, (12, 4)), torch.arange(12) // 3
    with light():
        compare(model, gnncompile.compile(model), torch.randn(4, WIDTH), kinds, batch)
        report = gnncompile.explain(model, torch.randn(4, WIDTH), kinds, batch)
    assert products == [1, 1]
    assert any(
        "more work than one" in skip.reason and "test_push_linear_through_gather.py" in skip.line
        for skip in report.skipped
    )
