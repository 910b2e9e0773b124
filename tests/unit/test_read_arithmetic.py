"""Arithmetic on values per edge is computed by the region that reads it, with eager's numbers and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, fx, nn

import gnncompile
from gnncompile.ir.region import parse
from gnncompile.passes.post_grad import read_arithmetic
from tests.graphs import EDGE_LISTS
from tests.harness import same_gradients

which = triton_regions.which

CHANNELS = 40


def total(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Sums rows by index."""
    return rows.new_zeros(num_rows, rows.size(1)).index_add(0, index, rows)


class States(nn.Module):
    """A state of edges that several steps read: its gradient is a sum of theirs."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.start, self.step, self.steps = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS), steps

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        first = self.start(e) + x[source]
        state = first.tanh()
        for _ in range(self.steps):
            state = (first + self.step(total(state, destination, x.size(0)))[source]).tanh()
        return total(state, destination, x.size(0))


class Centred(nn.Module):
    """States of edges that are centred over all edges: their gradients need sums of all edges first."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(CHANNELS) + 0.5)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        for layer in self.layers:
            raw = layer(e) + x[source]
            x = x + total(raw.sigmoid(), destination, x.size(0))
            e = e + ((raw - raw.sum(0) / (raw.size(0) + 1)) * self.scale).relu()
        return torch.cat([x, total(e, destination, x.size(0))], dim=1)


class Maximum(nn.Module):
    """A maximum over sums that are stored: its gradient finds it again by its bits."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        source, destination = edge_index
        rows = self.one(e).sort(1)[0] + self.other(e).sort(1)[0]
        places = destination.view(-1, 1).expand_as(rows)
        most = rows.new_zeros(x.size(0), CHANNELS).scatter_reduce(0, places, rows, "amax", include_self=False)
        return most + total(x[source], destination, x.size(0))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tensors that a region reads in place of each result of arithmetic."""
    found: list[int] = []
    original = read_arithmetic.replace_input

    def spy(reader: fx.Node, rows: fx.Node, instead: list[fx.Node], make: Any) -> None:
        found.append(len(instead))
        tiled, factor = parse(reader.args[2]).tiled, parse(reader.args[2]).factor
        original(reader, rows, instead, make)
        tensors, after = reader.args[0], parse(reader.args[2])
        assert rows not in tensors and len(set(tensors)) == len(tensors) == after.count
        assert not tiled or after.factor == factor

    monkeypatch.setattr(read_arithmetic, "replace_input", spy)
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from the cache has run its passes
        yield found


@triton_regions.INTERPRETED
@pytest.mark.parametrize("edges", EDGE_LISTS)
@pytest.mark.parametrize("make", [lambda: States(2), lambda: States(3), lambda: States(5), Centred, Maximum])
def test_gradients(make: Callable[[], nn.Module], edges: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(0)
    model = make().to(device, torch.float64)
    edge_index = EDGE_LISTS[edges].to(device)
    given = [torch.randn(5, CHANNELS), torch.randn(edge_index.size(1), CHANNELS)]
    x, e = (t.to(device, torch.float64) for t in given)
    other = copy.deepcopy(model)
    same_gradients(model, (other, gnncompile.compile(other)), x, edge_index, e)


@pytest.mark.parametrize("steps, read", [(1, []), (2, [2]), (3, [3]), (5, [])])
def test_few_summands_are_read(steps: int, read: list[int], sums: list[int]) -> None:
    """The gradient of the first state is a sum over the steps. Many summands are added up outside of the region."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    edge_index = EDGE_LISTS["unsorted, duplicates, hub"]
    x, e = torch.randn(5, CHANNELS, requires_grad=True), torch.randn(edge_index.size(1), CHANNELS)
    gnncompile.compile(States(steps))(x, edge_index, e).sum().backward()
    assert sums == read


@triton_regions.INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_statistics_are_computed_by_their_readers(dtype: torch.dtype, which: str, sums: list[int]) -> None:
    """The gradient of a centred state reads few tensors per edge. In 16 bits, its statistics may be float32."""
    if which == "cpp" and dtype != torch.float32:
        pytest.skip("on CPUs, layers of edges in 16 bits are the library's")
    torch.manual_seed(0)
    model, edge_index = Centred(3), EDGE_LISTS["unsorted, duplicates, hub"]
    given = [torch.randn(5, CHANNELS), torch.randn(edge_index.size(1), CHANNELS)]
    device = triton_regions.home(which)
    x, e = (t.to(device, dtype) for t in given)
    gnncompile.compile(model.to(device, dtype))(x, edge_index.to(device), e).sum().backward()
    assert sums and max(sums) > 1
