"""Triton kernels count the edges that reach a maximum or a minimum in the pass that finds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.codegen.triton.hub_tile import hub_tile
from gnncompile.codegen.triton.kernel import TritonKernel
from gnncompile.codegen.triton.plan import schedule
from gnncompile.codegen.triton.tile import Tile, choose_tile
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import BITS, BOOL, Output, Region
from gnncompile.ir.residuals import with_residuals
from tests.graphs import layout
from tests.harness import kernels, tune
from tests.triton_regions import GRAPHS, INF, NAN, D, E, Graph, S, Space, graph, in_double, launch, take_few_edges

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device

# Duplicates in several steps and pieces, rows of one edge and of none, edges that are masked out.
TIED = graph(
    [*[0] * 11, *[1] * 3, *[3] * 6, 4],
    [0, 0, 1, 2, 0, 3, 0, 0, 1, 4, 0, 2, 5, 2, 6, 6, 1, 6, 3, 6, 5],
    num_rows=6,
    num_cols=7,
    dead=(3, 12),
)
EVERY = {**GRAPHS, "tied": TIED}


def maximum(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """As the forward of a layer that takes maxima, when a gradient may be asked for."""
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    return with_residuals(b.finish([Output(b.reduce("max", x), dtype, (heads, channels))]))


def principal(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Sum, sum of squares, maximum and minimum, as PNA takes them of one value."""
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    found = [*(b.reduce(kind, x) for kind in ("sum", "max", "min")), b.reduce("sum", b.op("mul", x, x))]
    return with_residuals(b.finish([Output(v, dtype, (heads, channels)) for v in found]))


def weighted_sums(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Of values that are computed per edge, and of others that are as narrow as a head."""
    b = Builder(by)
    x, w = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, E, (heads, 1), dtype)
    extrema = [b.reduce("max", b.op("mul", x, w)), b.reduce("min", w)]
    return with_residuals(b.finish([Output(v, dtype, (heads, b.nodes[v].shape[1])) for v in extrema]))


def read_again(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """A maximum is read on edges, and so is the number of edges that reach it, so that further passes come."""
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    top = b.reduce("max", x)
    ties = b.ties(top)
    second = b.reduce("max", b.op("where", b.op("lt", x, top), x, b.const(-3.0)))
    third = b.reduce("min", b.op("mul", b.op("sub", x, second), ties))
    found = [top, ties, second, b.ties(second), third, b.ties(third)]
    return b.finish([Output(v, dtype, (heads, channels)) for v in found])


def of_rows(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """What is the same for all edges of a row is reached by all of them."""
    b = Builder(by)
    extrema = [b.reduce("max", b.input(0, by, (heads, channels), dtype)), b.reduce("min", b.const(0.5))]
    return b.finish([Output(b.ties(v), dtype, b.nodes[v].shape) for v in extrema])


def compared(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """What each edge is compared with in a pass behind, as for bits that a gradient reads, and what it is not."""
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    extrema = [b.reduce(kind, x) for kind in ("max", "min")]
    reached = Output(b.op("eq", x, extrema[0]), BOOL, (heads, channels))
    return b.finish([reached, *(Output(b.ties(v), dtype, (heads, channels)) for v in extrema)])


def apart(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Each edge is compared in the second of three passes; nothing but the count reads the edges in the third."""
    b = Builder(by)
    x, w = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, E, (heads, 1), dtype)
    top = b.reduce("max", x)
    second = b.reduce("min", b.op("where", b.op("lt", x, top), w, b.const(0.0)))
    found = [b.ties(top), b.reduce("max", b.op("mul", w, second))]
    return b.finish([Output(v, dtype, (heads, channels)) for v in found])


CASES = [maximum, principal, weighted_sums, read_again, of_rows, compared, apart]
PASSES = {maximum: 1, principal: 1, weighted_sums: 1, read_again: 3, of_rows: 1, compared: 2, apart: 3}


