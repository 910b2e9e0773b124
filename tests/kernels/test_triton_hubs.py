"""Rows with very many edges: cut into pieces, with the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.codegen.triton.hub_tile import hub_tile, joining_tile, large_programs, large_tile
from gnncompile.codegen.triton.kernel import TritonKernel, Variant
from gnncompile.codegen.triton.plan import Part, schedule
from gnncompile.codegen.triton.tile import Tile, choose_tile
from gnncompile.codegen.triton.writer import writer_of
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import Output, Region, Space
from gnncompile.layout import csr
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
    Graph,
    S,
    attention,
    attention_gradient,
    channel_softmax,
    check,
    dot_attention,
    edge_values,
    graph,
    launch,
    max_and_min,
    mean,
    neighbour_sum,
    poisoned,
    random_tensors,
    row_wise,
    rows_tile,
    several,
    take_few_edges,
    weighted_sum,
)

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device


@pytest.fixture
def small_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `MIXED`, rows 0 and 3 (4 and 3 edges) are hubs, and row 2 is in the list of hubs without being one."""
    tune(monkeypatch, hub_edges=2)


def forget(edges: Layout) -> None:
    """Makes the host not know how many hubs there are, as before the number has arrived from a GPU."""
    found = csr.hubs(edges.rowptr, edges.edge.size(0))
    assert found is not None
    found.number = found._arriving = None


