"""Triton kernels against the reference: compiled on a machine with a GPU, elsewhere under Triton's interpreter."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.codegen.triton.kernel import TritonKernel
from gnncompile.codegen.triton.plan import schedule
from gnncompile.codegen.triton.tile import choose_tile
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.vjp import vjp
from tests.harness import tune
from tests.triton_regions import (
    CASES,
    GRAPHS,
    INF,
    MIXED,
    NAN,
    Case,
    D,
    E,
    S,
    attention,
    attention_gradient,
    channel_softmax,
    check,
    degree_and_constants,
    dot_attention,
    edge_attention,
    edge_relu,
    edge_values,
    gated,
    graph,
    max_and_min,
    mean,
    neighbour_sum,
    random_tensors,
    row_wise,
    rows_tile,
    several,
    source,
    total,
    vector_dots,
    vectors,
    weighted_sum,
    width,
)

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device


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


@pytest.mark.parametrize("channels", [32, 64, 70])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lanes_share_the_channels_of_vectors_without_dots(dtype: str, channels: int, device: str) -> None:
    """Each lane then has all components of its channels. Attention and dot products keep Triton's own lanes."""
    assert "tl.max_contiguous" in source(vectors(D, dtype, 3, channels))
    for case in (vector_dots, edge_relu, attention):
        assert "tl.max_contiguous" not in source(case(D, dtype, 3, channels))
    for name in ("mixed", "hub", "no_edge"):
        check(vectors(S, dtype, 3, channels), GRAPHS[name], device)
        check(vector_dots(S, dtype, 3, channels), GRAPHS[name], device)


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


@pytest.mark.parametrize("case", [dot_attention, attention_gradient])
def test_heads_over_a_second_grid_axis(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five heads of 100 channels, two of them in a program: the last one has one. Narrow results beside wide ones."""
    region = case(D, "float32", 5, 100)
    tile = choose_tile(region, schedule(region))
    assert (tile.heads, tile.across(region.grid), tile.num_warps) == (2, 3, 1)
    for name, g in GRAPHS.items():
        if name != "hub":
            check(region, g, device)
    tune(monkeypatch, hub_edges=2)
    check(region, MIXED, device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_with_wide_rows_of_edges_and_its_gradient(
    dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five heads of 64 channels, four of them in a program. Rows of edges and of the walk leave the L2 cache first.

    Indices are read one edge ahead: in rows without edges, on the last edge of a row, and in pieces of hubs.
    """
    region = with_residuals(edge_attention(D, dtype, 5, 64))
    stages = [stage.region for stage in vjp(region, (True,) * 4, (True, False, False)).stages]
    assert [one.by for one in stages if one.walks_edges] == [D, S]
    for one in (region, *stages[:1]):
        text = source(one)
        assert "next_col = tl.load(col + position + 1, mask=position + 1 < end, other=0)" in text
        assert 'eviction_policy="evict_first"' in text
        gathered = [line for line in text.splitlines() if "other * " in line]
        assert gathered and not any("evict" in line for line in gathered)
    for one in (region, *stages):
        for name in ("mixed", "no_edge", "one_node", "one_loop"):
            tensors = [0.1 + 0.2 * t.abs() for t in random_tensors(one, GRAPHS[name])]
            check(one, GRAPHS[name], device, tensors)
    tune(monkeypatch, hub_edges=2)
    for one in (region, *stages):
        check(one, MIXED, device, [0.1 + 0.2 * t.abs() for t in random_tensors(one, MIXED)])


def test_rows_of_several_heads_are_read_whole(device: str) -> None:
    """Where all of them are there and no step is asked for ahead; by programs of one row and of several."""
    region = attention(D, "float32", 4, 32)
    text = source(region)
    assert "tl.reshape(tl.load(t2 + flat_other * 128 + element128, mask=flat_alive, other=0), [8, 4, 32])" in text
    staged = replace(choose_tile(region, schedule(region)), stages=2)
    assert not re.search(r"\belement\d", source(region, staged) + source(attention(D, "float32", 3, 32)))
    assert "flat_edge_at" in source(weighted_edges(D, "float32", 4, 8))
    for case in (attention, attention_gradient, weighted_edges):
        for by, g in itertools.product((D, S), GRAPHS.values()):
            region = case(by, "float32", 2, 4)
            assert "element8" in source(region)
            check(region, g, device)
            check(region, g, device, tile=rows_tile(region, rows=1))
            check(region, g, device, tile=rows_tile(region, rows=2))


def weighted_edges(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Wide values per edge, and narrow ones."""
    b = Builder(by)
    x, w = b.input(0, E, (heads, channels), dtype), b.input(1, E, (heads, 1), dtype)
    return b.finish([Output(b.reduce("sum", b.op("mul", x, w)), dtype, (heads, channels))])


def test_rows_of_two_widths_over_a_second_grid_axis(device: str) -> None:
    """Of the narrower rows, which take two blocks of the five, the other three blocks touch nothing."""
    b = Builder(D)
    sums = [b.reduce("sum", b.input(k, S, (1, size), "float32")) for k, size in enumerate((5000, 2048))]
    region = b.finish([Output(v, "float32", (size,)) for v, size in zip(sums, (5000, 2048), strict=True)])
    assert choose_tile(region, schedule(region)).channels == 1024
    check(region, MIXED, device)


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


@pytest.mark.parametrize("channels", [2, 70])
@pytest.mark.parametrize("several_rows", [False, True])
@pytest.mark.parametrize("edges", [1, 2, 4])
def test_nan_and_infinity_in_softmax(edges: int, several_rows: bool, channels: int, device: str) -> None:
    """Rows of all -inf, with one -inf, with +inf, with NaN, with large logits; as torch, NaN where exp(inf - inf). The
    edges of wide rows share one maximum: -inf may come before anything else.
    """
    region = attention(D, "float32", 1, channels)
    a = torch.tensor([[-INF], [1.0], [INF], [NAN], [3e38], [-3e38], [200.0]])
    row = [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 6, 6]
    col = [0, 0, 0, 1, 6, 1, 2, 3, 1, 5, 4, 1, 6, 0]
    g = graph(row, col, 7, 7)
    tensors = [torch.zeros(7, 1), a, torch.randn(7, channels), torch.randn(1, channels)]
    tile = rows_tile(region, rows=2 if several_rows else 1, edges=edges)
    check(region, g, device, tensors, tile)


@pytest.mark.parametrize("several_rows", [False, True])
def test_infinity_behind_another_step(several_rows: bool, device: str) -> None:
    """What is weighed with 0 in the end may be infinite: 0 times infinity is no number, wherever it stands."""
    region = attention(D, "float32", 1, 64)
    x = torch.ones(3, 64)
    x[0, 0], x[1, 1] = INF, -INF
    g = graph([0, 0, 0, 1, 1], [0, 1, 2, 2, 2], 2, 3)
    tensors = [torch.zeros(2, 1), torch.tensor([[-2e3], [0.0], [2e3]]), x, torch.zeros(1, 64)]
    check(region, g, device, tensors, rows_tile(region, rows=2 if several_rows else 1, edges=1))


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
    assert torch.equal(results[1], results[0]) and torch.equal(results[3], results[0])
    torch.testing.assert_close(results[2], results[0])  # Triton may spread rows that are read singly in another way