def few_values(region: Region, g: Graph, seed: int = 0) -> list[Tensor]:
    """Few different numbers: zeros of both signs, infinities; one channel of NaN now and then, one of -inf alone."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.tensor([-0.0, 0.0, 1.0, 2.0, -2.0, -INF, INF, NAN])
    often = torch.tensor([4.0, 4.0, 4.0, 4.0, 4.0, 2.0, 1.0, 1.0])
    rows = {region.by: g.num_rows, region.by.opposite: g.num_cols, E: g.row.numel()}
    found = []
    for node in region.inputs:
        size = rows[node.space], node.shape[0] * node.shape[1]
        pick = torch.multinomial(often, size[0] * size[1], replacement=True, generator=random).view(size)
        values = numbers[pick]
        values[:, 1:2] = -INF
        found.append(values.to(getattr(torch, node.dtype)))
    return found


def check(region: Region, g: Graph, device: str, tile: Tile | None = None) -> list[Tensor]:
    """Counts and extrema are what the reference finds, to the last bit but for the sign of a zero."""
    tensors = few_values(region, g)
    expected = run(in_double(region), [t.double() for t in tensors], g.layout("cpu"))
    found = launch(region, tensors, g, device, tile)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), wanted.double(), rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channels", [3, 64])
def test_no_pass_of_their_own(case: triton_regions.Case, channels: int) -> None:
    region = case(D, "float32", 1, channels)
    plan = schedule(region)
    assert plan.passes == PASSES[case]
    ties = [(at, node.args[0]) for at, node in enumerate(region.nodes) if node.op == "ties"]
    later = [plan.need[at] - plan.need[extremum] for at, extremum in ties]
    waits = {compared: 1, read_again: 1, apart: 2}.get(case, 0)  # the first maximum is compared again
    assert later == [waits if k == 0 else 0 for k in range(len(ties))]


def test_bits_of_wide_rows() -> None:
    """They are compared in a pass behind anyway, and counted there, by the tile that other such regions have."""
    region = maximum(D, "float32", 1, 256)
    plan = schedule(region)
    assert [o.dtype for o in region.outputs] == ["float32", "float32", BITS]
    assert (plan.passes, plan.counted) == (2, {})


def test_rows_are_gathered_once() -> None:
    region = principal(D, "float32", 1, 16)
    kernel = TritonKernel(region)
    assert kernel.gathered == ((0,),)
    walked = [text.partition("walks ")[2].partition(".")[0] for text in kernel.hub_texts]
    assert walked == ["hubs"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, channels", [(1, 1), (3, 4), (1, 70)])
def test_counts(case: triton_regions.Case, heads: int, channels: int, device: str) -> None:
    check(case(D, "float32", heads, channels), TIED, device)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channels", [2, 64])
@pytest.mark.parametrize("rows, edges, steps", [(1, 1, 1), (1, 4, 1), (2, 2, 1), (4, 1, 4)])
def test_tiles(case: triton_regions.Case, channels: int, rows: int, edges: int, steps: int, device: str) -> None:
    """Several steps, some behind the last edge of a row; more rows of a program than there are."""
    region = case(S, "float32", 1, channels)
    tile = replace(choose_tile(region, schedule(region)), rows=rows, edges=edges, steps=steps)
    check(region, TIED, device, tile)


@pytest.mark.parametrize("case", [maximum, principal])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("channels", [3, 64])
def test_graphs(case: triton_regions.Case, name: str, channels: int, device: str) -> None:
    region = case(D, "float32", 1, channels)
    found = check(region, EVERY[name], device)
    if name in ("no_edge", "one_node", "all_masked"):
        counts = 2 if case is principal else 1  # of edges, and the zero that such a row begins with
        assert [t.unique().tolist() for t in found] == [[0.0]] * (len(found) - counts) + [[1.0]] * counts


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_types(case: triton_regions.Case, dtype: str, device: str) -> None:
    check(case(D, dtype, 1, 5), TIED, device)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channels", [3, 64])
@pytest.mark.parametrize("most_edges", [1, 2, 16])
def test_hubs(
    case: triton_regions.Case, channels: int, most_edges: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of two edges, which take one step or two, as putting them together does or takes more."""
    tune(monkeypatch, hub_edges=2)
    take_few_edges(monkeypatch, most_edges)
    region = case(D, "float32", 1, channels)
    check(region, TIED, device, replace(choose_tile(region, schedule(region)), edges=1))


