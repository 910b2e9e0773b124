"""Messages that read rows through further indices: reverse edges, types of edges, graphs of a batch."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, nn

import gnncompile
from gnncompile.ir.region import parse
from tests.edge_states import total
from tests.harness import launched, same_gradients

which = triton_regions.which
CHANNELS, TYPES, GRAPHS = 16, 5, 2
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Reverse(nn.Module):
    """A message less the state of the edge in the other direction, as D-MPNN has."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, batch: Tensor) -> Tensor:
        source, destination = edge_index
        state = (x[source] * x[destination]).relu()
        for _ in range(2):
            state = (state + self.step(total(state, destination, x.size(0))[source] - state[reverse])).relu()
        return total(state, destination, x.size(0))


class Typed(nn.Module):
    """A sum of embeddings of the types of bonds, as in models of molecules, and a product with one of relations."""

    def __init__(self) -> None:
        super().__init__()
        self.bonds = nn.ModuleList(nn.Embedding(TYPES, CHANNELS) for _ in range(2))
        self.relation = nn.Parameter(torch.randn(TYPES, CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, batch: Tensor) -> Tensor:
        source, destination = edge_index
        bond = self.bonds[0](types[:, 0]) + self.bonds[1](types[:, 1])
        x = x + total((x[source] + bond).relu(), destination, x.size(0))
        return total(x[source] * self.relation[types[:, 0]], destination, x.size(0))


class OfGraphs(nn.Module):
    """Messages that read a row of the graph which the edge belongs to, as in graph networks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, batch: Tensor) -> Tensor:
        source, destination = edge_index
        graphs = self.layer(total(x, batch, GRAPHS)).tanh()
        return total(x[source] * graphs[batch[destination]], destination, x.size(0))


class Kept(nn.Module):
    """Rows that a layer outside of the region reads as well: they have to be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(TYPES, CHANNELS), nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, batch: Tensor) -> Tensor:
        source, destination = edge_index
        bond = self.table(types[:, 0])
        received = total(x[source] * bond, destination, x.size(0))
        return torch.cat([received.sum(0), self.layer(bond).sum(0)])


MODELS = {"reverse": Reverse, "typed": Typed, "of graphs": OfGraphs, "kept": Kept}


def inputs(name: str) -> Inputs:
    """A graph in which edges 2k and 2k + 1 are each other's reverse, with types, and the graph of each node."""
    torch.manual_seed(0)
    nodes, pairs = {"unsorted": (11, 20), "hub": (40, 150), "one node": (1, 2), "no edge": (4, 0)}[name]
    ends = torch.randint(nodes, (pairs, 2))
    if name == "hub":
        ends[:140, 0] = 3
    edge_index = torch.stack([ends, ends.flip(1)], 1).view(-1, 2).t().contiguous()
    types = torch.randint(TYPES, (2 * pairs, 2))
    batch = torch.arange(nodes) * GRAPHS // nodes
    return torch.randn(nodes, CHANNELS, dtype=torch.float64), edge_index, types, torch.arange(2 * pairs) ^ 1, batch


