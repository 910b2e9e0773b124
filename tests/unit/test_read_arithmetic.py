"""Arithmetic on values per edge is computed by the region that reads it, with eager's numbers and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, fx, nn

import gnncompile
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space, parse
from gnncompile.passes.post_grad import read_arithmetic
from tests.edge_states import CHANNELS, Centred, total
from tests.graphs import EDGE_LISTS, layout
from tests.harness import after_pass, same_gradients

which = triton_regions.which


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
    original = read_arithmetic.set_region

    def spy(reader: fx.Node, tensors: list[fx.Node], region: Region) -> None:
        found.append(len(tensors) - len(reader.args[0]) + 1)
        before = parse(reader.args[2])
        assert len(set(tensors)) == len(tensors) == region.count
        assert before.factor == region.factor and before.contracts == region.contracts
        original(reader, tensors, region)

    monkeypatch.setattr(read_arithmetic, "set_region", spy)
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from the cache has run its passes
        yield found


@triton_regions.INTERPRETED
@pytest.mark.parametrize("edges", EDGE_LISTS)
@pytest.mark.parametrize("make", [lambda: States(2), lambda: States(3), lambda: States(5), Centred, Maximum])
def test_gradients(make: Callable[[], nn.Module], edges: str, which: str, sums: list[int]) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(0)
    model = make().to(device, torch.float64)
    edge_index = EDGE_LISTS[edges].to(device)
    given = [torch.randn(5, CHANNELS), torch.randn(edge_index.size(1), CHANNELS)]
    x, e = (t.to(device, torch.float64) for t in given)
    other = copy.deepcopy(model)
    same_gradients(model, (other, gnncompile.compile(other, fullgraph=True)), x, edge_index, e)
    assert make is not Maximum or not sums


@pytest.mark.parametrize("steps, read", [(1, []), (2, [2]), (3, [3]), (5, [])])
def test_few_summands_are_read(steps: int, read: list[int], sums: list[int]) -> None:
    """The gradient of the first state is a sum over the steps. Many summands are added up outside of the region.

    Without epilogues: else the regions that give the summands add them up.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    edge_index = EDGE_LISTS["unsorted, duplicates, hub"]
    x, e = torch.randn(5, CHANNELS, requires_grad=True), torch.randn(edge_index.size(1), CHANNELS)
    compiled = gnncompile.compile(States(steps), fullgraph=True, options={"epilogues": False})
    compiled(x, edge_index, e).sum().backward()
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
    exact = copy.deepcopy(model).double()
    exact(given[0].double(), edge_index, given[1].double()).sum().backward()
    x, e = (t.to(device, dtype) for t in given)
    gnncompile.compile(model.to(device, dtype), fullgraph=True)(x, edge_index.to(device), e).sum().backward()
    assert sums and max(sums) > 1
    limit = 1e-4 if dtype == torch.float32 else 0.1
    for one, right in zip(model.parameters(), exact.parameters(), strict=True):
        assert one.grad is not None and right.grad is not None
        torch.testing.assert_close(one.grad.cpu().double(), right.grad, rtol=limit, atol=limit * right.grad.abs().max())


def _summed(rows: Tensor, edge_index: Tensor) -> Tensor:
    """The sum of rows by destination, `[5, channels]`, by a region."""
    b = Builder(Space.DESTINATION)
    summed = b.reduce("sum", b.input(0, Space.EDGE, (1, rows.size(1)), "float32"))
    region = b.finish([Output(summed, "float32", (rows.size(1),))])
    walk = [*layout(edge_index[1], edge_index[0], 5)]
    (made,) = torch.ops.gnncompile.region.default([rows], walk, region.spec)
    return made


ARITHMETIC: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], int | None]] = {
    "a row for all edges": (lambda t: t["a"] * t["row"].expand(9, 4), 2),
    "a row without its axis": (lambda t: t["a"] - t["row"][0].expand(9, 4), 2),
    "a column": (lambda t: t["a"] * t["column"], 2),
    "a number for all edges": (lambda t: t["a"] * t["number"].expand(9, 4), None),
    "a number for all edges and a column": (lambda t: t["number"].expand(9, 4) * t["column"], None),
    "a scalar for all edges and a column": (lambda t: t["number"].reshape(()).expand(9, 4) * t["column"], None),
    "a value that is compared": (lambda t: torch.where(t["a"].exp() == t["b"], 0.0, t["c"]), None),
    "a difference of products": (lambda t: t["a"] * t["b"] - t["b"] * t["c"], None),
    "a number": (lambda t: t["a"] * torch.ops.aten.scalar_tensor(2.7), 1),
    "a number that its type cuts": (lambda t: t["a"] * torch.ops.aten.scalar_tensor(2.7, dtype=torch.int64), None),
    "no value per edge": (lambda t: t["row"].exp().expand(9, 4) * t["row"].expand(9, 4), None),
    "three matrices": (lambda t: t["a"] * t["b"] + t["c"], 3),
    "four matrices": (lambda t: t["a"] * t["b"] + t["c"] * t["d"], None),
    "a mask": (lambda t: torch.where(t["a"] <= 0, 0.0, t["b"] * 2), 2),
    "one matrix twice": (lambda t: t["a"] * t["a"].sigmoid(), 1),
    "a sum of rows": (lambda t: t["a"] - t["a"].sum(0), 2),
    "a sum of columns": (lambda t: t["a"] - t["a"].sum(1, keepdim=True), None),
    "integers": (lambda t: t["a"] * t["integers"], None),
    "another layout": (lambda t: t["a"] + t["transposed"].t(), None),
}
"""What a region reads, and how many tensors it reads instead; None if it is stored."""


@pytest.mark.parametrize("name", ARITHMETIC)
def test_what_is_computed_where_it_is_read(name: str) -> None:
    torch.manual_seed(0)
    function, read = ARITHMETIC[name]
    sizes = {"a": (9, 4), "b": (9, 4), "c": (9, 4), "d": (9, 4), "row": (1, 4), "column": (9, 1), "number": (1, 1)}
    tensors = {key: torch.randn(size) for key, size in (sizes | {"transposed": (4, 9)}).items()}
    tensors |= {"integers": torch.randint(3, (9, 4))}
    edge_index = torch.randint(5, (2, 9))
    traced = after_pass(lambda t: _summed(function(t), edge_index), tensors, read_arithmetic.run)
    (region,) = traced.graph.find_nodes(op="call_function", target=torch.ops.gnncompile.region.default)
    given, spec = region.args[0], region.args[2]
    assert (len(given) if parse(spec).nodes[1].op != "reduce_sum" else None) == read
    torch.testing.assert_close(traced(tensors), _summed(function(tensors), edge_index))
