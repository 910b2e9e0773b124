"""Graphs, regions and a check that the tests of Triton kernels share."""

# ruff: noqa: E402

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of Triton; torch._dynamo imports it too

from gnncompile.codegen.triton.plan import Part, schedule
from gnncompile.codegen.triton.tile import Tile, choose_tile
from gnncompile.codegen.triton.writer import writer_of
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import BOOL, Output, Region, Space
from gnncompile.runtime.launch import fallbacks
from tests.graphs import layout
from tests.harness import kernels, needs_interpreter, tune, tune_halves

triton = pytest.importorskip("triton")
from gnncompile.codegen.triton.kernel import TritonKernel

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
NAN, INF = float("nan"), float("inf")

DEVICE = "cuda" if HAS_GPU else "cpu"
"""The device of Triton's kernels: a GPU if there is one, else a CPU, where Triton interprets them."""
GPU = [pytest.mark.gpu] if HAS_GPU else []
GENERATORS = ["cpp", pytest.param("triton", marks=GPU)]

# The interpreter computes with NumPy, which warns of infinities and NaN in padded lanes.
INTERPRETED = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=GENERATORS)
def which(request: pytest.FixtureRequest) -> Iterator[str]:
    """The generator of the kernels of compiled models. No region may fall back to another one."""
    needs_interpreter(request.param, home(request.param))
    torch._dynamo.reset()
    with kernels(request.param):
        yield request.param
        assert not fallbacks


