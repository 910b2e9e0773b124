"""Messages that read slices of wider arithmetic: the same numbers and gradients, and no wide rows are stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import gnncompile
from gnncompile.passes.analysis import aten, own
from tests.graphs import EDGE_LISTS
from tests.harness import light, look_at_graphs

WIDTH = 4

SLICES: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda rows: rows.split(WIDTH, dim=-1),
    "sizes": lambda rows: rows.split([WIDTH, 2 * WIDTH], dim=1),
    "chunk": lambda rows: rows.chunk(3, dim=-1),
    "overlapping": lambda rows: (rows[:, : 2 * WIDTH], rows[:, WIDTH:]),
    "one": lambda rows: (rows[:, WIDTH:],),
}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each graph are stored per edge, other than those of linear layers."""
    return look_at_graphs(monkeypatch, lambda graph: [_stored(graph)])


def _stored(graph: fx.Graph) -> int:
    regions = graph.find_nodes(op="call_function", target=own.region.default)
    gathers = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    return sum('"on_edges"' in str(node.args[2]) for node in regions) + len(gathers)


class Filtered(nn.Module):
    """Node rows times filters of edge features, in slices that are summed."""

    def __init__(self, slices: str, then: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.filter, self.rows = nn.Linear(3, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.slices, self.then = SLICES[slices], then

    def forward(self, x: Tensor, edge_attr: Tensor, weight: Tensor, edge_index: Tensor) -> list[Tensor]:
        source, destination = edge_index
        message = self.then(self.rows(x)[source] * (self.filter(edge_attr) * weight))
        parts = self.slices(message)
        return [x.new_zeros(x.size(0), part.size(1)).index_add(0, destination, part) for part in parts]


def results(model: nn.Module, inputs: tuple[Tensor, ...], edges: Tensor) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in inputs]
    outs = model(*leaves, edges)
    loss = sum((out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)).sum() for out in outs)
    read = [*leaves, *model.parameters()]
    return [*outs, *torch.autograd.grad(loss, read, allow_unused=True, materialize_grads=True)]


def compare(model: nn.Module, edges: Tensor) -> None:
    torch.manual_seed(0)
    count = edges.size(1)
    inputs = (torch.randn(5, WIDTH), torch.randn(count, 3), torch.rand(count, 1))
    with light():
        found = results(gnncompile.compile(model, fullgraph=True), inputs, edges)
    expected = results(copy.deepcopy(model).double(), tuple(one.double() for one in inputs), edges)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("edges", EDGE_LISTS)
def test_edge_lists(edges: str, stored: list[int]):
    compare(Filtered("split"), EDGE_LISTS[edges].clone())
    assert stored == [0]


@pytest.mark.parametrize("slices", SLICES)
def test_slices(slices: str, stored: list[int]):
    compare(Filtered(slices), EDGE_LISTS["unsorted, duplicates, hub"].clone())
    assert stored == [0]


class Whole(Filtered):
    """The same, where something also reads the whole rows."""

    def forward(self, x: Tensor, edge_attr: Tensor, weight: Tensor, edge_index: Tensor) -> list[Tensor]:
        source, destination = edge_index
        message = self.rows(x)[source] * (self.filter(edge_attr) * weight)
        parts = [message, *message.chunk(3, dim=-1)]
        return [x.new_zeros(x.size(0), part.size(1)).index_add(0, destination, part) for part in parts]


class State(Filtered):
    """The same, where one slice leaves the model."""

    def forward(self, x: Tensor, edge_attr: Tensor, weight: Tensor, edge_index: Tensor) -> list[Tensor]:
        source, destination = edge_index
        left, right, state = (self.rows(x)[source] * (self.filter(edge_attr) * weight)).chunk(3, dim=-1)
        sums = [x.new_zeros(x.size(0), WIDTH).index_add(0, destination, part) for part in (left, right)]
        return [*sums, state]


@pytest.mark.parametrize("kind", [Whole, State])
def test_rows_that_are_read_otherwise_as_well(kind: type[Filtered]):
    compare(kind("chunk"), EDGE_LISTS["unsorted, duplicates, hub"].clone())


class Vectors(nn.Module):
    """Sums of vectors that start at zero, along unit vectors whose lengths are read as well."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, edge_attr: Tensor, pos: Tensor, edge_index: Tensor) -> list[Tensor]:
        source, destination = edge_index
        away = self.place(x)[source] - self.place(x)[destination]
        length = away.square().sum(-1, keepdim=True).add(0.1).sqrt()
        along, between = (self.rows(x)[source] * length).split(WIDTH, dim=-1)
        vectors = x.new_full((x.size(0), 3, WIDTH), 0.5)
        moved = (away / length).unsqueeze(-1) * along.unsqueeze(1) + vectors[source] * between.unsqueeze(1)
        return [vectors.index_add(0, destination, moved)]

    def place(self, x: Tensor) -> Tensor:
        """The first three features of each node."""
        return x[:, :3]


@pytest.mark.parametrize("edges", EDGE_LISTS)
def test_rows_of_one_number_and_rows_read_in_two_shapes_are_not_stored(edges: str, stored: list[int]):
    compare(Vectors(), EDGE_LISTS[edges].clone())
    assert stored == [0]


class OneNumber(nn.Module):
    """Messages that are the same for all edges."""

    def forward(self, x: Tensor, edge_attr: Tensor, weight: Tensor, edge_index: Tensor) -> list[Tensor]:
        source, destination = edge_index
        ones = x.new_ones(x.size(0), WIDTH)
        return [(x * 0).index_add(0, destination, ones[source] * 2)]


@pytest.mark.parametrize("edges", EDGE_LISTS)
def test_messages_that_are_the_same_for_all_edges(edges: str):
    compare(OneNumber(), EDGE_LISTS[edges].clone())
