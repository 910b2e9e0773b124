"""Arithmetic on the values per edge that a region gives is part of the region, with eager's numbers and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from torch import Tensor, fx

import gnncompile
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space, parse
from gnncompile.passes.post_grad import fuse_epilogue
from tests.edge_states import CHANNELS, Centred
from tests.graphs import EDGE_LISTS, layout
from tests.harness import after_pass, launched, same_gradients

which = triton_regions.which

EDGES = EDGE_LISTS["unsorted, duplicates, hub"]
WALK = [*layout(EDGES[1], EDGES[0], 5)]


def ends_of_edges(spec: str) -> list[str]:
    """The operations that a region's results per edge end with."""
    region = parse(spec)
    return [region.nodes[out.node].op for out in region.outputs if region.per_edge(out)]


@triton_regions.INTERPRETED
@pytest.mark.parametrize("edges", EDGE_LISTS)
def test_gradients_of_states(edges: str, which: str) -> None:
    device = triton_regions.home(which)
    torch.manual_seed(0)
    model, edge_index = Centred(3).to(device, torch.float64), EDGE_LISTS[edges].to(device)
    given = [torch.randn(5, CHANNELS), torch.randn(edge_index.size(1), CHANNELS)]
    other = copy.deepcopy(model)
    x, e = (t.to(device, torch.float64) for t in given)
    with launched() as specs:
        same_gradients(model, (other, gnncompile.compile(other, fullgraph=True)), x, edge_index, e)
    fused = [parse(spec) for spec in specs if ends_of_edges(spec) == ["add", "add"]]
    assert len(fused) == 3 and all(region.tiled for region in fused)


def _given(value: Callable[[Builder, int, int], int], tensors: dict[str, Tensor], masked: bool = False) -> list[Tensor]:
    """A sum by destination, `[5, 4]`, and a value per edge, `[9, 4]`, of a region that reads rows and `e`."""
    b = Builder(Space.DESTINATION, unmasked=not masked)
    dtype = str(tensors["e"].dtype).removeprefix("torch.")
    rows, e = b.input(0, Space.SOURCE, (1, 4), dtype), b.input(1, Space.EDGE, (1, 4), dtype)
    at = value(b, rows, e)
    region = b.finish([Output(b.reduce("sum", at), dtype, (4,)), Output(at, dtype, (4,))])
    made: list[Tensor] = torch.ops.gnncompile.region.default([tensors["x"], tensors["e"]], WALK, region.spec)
    return made


def _product(b: Builder, rows: int, e: int) -> int:
    return b.op("mul", rows, e)


def _sum(b: Builder, rows: int, e: int) -> int:
    return b.op("add", rows, e)


Follows = Callable[[Tensor, dict[str, Tensor]], Tensor]

FOLLOWS: dict[str, tuple[Follows, int, str]] = {
    "a sum": (lambda v, t: v + t["a"], 1, "add"),
    "a difference": (lambda v, t: t["a"] - v, 1, "sub"),
    "a sum with a factor": (lambda v, t: torch.add(t["a"], v, alpha=-2), 1, "add"),
    "a sum with what is read anyway": (lambda v, t: v + t["e"], 0, "add"),
    "a sum with what others read": (lambda v, t: v + t["shared"], 1, "add"),
    "a sum with a product": (lambda v, t: v + t["a"] * t["b"], 2, "add"),
    "sums of four matrices": (lambda v, t: v + t["a"] + t["b"] + t["shared"] + t["c"], 3, "add"),
    "a sum with what takes long": (lambda v, t: v + _sines(t["a"], 400), 0, "mul"),
    "a long chain": (lambda v, t: _sines(v, 400), 0, "sin"),
    "a number": (lambda v, t: v.relu(), 0, "where"),
    "a row for all edges": (lambda v, t: (v * t["row"]).exp(), 1, "exp"),
    "a column": (lambda v, t: v + t["column"], 1, "add"),
    "a mask": (lambda v, t: torch.where(t["a"] <= 0, 0.0, v), 1, "where"),
    "a mask that others read": (lambda v, t: torch.where(t["shared"] <= 0, 0.0, v), 0, "mul"),
    "a sum, then a mask that others read": (lambda v, t: torch.where(t["shared"] <= 0, 0.0, v + t["a"]), 1, "add"),
    "a sum with what would be stored for it": (lambda v, t: v + t["made"], 0, "mul"),
    "a comparison": (lambda v, t: torch.where(v == t["a"], 0.0, v), 0, "mul"),
    "a wider type": (lambda v, t: v.double(), 0, "mul"),
    "a wider result": (lambda v, t: v.unsqueeze(1) + t["wide"], 0, "mul"),
}
"""What follows a value per edge, how many tensors the region reads more, and the operation that the value ends with.

That is the product that the region computed before if nothing is part of the region.
"""


