"""Launches that depend on sizes alone, as programs that are traced for packages make them: all kinds of regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gnncompile.ir import reference
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import BOOL, Region, Space
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.vjp import vjp
from tests import tiled_regions, triton_regions
from tests.harness import tune
from tests.triton_regions import CASES, DEVICE, GPU, GRAPHS, INTERPRETED, TOLERANCE, Case, random_tensors

pytest.importorskip("triton")
from gnncompile.codegen.triton import hub_lists, seals
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.hub_lists import NO_LARGE, list_exact_hubs, list_hubs, longest_of
from gnncompile.codegen.triton.sized import bounded, run_region

pytestmark = [*GPU, INTERPRETED]
HUB = triton_regions.graph([0] * 300 + [2] * 140 + [1, 3], [i % 5 for i in range(442)], 4, 5, dead=(7, 401))


def launch(entry: Entry, tensors: list[Tensor], numbers: list[int], programs: int, written: list[int]) -> list[Tensor]:
    """Launches on copies of the tensors that are written. Each pointer has the dtype that the entry tells."""
    flag = torch.zeros(int(entry.flag is not None), dtype=torch.bool, device=DEVICE)
    given = [*(t.clone() if at in written else t for at, t in enumerate(tensors)), *([flag] if len(flag) else [])]
    assert [t.dtype for t in given] == list(entry.types) and len(numbers) == entry.numbers
    entry.run(given, numbers, programs)
    if flag.any():
        raise WrongError(entry.flag)
    return [given[at] for at in written]


class WrongError(Exception):
    """The error that a kernel found."""


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new memory with NaN."""
    ordinary = torch.Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = ordinary(self, *args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(1)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def compare(region: Region, tensors: list[Tensor], layout: Layout, degree: int = 3) -> None:
    """Compares with the reference."""
    on_device = [t.to(DEVICE) for t in tensors], [t.to(DEVICE) for t in layout]
    found = run_region(region, degree, *on_device, launch)
    for out, ours, right in zip(region.outputs, found, reference.run(region, tensors, layout), strict=True):
        if out.dtype == BOOL:
            assert torch.equal(ours.cpu(), right.view_as(ours.cpu()))
            continue
        limit = 10 * TOLERANCE.get(out.dtype, 0)
        torch.testing.assert_close(ours.cpu(), right.view(ours.shape), rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("name", ["mixed", "no_edge", "no_row", "one_node", "all_masked", "hub"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_regions_by_row(case: Case, name: str) -> None:
    graph = HUB if name == "hub" else GRAPHS[name]
    region = case(Space.DESTINATION, "float32", 2, 5)
    compare(region, random_tensors(region, graph), graph.layout("cpu"))


@pytest.mark.parametrize("degree", [1, 30, 1000])
def test_the_tile_is_that_of_the_expected_degree(degree: int) -> None:
    region = triton_regions.attention(Space.DESTINATION, "float32", 4, 8)
    compare(region, random_tensors(region, HUB), HUB.layout("cpu"), degree)


@pytest.mark.parametrize("edges", [150, 0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", tiled_regions.REGIONS)
def test_tiled_regions_and_their_gradients(name: str, dtype: str, edges: int) -> None:
    torch.manual_seed(0)
    make = tiled_regions.Maker(dtype)
    region = tiled_regions.REGIONS[name](make)
    index = torch.randint(19, (2, edges)).sort()[0]
    graph = triton_regions.Graph(index[0], index[1] % 9, 20, 9)
    tensors, layout = make.tensors(20, 9, edges, getattr(torch, dtype)), graph.layout("cpu")
    compare(region, tensors, layout)
    kept = with_residuals(region)
    results = reference.run(kept, tensors, layout)
    count = len(region.outputs)
    wanted, given = (True,) * len(tensors), tuple(k < count for k in range(len(kept.outputs)))
    stage = next(s for s in vjp(kept, wanted, given).stages if s.region.walks_edges and s.region.by is region.by)
    if any(operand.kind == "temporary" for operand in stage.operands):
        pytest.skip("the first walk reads results of other stages")
    cotangents = [torch.randn_like(result) if result.is_floating_point() else result for result in results]
    kinds = {"input": tensors, "output": results, "cotangent": cotangents}
    compare(stage.region, [kinds[o.kind][o.index] for o in stage.operands], layout)


@pytest.mark.parametrize(
    "rows, edges, longest, fewest",
    [(5, 40, 4, 3), (3000, 9000, 2, 2), (3000, 9000, 2, NO_LARGE), (1, 600, 128, 2), (2500, 100, 128, 2), (0, 0, 3, 2)],
)
@pytest.mark.parametrize("few", [True, False], ids=["one launch", "four launches"])
def test_hubs_are_listed_with_large_ones_first(
    rows: int, edges: int, longest: int, fewest: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_lists, "FEW", 8192 if few else 0)
    torch.manual_seed(0)
    row = (torch.rand(edges) ** 4 * rows).long()  # many edges of the first rows
    degree = torch.bincount(row, minlength=rows)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.long), degree.cumsum(0)]).int().to(DEVICE)
    most = min(edges // (longest + 1), rows)
    most_pieces = edges // longest * min(most, 1) + most
    hubs, pieces = (found.cpu() for found in list_hubs(rowptr, most, most_pieces, longest, fewest, launch))
    parts = torch.where(degree > longest, -(-degree // longest), 0)
    large, small = (parts >= fewest).nonzero().flatten(), ((parts > 0) & (parts < fewest)).nonzero().flatten()
    expected = torch.cat([large, small])
    ends = parts[expected].cumsum(0)
    table = torch.stack([expected, ends - parts[expected], parts[expected]], 1)
    assert torch.equal(hubs[: len(expected)].long(), table) and not hubs[len(expected) :].any()
    owners = torch.repeat_interleave(torch.arange(len(expected)), parts[expected])
    assert torch.equal(pieces[: len(owners)].long(), owners) and (pieces[len(owners) :] == -1).all()
    assert len(pieces) == most_pieces and len(hubs) == most


@pytest.mark.parametrize("degrees", [[], [0], [700], [3, 0, 130, 128, 2000, 129, 400] * 9, [1] * 3000], ids=len)
def test_lists_of_a_kept_layout_have_no_more_rows_than_there_are_hubs(degrees: list[int]) -> None:
    rowptr = torch.tensor([0, *degrees]).cumsum(0).int().to(DEVICE)
    edges, longest = sum(degrees), longest_of(sum(degrees))
    hubs, pieces = (one.cpu() for one in list_exact_hubs(rowptr, edges, launch))
    parts = torch.tensor([-(-degree // longest) if degree > longest else 0 for degree in degrees], dtype=torch.long)
    order = parts.sort(descending=True, stable=True)[1][: int((parts > 0).sum())]
    ends = parts[order].cumsum(0)
    assert hubs.tolist() == torch.stack([order, ends - parts[order], parts[order]], 1).tolist()
    assert pieces.tolist() == torch.repeat_interleave(torch.arange(len(order)), parts[order]).tolist()


def test_a_layout_with_another_seal_becomes_one_without_edges() -> None:
    """The copies are made as long as the flag is not read."""

    def unread(
        entry: Entry, tensors: list[Tensor], numbers: list[int], programs: int, written: list[int]
    ) -> list[Tensor]:
        flag = torch.zeros(1, dtype=torch.bool, device=DEVICE)
        given = [t.clone() if at in written else t for at, t in enumerate(tensors)]
        entry.run([*given, *([flag] if entry.flag else [])], numbers, programs)
        flags.append(bool(flag))
        return [given[at] for at in written]

    for count in (1, 3000, seals.FEW + 5):  # one launch, and two
        tensors = [torch.arange(1, 1 + n, device=DEVICE, dtype=torch.int32) for n in (count, 3, count)]
        expected = seals.seal(tensors, [4], launch)
        for seal, is_same in ((expected, True), (expected + 1, False)):
            flags: list[bool] = []
            found = seals.same_or_empty(tensors, [4], seal, {0: 0, 2: -1}, unread)
            assert any(flags) is not is_same
            for at, fill, ours in ((0, 0, found[0]), (2, -1, found[1])):
                assert torch.equal(ours, tensors[at] if is_same else torch.full_like(tensors[at], fill))


@pytest.mark.parametrize("heads, channels", [(1, 64), (1, 5), (4, 8)])
@pytest.mark.parametrize("case", [triton_regions.neighbour_sum, triton_regions.several, triton_regions.attention])
def test_many_hubs_and_large_ones(case: Case, heads: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hubs with one piece to many, in the middle of other rows; those with two pieces and more are large."""
    tune(monkeypatch, hub_edges=8)
    triton_regions.take_few_edges(monkeypatch, 1)
    row = torch.repeat_interleave(torch.arange(12), torch.tensor([3, 9, 0, 8, 70, 1, 17, 16, 0, 25, 33, 2]))
    graph = triton_regions.Graph(row, torch.arange(len(row)) % 7, 12, 7)
    region = case(Space.DESTINATION, "float32", heads, channels)
    compare(region, random_tensors(region, graph), graph.layout("cpu"))


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 1024), (10_000,)])
def test_wrong_entries_of_an_index_are_replaced_and_are_an_error(
    shape: tuple[int, ...], dtype: torch.dtype, wraps: bool
) -> None:
    index = torch.randint(-7 if wraps else 0, 7, shape, dtype=dtype, device=DEVICE)
    assert torch.equal(bounded(index, 7, wraps, launch), index)
    for wrong in (7, -8 if wraps else -1, 2**31 - 1) if index.numel() else ():
        changed = index.clone()
        changed.view(-1)[index.numel() * 2 // 3] = wrong
        with pytest.raises(WrongError, match="index"):
            bounded(changed, 7, wraps, launch)
