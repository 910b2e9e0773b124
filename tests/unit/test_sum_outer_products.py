"""Messages times a matrix per edge: multiplied after the sum, with the same results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing, NNConv

import gnncompile
from gnncompile.ir.region import Region, Space, parse
from tests.edge_layers import compare
from tests.graphs import EDGE_LISTS
from tests.harness import launched, light, needs_interpreter

NODES, K, C, M, COLUMNS = 5, 6, 4, 3, 2
DENSE = torch.cat([EDGE_LISTS["unsorted, duplicates, hub"], EDGE_LISTS["unsorted, duplicates, hub"].flip(1)], 1)


def layer(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, M), nn.Tanh(), nn.Linear(M, K * C, bias=bias))


class Own(MessagePassing):
    """A message that one function makes of the source's row, the rows of a layer, and the features of the edge."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__(**{"aggr": "add"} | options)
        self.function, self.nn = function, layer()

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.function(x_j, self.nn(edge_attr), edge_attr)


MOVED: dict[str, Callable[[], nn.Module]] = {
    "NNConv": lambda: NNConv(K, C, layer()),
    "NNConv, mean, no bias": lambda: NNConv(K, C, layer(bias=False), aggr="mean", root_weight=False),
    "einsum": lambda: Own(lambda x, w, _: torch.einsum("ek,ekc->ec", x, w.view(-1, K, C))),
    "einsum, transposed": lambda: Own(lambda x, w, _: torch.einsum("ek,eck->ec", x, w.view(-1, C, K))),
    "bmm, transposed": lambda: Own(lambda x, w, _: torch.bmm(w.view(-1, C, K), x.unsqueeze(2)).squeeze(2)),
    "sum": lambda: Own(lambda x, w, _: (x.unsqueeze(-1) * w.view(-1, K, C)).sum(1)),
    "sum, transposed": lambda: Own(lambda x, w, _: (w.view(-1, C, K) * x[:, None]).sum(-1)),
    "sum, axis kept": lambda: Own(lambda x, w, _: (w.view(-1, C, K) * x[:, None]).sum(-1, keepdim=True).squeeze(-1)),
    "weights of edges": lambda: Own(lambda x, w, e: 2 * e[:, :1] * (x[:, None] @ w.view(-1, K, C)).squeeze(1) / 3),
    "a weight of the shape of a matrix": lambda: Own(
        lambda x, w, e: (e[:, :1, None] * (x[:, None] @ w.view(-1, K, C)) / x.new_full((1,), 3)).squeeze(1)
    ),
    "of both ends": lambda: Own(lambda x, w, e: ((x * e[:, 1:])[:, None] @ w.view(-1, K, C)).squeeze(1)),
}

