"""Sums over the rows of dense graphs, which have a tile of their own; and sums of wide rows, split by channels."""

from __future__ import annotations

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile import tuning
from gnncompile.codegen.triton.kernel import TritonKernel
from gnncompile.codegen.triton.plan import schedule
from gnncompile.codegen.triton.tile import Tile, choose_tile, tiles_by_degree
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import run
from gnncompile.ir.region import BITS, Output, Region, Space
from tests.harness import tune
from tests.kernels.test_triton_ties import maximum
from tests.triton_regions import (
    GRAPHS,
    Case,
    D,
    E,
    Graph,
    S,
    attention,
    channel_softmax,
    check,
    dot_attention,
    edge_relu,
    graph,
    launch,
    max_and_min,
    mean,
    mixed_widths,
    neighbour_sum,
    random_tensors,
    row_wise,
    several,
    weighted_sum,
)

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device
SEVERAL, MANY = tuning.TILES.several_edges, tuning.TILES.many_edges
DENSE = graph([0] * 3 + [2] * 300 + [3] * 40 + [4] * 16 + [5] * 17, [k % 7 for k in range(376)], 7, 7)


@pytest.fixture
def all_rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, many_edges=0)


def wide_edges(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """A sum of rows that stand on the edges, as in pooling."""
    b = Builder(by)
    return b.finish([Output(b.reduce("sum", b.input(0, E, (heads, channels), dtype)), dtype, (heads, channels))])


def gathered(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """The rows of edges, without a reduction."""
    b = Builder(by)
    return b.finish([Output(b.on_edges(b.input(0, by, (heads, channels), dtype)), dtype, (heads, channels))])


def tiles_of(region: Region) -> list[tuple[int, Tile]]:
    return tiles_by_degree(region, schedule(region))


def with_edges(number: int, rows: int = 3) -> Graph:
    """All edges but one at a row in the middle, the other at the last."""
    return graph([1] * (number - 1) + [rows - 1], [k % 5 for k in range(number)], rows, 5)


def watch(kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by each launch over rows: from how many edges per row on its kernel is."""
    found: list[int] = []
    for least, one in [(0, kernel), *kernel._denser]:
        walk = one._launch
        monkeypatch.setattr(one, "_launch", lambda *a, least=least, walk=walk: (found.append(least), walk(*a)))
    return found


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("edges", [1, 3 * SEVERAL - 1, 3 * SEVERAL, 3 * MANY - 1, 3 * MANY])
def test_by_how_many_edges_rows_have(edges: int, trusted: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, g = TritonKernel(neighbour_sum(D, "float32", 1, 256)), with_edges(edges)
    found, out = watch(kernel, monkeypatch), torch.empty(3, 256, device=device)
    (kernel.trusted if trusted else kernel)([torch.ones(5, 256, device=device)], g.layout(device), [out])
    assert found == [max(least for least in (0, SEVERAL, MANY) if edges >= 3 * least)]
    assert out[:, 0].tolist() == [0, edges - 1, 1]


def test_a_tile_that_is_given_is_kept() -> None:
    """Else the benchmark of tiles would time another one on dense graphs."""
    region = neighbour_sum(D, "float32", 1, 64)
    kernel = TritonKernel(region, choose_tile(region, schedule(region)))
    assert kernel._for(with_edges(9 * MANY).layout("cpu")) is kernel


def test_all_code_is_listed() -> None:
    kernel = TritonKernel(neighbour_sum(D, "float32", 1, 256))
    assert [kernel.listing.count(f"1 row(s) per program, {edges} edge(s)") for edges in (4, 8, 16)] == [1, 1, 1]


@pytest.mark.parametrize("by", [D, S])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels", [16, 32, 64, 100, 128, 150, 260])
def test_dense_graphs(by: Space, dtype: str, channels: int, device: str) -> None:
    """Rows of fewer and of more edges than a step, one of them a hub, others empty; channels are split, or masked."""
    for case in (neighbour_sum, weighted_sum, mean):
        region = case(by, dtype, 1, channels)
        assert TritonKernel(region)._for(DENSE.layout(device)).tile == tiles_of(region)[-1][1]
        check(region, DENSE, device)


@pytest.mark.parametrize("name", GRAPHS)
def test_any_graph(name: str, device: str, all_rows_are_long: None) -> None:
    """No row, no edge, hubs, masked edges, two sides of different sizes."""
    for case in (neighbour_sum, mean, wide_edges):
        region = case(D, "float32", 1, 70)
        assert TritonKernel(region)._for(GRAPHS[name].layout(device)).tile == tiles_of(region)[-1][1]
        check(region, GRAPHS[name], device)


def test_the_same_bits_each_time(device: str) -> None:
    region, g = weighted_sum(D, "float32", 1, 150), with_edges(40 * MANY)
    tensors = random_tensors(region, g)
    first = launch(region, tensors, g, device)[0]
    for _ in range(3):
        assert torch.equal(launch(region, tensors, g, device)[0], first)


def test_halves_are_added_up_in_float32(device: str) -> None:
    """No bfloat16 holds the sum, nor most of those on the way to it."""
    b = Builder(D)
    total = b.reduce("sum", b.input(0, S, (1, 64), "bfloat16"))
    region, x = b.finish([Output(total, "float32", (64,))]), torch.full((5, 64), 1 + 2**-7, dtype=torch.bfloat16)
    assert launch(region, [x], with_edges(1001), device)[0][1].eq(1007.8125).all()


@pytest.mark.parametrize("channels", [128, 256])
def test_packed_bools_are_read_by_whole_rows(channels: int, device: str) -> None:
    """As by the gradient of a sum of relu(x + e): kernels that split rows have no place for half a word."""
    b = Builder(D)
    x, kept = b.input(0, S, (1, channels), "float32"), b.input(1, E, (1, channels), BITS)
    region = b.finish([Output(b.reduce("sum", b.op("where", kept, x, b.const(0))), "float32", (channels,))])
    assert len(tiles_of(region)) == 1 and TritonKernel(region).listing
    g = with_edges(9 * MANY)
    words = torch.randint(-(2**31), 2**31, (9 * MANY, channels // 32), dtype=torch.int32)
    tensors = [torch.randn(5, channels), words]
    found, expected = launch(region, tensors, g, device)[0], run(region, tensors, g.layout("cpu"))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)  # both are sums of 287 numbers in float32


def test_tiles_for_long_rows() -> None:
    whole, split = (0, Tile(1, 4, 256, 1)), (SEVERAL, Tile(1, 8, 128, 1))
    assert tiles_of(neighbour_sum(D, "float32", 1, 256)) == [whole, split, (MANY, Tile(1, 16, 64, 1))]
    halves = (SEVERAL, Tile(1, 8, 128, 1)), (MANY, Tile(1, 16, 128, 1))
    assert tiles_of(neighbour_sum(D, "bfloat16", 1, 256)) == [whole, *halves]
    several = (0, Tile(4, 2, 64, 1)), (SEVERAL, Tile(2, 1, 64, 1))
    assert tiles_of(weighted_sum(S, "float32", 1, 64)) == [*several, (MANY, Tile(1, 16, 64, 1))]
    assert tiles_of(neighbour_sum(D, "float32", 1, 16))[1:] == [
        (SEVERAL, Tile(4, 2, 16, 1)),
        (MANY, Tile(1, 32, 16, 1)),
    ]


def _two_sums(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """The gradients of keys and values, from numbers per edge and head."""
    b = Builder(by)
    rows = [b.input(k, by.opposite, (heads, channels), dtype) for k in range(2)]
    sums = [b.reduce("sum", b.op("mul", x, b.input(2 + k, E, (heads, 1), "float32"))) for k, x in enumerate(rows)]
    return b.finish([Output(one, dtype, (heads, channels)) for one in sums])


def test_two_sums_of_16_bits_take_two_edges_of_two_rows(device: str) -> None:
    region = _two_sums(S, "bfloat16", 4, 32)
    assert tiles_of(region) == [(0, Tile(2, 2, 32, 1))]
    assert tiles_of(_two_sums(S, "float32", 4, 32)) == [(0, Tile(1, 2, 32, 1))]
    for g in (GRAPHS["mixed"], GRAPHS["no_edge"], GRAPHS["one_loop"], with_edges(9)):
        check(region, g, device)


@pytest.mark.parametrize("case", [attention, dot_attention, max_and_min, several, row_wise, mixed_widths, edge_relu])
def test_other_regions_have_one_tile(case: Case) -> None:
    assert len(tiles_of(case(D, "float32", 1, 256))) == 1


def test_sums_of_few_channels_or_of_several_heads_have_one_tile() -> None:
    assert len(tiles_of(neighbour_sum(D, "float32", 1, 8))) == len(tiles_of(neighbour_sum(D, "float32", 8, 64))) == 1


@pytest.mark.parametrize("case", [neighbour_sum, weighted_sum, mean])
@pytest.mark.parametrize("channels", [256, 200, 512])
def test_sums_of_wide_rows_are_split(case: Case, channels: int, device: str) -> None:
    g = graph([0] * 20 + [2] * 15 + [3] * 140, [k % 7 for k in range(175)], 7, 7)
    for dtype in ("float32", "bfloat16"):
        region = case(D, dtype, 1, channels)
        assert TritonKernel(region)._for(g.layout(device)).tile == tiles_of(region)[1][1]
        check(region, g, device)


def test_a_maximum_of_halves_takes_one_row_of_a_dense_graph(device: str) -> None:
    region = maximum(D, "bfloat16", 1, 128)
    tiles = tiles_of(region)
    assert [(least, tile.rows) for least, tile in tiles] == [(0, 4), (SEVERAL, 1)]
    assert TritonKernel(region)._for(DENSE.layout(device)).tile == tiles[-1][1]
    check(region, DENSE, device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_wait_for_each_other_only_where_edges_are_cheap(dtype: str) -> None:
    regions = [case(D, dtype, 1, 128) for case in (neighbour_sum, weighted_sum)]
    rows = [choose_tile(region, schedule(region)).rows for region in regions]
    assert rows == ([2, 1] if dtype == "bfloat16" else [1, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("channels", [64, 100, 128, 256])
def test_a_softmax_of_halves_shares_the_channels_of_an_edge(dtype: str, channels: int, device: str) -> None:
    """Each lane then has 4 channels of 128, not 8 of every second edge."""
    region = channel_softmax(D, dtype, 1, channels)
    hinted = "tl.max_contiguous" in TritonKernel(region).text
    assert hinted == (dtype != "float32" and channels >= 100)
    for name in GRAPHS:
        check(region, GRAPHS[name], device)


NARROW, WIDE = [(1, 16), (1, 27), (2, 16), (4, 8)], [(1, 64), (1, 100), (1, 128)]
SHORT = [(case, *shape) for case in (neighbour_sum, edge_relu, maximum, gathered) for shape in NARROW + WIDE]
SHORT += [(attention, *shape) for shape in NARROW]  # with a softmax, wide rows keep their tile


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case, heads, channels", SHORT)
def test_short_rows_share_a_program(case: Case, heads: int, channels: int, dtype: str, device: str) -> None:
    region = case(D, dtype, heads, channels)
    short, usual = tiles_of(region)[:2]
    assert (short[0], usual[0]) == (0, SEVERAL) and short[1] != usual[1]
    assert (short[1].rows, short[1].edges) == (8 if channels < 64 else 4, 2 if heads == 1 else 1)
    assert short[1].num_warps == (2 if channels > 64 else 1)
    for g in (*GRAPHS.values(), with_edges(3 * SEVERAL - 1), with_edges(3 * SEVERAL)):
        taken = TritonKernel(region)._for(g.layout(device)).tile
        assert (taken == short[1]) == (g.row.numel() < max(g.num_rows, 1) * SEVERAL)
        check(region, g, device)


@pytest.mark.parametrize(
    "case, dtype, shape",
    [
        *((case, "float32", shape) for case in (neighbour_sum, edge_relu) for shape in ((1, 8), (1, 256), (2, 64))),
        (neighbour_sum, "float64", (1, 64)),
        (several, "bfloat16", (1, 128)),  # of three reductions
        (attention, "float32", (1, 64)),
    ],
)
def test_other_regions_keep_their_tile_for_short_rows(case: Case, dtype: str, shape: tuple[int, int]) -> None:
    assert tiles_of(region := case(D, dtype, *shape))[0] == (0, choose_tile(region, schedule(region)))