def _sines(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.sin()
    return x


def _traced(function: Callable[[dict[str, Tensor]], list[Tensor]], tensors: dict[str, Tensor]) -> fx.GraphModule:
    """The graph of a function after the pass. Its numbers are those of the function."""
    traced = after_pass(function, tensors, fuse_epilogue.run)
    for found, expected in zip(traced(tensors), function(tensors), strict=True):
        limit = 1e-5 if tensors["e"].dtype == torch.float32 else 0.05  # a sum is rounded once where eager rounds twice
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
    return traced


def _region(traced: fx.GraphModule) -> tuple[Region, int]:
    """The region of a graph, and the number of its tensors."""
    (node,) = traced.graph.find_nodes(op="call_function", target=torch.ops.gnncompile.region.default)
    return parse(node.args[2]), len(node.args[0])


def _tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {"x": (5, 4), "row": (1, 4), "column": (9, 1), "wide": (9, 2, 4), "square": (4, 4)}
    sizes |= dict.fromkeys(("e", "a", "b", "c", "shared"), (9, 4))
    return {key: torch.randn(size).to(dtype) for key, size in sizes.items()}


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_follows(name: str) -> None:
    follows, read, last = FOLLOWS[name]

    def program(t: dict[str, Tensor]) -> list[Tensor]:
        more = {**t, "made": t["shared"].exp()}
        summed, value = _given(_product, t)
        return [summed, follows(value, more), more["made"].sum(1), t["shared"].sin()]

    region, tensors = _region(_traced(program, _tensors()))
    assert tensors == 2 + read and region.nodes[region.outputs[1].node].op == last


@pytest.mark.parametrize("also_summed", [False, True])
def test_walks_in_tiles_store_no_value_twice(also_summed: bool) -> None:
    """A sum by row reads the value where it is stored. With an epilogue, it would be stored beside the result."""

    def program(t: dict[str, Tensor]) -> list[Tensor]:
        b = Builder(Space.DESTINATION, unmasked=True, tiled=True)
        e, weight = b.input(1, Space.EDGE, (1, 4), "float32"), b.input(2, Space.FEATURE, (1, 4), "float32")
        value = b.linear(e, weight)
        summed = b.reduce("sum", value if also_summed else b.input(0, Space.SOURCE, (1, 4), "float32"))
        region = b.finish([Output(summed, "float32", (4,)), Output(value, "float32", (4,))])
        made = torch.ops.gnncompile.region.default([t["x"], t["e"], t["square"]], WALK, region.spec)
        return [made[0], made[1] + t["a"]]

    region, _ = _region(_traced(program, _tensors()))
    assert (region.nodes[region.outputs[1].node].op == "add") is not also_summed


def test_edges_that_are_masked_out_keep_zeros() -> None:
    """A walk does not write their rows, so no epilogue of them may be anything but zero."""
    for masked in (False, True):
        region, tensors = _region(_traced(lambda t: _program(t, masked), _tensors()))  # noqa: B023
        assert tensors == 2 + (not masked) and region.unmasked is not masked


def _program(t: dict[str, Tensor], masked: bool) -> list[Tensor]:
    summed, value = _given(_product, t, masked)
    return [summed, value + t["a"]]


def test_how_a_region_rounds_is_kept() -> None:
    """A difference of two products is computed without fused multiply-add, in all of a region."""

    def difference(t: dict[str, Tensor]) -> list[Tensor]:
        summed, value = _given(_product, t)
        return [summed, value - t["a"] * t["b"]]

    def shifted(t: dict[str, Tensor]) -> list[Tensor]:
        summed, value = _given(_sum, t)
        return [summed, value - t["a"] * t["b"]]

    assert [_region(_traced(program, _tensors()))[1] for program in (difference, shifted)] == [2, 4]


def test_sixteen_bits_stay_sixteen_bits() -> None:
    def program(t: dict[str, Tensor]) -> list[Tensor]:
        summed, value = _given(_sum, t)
        return [summed, (value + t["a"]).float() * 2]

    region, tensors = _region(_traced(program, _tensors(torch.bfloat16)))
    assert tensors == 3 and [out.dtype for out in region.outputs] == ["bfloat16", "bfloat16"]


def test_other_results_may_be_read_before_but_not_by_the_operand() -> None:
    """The region is placed behind its last operand, so that operand must not be made of the region's own results."""

    def before(t: dict[str, Tensor]) -> list[Tensor]:
        summed, value = _given(_sum, t)
        return [summed.exp(), value + t["a"]]

    def behind(t: dict[str, Tensor]) -> list[Tensor]:
        summed, value = _given(_sum, t)
        return [summed, value + summed.sum(0, keepdim=True)]

    def twice(t: dict[str, Tensor]) -> list[Tensor]:
        summed, value = _given(_sum, t)
        early = summed @ t["x"].t()
        return [early, value + t["a"] @ t["x"][:4]]

    assert [_region(_traced(program, _tensors()))[1] for program in (before, behind, twice)] == [3, 2, 2]