def same_where_unknown(region: Region, g: Graph, device: str) -> None:
    """The same bits come of as many launches as there can be hubs and pieces."""
    tensors, edges = random_tensors(region, g), g.layout(device)
    known = launch(region, tensors, g, device, edges=edges)
    forget(edges)
    for a, b in zip(known, launch(region, tensors, g, device, edges=edges), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("several_steps", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_hubs(
    case: Case, several_steps: bool, rows: int, device: str, small_hubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hubs of two pieces, each of which takes one step; or two, as putting them together does. A program for other rows
    has a hub among its rows, or none.
    """
    region = case(D, "float32", 2, 7)
    tile = replace(choose_tile(region, schedule(region)), rows=rows)
    if several_steps:
        take_few_edges(monkeypatch, 1)
        tile = replace(tile, edges=1)
    check(region, MIXED, device, tile=tile)


@pytest.mark.parametrize("case", [neighbour_sum, mean, max_and_min, attention, edge_values, channel_softmax])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("most", [1, 3, 4, 9])
def test_the_longest_row_that_is_no_hub(
    case: Case, rows: int, most: int, device: str, small_hubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a list of hubs was made with is what a kernel goes by: all rows are walked, each edge of them once."""
    monkeypatch.setattr(csr, "most_edges", lambda num_edges: most)
    region = case(D, "float32", 2, 5)
    check(region, MIXED, device, tile=replace(choose_tile(region, schedule(region)), rows=rows))


@pytest.mark.parametrize("case", [max_and_min, attention, attention_gradient, edge_values])
def test_wide_hubs(case: Case, device: str, small_hubs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide rows, some of them split by channels; feature axes that are no powers of two."""
    tune(monkeypatch, split_width=32)
    check(case(D, "float32", 1, 70), MIXED, device)
    check(case(S, "float32", 4, 16), MIXED, device)


@pytest.mark.parametrize("case", [dot_attention, attention_gradient])
def test_hubs_whose_heads_are_shared(case: Case, device: str, small_hubs: None) -> None:
    """Programs that each have some heads of a row put together the pieces of these alone."""
    region = case(D, "float32", 5, 100)
    assert choose_tile(region, schedule(region)).heads == 2
    check(region, MIXED, device)


@pytest.mark.parametrize("case", [neighbour_sum, max_and_min, attention, attention_gradient, edge_values])
def test_unknown_hubs(case: Case, device: str, small_hubs: None) -> None:
    """Until their number is known as many hubs and pieces are launched for as there can be: the same bits."""
    same_where_unknown(case(D, "float32", 1, 5), MIXED, device)


@pytest.mark.parametrize(
    "values", [[-INF, -INF, -INF, 1.0, 2.0], [-INF] * 5, [INF, 1.0, 1.0, 1.0, 2.0], [NAN, 1.0, 1.0, 1.0, 1.0]]
)
@pytest.mark.parametrize("channels", [3, 64])
def test_softmax_over_pieces_that_are_not_finite(
    channels: int, values: list[float], device: str, small_hubs: None
) -> None:
    """Edges 0 and 1 are the first piece: a piece of -inf alone leaves the others as they are."""
    b = Builder(D)
    alpha = b.softmax(b.input(0, E, (1, 1), "float32"))
    weighted_sums = b.op("mul", alpha, b.input(1, S, (1, channels), "float32"))
    region = b.finish([Output(b.reduce("sum", weighted_sums), "float32", (channels,))])
    g = graph([0] * 5, list(range(5)), 1, 5)
    tensors = [torch.tensor(values), torch.randn(5, channels)]
    expected = torch.softmax(tensors[0], 0) @ tensors[1]
    (found,) = launch(region, tensors, g, device)
    torch.testing.assert_close(found[0].cpu(), expected, equal_nan=True)


def launches_of(kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Records how many programs each launch gets, from now on."""
    counted: list[tuple[str, int]] = []

    def recorded(what: str, inner: Any) -> Any:
        def record(given: Any, counts: Any, device: int, programs: int) -> None:
            counted.append((what, programs))
            inner(given, counts, device, programs)

        return record

    monkeypatch.setattr(kernel, "ordinary", recorded("rows", kernel.ordinary))
    for what in ("pieces", "hubs"):
        monkeypatch.setattr(kernel, what, [recorded(what, v) for v in getattr(kernel, what)])
    return counted


@pytest.mark.parametrize(
    "name, limit, rows, pieces, hubs",
    [
        ("hub", 300, 1, 0, 0),
        ("hub", 299, 1, 2, 1),
        ("hub", 100, 1, 3, 1),
        ("mixed", 2, 2, 4, 2),
        ("mixed", 4, 2, 0, 0),
        ("all_masked", 1, 1, 0, 0),
        ("no_row", 1, 0, 0, 0),
    ],
)
@pytest.mark.parametrize("case", [neighbour_sum, attention_gradient])
def test_hubs_get_launches_if_there_are_any(
    case: Case,
    name: str,
    limit: int,
    rows: int,
    pieces: int,
    hubs: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one pass the pieces are walked in the launch of the rows, in two they have two of their own."""
    tune(monkeypatch, hub_edges=limit)
    region, g = case(D, "float32", 1, 3), GRAPHS[name]

    def expected(pieces: int, hubs: int) -> list[tuple[str, int]]:
        walked = [("rows", rows + pieces)] if case is neighbour_sum else [("rows", rows), *2 * [("pieces", pieces)]]
        return [one for one in (*walked, ("hubs", hubs)) if one[1]]

    kernel = TritonKernel(region, rows_tile(region))
    counted = launches_of(kernel, monkeypatch)
    tensors, edges = [t.to(device) for t in random_tensors(region, g)], g.layout(device)
    if name != "no_row" and device == "cuda":  # the number is there as soon as the device is done
        csr.hubs(edges.rowptr, edges.edge.size(0))
        torch.cuda.synchronize()
    kernel(tensors, edges, poisoned(region, g, device))
    assert counted == expected(pieces, hubs)
    if name == "mixed" and limit == 2:
        counted.clear()
        forget(edges)
        kernel(tensors, edges, poisoned(region, g, device))
        assert counted == expected(8, 3)


def test_launches_of_a_region() -> None:
    """One over the pieces for each pass, and one for the rows, unless all outputs live on edges. In one pass the pieces
    are walked beside the other rows.
    """

    def walked(region: Region) -> list[str]:
        kernel = TritonKernel(region)
        return [text.partition("walks ")[2].partition(".")[0] for text in (kernel.text, *kernel.hub_texts)]

    two_passes = ["ordinary", "pieces, pass 1", "pieces, pass 2", "hubs"]
    assert (
        walked(attention_gradient(D, "float32", 1, 8)) == walked(attention_gradient(D, "float32", 1, 128)) == two_passes
    )
    for channels in (8, 128):
        assert walked(attention(D, "float32", 1, channels)) == ["both", "hubs"]
        assert walked(edge_values(D, "float32", 1, channels)) == ["both"]
    assert walked(row_wise(D, "float32", 1, 16)) == ["all"]


def edge_and_row(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Values per edge, and others per row for which nothing is summed."""
    b = Builder(by)
    x, y = b.input(0, by.opposite, (heads, channels), dtype), b.input(1, by, (heads, channels), dtype)
    found = [b.op("mul", x, y), b.op("neg", y)]
    return b.finish([Output(v, dtype, (heads, channels)) for v in found])


@pytest.mark.parametrize("case", [neighbour_sum, attention, dot_attention, edge_values, edge_and_row])
@pytest.mark.parametrize("channels", [128, 70])
def test_pieces_beside_other_rows(case: Case, channels: int, device: str, small_hubs: None) -> None:
    """One launch walks both; as many bits are the same where the host does not know how many pieces there are."""
    region = case(D, "float32", 2, channels)
    assert TritonKernel(region).text.partition("walks ")[2].startswith("both.")
    check(region, MIXED, device)
    same_where_unknown(region, MIXED, device)


def degrees(*edges: int) -> Graph:
    """A graph whose rows have so many edges, in an order of its own."""
    row = torch.repeat_interleave(torch.arange(len(edges)), torch.tensor(edges))
    order = torch.randperm(row.numel(), generator=torch.Generator().manual_seed(0))
    return graph(row[order].tolist(), [k % 7 for k in range(row.numel())], len(edges), 7)


SEVERAL = {
    "hubs": degrees(3, 129, 0, 128, 300, 1, 130, 2, 5),  # 129: a piece of one edge
    "hubs_alone": degrees(260, 129),
    "one_row": degrees(300),
    "no_hub": degrees(128, 0, 100, 7, 60),
    "few": degrees(1, 2, 0),
    "no_edge": GRAPHS["no_edge"],
    "no_row": GRAPHS["no_row"],
}


def in_launches_of_their_own(region: Region, tile: Tile) -> TritonKernel:
    """Rows and pieces are walked one behind the other."""
    kernel, plan = TritonKernel(region, tile), schedule(region)
    assert kernel.hub_tile is not None and kernel.together
    kernel.together, kernel.ordinary = False, Variant(writer_of(region, plan, tile, Part("ordinary")))
    kernel.pieces = [Variant(writer_of(region, plan, kernel.hub_tile, Part("pieces")))]
    return kernel


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize(
    "rows, case", [(2, neighbour_sum), (4, max_and_min), (8, mean), (4, attention), (2, edge_values)]
)
def test_pieces_beside_several_rows(case: Case, rows: int, name: str, device: str) -> None:
    """One launch walks both, and finds the same bits as launches of their own; also where it is for more pieces than
    there are.
    """
    region, g = case(D, "float32", 1, 3), SEVERAL[name]
    tile = rows_tile(region, rows=rows)
    assert TritonKernel(region, tile).text.count("def walk_") == 2
    check(region, g, device, tile=tile)
    tensors, edges = random_tensors(region, g), g.layout(device)
    apart = poisoned(region, g, device)
    in_launches_of_their_own(region, tile)([t.to(device) for t in tensors], edges, apart)
    found = launch(region, tensors, g, device, tile, edges)
    if csr.hubs(edges.rowptr, edges.edge.size(0)) is not None:
        forget(edges)
    for a, b, c in zip(apart, found, launch(region, tensors, g, device, tile, edges), strict=True):
        assert torch.equal(a.cpu(), b) and torch.equal(b, c)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("case", [neighbour_sum, weighted_sum, max_and_min, mean, attention])
def test_types_of_pieces_beside_several_rows(case: Case, dtype: str, device: str, small_hubs: None) -> None:
    for rows, channels in ((2, 64), (8, 5)):
        region = case(D, dtype, 1, channels)
        check(region, MIXED, device, tile=rows_tile(region, rows=rows))


@pytest.mark.parametrize(
    "case, heads, channels",
    [
        (neighbour_sum, 1, 128),
        (max_and_min, 1, 100),
        (attention, 1, 12),
        (attention_gradient, 1, 3),
        (channel_softmax, 1, 10),
        (attention, 3, 12),
    ],
)
def test_large_hubs(
    case: Case, heads: int, channels: int, device: str, small_hubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hubs of more pieces than others read at once, in one step or several, by programs of fewer channels, the last of
    which may have none; beside hubs of as many pieces as others, and in launches for more of either than there are.
    """
    take_few_edges(monkeypatch, 2)
    tune(monkeypatch, large_pieces=4)
    region, g = case(D, "float32", heads, channels), degrees(3, 20, 0, 4, 2, 7, 5, 16, 1)
    check(region, g, device)
    same_where_unknown(region, g, device)


def test_tiles_for_large_hubs() -> None:
    """No more elements than other hubs have, and none where channels are summed. Narrow rows have more warps."""

    def of(region: Region) -> tuple[Tile, Tile | None, int]:
        plan = schedule(region)
        pieces = hub_tile(region, plan, choose_tile(region, plan))
        assert pieces is not None
        tile = joining_tile(region, pieces)
        return tile, large_tile(region, tile), large_programs(region, tile)

    assert of(neighbour_sum(D, "float32", 1, 128)) == (Tile(1, 64, 32, 2), Tile(1, 512, 4, 2), 8)
    assert of(neighbour_sum(D, "float32", 1, 40)) == (Tile(1, 128, 32, 8), Tile(1, 1024, 4, 8), 5)
    assert of(neighbour_sum(D, "float32", 1, 100)) == (Tile(1, 64, 32, 2), Tile(1, 512, 4, 2), 7)
    assert of(neighbour_sum(D, "float32", 1, 4)) == (Tile(1, 128, 4, 8), Tile(1, 512, 4, 8), 1)
    assert of(attention(D, "float32", 4, 32)) == (Tile(1, 64, 32, 8), Tile(1, 512, 4, 8), 8)
    assert of(several(D, "float32", 1, 64)) == (Tile(1, 128, 64, 8), None, 0)


@pytest.mark.parametrize("pieces", [1, 5, 40])
def test_many_pieces_are_put_together(
    pieces: int, device: str, small_hubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several steps, by programs that have some channels of the hub each."""
    take_few_edges(monkeypatch, 8)
    g = graph([0] * (2 * pieces), [k % 3 for k in range(2 * pieces)], 2, 3)
    for case in (neighbour_sum, max_and_min, channel_softmax):
        check(case(D, "float32", 1, 128), g, device)


def _heavy() -> Region:
    """So much arithmetic that reading a row takes less time."""
    b = Builder(D)
    x = b.input(0, S, (1, 128), "float32")
    for op in ("sigmoid", "log1p", "log1p"):
        x = b.op(op, x)
    return b.finish([Output(b.reduce("sum", x), "float32", (128,))])


def _two_rows(dtype: str, heads: int) -> Region:
    """Two rows are gathered per edge, as by the gradient of attention by source."""
    b = Builder(D)
    rows = [b.input(k, S, (heads, 128 // heads), dtype) for k in range(2)]
    weight = b.input(2, E, (heads, 1), "float32")
    sums = [b.reduce("sum", b.op("mul", b.op("sigmoid", row), weight)) for row in rows]
    return b.finish([Output(v, dtype, (heads, 128 // heads)) for v in sums])


def test_tiles_for_ordinary_rows() -> None:
    def of(region: Region) -> Tile:
        return choose_tile(region, schedule(region))

    assert of(neighbour_sum(D, "float32", 1, 128)) == Tile(1, 8, 128, 1)
    assert of(attention(D, "float32", 4, 32)) == Tile(1, 8, 32, 1)
    assert of(attention(D, "float32", 1, 128)) == Tile(1, 4, 128, 1)
    assert of(dot_attention(D, "float32", 4, 32)) == Tile(1, 4, 32, 1)
    assert of(dot_attention(D, "float32", 1, 128)) == Tile(1, 4, 128, 1, stages=2)
    assert of(_two_rows("float32", 4)) == Tile(1, 2, 32, 1)
    assert of(_two_rows("float16", 4)) == Tile(1, 4, 32, 1, stages=2)
    assert of(_two_rows("float32", 1)) == Tile(1, 4, 128, 1, stages=2)
    assert of(_heavy()) == Tile(1, 1, 128, 1)


def test_tiles_for_hubs() -> None:
    def of(region: Region) -> Tile | None:
        plan = schedule(region)
        return hub_tile(region, plan, choose_tile(region, plan))

    assert of(neighbour_sum(D, "float32", 1, 128)) == Tile(1, 32, 128, 1)
    assert of(neighbour_sum(D, "float32", 1, 4)) == Tile(1, 128, 4, 1)
    assert of(dot_attention(D, "float32", 1, 128)) == Tile(1, 8, 128, 1, stages=2)  # two wide values per edge
    assert of(_heavy()) == Tile(1, 1, 128, 1)
    assert of(row_wise(D, "float32", 1, 16)) is None


@pytest.mark.parametrize(
    "case, dtype, channels, rows_and_edges",
    [
        (neighbour_sum, "float32", 4, (8, 4)),
        (neighbour_sum, "float32", 32, (4, 1)),
        (neighbour_sum, "float32", 64, (2, 1)),
        (neighbour_sum, "float32", 128, (1, 8)),
        (neighbour_sum, "bfloat16", 128, (2, 1)),
        (neighbour_sum, "bfloat16", 256, (1, 4)),
        (attention, "float32", 16, (2, 4)),
        (dot_attention, "float32", 64, (2, 2)),
    ],
)
def test_narrow_rows_share_a_program(case: Case, dtype: str, channels: int, rows_and_edges: tuple[int, int]) -> None:
    region = case(D, dtype, 1, channels)
    tile = choose_tile(region, schedule(region))
    assert (tile.rows, tile.edges) == rows_and_edges
