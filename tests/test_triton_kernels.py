"""Triton kernels against the reference: compiled on a machine with a GPU, elsewhere under Triton's interpreter."""

# ruff: noqa: E402

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which torch._dynamo does as well

from gnncompile.codegen import triton_plan
from gnncompile.codegen.triton_plan import Tile, choose_tile, hub_tile, schedule
from gnncompile.codegen.triton_source import source
from gnncompile.errors import Unsupported
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import BOOL, Node, Output, Region, Space
from gnncompile.ir.vjp import vjp, with_residuals
from gnncompile.runtime import layout as runtime_layout
from tests.graphs import layout

triton = pytest.importorskip("triton")
from gnncompile.codegen import triton_kernel
from gnncompile.codegen.triton_kernel import TritonKernel

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
NAN, INF = float("nan"), float("inf")

# The interpreter's arithmetic is NumPy's, which warns of the infinities and NaN that padded lanes hold.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu) if HAS_GPU else "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    if not HAS_GPU and isinstance(triton.language.sum, triton.JITFunction):
        pytest.fail("Triton was imported before this module set TRITON_INTERPRET=1; set it in tests/conftest.py")
    return str(request.param)


# -- graphs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """Edges by the row that owns them; `alive` of None means that every edge counts."""

    row: Tensor
    col: Tensor
    num_rows: int
    num_cols: int
    alive: Tensor | None = None

    def layout(self, device: str) -> Layout:
        made = layout(self.row, self.col, self.num_rows, self.alive)
        return Layout(made.rowptr.to(device), made.col.to(device), made.edge.to(device))


def graph(row: list[int], col: list[int], num_rows: int, num_cols: int, dead: tuple[int, ...] = ()) -> Graph:
    alive = None
    if dead:
        alive = torch.ones(len(row), dtype=torch.bool)
        alive[list(dead)] = False
    as_index = [torch.tensor(x, dtype=torch.long) for x in (row, col)]
    return Graph(as_index[0], as_index[1], num_rows, num_cols, alive)


# Unsorted, with a duplicate, loops, an empty row (1), more columns than rows, and edges that are masked out.
MIXED = graph([3, 0, 2, 0, 3, 3, 0, 2, 3, 0], [6, 1, 2, 1, 3, 0, 5, 4, 4, 0], 4, 7, dead=(2, 5))
GRAPHS = {
    "mixed": MIXED,
    "no_edge": graph([], [], 3, 2),
    "no_row": graph([], [], 0, 2),
    "one_node": graph([], [], 1, 1),
    "one_loop": graph([0], [0], 1, 1),
    "hub": graph([0] * 300, [i % 5 for i in range(300)], 2, 5),
    "all_masked": graph([0, 1], [1, 0], 2, 2, dead=(0, 1)),
}


# -- regions ------------------------------------------------------------------------------------------------------


def width(shape: tuple[int, int]) -> tuple[int, ...]:
    return (shape[0] * shape[1],)


def total(b: Builder, value: int) -> int:
    return b.sum_axis(b.sum_axis(value, 1), 0)