STAYING: dict[str, Callable[[], nn.Module]] = {
    "maximum": lambda: NNConv(K, C, layer(), aggr="max"),
    "a layer that others read": lambda: Own(
        lambda x, w, _: (x[:, None] @ w.view(-1, K, C)).squeeze(1) + w.view(-1, K, C).sum(1)
    ),
    "an activation behind": lambda: Own(lambda x, w, _: F.relu((x[:, None] @ w.view(-1, K, C)).squeeze(1))),
    "a number for each channel": lambda: Own(
        lambda x, w, _: (torch.bmm(w.view(-1, C, K), x.unsqueeze(2)) * torch.arange(1.0, C + 1)[:, None].to(x)).squeeze(
            2
        )
    ),
    "a gate for each edge": lambda: Own(lambda x, w, _: (x[:, :1, None] * w.view(-1, K, C)).sum(1)),
    "a gate for each edge, einsum": lambda: Own(lambda x, w, _: torch.einsum("ek,ekc->ec", x[:, :1], w.view(-1, K, C))),
    "one bias for all elements": lambda: Own(
        lambda x, w, e: (
            x[:, None] @ F.linear(e, w[:1].view(-1, COLUMNS)[: K * C // 2].repeat(2, 1), w[0, 0]).view(-1, K, C)
        ).squeeze(1)
    ),
    "a matrix that is no layer": lambda: Own(lambda x, w, _: (x[:, None] @ w.tanh().view(-1, K, C)).squeeze(1)),
}


class Repeated(nn.Module):
    """One layer of the edges for several convolutions, as in Gilmer's network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = NNConv(K, K, nn.Sequential(nn.Linear(COLUMNS, M), nn.Linear(M, K * K))), nn.GRUCell(K, K)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        for _ in range(3):
            x = self.gru(self.conv(x, edge_index, edge_attr).relu(), x)
        return x


class Written(nn.Module):
    """Something is written to after the product has read it: to `which` of the tensors."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.lin = which, nn.Linear(COLUMNS, K * C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        rows, edge_attr = x[edge_index[0]], edge_attr * 1
        weight, bias = self.lin.weight * 1, self.lin.bias * 1
        given = {"rows": rows, "edge_attr": edge_attr, "weight": weight, "bias": bias}
        with torch.no_grad():
            m = torch.bmm(rows.unsqueeze(1), F.linear(edge_attr, weight, bias).view(-1, K, C)).squeeze(1)
            if self.which == "factor":
                m = m * edge_attr[:, :1]
            given.get(self.which, edge_attr).mul_(2)
            return x.new_zeros(x.size(0), C).index_add(0, edge_index[1], m)


class Modes(nn.Module):
    """The layer and the product of a message run under different modes."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode, self.lin = mode, nn.Linear(COLUMNS, K * C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        with self.mode():
            w = self.lin(edge_attr).view(-1, K, C)
        m = (x[edge_index[0]].unsqueeze(2) * w).sum(1)
        return x.new_zeros(x.size(0), C).index_add(0, edge_index[1], m)


class Summed(nn.Module):
    """Sums that have no matrices of edges, of shapes with few axes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return x.new_zeros(x.size(0)).index_add(0, edge_index[1][:1], self.function(x * edge_attr.sum()))


def example(edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    edge_attr = torch.rand(edge_index.size(1), COLUMNS, requires_grad=True)
    return torch.randn(NODES, K, requires_grad=True), edge_index, edge_attr


def sums_outer_products(regions: list[Region]) -> bool:
    made = [(r.by, r.nodes[o.node].shape) for r in regions for o in r.outputs]
    return (Space.DESTINATION, (M, K)) in made


@pytest.mark.parametrize("which", ["reference", "cpp"])
@pytest.mark.parametrize("name", MOVED)
def test_matrices_are_applied_to_sums(name: str, which: str) -> None:
    torch.manual_seed(0)
    model = MOVED[name]()
    with light(which):
        compiled = gnncompile.compile(model, fullgraph=True)
        assert sums_outer_products(compare(model, *example(DENSE), compiled))
        for edges in EDGE_LISTS.values():
            compare(model, *example(edges), compiled)


def test_a_layer_may_serve_several_sums() -> None:
    torch.manual_seed(0)
    model = Repeated()
    with light():
        regions = compare(model, *example(DENSE))
    assert sums_outer_products(regions) and not any(n.shape == (K, K) for r in regions for n in r.inputs)


@pytest.mark.parametrize("which", ["rows", "edge_attr", "weight", "bias", "factor"])
def test_what_is_written_to_later_is_read_before(which: str) -> None:
    torch.manual_seed(0)
    model = Written(which)
    x, edge_index, edge_attr = (t.detach() for t in example(DENSE))
    with light():
        found = gnncompile.compile(model)(x, edge_index, edge_attr)
    torch.testing.assert_close(found, model(x, edge_index, edge_attr))


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16, enabled=False)])
def test_modes_stay_what_they_are(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = Modes(mode)
    with light():
        compare(model, *example(DENSE), gnncompile.compile(model))


def test_autocast_of_the_product_alone() -> None:
    torch.manual_seed(0)
    model = Own(lambda x, w, _: (x.unsqueeze(-1) * w.view(-1, K, C)).sum(1))
    given = example(DENSE)
    with light():
        compiled = gnncompile.compile(model)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = compiled(*given), model(*given)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "function",
    [lambda x: (x.sum() * 2).unsqueeze(0), lambda x: x.sum().view(1), lambda x: torch.sum(x, dim=[]).view(1)],
)
def test_sums_of_few_axes(function: Callable[[Tensor], Tensor]) -> None:
    model = Summed(function)
    with light():
        compare(model, *example(DENSE))


