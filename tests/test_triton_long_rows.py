"""Sums over the rows of dense graphs, which have a tile of their own; and sums of wide rows, split by channels."""

from __future__ import annotations

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.codegen import triton_kernel
from gnncompile.codegen.triton_kernel import TritonKernel
from gnncompile.codegen.triton_plan import schedule
from gnncompile.codegen.triton_tile import LONG_ROWS, Tile, choose_tile, long_tile
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Region, Space
from tests.triton_regions import (
    GRAPHS,
    MIXED,
    Case,
    D,
    Graph,
    S,
    attention,
    check,
    dot_attention,
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


@pytest.fixture
def all_rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "LONG_ROWS", 0)


def with_edges(number: int, rows: int = 3) -> Graph:
    """All edges but one at a row in the middle, the other at the last."""
    return graph([1] * (number - 1) + [rows - 1], [k % 5 for k in range(number)], rows, 5)


def walked_by(kernel: TritonKernel, edges: Layout, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches, and says which of the two kernels walked the rows."""
    found: list[str] = []
    for name, one in (("short", kernel), ("long", kernel._for_long_rows)):
        walk = one._ordinary
        monkeypatch.setattr(one, "_ordinary", lambda *a, name=name, walk=walk: (found.append(name), walk(*a)))
    device, rows = edges.rowptr.device, edges.rowptr.numel() - 1
    kernel([torch.ones(5, 64, device=device)], edges, [torch.empty(rows, 64, device=device)])
    return found


@pytest.mark.parametrize("edges", [1, 3 * LONG_ROWS - 1, 3 * LONG_ROWS, 9 * LONG_ROWS])
def test_which_graphs_have_long_rows(edges: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(neighbour_sum(D, "float32", 1, 64))
    expected = ["long" if edges >= 3 * LONG_ROWS else "short"]
    assert walked_by(kernel, with_edges(edges).layout(device), monkeypatch) == expected


def test_a_tile_that_is_given_is_kept() -> None:
    """Else the benchmark of tiles would time another one on dense graphs."""
    region = neighbour_sum(D, "float32", 1, 64)
    kernel = TritonKernel(region, choose_tile(region, schedule(region)))
    assert kernel._for(with_edges(9 * LONG_ROWS).layout("cpu")) is kernel


@pytest.mark.parametrize("by", [D, S])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels", [16, 32, 64, 100, 128, 150, 260])
def test_dense_graphs(by: Space, dtype: str, channels: int, device: str) -> None:
    """Rows of fewer and of more edges than a step, one of them a hub, others empty; channels are split, or masked."""
    g = graph([0] * 3 + [2] * 300 + [3] * 40 + [4] * 16 + [5] * 17, [k % 7 for k in range(376)], 7, 7)
    for case in (neighbour_sum, weighted_sum, mean):
        region = case(by, dtype, 1, channels)
        assert TritonKernel(region)._for(g.layout(device)).tile == long_tile(region, schedule(region)) is not None
        check(region, g, device)


@pytest.mark.parametrize("name", GRAPHS)
def test_any_graph(name: str, device: str, all_rows_are_long: None) -> None:
    """No row, no edge, hubs, masked edges, two sides of different sizes."""
    for case in (neighbour_sum, mean):
        check(case(D, "float32", 1, 70), GRAPHS[name], device)


def test_the_same_bits_each_time(device: str) -> None:
    region, g = weighted_sum(D, "float32", 1, 150), with_edges(40 * LONG_ROWS)
    tensors = random_tensors(region, g)
    first = launch(region, tensors, g, device)[0]
    for _ in range(3):
        assert torch.equal(launch(region, tensors, g, device)[0], first)


def test_ones_on_a_dense_hub_are_counted(device: str) -> None:
    """Added up in float32, not in the type of the rows."""
    region, g = neighbour_sum(D, "bfloat16", 1, 64), with_edges(1001)
    assert launch(region, [torch.ones(5, 64, dtype=torch.bfloat16)], g, device)[0][1].eq(1000).all()


def test_tiles_for_long_rows() -> None:
    def of(region: Region) -> Tile | None:
        return long_tile(region, schedule(region))

    assert of(neighbour_sum(D, "float32", 1, 128)) == of(weighted_sum(S, "float32", 1, 64)) == Tile(1, 16, 64, 1)
    assert of(neighbour_sum(D, "bfloat16", 1, 256)) == Tile(1, 16, 128, 1)
    assert of(neighbour_sum(D, "float32", 1, 16)) == Tile(1, 32, 16, 1)
    assert of(neighbour_sum(D, "float32", 1, 8)) is None
    others = (attention, dot_attention, max_and_min, several, row_wise, mixed_widths)
    assert [of(case(D, "float32", 1, 64)) for case in others] == [None] * len(others)
    assert of(neighbour_sum(D, "float32", 4, 32)) is None


@pytest.mark.parametrize("case", [neighbour_sum, weighted_sum, mean])
@pytest.mark.parametrize("channels", [256, 200, 512])
def test_sums_of_wide_rows_are_split(case: Case, channels: int, device: str) -> None:
    for dtype in ("float32", "bfloat16"):
        region = case(D, dtype, 1, channels)
        assert choose_tile(region, schedule(region)).channels == 128
        check(region, MIXED, device)


def test_other_wide_rows_are_whole() -> None:
    for case in (dot_attention, max_and_min):
        region = case(D, "float32", 1, 256)
        assert choose_tile(region, schedule(region)).channels == 256
    region = neighbour_sum(D, "float32", 8, 64)
    assert choose_tile(region, schedule(region)).extent(region.grid, 1) == 64
