"""Tiled regions: every kernel and its backward against plain torch in float64, on awkward graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import gnncompile.ops.region  # noqa: F401  (registers the ops)
from gnncompile.codegen.triton import edge_shares
from gnncompile.ir import reference
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.runtime import launch
from tests.graphs import layout
from tests.harness import kernels, tune
from tests.tiled_regions import REGIONS, Maker
from tests.triton_regions import DEVICE, GPU, INTERPRETED


def edges(name: str) -> tuple[Tensor, Tensor, int, int]:
    """Rows and columns of the edges of a graph, and their numbers."""
    generator = torch.Generator().manual_seed(len(name))
    rows, columns, count = {
        "no edge": (4, 3, 0),
        "one node": (1, 1, 5),
        "one edge": (3, 2, 1),
        "hub": (50, 7, 400),
        "bipartite": (70, 9, 400),
        "many rows": (500, 40, 350),
    }[name]
    row = torch.randint(rows, (count,), generator=generator)
    if name == "hub":
        row[100:] = 17
    return row, torch.randint(columns, (count,), generator=generator), rows, columns


ONE_WALK = ("gated", "directed", "shared")
"""Regions whose forward and backward are one walk each, so that nothing is stored for the next."""

GRAPHS = ("no edge", "one node", "one edge", "hub", "bipartite", "many rows")


def both(name: str, alive: Tensor | None = None) -> list[Tensor]:
    """The layouts of a graph by rows and by columns."""
    row, column, rows, columns = edges(name)
    return [*layout(row, column, rows, alive), *layout(column, row, columns, alive)]


def region_of(
    name: str, dtype: str = "float32", unmasked: bool = True, least_features: int = 0
) -> tuple[Region, Maker]:
    """A region with residuals, and its maker. Results of layers with at least so many features are stored."""
    make = Maker(dtype, unmasked)
    region = with_residuals(REGIONS[name](make), least_features=least_features)
    verify(region)
    return region, make


def expected(
    name: str, tensors: list[Tensor], walk: list[Tensor], cotangents: list[Tensor], unmasked: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients by torch's autograd, of the reference in float64."""
    region, _ = region_of(name, "float64", unmasked)
    leaves = [t.double().requires_grad_() for t in tensors]
    outputs = reference.run(region, leaves, Layout(*walk[:3]))[: len(cotangents)]
    found = torch.autograd.grad(outputs, leaves, [c.double() for c in cotangents], allow_unused=True)
    gradients = [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]
    return [o.detach() for o in outputs], gradients


def check(
    name: str,
    graph: str,
    dtype: str,
    unmasked: bool,
    run: Callable[..., list[Tensor]],
    tolerance: float,
    device: str = "cpu",
    least_features: int = 0,
) -> None:
    """Compares outputs and all gradients of a region with those of the reference in float64.

    In 16 bits, another edge may reach a maximum. So the layers of `maximum` then compute with few digits, exactly.
    """
    torch.manual_seed(0)
    row, _, rows, columns = edges(graph)
    alive = None if unmasked else torch.rand(row.numel()) < 0.7
    walk = both(graph, alive)
    region, make = region_of(name, dtype, unmasked, least_features)
    visible = len(REGIONS[name](Maker(dtype, unmasked)).outputs)
    tensors = make.tensors(rows, columns, row.numel(), getattr(torch, dtype))
    if name == "maximum" and tensors[0].element_size() == 2:
        tensors = [(t * 4).round() / 4 for t in tensors]
    leaves = [t.to(device, copy=True).requires_grad_() for t in tensors]
    outputs = run(leaves, [t.to(device) for t in walk], region)[:visible]
    cotangents = [torch.randn(o.shape).to(o.dtype) for o in outputs]
    gradients = torch.autograd.grad(outputs, leaves, [c.to(device) for c in cotangents], allow_unused=True)
    wanted = expected(name, tensors, walk, cotangents, unmasked)
    for found, right in zip((*outputs, *gradients), (*wanted[0], *wanted[1]), strict=True):
        assert found is not None and found.dtype is getattr(torch, dtype)
        scale = right.abs().max().clamp(min=1.0) if right.numel() else 1.0
        torch.testing.assert_close(found.double().cpu() / scale, right.double() / scale, rtol=0, atol=tolerance)