def test_rows_that_are_split_by_channels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, split_width=32)
    tune(monkeypatch, hub_edges=5)
    region = principal(D, "float32", 1, 70)
    assert choose_tile(region, schedule(region)).channels == 32
    check(region, TIED, device)


@pytest.mark.parametrize("values", [[1.0, 2.0, NAN, 2.0], [NAN, 2.0, 2.0, 1.0], [2.0, 2.0, 2.0, NAN]])
@pytest.mark.parametrize("hub", [2, 100])
@pytest.mark.parametrize("channels", [1, 64])
def test_no_edge_reaches_a_nan(
    channels: int, hub: int, values: list[float], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(monkeypatch, hub_edges=hub)
    region = maximum(D, "float32", 1, channels)
    x = torch.tensor(values).view(4, 1).expand(4, channels).contiguous()
    for edges in (1, 4):
        tile = replace(choose_tile(region, schedule(region)), rows=1, edges=edges, steps=1)
        top, sharers = launch(region, [x], graph([0] * 4, [0, 1, 2, 3], 1, 4), device, tile)
        assert top.isnan().all() and (sharers == 0).all()


def test_tiles_for_counting() -> None:
    """Fewer edges at once where a step would not fit the registers; several steps where ptxas adds none."""

    def of(region: Region) -> tuple[Tile, Tile | None]:
        plan = schedule(region)
        tile = choose_tile(region, plan)
        return tile, hub_tile(region, plan, tile)

    assert of(maximum(D, "float32", 1, 128)) == (Tile(1, 8, 128, 1), Tile(1, 16, 128, 1))
    assert of(maximum(D, "float32", 1, 64)) == (Tile(2, 1, 64, 1, steps=4), Tile(1, 16, 64, 1))
    assert of(maximum(D, "float32", 1, 16)) == (Tile(4, 2, 16, 1, steps=4), Tile(1, 32, 16, 1))
    assert of(principal(D, "float32", 1, 16)) == (Tile(2, 4, 16, 1, steps=2), Tile(1, 16, 16, 1))


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "tanh", "softplus"])
def test_a_maximum_of_computed_values_is_found_again(device: str, function: str):
    """In float32, the gradient must compute the same bits as the forward."""
    b = Builder(D)
    a, c, x = (b.input(k, space, (1, n), "float32") for k, (space, n) in enumerate(((S, 1), (D, 1), (S, 8))))
    logit = b.op("add", a, c)
    weight = b.softmax(logit) if function == "softmax" else b.op(function, logit)
    region = with_residuals(b.finish([Output(b.reduce("max", b.op("mul", weight, x)), "float32", (8,))]))
    torch.manual_seed(0)
    row, col = torch.randint(40, (400,)), torch.randint(50, (400,))
    walk = [*layout(row, col, 40), *layout(col, row, 50)]
    tensors, cotangent = [torch.randn(50, 1), torch.randn(40, 1), torch.randn(50, 8)], torch.randn(40, 8)
    exact = [t.double().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(run(region, exact, Layout(*walk[:3]))[0], exact, cotangent.double())
    leaves = [t.to(device).requires_grad_() for t in tensors]
    with kernels("triton"):
        out = torch.ops.gnncompile.region(leaves, [part.to(device) for part in walk], region.spec)[0]
        gradients = torch.autograd.grad(out, leaves, cotangent.to(device))
    for found, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found.double().cpu(), right, rtol=1e-4, atol=1e-4)