def neighbour_sum(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    return b.finish([Output(b.reduce("sum", x), dtype, (heads, channels))])


def weighted_sum(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    w, x = b.input(0, E, (1, 1), dtype), b.input(1, by.opposite, (heads, channels), dtype)
    return b.finish([Output(b.reduce("sum", b.op("mul", w, x)), dtype, (heads, channels))])


def mean(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x, inverse = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, by, (1, 1), "float32")
    bias = b.input(2, P, (heads, channels), dtype)
    y = b.op("add", b.op("mul", b.reduce("sum", x), inverse), bias)
    return b.finish([Output(b.op("where", b.op("gt", y, b.const(0.0)), y, b.const(0.0)), dtype, (heads, channels))])


def max_and_min(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    return b.finish([Output(b.reduce(kind, x), dtype, (heads, channels)) for kind in ("max", "min")])


def edge_relu(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    z = b.op("add", b.input(0, by.opposite, (heads, channels), dtype), b.input(1, E, (heads, channels), dtype))
    z = b.op("where", b.op("gt", z, b.const(0.0)), z, b.const(0.0))
    return b.finish([Output(b.reduce("sum", z), dtype, (heads, channels))])


def gated(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x_i, x_j = b.input(0, by, (heads, channels), dtype), b.input(1, by.opposite, (heads, channels), dtype)
    z = b.reduce("sum", b.op("mul", x_i, b.op("sigmoid", x_j)))
    return b.finish([Output(b.op("add", z, b.op("tanh", x_i)), dtype, (heads, channels))])


def attention_logits(b: Builder, by: Space, dtype: str, heads: int) -> int:
    z = b.op("add", b.input(0, by, (heads, 1), dtype), b.input(1, by.opposite, (heads, 1), dtype))
    return b.op("where", b.op("ge", z, b.const(0.0)), z, b.op("mul", z, b.const(0.2)))


def attention(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    alpha = b.softmax(attention_logits(b, by, dtype, heads))
    y = b.reduce("sum", b.op("mul", alpha, b.input(2, by.opposite, (heads, channels), dtype)))
    y = b.op("add", y, b.input(3, P, (heads, channels), dtype))
    return b.finish(
        [
            Output(y, dtype, (heads, channels)),
            Output(b.softmax_row("softmax_max", alpha), "float32", (heads,)),
            Output(b.softmax_row("softmax_sum", alpha), "float32", (heads,)),
        ]
    )


def dot_attention(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    q, k, v = (b.input(i, by if i == 0 else by.opposite, (heads, channels), dtype) for i in range(3))
    logits = b.op("mul", b.sum_axis(b.op("mul", q, k), 1), b.const(channels**-0.5))
    y = b.reduce("sum", b.op("mul", b.softmax(logits), v))
    return b.finish([Output(y, dtype, (heads, channels))])


def attention_gradient(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Gradient of the logits per edge, and their sum per row: needs a reduction before the edges are stored."""
    b = Builder(by)
    alpha = b.softmax(attention_logits(b, by, dtype, heads))
    x, dy = b.input(2, by.opposite, (heads, channels), dtype), b.input(3, by, (heads, channels), dtype)
    dalpha = b.sum_axis(b.op("mul", x, dy), 1)
    pull = b.reduce("sum", b.op("mul", alpha, dalpha))
    ds = b.op("mul", alpha, b.op("sub", dalpha, pull))
    return b.finish([Output(ds, dtype, (heads,)), Output(b.reduce("sum", ds), dtype, (heads,))])


def channel_softmax(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    y = b.reduce("sum", b.op("mul", b.softmax(b.op("mul", x, b.input(1, P, (1, 1), "float32"))), x))
    return b.finish([Output(y, dtype, (heads, channels))])


def several(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Sum, sum of squares and maximum at once, then a standard deviation: an epilogue on reductions."""
    b = Builder(by)
    x, inverse = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, by, (1, 1), "float32")
    mean, square = (b.op("mul", b.reduce("sum", v), inverse) for v in (x, b.op("mul", x, x)))
    spread = b.op("sqrt", b.op("add", b.op("abs", b.op("sub", square, b.op("mul", mean, mean))), b.const(0.5)))
    norm = b.sum_axis(b.op("mul", spread, spread), 1)
    results = [(mean, (heads, channels)), (spread, (heads, channels)), (b.reduce("max", x), (heads, channels))]
    return b.finish([Output(v, dtype, s) for v, s in [*results, (norm, (heads,))]])


def edge_values(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Per-edge results only: a bool, a wide value, and one summed over both feature axes."""
    b = Builder(by)
    x_i, x_j = b.input(0, by, (heads, channels), dtype), b.input(1, by.opposite, (heads, channels), dtype)
    keep, shape = b.input(2, E, (1, 1), BOOL), (heads, channels)
    z = b.op("where", keep, b.op("div", x_i, b.op("add", b.op("abs", x_j), b.const(1.0))), b.const(-0.5))
    spread = b.op("on_edges", x_i)
    both = b.op("and", b.op("not", keep), b.op("lt", x_i, x_j))
    score = total(b, b.op("add", z, b.op("float", both)))
    return b.finish(
        [Output(both, BOOL, shape), Output(z, dtype, shape), Output(score, dtype, ()), Output(spread, dtype, shape)]
    )


def degree_and_constants(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Reductions of what does not vary along the edges, and outputs that are constants or parameters."""
    b = Builder(by)
    x, p = b.input(0, by, (heads, channels), dtype), b.input(1, P, (heads, channels), dtype)
    outputs = [b.reduce("sum", b.const(1.0)), b.reduce("sum", x), b.reduce("max", p), p, b.const(0.1)]
    outputs.append(b.op("mul", b.op("exp", b.const(0.1)), b.const(0.1)))
    return b.finish([Output(o, dtype, width(b.nodes[o].shape)) for o in outputs])


def row_wise(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x, w = b.input(0, by, (heads, channels), dtype), b.input(1, P, (heads, channels), dtype)
    y = b.op("mul", b.op("erf", x), w)
    y = b.op("add", y, b.op("sub", b.op("sin", x), b.op("cos", b.op("log", b.op("abs", x)))))
    squares = total(b, b.op("mul", y, y))
    per_channel = b.sum_axis(b.op("mul", x, w), 0)
    return b.finish(
        [Output(y, dtype, (heads, channels)), Output(squares, dtype, ()), Output(per_channel, dtype, (channels,))]
    )


def mixed_widths(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """An edge vector of another width than the nodes', summed to a gate."""
    b = Builder(by)
    gate = b.sum_axis(b.op("mul", b.input(0, E, (1, 5), dtype), b.input(1, P, (1, 5), dtype)), 1)
    x = b.input(2, by.opposite, (heads, channels), dtype)
    return b.finish([Output(b.reduce("sum", b.op("mul", gate, x)), dtype, (heads, channels))])


Case = Callable[[Space, str, int, int], Region]
CASES: list[Case] = [
    neighbour_sum,
    weighted_sum,
    mean,
    max_and_min,
    edge_relu,
    gated,
    attention,
    dot_attention,
    attention_gradient,
    channel_softmax,
    several,
    edge_values,
    degree_and_constants,
    row_wise,
    mixed_widths,
]


# -- the check ----------------------------------------------------------------------------------------------------


def random_tensors(region: Region, g: Graph, seed: int = 0) -> list[Tensor]:
    """One tensor per position, on the CPU; inputs that no output needs are filled in with an empty tensor."""
    random = torch.Generator().manual_seed(seed)
    rows = {region.by: g.num_rows, region.by.opposite: g.num_cols, E: g.row.numel(), P: 1}
    tensors = [torch.empty(0)] * (1 + max((int(n.value or 0) for n in region.inputs), default=-1))
    for node in region.inputs:
        value = torch.randn(rows[node.space], node.shape[0] * node.shape[1], generator=random)
        tensors[int(node.value or 0)] = value > 0 if node.dtype == BOOL else value.to(getattr(torch, node.dtype))
    return tensors


def in_double(region: Region) -> Region:
    """The same region in float64, for a reference without rounding."""

    def wide(dtype: str) -> str:
        return "float64" if dtype.startswith(("float", "bfloat")) else dtype

    nodes = tuple(replace(n, dtype=wide(n.dtype)) for n in region.nodes)
    return Region(region.by, nodes, tuple(replace(o, dtype=wide(o.dtype)) for o in region.outputs))


def launch(
    region: Region,
    tensors: list[Tensor],
    g: Graph,
    device: str,
    tile: Tile | None = None,
    edges: Layout | None = None,
) -> list[Tensor]:
    """Runs the kernel on outputs that are poisoned where it has to write."""
    outputs = []
    for out in region.outputs:
        rows = g.row.numel() if region.nodes[out.node].space is E else g.num_rows
        made = torch.empty(rows, *out.trailing, dtype=getattr(torch, out.dtype), device=device)
        outputs.append(made.fill_(True if out.dtype == BOOL else NAN))
        if region.nodes[out.node].space is E and g.alive is not None:
            outputs[-1][~g.alive.to(device)] = 0
    TritonKernel(region, tile)([t.to(device) for t in tensors], edges or g.layout(device), outputs)
    return [o.cpu() for o in outputs]


def check(region: Region, g: Graph, device: str, tensors: list[Tensor] | None = None, tile: Tile | None = None) -> None:
    tensors = random_tensors(region, g) if tensors is None else tensors
    expected = run(in_double(region), [t if t.dtype == torch.bool else t.double() for t in tensors], g.layout("cpu"))
    for out, found, wanted in zip(region.outputs, launch(region, tensors, g, device, tile), expected, strict=True):
        if out.dtype == BOOL:
            assert torch.equal(found, wanted)
            continue
        limit = TOLERANCE[out.dtype]
        torch.testing.assert_close(found.double(), wanted.double(), rtol=limit, atol=limit, equal_nan=True)


def rows_tile(region: Region, rows: int = 2, edges: int = 2) -> Tile:
    return replace(choose_tile(region, schedule(region)), rows=rows, edges=edges)


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, channels", [(1, 7), (3, 4)])
def test_regions(case: Case, heads: int, channels: int, device: str) -> None:
    check(case(D, "float32", heads, channels), MIXED, device)


@pytest.mark.parametrize("case", CASES)
def test_by_source(case: Case, device: str) -> None:
    check(case(S, "float32", 4, 3), MIXED, device)


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "mixed"])
@pytest.mark.parametrize("case", [neighbour_sum, max_and_min, attention, attention_gradient, row_wise])
def test_graphs(case: Case, name: str, device: str) -> None:
    check(case(D, "float32", 1, 3), GRAPHS[name], device)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("case", [weighted_sum, max_and_min, attention, edge_values, degree_and_constants, row_wise])
def test_types(case: Case, dtype: str, device: str) -> None:
    check(case(D, dtype, 1, 3), MIXED, device)


@pytest.mark.parametrize("heads, channels", [(1, 1), (1, 16), (1, 64), (1, 100), (3, 1), (4, 7), (4, 16)])
@pytest.mark.parametrize("case", [weighted_sum, gated, attention, dot_attention, row_wise])
def test_widths(case: Case, heads: int, channels: int, device: str) -> None:
    check(case(D, "float32", heads, channels), MIXED, device)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, channels", [(1, 1), (3, 3)])
def test_several_rows_per_program(case: Case, heads: int, channels: int, device: str) -> None:
    """Three or more steps over the longest row, and a last program that has only one row of two (or none)."""
    region = case(D, "float32", heads, channels)
    check(region, replace(MIXED, num_rows=5), device, tile=rows_tile(region))


@pytest.mark.parametrize("case", CASES)
def test_one_edge_per_step(case: Case, device: str) -> None:
    region = case(D, "float32", 1, 3)
    check(region, MIXED, device, tile=rows_tile(region, rows=1, edges=1))


def test_channels_over_a_second_grid_axis(device: str) -> None:
    """Width 1100 in three blocks of channels; narrow results beside wide ones."""
    region = attention(D, "float32", 3, 370)
    assert choose_tile(region, schedule(region)).channels == 256
    check(region, MIXED, device)
    check(edge_relu(D, "float32", 1, 1100), MIXED, device)


def test_wide_rows_that_are_summed(device: str) -> None:
    check(dot_attention(D, "float32", 1, 1100), MIXED, device)


@pytest.mark.parametrize("several_rows", [False, True])
def test_wide_reductions_combine_at_every_step(several_rows: bool, device: str) -> None:
    region = several(D, "float32", 1, 64)
    check(region, MIXED, device, tile=rows_tile(region, rows=2 if several_rows else 1))


@pytest.mark.parametrize("several_rows", [False, True])
def test_nan_and_infinity_in_extremes(several_rows: bool, device: str) -> None:
    region = max_and_min(D, "float32", 1, 3)
    x = torch.tensor([[0.0, NAN, 1.0], [NAN, INF, 1.0], [-INF, INF, 1.0], [-INF, 2.0, 1.0]])
    g = graph([0, 0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 3, 0, 2], 5, 4)
    check(region, g, device, [x], rows_tile(region) if several_rows else None)


@pytest.mark.parametrize("several_rows", [False, True])
def test_nan_and_infinity_in_softmax(several_rows: bool, device: str) -> None:
    """Rows of all -inf, with one -inf, with +inf, with NaN, with large logits; as torch, NaN where exp(inf - inf)."""
    region = attention(D, "float32", 1, 2)
    a = torch.tensor([[-INF], [1.0], [INF], [NAN], [3e38], [-3e38], [200.0]])
    row = [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 6, 6]
    col = [0, 0, 0, 1, 6, 1, 2, 3, 1, 5, 4, 1, 6, 0]
    g = graph(row, col, 7, 7)
    tensors = [torch.zeros(7, 1), a, torch.randn(7, 2), torch.randn(1, 2)]
    check(region, g, device, tensors, rows_tile(region) if several_rows else None)


def test_padded_lanes_do_not_count(device: str) -> None:
    """exp(0) = 1 and 0 / 0 on padded channels, heads and edges must not reach a sum."""
    b = Builder(D)
    x_i, x_j = b.input(0, D, (3, 5), "float32"), b.input(1, S, (3, 5), "float32")
    z = b.op("add", b.op("exp", x_j), b.op("div", x_i, x_j))
    row = b.op("div", x_i, x_i)
    outputs = [b.reduce("sum", b.sum_axis(z, 1)), b.reduce("sum", b.sum_axis(z, 0)), total(b, row)]
    outputs += [b.reduce("sum", z), b.sum_axis(row, 0)]
    check(b.finish([Output(o, "float32", width(b.nodes[o].shape)) for o in outputs]), MIXED, device)


def test_gradient_of_max_shares_ties(device: str) -> None:
    """Counting the edges that attain the maximum: compared for equality within one kernel."""
    b = Builder(D)
    x, dy = b.input(0, S, (1, 3), "float32"), b.input(1, D, (1, 3), "float32")
    hit = b.op("eq", b.op("mul", x, b.const(0.1)), b.reduce("max", b.op("mul", x, b.const(0.1))))
    share = b.op("div", dy, b.reduce("sum", b.op("float", hit)))
    dx = b.op("where", hit, share, b.const(0.0))
    region = b.finish([Output(dx, "float32", (3,))])
    assert region.exact
    tensors = random_tensors(region, MIXED)
    tensors[0] = tensors[0].round()
    check(region, MIXED, device, tensors)


@pytest.mark.parametrize("case", [mean, gated, edge_relu, max_and_min, attention, dot_attention, channel_softmax])
def test_gradient_regions(case: Case, device: str) -> None:
    """Every region of a backward, on random tensors."""
    region = with_residuals(case(D, "float32", 2, 3))
    wanted = tuple(True for _ in region.inputs)
    for seed, stage in enumerate(vjp(region, wanted, tuple(True for _ in region.outputs)).stages):
        check(stage.region, MIXED, device, random_tensors(stage.region, MIXED, seed))


def test_softmax_of_a_softmax(device: str) -> None:
    b = Builder(D)
    alpha = b.softmax(b.softmax(b.input(0, S, (2, 1), "float32")))
    check(b.finish([Output(alpha, "float32", (2,))]), MIXED, device)


def test_second_launch_and_unaligned_tensors(device: str) -> None:
    """The launcher keeps the compiled kernel; a view that starts in the middle of a vector is served as well."""
    region = weighted_sum(D, "float32", 1, 4)
    kernel = TritonKernel(region)
    w, x = random_tensors(region, MIXED)
    shifted = torch.cat([torch.zeros(1), x.flatten()]).to(device)[1:].view_as(x)
    w = w.to(device)
    results = []
    for values in (x.to(device), x.to(device), shifted, x.to(device)):
        out = torch.full((MIXED.num_rows, 4), NAN, device=device)
        kernel([w, values], MIXED.layout(device), [out])
        results.append(out)
    for result in results[1:]:
        assert torch.equal(result, results[0])


# -- hubs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `MIXED`, rows 0 and 3 (4 and 3 edges) are hubs, and row 2 is in the list of hubs without being one."""
    monkeypatch.setattr(runtime_layout, "HUB", 2)


def forget(edges: Layout) -> None:
    """Makes the host not know how many hubs there are, as before the number has arrived from a GPU."""
    found = runtime_layout.hubs(edges.rowptr, edges.edge.size(0))
    assert found is not None
    found.number = found._arriving = None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("several_steps", [False, True])
def test_hubs(case: Case, several_steps: bool, device: str, small_hubs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hubs of two pieces, each of which takes one step; or two, as putting them together does."""
    region = case(D, "float32", 2, 7)
    if several_steps:
        monkeypatch.setattr(triton_plan, "MOST_EDGES", 1)
    check(
        region, MIXED, device, tile=replace(choose_tile(region, schedule(region)), edges=1) if several_steps else None
    )


@pytest.mark.parametrize("case", [max_and_min, attention, attention_gradient, edge_values])
def test_wide_hubs(case: Case, device: str, small_hubs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide rows, some of them split by channels; feature axes that are no powers of two."""
    monkeypatch.setattr(triton_plan, "SPLIT_WIDTH", 32)
    check(case(D, "float32", 1, 70), MIXED, device)
    check(case(S, "float32", 4, 16), MIXED, device)


@pytest.mark.parametrize("case", [neighbour_sum, max_and_min, attention, attention_gradient, edge_values])
def test_unknown_hubs(case: Case, device: str, small_hubs: None) -> None:
    """Until their number is known as many hubs and pieces are launched for as there can be: the same bits."""
    region = case(D, "float32", 1, 5)
    tensors, edges = random_tensors(region, MIXED), MIXED.layout(device)
    known = launch(region, tensors, MIXED, device, edges=edges)
    forget(edges)
    for a, b in zip(known, launch(region, tensors, MIXED, device, edges=edges), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "values", [[-INF, -INF, -INF, 1.0, 2.0], [-INF] * 5, [INF, 1.0, 1.0, 1.0, 2.0], [NAN, 1.0, 1.0, 1.0, 1.0]]
)
def test_softmax_over_pieces_that_are_not_finite(values: list[float], device: str, small_hubs: None) -> None:
    """Edges 0 and 1 are the first piece: a piece of -inf alone leaves the others as they are."""
    b = Builder(D)
    alpha = b.softmax(b.input(0, E, (1, 1), "float32"))
    region = b.finish([Output(b.reduce("sum", b.op("mul", alpha, b.input(1, S, (1, 3), "float32"))), "float32", (3,))])
    g = graph([0] * 5, list(range(5)), 1, 5)
    tensors = [torch.tensor(values), torch.randn(5, 3)]
    expected = torch.softmax(tensors[0], 0) @ tensors[1]
    (found,) = launch(region, tensors, g, device)
    torch.testing.assert_close(found[0].cpu(), expected, equal_nan=True)


def hub_launches(kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Records how many programs each launch for hubs gets, from now on."""
    counted: list[tuple[str, int]] = []

    def recorded(what: str, inner: Any) -> Any:
        def record(given: Any, programs: int, device: int) -> None:
            counted.append((what, programs))
            inner(given, programs, device)

        return record

    for what in ("pieces", "hubs"):
        monkeypatch.setattr(kernel, f"_{what}", [recorded(what, v) for v in getattr(kernel, f"_{what}")])
    return counted


@pytest.mark.parametrize(
    "name, limit, launches",
    [
        ("hub", 300, []),
        ("hub", 299, [("pieces", 2), ("hubs", 1)]),
        ("hub", 100, [("pieces", 3), ("hubs", 1)]),
        ("mixed", 2, [("pieces", 4), ("hubs", 2)]),
        ("mixed", 4, []),
        ("all_masked", 1, []),
        ("no_row", 1, []),
    ],
)
def test_hubs_get_launches_if_there_are_any(
    name: str, limit: int, launches: list[tuple[str, int]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_layout, "HUB", limit)
    region, g = neighbour_sum(D, "float32", 1, 3), GRAPHS[name]
    kernel = TritonKernel(region)
    counted = hub_launches(kernel, monkeypatch)
    tensors, edges = [t.to(device) for t in random_tensors(region, g)], g.layout(device)
    if name != "no_row" and device == "cuda":  # the number is there as soon as the device is done
        runtime_layout.hubs(edges.rowptr, edges.edge.size(0))
        torch.cuda.synchronize()
    kernel(tensors, edges, [torch.empty(g.num_rows, 3, device=device)])
    assert counted == launches
    if name == "mixed" and limit == 2:
        counted.clear()
        forget(edges)
        kernel(tensors, edges, [torch.empty(g.num_rows, 3, device=device)])
        assert counted == [("pieces", 8), ("hubs", 3)]


def test_launches_of_a_region() -> None:
    """One over the pieces for each pass, and one for the rows, unless all outputs live on edges."""
    texts = TritonKernel(attention(D, "float32", 1, 8)).hub_texts
    assert ["walks pieces, pass 1" in texts[0], "walks pieces, pass 2" in texts[1], "walks hubs" in texts[2]] == [
        True
    ] * 3
    assert len(texts) == 3
    assert len(TritonKernel(edge_values(D, "float32", 1, 8)).hub_texts) == 1
    assert TritonKernel(row_wise(D, "float32", 1, 16)).hub_texts == []
    assert f"if end - begin > {runtime_layout.HUB}:" in TritonKernel(neighbour_sum(D, "float32", 1, 128)).text


def test_tiles_for_hubs() -> None:
    def of(region: Region) -> Tile | None:
        plan = schedule(region)
        return hub_tile(region, plan, choose_tile(region, plan))

    assert of(neighbour_sum(D, "float32", 1, 128)) == Tile(1, 16, 128, 1)
    assert of(dot_attention(D, "float32", 1, 128)) == Tile(1, 8, 128, 1)  # two wide values per edge
    assert of(row_wise(D, "float32", 1, 16)) is None


# -- launching ----------------------------------------------------------------------------------------------------


class FakeJit:
    """Stands for a Triton kernel: counts compilations, and records what is handed to the compiled kernel."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.by_triton = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def compile_and_run(*arguments: Tensor, **options: Any) -> Any:
            self.by_triton += 1
            return FakeCompiled(self)

        return compile_and_run


class FakeCompiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, jit: FakeJit) -> None:
        self.jit = jit

    def run(self, *arguments: Any) -> None:
        self.jit.launched.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.jit.launched.append((grid, *arguments))


def test_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is asked once for each alignment; then the compiled kernel runs directly, unless hooks watch."""
    monkeypatch.setattr(triton_kernel, "_current_stream", lambda device: 77)
    kernel, jit = TritonKernel(neighbour_sum(D, "float32", 1, 4)), FakeJit()
    kernel._ordinary._kernel = jit
    x, out, edges = torch.randn(8, 4), torch.empty(4, 4), MIXED.layout("cpu")
    shifted = torch.zeros(33)[1:].view(8, 4)

    def expected(x: Tensor) -> tuple[Any, ...]:
        pointers = (x.data_ptr(), edges.rowptr.data_ptr(), edges.col.data_ptr(), out.data_ptr())
        return (4, 1, 1, 77, "function", "metadata", None, None, None, *pointers)

    for _ in range(2):
        kernel([x], edges, [out])
        kernel([shifted], edges, [out])
    assert jit.by_triton == 2
    assert jit.launched == [expected(x), expected(shifted)]
    assert sorted(kernel._ordinary.compiled, key=str) == [(-1, 0), -1]

    jit.launched.clear()
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        kernel([x], edges, [out])
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    kernel([x], edges, [out])
    assert jit.launched == [((4, 1, 1), *expected(x)[9:]), expected(x)]


def test_tensors_of_another_type_are_refused(device: str) -> None:
    kernel, edges = TritonKernel(neighbour_sum(D, "float32", 1, 4)), MIXED.layout(device)
    out = torch.empty(4, 4, device=device)
    with pytest.raises(ValueError, match=r"found a tensor torch\.float64 .* expected torch\.float32"):
        kernel([torch.zeros(7, 4, dtype=torch.float64, device=device)], edges, [out])
    with pytest.raises(ValueError, match=r"expected torch\.int32"):
        kernel([torch.zeros(7, 4, device=device)], Layout(edges.rowptr.long(), edges.col, edges.edge), [out])


@pytest.mark.gpu
def test_tensors_on_another_device_are_refused() -> None:
    kernel, edges = TritonKernel(neighbour_sum(D, "float32", 1, 4)), MIXED.layout("cuda")
    with pytest.raises(ValueError, match=r"expected torch\.float32 on cuda:0"):
        kernel([torch.zeros(7, 4)], edges, [torch.empty(4, 4, device="cuda")])


def test_source_is_deterministic_and_free_of_sizes() -> None:
    first, second = (source(attention(D, "float32", 4, 16)) for _ in range(2))
    assert first == second
    assert "constexpr" not in first and "num_rows" not in first and "atomic" not in first
    assert 'do_not_specialize=["num_rows"]' in source(row_wise(D, "float32", 1, 16))


def test_logits_are_all_that_the_first_pass_reads() -> None:
    first, second = source(attention(D, "float32", 4, 16)).split("# pass 2 of 2")
    assert "load(t1" in first and "load(t2" not in first and "load(t2" in second and "load(t3" in second


def test_unsupported() -> None:
    b = Builder(D)
    value = b.input(0, S, (1, 1), "float32")
    for _ in range(5):
        value = b.softmax(value)
    with pytest.raises(Unsupported, match="passes"):
        TritonKernel(b.finish([Output(value, "float32", (1,))]))
    with pytest.raises(Unsupported, match="elements"):
        TritonKernel(dot_attention(D, "float32", 3, 5000))
    opposite = Region(D, (Node("input", (), S, (1, 1), "float32", 0),), (Output(0, "float32", (1,)),))
    with pytest.raises(Unsupported, match="other end"):
        TritonKernel(opposite)