@triton_regions.INTERPRETED
@pytest.mark.parametrize("graph", ["unsorted", "hub", "one node", "no edge"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, graph: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(1)
    model = MODELS[name]().to(device, torch.float64)
    given = [t.to(device) for t in inputs(graph)]
    other = copy.deepcopy(model)
    with launched() as specs:
        same_gradients(model, (other, gnncompile.compile(other)), *given)
    through = [any(n.through_index for n in parse(spec).inputs) for spec in specs]
    assert any(through) == (name != "kept")


@pytest.mark.parametrize("name", MODELS)
def test_many_sizes(name: str) -> None:
    """One compiled model serves graphs of all sizes, without a recompile."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = MODELS[name]().double()
    other = copy.deepcopy(model)
    ours = gnncompile.compile(other)
    for graph in ("unsorted", "hub", "no edge", "unsorted"):
        same_gradients(model, (other, ours), *inputs(graph))


@triton_regions.INTERPRETED
@pytest.mark.parametrize("graph", ["unsorted", "hub", "one node", "no edge"])
@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, graph: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(1)
    model = MODELS[name]().to(device, torch.float64)
    given = [t.to(device) for t in inputs(graph)]
    ours = gnncompile.compile(model)
    with torch.no_grad(), launched() as specs:
        torch.testing.assert_close(ours(*given), model(*given), rtol=1e-9, atol=1e-9)
    through = [any(n.through_index for n in parse(spec).inputs) for spec in specs]
    assert any(through) == (name != "kept")


class Given(nn.Module):
    """A table without a gradient beside rows that have one, for several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CHANNELS, CHANNELS)
        self.register_buffer("table", torch.randn(TYPES, 2, CHANNELS // 2))

    def forward(self, x: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, batch: Tensor) -> Tensor:
        source, destination = edge_index
        heads = self.layer(x).view(-1, 2, CHANNELS // 2)
        message = (heads[source] * self.table[types[:, 1]] + heads[destination]).tanh()
        return total(message, destination, x.size(0)).flatten(1)


@triton_regions.INTERPRETED
@pytest.mark.parametrize("graph", ["unsorted", "hub", "one node", "no edge"])
def test_tables_without_a_gradient(graph: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(1)
    model = Given().to(device, torch.float64)
    given = [t.to(device) for t in inputs(graph)]
    other = copy.deepcopy(model)
    ours = gnncompile.compile(other)
    same_gradients(model, (other, ours), *given)
    with torch.no_grad(), launched() as specs:
        torch.testing.assert_close(ours(*given), model(*given), rtol=1e-9, atol=1e-9)
    assert any(n.through_index for spec in specs for n in parse(spec).inputs)


class Memory(nn.Module):
    """A table that the model writes to, between the gather and the reduction or after it."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.layer = when, nn.Linear(CHANNELS, CHANNELS)
        self.register_buffer("table", torch.randn(TYPES, CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor, types: Tensor, reverse: Tensor, batch: Tensor) -> Tensor:
        source, destination = edge_index
        table = self.table.clone() if self.when == "local" else self.table
        message = self.layer(x)[source] * table[types[:, 0]]
        if self.when in ("between", "local"):
            table.mul_(0.5)
        if self.when == "view":
            self.table[:3].mul_(2)
        received = total(message, destination, x.size(0))
        if self.when == "after":
            self.table[types[:3, 0]] = 0.0
        return received


@pytest.mark.parametrize("when", ["between", "view", "local", "after"])
def test_rows_are_read_before_the_table_is_written(when: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, given = Memory(when).double(), inputs("unsorted")
    other = copy.deepcopy(model)
    ours = gnncompile.compile(other, fullgraph=True)
    for _ in range(2):
        same_gradients(model, (other, ours), *given)
        with torch.no_grad():
            torch.testing.assert_close(ours(*given), model(*given), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.table, model.table)


@pytest.mark.parametrize("kind", ["buffer", "frozen embedding"])
def test_a_table_may_change_between_forward_and_backward(kind: str) -> None:
    """As a moving average does: the gradient is that of the rows which the forward has read."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, (x, *given) = Given().double() if kind == "buffer" else Typed().double(), inputs("unsorted")
    gradients = []
    for compiled in (False, True):
        one = copy.deepcopy(model)
        tables = [one.table] if kind == "buffer" else [bonds.weight for bonds in one.bonds]
        for table in tables:
            table.requires_grad_(False)
        leaf = x.clone().requires_grad_()
        out = (gnncompile.compile(one) if compiled else one)(leaf, *given)
        with torch.no_grad():
            for table in tables:
                table.add_(1)
        out.sin().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("grad", [False, True])
def test_entries_out_of_range_are_errors(grad: bool) -> None:
    torch._dynamo.reset()
    model = gnncompile.compile(Typed().double())
    x, edge_index, types, reverse, batch = inputs("unsorted")
    wrong = types.clone()
    wrong[3, 1] = TYPES
    with torch.set_grad_enabled(grad):
        model(x, edge_index, types, reverse, batch)
        with pytest.raises(IndexError):
            model(x, edge_index, wrong, reverse, batch)


def test_entries_count_from_the_end_where_python_lets_them() -> None:
    torch._dynamo.reset()
    model = Reverse().double()
    x, edge_index, types, reverse, batch = inputs("unsorted")
    other = copy.deepcopy(model)
    same_gradients(model, (other, gnncompile.compile(other)), x, edge_index, types, reverse - reverse.numel(), batch)