@pytest.mark.parametrize("name", STAYING)
def test_other_messages_stay_what_they_are(name: str) -> None:
    torch.manual_seed(0)
    model = STAYING[name]()
    with light():
        compiled = gnncompile.compile(model, fullgraph=True)
        assert not sums_outer_products(compare(model, *example(DENSE), compiled))


def test_where_the_layer_does_more_work_after_the_sum_it_stays() -> None:
    torch.manual_seed(0)
    model = MOVED["NNConv"]()
    with light():
        compiled = gnncompile.compile(model, fullgraph=True)
        assert not sums_outer_products(compare(model, *example(DENSE[:, :8]), compiled))  # as many edges as nodes
    wide = NNConv(K, C, nn.Linear(COLUMNS, K * C))
    wide.nn = nn.Sequential(nn.Linear(COLUMNS, 64), nn.Linear(64, K * C))
    with light():
        regions = compare(wide, *example(DENSE))
    assert not any(n.shape == (64, K) for r in regions for n in r.nodes)
    with light():
        half = MOVED["NNConv"]().half()
        given = [t.half().detach() if t.is_floating_point() else t for t in example(DENSE)]
        with launched() as specs:
            gnncompile.compile(half, fullgraph=True)(*given)
    assert not sums_outer_products([parse(spec) for spec in specs])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("edges", ["dense", "one node", "no edge"])
@pytest.mark.parametrize("name", ["NNConv", "NNConv, mean, no bias", "einsum, transposed", "of both ends"])
def test_by_triton_kernels(name: str, edges: str, device: str) -> None:
    needs_interpreter("triton", device)
    torch.manual_seed(0)
    model = MOVED[name]().to(device)
    edge_index = {"dense": DENSE, "one node": torch.zeros(2, 20, dtype=torch.long), "no edge": DENSE[:, :0]}[edges]
    x, edge_index, edge_attr = (t.to(device).detach() for t in example(edge_index))
    x, edge_attr = x[: 1 if edges == "one node" else NODES].requires_grad_(), edge_attr.requires_grad_()
    with light("triton"):
        compiled = gnncompile.compile(model, fullgraph=True)
        dense = compare(
            model, *(t.to(device).detach().requires_grad_(t.requires_grad) for t in example(DENSE)), compiled
        )
        compare(model, x, edge_index, edge_attr, compiled)
    assert sums_outer_products(dense)


def test_an_option_turns_it_off() -> None:
    torch.manual_seed(0)
    model = MOVED["NNConv"]()
    with light():
        compiled = gnncompile.compile(model, fullgraph=True, options={"per_node": False})
        assert not sums_outer_products(compare(model, *example(DENSE), compiled))


def test_low_precision() -> None:
    torch.manual_seed(0)
    model = MOVED["NNConv"]().bfloat16()
    x, edge_index, edge_attr = (t.bfloat16().detach() if t.is_floating_point() else t for t in example(DENSE))
    found = gnncompile.compile(model, fullgraph=True)(x, edge_index, edge_attr)
    wanted = copy.deepcopy(model).double()(x.double(), edge_index, edge_attr.double())
    torch.testing.assert_close(found.double(), wanted, rtol=3e-2, atol=3e-2)
