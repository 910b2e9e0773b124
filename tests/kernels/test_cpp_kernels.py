"""C++ kernels against the reference interpreter in float64.

Each region is compiled once and then runs on every graph, to keep compilation short.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnncompile.codegen.cpp import compiler
from gnncompile.codegen.cpp.kernel import FRESH_BYTES, CppKernel
from gnncompile.codegen.cpp.plan import plan
from gnncompile.codegen.cpp.source import source
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import BOOL, Node, Output, Region, Space
from tests.graphs import layout

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER
NAN, INF = float("nan"), float("inf")
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

Graph = tuple[Layout, int]  # a layout and the number of rows at the other end


def graph(row: Sequence[int], col: Sequence[int], rows: int, cols: int, dead: Sequence[int] = ()) -> Graph:
    alive = torch.ones(len(row), dtype=torch.bool)
    alive[list(dead)] = False
    made = layout(torch.tensor(row, dtype=torch.long), torch.tensor(col, dtype=torch.long), rows, alive)
    return made, cols


def random_graph() -> Graph:
    """Unsorted, bipartite, with duplicates, an empty row, a hub and masked edges; enough work for two threads."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(60, (3000,), generator=generator)
    row[row == 7] = 8
    row[:700] = 5
    col = torch.randint(37, (3000,), generator=generator)
    return layout(row, col, 60, torch.rand(3000, generator=generator) > 0.1), 37


GRAPHS = {
    "random": random_graph(),
    "mixed": graph([3, 0, 2, 0, 3, 3, 0, 2, 3, 0], [6, 1, 2, 1, 3, 0, 5, 4, 4, 0], 4, 7, dead=(2, 5)),
    "no_edge": graph([], [], 3, 2),
    "no_row": graph([], [], 0, 2),
    "one_node": graph([], [], 1, 1),
    "one_loop": graph([0], [0], 1, 1),
    "all_masked": graph([0, 1], [1, 0], 2, 2, dead=(0, 1)),
}


# -- running ------------------------------------------------------------------------------------------------------


@cache
def kernel(region: Region) -> CppKernel:
    return CppKernel(region)


def in_double(region: Region) -> Region:
    def wide(node: Node) -> Node:
        return replace(node, dtype="float64") if node.op == "input" and node.dtype != BOOL else node

    outputs = tuple(o if o.dtype == BOOL else replace(o, dtype="float64") for o in region.outputs)
    return Region(region.by, tuple(wide(n) for n in region.nodes), outputs)