def by_op(tensors: list[Tensor], walk: list[Tensor], region: Region) -> list[Tensor]:
    """Runs a region by its operation."""
    found: list[Tensor] = torch.ops.gnncompile.region(tensors, walk, region.spec)
    return found


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", REGIONS)
def test_kernels_equal_plain_torch(name: str, graph: str) -> None:
    check(name, graph, "float32", True, by_op, 2e-5)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-11), ("bfloat16", 3e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("name", REGIONS)
def test_every_type(name: str, dtype: str, tolerance: float) -> None:
    check(name, "bipartite", dtype, True, by_op, tolerance)


@pytest.mark.parametrize("graph", ["hub", "many rows"])
@pytest.mark.parametrize("name", REGIONS)
def test_masked_edges_count_nowhere(name: str, graph: str) -> None:
    check(name, graph, "float32", False, by_op, 2e-5)


@pytest.mark.parametrize("unmasked", [True, False])
@pytest.mark.parametrize("graph", ["no edge", "one node", "hub"])
@pytest.mark.parametrize("name", REGIONS)
def test_gradients_read_layers_that_are_stored(name: str, graph: str, unmasked: bool) -> None:
    check(name, graph, "float32", unmasked, by_op, 2e-5, least_features=2)


@pytest.fixture(params=[pytest.param(DEVICE, marks=GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of Triton's kernels. Few programs share the edges, so each walks several tiles."""
    tune(monkeypatch, processors=1)
    with kernels("triton"):
        yield request.param
        assert not launch.fallbacks


@INTERPRETED
@pytest.mark.parametrize("name", REGIONS)
def test_triton_counts_no_masked_edge(name: str, device: str) -> None:
    check(name, "hub", "float32", False, by_op, 2e-5, device)


@INTERPRETED
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", REGIONS)
def test_triton_equals_plain_torch(name: str, graph: str, device: str) -> None:
    check(name, graph, "float32", True, by_op, 2e-5, device)


@INTERPRETED
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-11), ("bfloat16", 3e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("name", REGIONS)
def test_every_type_by_triton(name: str, dtype: str, tolerance: float, device: str) -> None:
    check(name, "bipartite", dtype, True, by_op, tolerance, device)


@INTERPRETED
@pytest.mark.parametrize("graph", ["hub", "many rows"])
@pytest.mark.parametrize("name", REGIONS)
def test_masked_edges_count_nowhere_by_triton(name: str, graph: str, device: str) -> None:
    check(name, graph, "float32", False, by_op, 2e-5, device)


@INTERPRETED
@pytest.mark.parametrize("name", REGIONS)
def test_gradients_read_layers_that_are_stored_by_triton(name: str, device: str) -> None:
    check(name, "hub", "float32", True, by_op, 2e-5, device, least_features=2)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes shares as small as they can be. The list gets the number of shares of each region that runs."""
    numbers: list[int] = []

    def divide(*arguments: int) -> Sequence[edge_shares.Share]:
        made = original(*arguments)
        numbers.append(len(made))
        return made

    original = edge_shares.divide
    monkeypatch.setattr(edge_shares, "BYTES", 1)
    monkeypatch.setattr(edge_shares, "divide", divide)
    return numbers


@INTERPRETED
@pytest.mark.parametrize("graph", ["no edge", "one edge", "hub", "many rows"])
@pytest.mark.parametrize("name", REGIONS)
def test_shares_of_the_edges(name: str, graph: str, device: str, counted: list[int]) -> None:
    check(name, graph, "float32", True, by_op, 2e-5, device)
    assert (max(counted) > 1) == (edges(graph)[0].numel() > 300 and name not in ONE_WALK)


@INTERPRETED
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-11), ("bfloat16", 3e-2), ("float16", 4e-3)])
@pytest.mark.parametrize("name", REGIONS)
def test_shares_of_every_type(name: str, dtype: str, tolerance: float, device: str, counted: list[int]) -> None:
    check(name, "bipartite", dtype, True, by_op, tolerance, device)
    assert counted


@INTERPRETED
@pytest.mark.parametrize("name", REGIONS)
def test_edges_that_are_masked_out_are_one_share(name: str, device: str, counted: list[int]) -> None:
    check(name, "hub", "float32", False, by_op, 2e-5, device)
    assert {*counted} == {1}