def take_few_edges(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Lets kernels take one edge of a row per step, and `most` edges or pieces of a hub."""
    tune(monkeypatch, edges_per_step=1, edges_of_piece=most)


def home(which: str) -> str:
    """Returns the device of the tensors that kernels of a kind take: "cpp", "triton" or "reference"."""
    return DEVICE if which == "triton" else "cpu"


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products go to the kernels too, on whatever device there is."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, least_over_rows=1, least_by_rows=1, least_product=1, least_weight=1)
    tune_halves(monkeypatch, least_weight=1)
    if DEVICE == "cuda":
        tune(monkeypatch, capability=torch.cuda.get_device_capability())
    torch._dynamo.reset()


@pytest.fixture(params=[pytest.param(DEVICE, marks=GPU)])
def device(request: pytest.FixtureRequest) -> str:
    if not HAS_GPU and isinstance(triton.language.sum, triton.JITFunction):
        pytest.fail("Triton was imported before this module set TRITON_INTERPRET=1; set it in tests/conftest.py")
    return str(request.param)


# -- graphs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """Edges, each with the row that owns it. Edges that are not `alive` are masked out; None masks out none."""

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


# Unsorted, with a duplicate edge, self loops, an empty row (1), more columns than rows, and masked edges.
MIXED = graph([3, 0, 2, 0, 3, 3, 0, 2, 3, 0], [6, 1, 2, 1, 3, 0, 5, 4, 4, 0], 4, 7, dead=(2, 5))
GRAPHS = {
    "mixed": MIXED,
    "no_edge": graph([], [], 3, 2),
    "no_row": graph([], [], 0, 2),
    "one_node": graph([], [], 1, 1),
    "one_loop": graph([0], [0], 1, 1),
    "hub": graph([0] * 300, [i % 5 for i in range(300)], 2, 5),
    "all_masked": graph([0, 1], [1, 0], 2, 2, dead=(0, 1)),
    "dense": graph([2, 0, 0, 2, 0] * 6, [(7 * k) % 5 for k in range(30)], 3, 5, dead=(0, 4, 11)),
}
"""Rows have fewer than 8 edges on average, for which kernels have a tile of their own, but for `hub` and `dense`."""


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
    x = b.op("floor", b.op("mul", x, b.const(2.0)))  # so that there are ties
    extrema = [b.reduce(kind, x) for kind in ("max", "min")]
    return b.finish([Output(v, dtype, (heads, channels)) for v in (*extrema, *map(b.ties, extrema))])


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


def edge_attention(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Dot-product attention whose keys and values have features of the edges added."""
    b = Builder(by)
    q, k, v = (b.input(i, by if i == 0 else by.opposite, (heads, channels), dtype) for i in range(3))
    features = b.input(3, E, (heads, channels), dtype)
    logits = b.op("mul", b.sum_axis(b.op("mul", q, b.op("add", k, features)), 1), b.const(channels**-0.5))
    y = b.reduce("sum", b.op("mul", b.softmax(logits), b.op("add", v, features)))
    return b.finish([Output(y, dtype, (heads, channels))])


def attention_gradient(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """The gradient of the logits per edge, and its sum per row. A reduction must finish before the edges are stored."""
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


def weighed_sums(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Sums weighted by one softmax.

    Wide and narrow sums share the softmax's pass, others must wait for a later pass. The softmax is an output too.
    """
    b = Builder(by)
    logits = attention_logits(b, by, dtype, heads)
    alpha = b.softmax(logits)
    x, gate = b.input(2, by.opposite, (heads, channels), dtype), b.input(3, E, (heads, 1), dtype)
    wide = b.reduce("sum", b.op("mul", gate, b.op("mul", alpha, x)))
    narrow = b.reduce("sum", b.op("mul", b.op("sigmoid", gate), alpha))
    twice = b.reduce("sum", b.op("mul", b.op("mul", x, alpha), alpha))
    later = b.reduce("sum", b.op("mul", alpha, b.op("tanh", b.op("mul", x, narrow))))
    other = b.softmax(b.op("mul", logits, narrow))
    both = b.reduce("sum", b.op("mul", b.op("mul", alpha, x), other))
    sums = [(one, (heads, channels)) for one in (wide, twice, later, both)]
    return b.finish([Output(v, dtype, size) for v, size in [*sums, (narrow, (heads,)), (alpha, (heads,))]])


def several(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """A sum, a sum of squares and a maximum in one pass, then a standard deviation as an epilogue."""
    b = Builder(by)
    x, inverse = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, by, (1, 1), "float32")
    mean, square = (b.op("mul", b.reduce("sum", v), inverse) for v in (x, b.op("mul", x, x)))
    spread = b.op("sqrt", b.op("add", b.op("abs", b.op("sub", square, b.op("mul", mean, mean))), b.const(0.5)))
    norm = b.sum_axis(b.op("mul", spread, spread), 1)
    results = [(mean, (heads, channels)), (spread, (heads, channels)), (b.reduce("max", x), (heads, channels))]
    return b.finish([Output(v, dtype, s) for v, s in [*results, (norm, (heads,))]])


def edge_values(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Outputs per edge only: a bool, wide values, and a value summed over both feature axes."""
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
    """Reductions of values that are equal for all edges of a row, and outputs that are constants or parameters."""
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
    """A gate from edge features, whose width differs from the width of the nodes' features."""
    b = Builder(by)
    gate = b.sum_axis(b.op("mul", b.input(0, E, (1, 5), dtype), b.input(1, P, (1, 5), dtype)), 1)
    x = b.input(2, by.opposite, (heads, channels), dtype)
    return b.finish([Output(b.reduce("sum", b.op("mul", gate, x)), dtype, (heads, channels))])


def feature_softmax(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Softmax over either feature axis, and over the heads of a value without channels."""
    b = Builder(by)
    x, narrow = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, E, (heads, 1), dtype)
    outputs = []
    for logits, axis in ((x, "heads"), (x, "channels"), (narrow, "heads")):
        powers = b.op("exp", b.op("sub", logits, b.over_features(f"max_{axis}", logits)))
        alpha = b.op("div", powers, b.over_features(f"sum_{axis}", powers))
        outputs.append(Output(b.reduce("sum", b.op("mul", x, alpha)), dtype, (heads, channels)))
    return b.finish(outputs)


def vectors(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Vectors that filters of their edges scale, and that turn towards the direction of the edge."""
    b = Builder(by)
    x, scale = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, E, (1, channels), dtype)
    towards = b.op("mul", b.input(2, E, (heads, 1), dtype), b.input(3, by.opposite, (1, channels), dtype))
    moved = b.reduce("sum", b.op("add", b.op("mul", x, scale), towards))
    squares = b.reduce("sum", b.sum_axis(b.op("mul", x, x), 0))
    return b.finish([Output(moved, dtype, (heads, channels)), Output(squares, dtype, (channels,))])


def vector_dots(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """The gradient of the direction and of the filter of each edge: dot products over channels, and over components."""
    b = Builder(by)
    x, scale = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, E, (1, channels), dtype)
    gradient = b.input(2, by, (heads, channels), dtype)
    direction = b.reduce("sum", b.sum_axis(b.op("mul", gradient, scale), 1))
    filters = b.on_edges(b.sum_axis(b.op("mul", gradient, x), 0))
    return b.finish([Output(direction, dtype, (heads,)), Output(filters, dtype, (channels,))])


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
    weighed_sums,
    several,
    edge_values,
    degree_and_constants,
    row_wise,
    mixed_widths,
    feature_softmax,
    vectors,
    vector_dots,
]


# -- kernels ------------------------------------------------------------------------------------------------------


def source(region: Region, tile: Tile | None = None, part: Part | None = None) -> str:
    """Returns the text of the kernel that does a part of a region's work, with the usual tile if none is given."""
    plan = schedule(region)
    return writer_of(region, plan, tile or choose_tile(region, plan), part or Part()).module()


# -- the check ----------------------------------------------------------------------------------------------------


def random_tensors(region: Region, g: Graph, seed: int = 0) -> list[Tensor]:
    """Returns one random tensor per position, on the CPU; an empty tensor where the region reads none."""
    random = torch.Generator().manual_seed(seed)
    rows = {region.by: g.num_rows, region.by.opposite: g.num_cols, E: g.row.numel(), Space.ORDERED: g.row.numel(), P: 1}
    tensors = [torch.empty(0)] * (1 + max((int(n.value or 0) for n in region.inputs), default=-1))
    for node in region.inputs:
        value = torch.randn(rows[node.space], node.shape[0] * node.shape[1], generator=random)
        tensors[int(node.value or 0)] = value > 0 if node.dtype == BOOL else value.to(getattr(torch, node.dtype))
    return tensors


def in_double(region: Region) -> Region:
    """Returns the same region in float64, for a reference almost without rounding."""

    def wide(dtype: str) -> str:
        return "float64" if dtype.startswith(("float", "bfloat")) else dtype

    nodes = tuple(replace(n, dtype=wide(n.dtype)) for n in region.nodes)
    return Region(region.by, nodes, tuple(replace(o, dtype=wide(o.dtype)) for o in region.outputs))


def poisoned(region: Region, g: Graph, device: str) -> list[Tensor]:
    """Returns output tensors that hold NaN wherever the kernel must write."""
    outputs = []
    for out in region.outputs:
        rows = g.row.numel() if region.nodes[out.node].space is E else g.num_rows
        made = torch.empty(rows, *out.trailing, dtype=getattr(torch, out.dtype), device=device)
        outputs.append(made.fill_(True if out.dtype == BOOL else NAN))
        if region.nodes[out.node].space is E and g.alive is not None:
            outputs[-1][~g.alive.to(device)] = 0
    return outputs


def launch(
    region: Region,
    tensors: list[Tensor],
    g: Graph,
    device: str,
    tile: Tile | None = None,
    edges: Layout | None = None,
) -> list[Tensor]:
    """Runs the kernel with outputs from :func:`poisoned`, and returns the outputs on the CPU."""
    outputs = poisoned(region, g, device)
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