def inputs(region: Region, where: Graph, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made, cols = where
    rows = {region.by: made.num_rows, region.by.opposite: cols, E: made.edge.numel(), P: 1}
    tensors: dict[int, Tensor] = {}
    for node in region.inputs:
        value = torch.randn(rows[node.space], *node.shape, generator=generator)
        tensors[int(node.value or 0)] = value > 0 if node.dtype == BOOL else value.to(getattr(torch, node.dtype))
    return [tensors.get(i, torch.empty(0)) for i in range(max(tensors) + 1)]


def launch(region: Region, tensors: Sequence[Tensor], where: Graph) -> list[Tensor]:
    """Runs the kernel; row outputs hold NaN before, so that a row that is not written shows."""
    made, _ = where
    outputs = []
    for out in region.outputs:
        on_edges = region.nodes[out.node].space is E
        rows, fill = (made.edge.numel(), 0.0) if on_edges else (made.num_rows, NAN)
        outputs.append(torch.full((rows, *out.trailing), fill, dtype=getattr(torch, out.dtype)))
    kernel(region)(tensors, made, outputs)
    return outputs


def check(region: Region, tensors: Sequence[Tensor], where: Graph, label: str = "") -> list[Tensor]:
    found = launch(region, tensors, where)
    wide = [t if t.dtype is torch.bool else t.double() for t in tensors]
    for out, got, expected in zip(region.outputs, found, run(in_double(region), wide, where[0]), strict=True):
        assert got.shape == expected.shape, label
        if out.dtype == BOOL:
            assert torch.equal(got, expected), label
            continue
        tolerance = TOLERANCE[out.dtype]
        scale = max(1.0, float(expected[expected.isfinite()].abs().max())) if expected.isfinite().any() else 1.0
        torch.testing.assert_close(
            got.double(),
            expected,
            rtol=tolerance,
            atol=tolerance * scale,
            equal_nan=True,
            msg=lambda m: f"{label}: {m}",
        )
    return found


def check_everywhere(region: Region) -> None:
    for name, where in GRAPHS.items():
        check(region, inputs(region, where), where, name)


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- regions ------------------------------------------------------------------------------------------------------


def out(b: Builder, value: int, dtype: str) -> Output:
    return Output(value, dtype, b.nodes[value].shape)


def leaky_relu(b: Builder, x: int) -> int:
    return b.op("where", b.op("gt", x, b.const(0.0)), x, b.op("mul", x, b.const(0.2)))


def neighbour_sum(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    return b.finish([Output(b.reduce("sum", x), dtype, (heads * channels,))])


def weighted_sum(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    message = b.op("mul", b.input(1, E, (1, 1), dtype), b.input(0, by.opposite, (heads, channels), dtype))
    return b.finish([out(b, b.reduce("sum", message), dtype)])


def mean_epilogue(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """relu(inverse_degree * sum + bias + x_i), all in the epilogue."""
    b = Builder(by)
    shape = (heads, channels)
    total = b.reduce("sum", b.input(0, by.opposite, shape, dtype))
    y = b.op("mul", total, b.input(1, by, (1, 1), dtype))
    y = b.op("add", b.op("add", y, b.input(2, P, shape, dtype)), b.input(3, by, shape, dtype))
    return b.finish([out(b, b.op("where", b.op("gt", y, b.const(0.0)), y, b.const(0.0)), dtype)])


def max_and_min(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    x = b.op("floor", b.op("mul", b.input(0, by.opposite, (heads, channels), dtype), b.const(2.0)))
    extrema = [b.reduce(kind, x) for kind in ("max", "min")]
    return b.finish([out(b, v, dtype) for v in (*extrema, b.reduce("sum", x), *map(b.ties, extrema))])


def edge_relu(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    shape = (heads, channels)
    z = b.op("add", b.input(0, by.opposite, shape, dtype), b.input(1, E, shape, dtype))
    return b.finish([out(b, b.reduce("sum", b.op("where", b.op("gt", z, b.const(0.0)), z, b.const(0.0))), dtype)])


def gated(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    shape = (heads, channels)
    gate = b.op("sigmoid", b.input(1, by.opposite, shape, dtype))
    gate = b.op("add", gate, b.op("tanh", b.input(2, by, (heads, 1), dtype)))
    return b.finish([out(b, b.reduce("sum", b.op("mul", b.input(0, by, shape, dtype), gate)), dtype)])


def attention(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    a_i, a_j = b.input(1, by, (heads, 1), dtype), b.input(2, by.opposite, (heads, 1), dtype)
    alpha = b.softmax(leaky_relu(b, b.op("add", a_i, a_j)))
    y = b.reduce("sum", b.op("mul", alpha, b.input(0, by.opposite, (heads, channels), dtype)))
    rows = [b.softmax_row(which, alpha) for which in ("softmax_max", "softmax_sum")]
    return b.finish([out(b, y, dtype), out(b, alpha, dtype), *(out(b, row, "float32") for row in rows)])


def dot_attention(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    shape = (heads, channels)
    q, k, v = b.input(0, by, shape, dtype), b.input(1, by.opposite, shape, dtype), b.input(2, by.opposite, shape, dtype)
    logit = b.op("mul", b.sum_axis(b.op("mul", q, k), 1), b.const(channels**-0.5))
    return b.finish([out(b, b.reduce("sum", b.op("mul", b.softmax(logit), v)), dtype)])


def wide_softmax(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Softmax aggregation: a softmax per channel."""
    b = Builder(by)
    x = b.input(0, by.opposite, (heads, channels), dtype)
    alpha = b.softmax(b.op("mul", x, b.input(1, P, (1, 1), dtype)))
    rows = [b.softmax_row(which, alpha) for which in ("softmax_max", "softmax_sum")]
    return b.finish([out(b, b.reduce("sum", b.op("mul", alpha, x)), dtype), *(out(b, r, "float32") for r in rows)])


def attention_gradient(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """A reduction (of alpha times its gradient) that the logits' gradient, an edge value, then needs."""
    b = Builder(by)
    shape = (heads, channels)
    g, x = b.input(0, by, shape, dtype), b.input(1, by.opposite, shape, dtype)
    alpha = b.softmax(b.op("add", b.input(2, by, (heads, 1), dtype), b.input(3, by.opposite, (heads, 1), dtype)))
    g_alpha = b.sum_axis(b.op("mul", g, x), 1)
    g_logit = b.op("mul", alpha, b.op("sub", g_alpha, b.reduce("sum", b.op("mul", alpha, g_alpha))))
    return b.finish([out(b, g_logit, dtype), out(b, b.reduce("sum", g_logit), dtype)])


def head_sums(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Both feature sums, values shared by several nests, several reductions, and bools."""
    b = Builder(by)
    shape = (heads, channels)
    x, row = b.input(0, by.opposite, shape, dtype), b.input(1, by, shape, dtype)
    keep = b.op("and", b.input(2, E, (1, 1), BOOL), b.op("not", b.op("lt", x, row)))
    z = b.op("exp", b.op("where", keep, b.op("mul", x, row), b.op("neg", b.op("abs", x))))
    by_channel, by_head = b.sum_axis(z, 0), b.sum_axis(z, 1)
    share = b.op("div", b.op("div", z, by_head), b.op("add", by_channel, b.const(1.0)))
    both = b.sum_axis(by_head, 0)
    values = [b.reduce("sum", share), b.reduce("max", by_head), b.reduce("min", by_channel), b.reduce("sum", both)]
    flags = b.op("or", b.op("ge", values[0], b.const(1.0)), b.op("le", row, b.const(-1.0)))
    edges = [out(b, share, dtype), out(b, both, "float32")]
    return b.finish([*(out(b, v, "float32") for v in values), *edges, out(b, flags, BOOL), out(b, values[2], dtype)])


def row_wise(by: Space, dtype: str, heads: int, channels: int) -> Region:
    b = Builder(by)
    shape = (heads, channels)
    x = b.op("mul", b.input(0, by, shape, dtype), b.input(1, by, (heads, 1), dtype))
    squares = b.sum_axis(b.op("mul", x, x), 1)
    y = b.op("div", x, b.op("sqrt", b.op("add", squares, b.const(1e-3))))
    waves = b.op("add", b.op("sin", y), b.op("mul", b.op("cos", y), b.op("erf", y)))
    return b.finish([out(b, waves, dtype), out(b, b.op("log", b.op("add", squares, b.const(1.0))), "float32")])


def counts(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Reductions of values that are the same on every edge of a row, and a parameter output."""
    b = Builder(by)
    x, scale = b.input(0, by, (heads, channels), dtype), b.input(1, P, (heads, channels), dtype)
    return b.finish(
        [out(b, b.reduce("sum", b.const(1.0)), "float32"), out(b, b.reduce("max", x), dtype), out(b, scale, dtype)]
    )


def feature_softmax(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Softmax over either feature axis, and over the heads of a value without channels."""
    b = Builder(by)
    x, narrow = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, E, (heads, 1), dtype)
    values = []
    for logits, axis in ((x, "heads"), (x, "channels"), (narrow, "heads")):
        powers = b.op("exp", b.op("sub", logits, b.over_features(f"max_{axis}", logits)))
        values.append(b.reduce("sum", b.op("mul", x, b.op("div", powers, b.over_features(f"sum_{axis}", powers)))))
    return b.finish([out(b, v, "float32") for v in values])


Make = Callable[[Space, str, int, int], Region]
SUMS: list[Make] = [neighbour_sum, weighted_sum, mean_epilogue, max_and_min, edge_relu, gated, head_sums, counts]
SUMS.append(feature_softmax)
SOFTMAXES: list[Make] = [attention, dot_attention, wide_softmax, attention_gradient]


# -- against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*SUMS, *SOFTMAXES, row_wise])
@pytest.mark.parametrize(("heads", "channels"), [(1, 64), (3, 7)])
def test_matches_reference(make: Make, heads: int, channels: int) -> None:
    check_everywhere(make(D, "float32", heads, channels))


@pytest.mark.parametrize("make", [neighbour_sum, attention, dot_attention, head_sums])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_dtypes(make: Make, dtype: str) -> None:
    check_everywhere(make(D, dtype, 4, 16))


@pytest.mark.parametrize("make", [wide_softmax, gated, max_and_min, row_wise, mean_epilogue])
def test_float64(make: Make) -> None:
    check_everywhere(make(D, "float64", 1, 20))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 1), (1, 16), (1, 100), (1, 257)])
@pytest.mark.parametrize("make", [neighbour_sum, dot_attention, attention])
def test_widths(make: Make, shape: tuple[int, int]) -> None:
    check_everywhere(make(D, "float32", *shape))


@pytest.mark.parametrize("make", [neighbour_sum, weighted_sum, attention_gradient])
def test_by_source(make: Make) -> None:
    check_everywhere(make(S, "float32", 3, 16))


def test_mixed_dtypes() -> None:
    """Storage types meet in one region; float64 anywhere makes it compute in float64."""
    b = Builder(D)
    x, w = b.input(0, S, (1, 8), "bfloat16"), b.input(1, E, (1, 8), "float16")
    y = b.reduce("sum", b.op("mul", b.op("mul", x, w), b.input(2, D, (1, 8), "float64")))
    check_everywhere(b.finish([out(b, y, "float32"), out(b, y, "float64")]))


def test_two_softmaxes_and_a_chain() -> None:
    """A second softmax whose logits need the first one's reduction: three loops over the edges."""
    b = Builder(D)
    x, a = b.input(0, S, (1, 12), "float32"), b.input(1, S, (2, 1), "float32")
    first = b.reduce("sum", b.op("mul", b.softmax(b.sum_axis(a, 0)), x))
    second = b.softmax(b.sum_axis(b.op("mul", first, x), 1))
    values = [b.reduce("sum", b.op("mul", second, x)), b.reduce("sum", b.op("mul", b.softmax(a), second)), first]
    check_everywhere(b.finish([out(b, v, "float32") for v in values]))


# -- special values -----------------------------------------------------------------------------------------------


def test_max_and_min_keep_ties_nan_and_infinities() -> None:
    region = max_and_min(D, "float32", 1, 7)
    where = GRAPHS["random"]
    x = torch.randint(-2, 3, (where[1], 1, 7)).float()
    x[3, 0, 0], x[4, 0, 1], x[5, 0, 2], x[:, 0, 3], x[:, 0, 4] = NAN, INF, -INF, -INF, INF
    found = check(region, [x], where)
    assert found[0][:, 0, 0].isnan().any() and found[1][:, 0, 0].isnan().any()


@pytest.mark.parametrize("make", [attention, wide_softmax])
def test_softmax_of_special_logits(make: Make) -> None:
    """Rows with some -inf, only -inf, +inf, NaN, and numbers whose exponentials overflow."""
    region = make(D, "float32", 1, 20)
    where = graph([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5], [0, 1, 0, 0, 2, 1, 3, 1, 4, 5, 0], 7, 6)
    logits = torch.tensor([-INF, 1.0, INF, NAN, 1e4, 1.1e4])
    x = torch.randn(6, 1, 20)
    if make is attention:
        check(region, [x, torch.zeros(7, 1, 1), logits.view(6, 1, 1)], where)
    else:
        check(region, [logits.view(6, 1, 1).expand(6, 1, 20).contiguous(), torch.ones(1, 1, 1)], where)


FUNCTIONS = ("exp", "exp2", "expm1", "log", "log1p", "erf", "tanh", "sigmoid", "sin", "cos", "sqrt", "floor", "ceil")
LIBRARY = ("sin", "cos")
WIDE = (1, 64)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1.2e-38, 0.5, 1.0, -1.0, -1.0000001, 2.0, -2.0, 3.0, -3.0, 1e20, 16777217.0]
SPECIAL += [3.4e38, -3.4e38, INF, -INF, NAN]


def elementwise(names: Sequence[str], exact: bool = False, arguments: int = 1) -> Region:
    """Functions of one tensor per argument, in loops that can be vectorised."""
    b = Builder(D)
    x = [b.input(at, D, WIDE, "float32") for at in range(arguments)]
    values = [out(b, b.op(name, *x), "float32") for name in names]
    region = b.finish([*values, out(b, b.op("eq", x[0], x[0]), BOOL)] if exact else values)
    assert region.exact == exact
    return region


def rows_of(points: Tensor) -> Tensor:
    return torch.cat([points, points.new_zeros(-points.numel() % 64)]).view(-1, *WIDE)


def launch_rows(region: Region, *points: Tensor) -> list[Tensor]:
    rows = [rows_of(p) for p in points]
    return [t.view(-1)[: points[0].numel()] for t in launch(region, rows, graph([], [], rows[0].size(0), 1))]


def check_ulps(found: Tensor, expected: Tensor, ulps: float, least: float = 2.0**-149) -> None:
    """Compares float32 with what float64 finds; numbers next to the largest may overflow."""
    _, exponent = torch.frexp(expected)
    ulp = torch.ldexp(torch.ones_like(expected), exponent - 24).clamp(min=least)
    number, large = expected.isfinite(), expected.abs() > 3.4e38
    assert bool(((found.double() - expected).abs() <= ulps * ulp)[number & ~large].all())
    assert bool((found.abs() > 3.4e38)[number & large].all())
    assert torch.equal(found[~number].nan_to_num(), expected[~number].float().nan_to_num())
    assert torch.equal(found[~number].isnan(), expected[~number].isnan())
    zero = expected == 0
    assert torch.equal(found[zero].signbit(), expected[zero].signbit())


@pytest.mark.parametrize("exact", [False, True])
def test_elementary_functions(exact: bool) -> None:
    """Each over all of float32, to a few units in the last place, with and without fused products."""
    every = torch.arange(-(1 << 31), 1 << 31, 16411).to(torch.int32).view(torch.float32)
    points = torch.cat([every, torch.linspace(-110, 95, 40001), torch.linspace(-1, 2, 20001), torch.tensor(SPECIAL)])
    found = launch_rows(elementwise(FUNCTIONS, exact), points)
    for name, value in zip(FUNCTIONS, found, strict=False):
        # 1 / (1 + exp(-x)) is 0 where exp overflows, and the sigmoid a subnormal.
        check_ulps(value, getattr(torch, name)(points.double()), 2.5, 2.0**-126 if name == "sigmoid" else 2.0**-149)


@pytest.mark.parametrize("exact", [False, True])
def test_powers(exact: bool) -> None:
    """Every pair of special numbers, and random bases to random powers, whole ones of negative bases."""
    special = torch.cartesian_prod(torch.tensor([*SPECIAL, 0.9999999, 1.0000001]), torch.tensor([*SPECIAL, 1 / 3]))
    base = torch.randint(1, 0x7F800000, (50000,), dtype=torch.int32).view(torch.float32)
    power = torch.rand(50000) * 300 - 150
    power = (power / base.log2()).where(torch.arange(50000) % 2 == 0, power.trunc())
    signed = torch.where(torch.arange(50000) % 2 == 0, base, -(base.log2() / 10).exp2())
    pairs = torch.cat([special, torch.stack([signed, power], 1)])
    found = launch_rows(elementwise(["pow"], exact, arguments=2), *pairs.t().contiguous())[0]
    check_ulps(found, pairs[:, 0].double() ** pairs[:, 1].double(), 1.5)


@pytest.mark.skipif(compiler.compiler()[0] != "g++", reason="reads what g++ says of its loops")
@pytest.mark.parametrize("exact", [False, True])
def test_elementary_functions_are_vectorised(exact: bool) -> None:
    """No function is called per element, and the loop of each is vectorised."""
    names = [name for name in FUNCTIONS if name not in LIBRARY]
    command = [*compiler.compiler(), *compiler.FLAGS, "-fopt-info-vec-optimized", "-x", "c++", "-c", "-"]
    for region in (elementwise(names, exact), elementwise(["pow"], exact, arguments=2)):
        text = source(region)
        done = subprocess.run([*command, "-o", os.devnull], input=text, capture_output=True, text=True, check=True)
        assert done.stderr.count("loop vectorized") == text.count("#pragma omp simd") == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_storage_rounding(dtype: str) -> None:
    """Every 16-bit pattern survives a load and a store; halves round to even, as torch does."""
    b = Builder(D)
    narrow, wide = b.input(0, D, (1, 1), dtype), b.input(1, D, (1, 1), "float32")
    region = b.finish([Output(narrow, "float32", ()), Output(wide, dtype, ())])
    patterns = torch.arange(1 << 16).to(torch.int32).sub(1 << 15).to(torch.int16).view(getattr(torch, dtype))
    values = torch.cat([torch.randn(60000), torch.randn(5000) * 1e-6, torch.tensor([NAN, INF, -INF, 65520.0, 1e30])])
    between = (patterns.float().nan_to_num(0, 0, 0)[: (1 << 16) - values.numel()]) * (1 + 2.0**-9)
    values = torch.cat([values, between])
    found = launch(region, [patterns, values], graph([], [], 1 << 16, 1))
    assert torch.equal(found[0].nan_to_num(123.0), patterns.float().nan_to_num(123.0))
    assert torch.equal(found[0].isnan(), patterns.isnan())
    torch.testing.assert_close(found[1], values.to(getattr(torch, dtype)), rtol=0, atol=0, equal_nan=True)


def test_maximum_is_found_again_bit_for_bit() -> None:
    """The gradient of max compares recomputed messages with the stored maximum: both kernels must round alike."""
    heads, channels = 3, 33

    def message(b: Builder) -> int:
        shape = (heads, channels)
        x, row, w = b.input(0, S, shape, "float32"), b.input(1, D, shape, "float32"), b.input(2, E, (1, 1), "float32")
        z = b.op("add", b.op("mul", x, row), w)
        return b.op("mul", b.op("tanh", z), b.sum_axis(b.op("mul", x, b.op("add", row, w)), 1))

    forward = Builder(D)
    first = forward.finish([out(forward, forward.reduce("max", message(forward)), "float32")])
    backward = Builder(D)
    top = backward.input(3, D, (heads, channels), "float32")
    hits = backward.op("float", backward.op("eq", message(backward), top))
    extra = backward.op("exp", backward.sum_axis(message(backward), 0))
    second = backward.finish([out(backward, backward.reduce("sum", v), "float32") for v in (hits, extra)])
    where, tensors = GRAPHS["random"], inputs(first, GRAPHS["random"])
    (maximum,) = launch(first, tensors, where)
    found, _ = launch(second, [*tensors, maximum], where)
    degree = where[0].rowptr.diff()
    assert bool((found[degree > 0] >= 1).all()) and bool((found[degree == 0] == 0).all())


# -- threads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [neighbour_sum, attention, row_wise, attention_gradient])
def test_bits_do_not_depend_on_threads(make: Make, threads: Callable[[int], None]) -> None:
    region = make(D, "float32", 1, 64)
    where, tensors = GRAPHS["random"], inputs(region, GRAPHS["random"])
    results = []
    for count in (1, 2, 5, 2):
        threads(count)
        results.append(launch(region, tensors, where))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime(threads: Callable[[int], None]) -> None:
    threads(2)
    region = neighbour_sum(D, "float32", 1, 64)
    launch(region, inputs(region, GRAPHS["random"]), GRAPHS["random"])
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    runtimes = {line[-1] for line in maps if "libgomp" in line[-1] or "libomp" in line[-1] or "libiomp" in line[-1]}
    # scikit-learn, which other tests import, brings one of its own.
    assert len([r for r in runtimes if "scikit_learn" not in r]) == 1


def gradient_of_edges(channels: int) -> Region:
    """Writes a row per edge, in the order of the user's list."""
    b = Builder(S)
    shape = (1, channels)
    return b.finish([out(b, b.op("mul", b.input(0, D, shape, "float32"), b.input(1, E, shape, "float32")), "float32")])


def memory_flags(address: int) -> list[str]:
    """What the kernel was told about the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            inside = first <= address < last
        elif name == "VmFlags:" and inside:
            return values
    return []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="needs a Linux that has huge pages"
)
def test_large_outputs_are_advised_to_use_huge_pages() -> None:
    edges = FRESH_BYTES // (64 * 4) + 1000
    where = graph([0] * edges, [0] * edges, 1, 1)
    region = gradient_of_edges(64)
    tensors = inputs(region, where)
    (found,) = launch(region, tensors, where)
    assert torch.equal(found, tensors[0] * tensors[1])
    assert "hg" in memory_flags(found.data_ptr() + found.nbytes // 2)


def test_rows_of_edges_are_prefetched_to_be_written() -> None:
    text = source(gradient_of_edges(64))
    assert "__builtin_prefetch(o0 + next_e * 64 + i, 1)" in text
    assert "__builtin_prefetch(t1 + next_e * 64 + i)" in text


# -- source, compiler, cache --------------------------------------------------------------------------------------


def test_source_is_deterministic_and_says_what_it_computes() -> None:
    text = source(attention(D, "float32", 2, 8))
    assert text == source(attention(D, "float32", 2, 8))
    assert "softmax(x" in text.split("#include")[0]
    assert max(len(line) for line in text.splitlines()) <= 160


def test_unsupported_regions_say_why() -> None:
    b = Builder(D)
    with pytest.raises(UnsupportedRegion, match="int16"):
        source(b.finish([Output(b.reduce("sum", b.input(0, S, (1, 4), "int16")), "float32", (4,))]))
    with pytest.raises(UnsupportedRegion, match="at most"):
        source(neighbour_sum(D, "float32", 64, 4096))
    with pytest.raises(UnsupportedRegion, match="gathered row"):
        source(b.finish([Output(b.input(0, S, (1, 4), "float32"), "float32", (4,))]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_choices_that_all_channels_share(dtype: str) -> None:
    """Choices per head are made by masks. The value that is not chosen may be NaN, and one that is keeps its sign."""
    b = Builder(D)
    x, y, first = b.input(0, S, (5, 16), dtype), b.input(1, E, (1, 16), dtype), b.input(2, P, (5, 1), BOOL)
    chosen = b.op("where", first, x, b.op("mul", y, b.const(-1.0)))
    region = b.finish([out(b, b.reduce("sum", chosen), dtype), out(b, b.on_edges(b.sum_axis(chosen, 0)), dtype)])
    assert "pick(" in source(region)
    for name, where in GRAPHS.items():
        tensors = inputs(region, where)
        tensors[2] = torch.tensor([True, False, True, False, False]).view(1, 5, 1)
        tensors[0][:, ~tensors[2].view(5)] = NAN
        check(region, tensors, where, name)


def filters_by_head(dtype: str, other: str) -> Region:
    """Four filters, of which each head takes one, as `weights[:, order]` in equivariant models; and their gradients."""
    b = Builder(D)
    x, firsts = b.input(0, S, (5, 16), dtype), [b.input(k, P, (5, 1), BOOL) for k in range(1, 4)]
    filters = [
        *(b.input(k, E, (1, 16), dtype) for k in (4, 5)),
        b.input(6, E, (5, 16), dtype),
        b.input(7, S, (1, 16), other),
    ]
    chosen, product, sums = filters[3], b.op("mul", x, x), []
    for first, weight in zip(firsts, filters, strict=False):
        chosen = b.op("where", first, weight, chosen)
    left = product
    for first in reversed(firsts):
        sums.append(b.sum_axis(b.op("where", first, left, b.const(0.0)), 0))
        left = b.op("where", first, b.const(0.0), left)
    sums += [b.sum_axis(left, 0), b.sum_axis(b.op("mul", left, x), 0)]
    per_edge = [out(b, b.on_edges(one), dtype) for one in sums]
    return b.finish([out(b, b.reduce("sum", b.op("mul", x, chosen)), dtype), *per_edge])


@pytest.mark.parametrize(
    "dtype, other", [("float64", "float64"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_rows_and_sums_that_heads_choose(dtype: str, other: str) -> None:
    """A head reads the row that it chooses, and adds to the sum that it chooses: NaN elsewhere does not matter."""
    region = filters_by_head(dtype, other)
    text = source(region)
    assert text.count(" = pick(") == 3 + 3 * (dtype != other)  # a product reads a masked value; rows of two types
    assert text.count("[c] += row") == 4
    for name, where in GRAPHS.items():
        for order in ([0, 1, 1, 2, 3], [3, 3, 3, 3, 3], [2, 0, 2, 0, 2]):
            tensors = inputs(region, where)
            for k in range(3):
                tensors[1 + k] = (torch.tensor(order) == k).view(1, 5, 1)
            for k in set(range(4)) - set(order):
                tensors[4 + k][:] = NAN
            check(region, tensors, where, name)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_long_functions_of_each_other_take_several_loops(dtype: str) -> None:
    """Softplus is a logarithm of an exponential. A loop of its own takes the second."""
    b = Builder(D)
    x = b.input(0, S, (2, 16), dtype)
    large = b.op("gt", x, b.const(1.0))
    softplus = b.op("log1p", b.op("exp", b.op("where", large, b.const(0.0), x)))
    region = b.finish([out(b, b.reduce("sum", b.op("where", large, x, softplus)), dtype)])
    first, last = plan(region).loops[0]
    assert [region.nodes[s.node].op for s in first.steps] == ["gt", "where", "exp"]
    assert [region.nodes[s.node].op for s in last.steps] == ["log1p", "where", "reduce_sum"]
    word = "uint64_t" if region.double else "uint32_t"
    assert f"{word} kept{large}[32];" in source(region)
    check_everywhere(region)


def test_short_sums_read_what_was_stored() -> None:
    """Elements that are stored one by one are not read as a vector: the processor would wait for all earlier stores."""
    for channels, lanes in ((3, 1), (7, 1), (8, 8), (40, 16)):
        assert f"total<{lanes}>" in source(dot_attention(D, "float32", 1, channels))


def test_wrong_tensors_are_named() -> None:
    region, where = neighbour_sum(D, "float32", 1, 64), GRAPHS["mixed"]
    with pytest.raises(ValueError, match="float64"):
        launch(region, [torch.zeros(7, 64, dtype=torch.float64)], where)
    with pytest.raises(ValueError, match="strides"):
        launch(region, [torch.zeros(64, 7).t()], where)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnsupportedRegion, match="no C\\+\\+ compiler found"):
        CppKernel(neighbour_sum(D, "float32", 1, 2))


def test_compile_error_shows_the_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UnsupportedRegion, match="nonsense"):
        compiler.load("nonsense", contract=True)
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_is_used_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    region, where = neighbour_sum(D, "float32", 1, 5), GRAPHS["mixed"]
    CppKernel(region)
    (built,) = (tmp_path / "cache").glob("*.so")
    assert built.with_suffix(".sha256").exists()
    before = built.stat().st_mtime_ns
    CppKernel(region)
    assert built.stat().st_mtime_ns == before
    replacement = tmp_path / "cache" / "damaged"
    replacement.write_bytes(built.read_bytes()[:-1] + b"?")
    replacement.replace(built)
    repaired = CppKernel(region)
    assert not built.read_bytes().endswith(b"?")
    x, result = torch.randn(7, 5), torch.empty(4, 5)
    repaired([x], where[0], [result])
    torch.testing.assert_close(result, run(region, [x], where[0])[0])


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    code = (
        "from gnncompile.codegen.cpp.kernel import CppKernel\n"
        "from gnncompile.ir.region import parse\n"
        f"CppKernel(parse({neighbour_sum(D, 'float32', 1, 6).spec!r}))\n"
    )
    root = str(Path(__file__).parents[2])
    env = {"GNNCOMPILE_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin", "PYTHONPATH": root}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    files = sorted(p.suffix for p in (tmp_path / "cache").iterdir())
    assert files == [".sha256", ".so"]
