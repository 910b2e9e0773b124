"""Layouts, and what is known of their hubs."""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.cudagraphs.static_inputs import StaticInputs
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space
from gnncompile.layout import bad_indices, csr
from gnncompile.ops import device_layouts
from gnncompile.runtime import launch
from tests import graphs
from tests.harness import needs_interpreter, tune


def edges(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Row 1 has six edges, row 4 five, the other rows at most one."""
    row = torch.tensor([1, 4, 1, 0, 1, 4, 4, 1, 3, 4, 1, 4, 1], device=device)
    return row, torch.arange(row.numel(), device=device) % 5


@pytest.mark.parametrize("masked", [False, True])
def test_csr(masked: bool, device: str) -> None:
    row, col = edges(device)
    alive = row != 0 if masked else None
    made = csr.csr(row, col, 5, 5, alive)
    expected = graphs.layout(row, col, 5, alive)
    live = int(expected.rowptr[-1])
    assert torch.equal(made[0], expected.rowptr)
    assert torch.equal(made[1][:live], expected.col[:live]) and torch.equal(made[2], expected.edge)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("nodes", [0, 1, 6, 300])
def test_self_loops_are_added_without_a_sort(nodes: int, masked: bool, device: str) -> None:
    """Node 0 is a hub where there are many; the last one has no edge."""
    g = torch.Generator().manual_seed(nodes)
    row, col = torch.randint(max(nodes - 1, 1), (2, 4 * nodes if nodes > 1 else nodes), generator=g).to(device)
    row[: 2 * nodes // 3] = 0
    alive = row != col if masked else None
    loops = torch.arange(nodes, device=device)
    kept = torch.cat([alive, loops >= 0]) if alive is not None else None
    expected = csr.csr(torch.cat([row, loops]), torch.cat([col, loops]), nodes, nodes, kept)
    made = csr.with_loops(*csr.csr(row, col, nodes, nodes, None), row, alive)
    live = int(expected[0][-1])
    assert torch.equal(made[0], expected[0])
    assert all(torch.equal(a[:live], b[:live]) for a, b in zip(made[1:], expected[1:], strict=True))
    assert torch.equal(made[2].sort().values, torch.arange(row.numel() + nodes, device=device))
    assert [t.dtype for t in made] == [torch.int32] * 3
    if device == "cuda" and nodes == 300:
        assert torch.equal(found(made[0], 1500).rows, found(expected[0], 1500).rows)


def test_self_loops_join_a_layout_of_bad_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the error for a bad index comes later. Until then such edges are masked out."""
    row, col = torch.tensor([2, 7, 0, -5, 2]), torch.tensor([1, 0, 9, 1, 2])
    bad = csr.out_of_range(row, col, (3, 3), (False, False))
    layout = csr.sorted_edges(row, col, 3, 3, bad)
    like_a_gpu = dataclasses.replace(csr.device_of("cpu"), host_waits=True)
    monkeypatch.setattr(csr, "device_of", lambda place: like_a_gpu)
    made = csr.with_loops(*layout, row, None)
    monkeypatch.undo()
    loops = torch.arange(3)
    expected = csr.csr(torch.cat([row[~bad], loops]), torch.cat([col[~bad], loops]), 3, 3, None)
    live = int(expected[0][-1])
    assert torch.equal(made[0], expected[0]) and torch.equal(made[1][:live], expected[1])


def test_where_there_is_no_hub_there_is_none_with_self_loops(device: str) -> None:
    row = torch.arange(200, device=device) % 50
    made = csr.csr(row, row, 50, 50, None)
    csr.give_hubs(made[0], row.new_empty(0, 3), row.new_empty(0), csr.NO_HUBS, tuning.TILES.hub_edges)
    hubs = csr.given_hubs(csr.with_loops(*made, row, None)[0])
    assert hubs is not None and hubs.number == csr.NO_HUBS and hubs.rows.numel() == 0


def test_bad_index() -> None:
    row, col = edges()
    with pytest.raises(IndexError, match="edge 1 joins nodes 4 and 1 outside the graph"):
        csr.csr(row, col, 4, 5, None)


@pytest.fixture
def small_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, hub_edges=3)


def found(rowptr: Tensor, num_edges: int = 13) -> csr.Hubs:
    hubs = csr.hubs(rowptr, num_edges)
    assert hubs is not None
    return hubs


HUBS = [[1, 0, 2], [4, 2, 2]]
"""Of `edges`: row 1 is cut into pieces 0 and 1, row 4 into pieces 2 and 3."""


def test_hubs(small_hubs: None, device: str) -> None:
    """13 edges suffice for three rows of four: the list has three rows, two of them hubs, the longest first."""
    rowptr = csr.csr(*edges(device), 5, 5, None)[0]
    hubs = found(rowptr)
    assert hubs.rows.dtype == hubs.pieces.dtype == torch.int32
    assert hubs.rows.shape == (3, 3) and hubs.rows[:2].tolist() == HUBS and int(hubs.rows[2, 2]) == 0
    assert hubs.pieces.tolist() == [0, 0, 1, 1, -1, -1, -1]
    if device == "cuda":
        torch.cuda.synchronize()
    assert hubs.programs() == hubs.number == (2, 4)
    assert found(rowptr) is hubs


def test_a_number_that_has_not_arrived(small_hubs: None) -> None:
    hubs = found(csr.csr(*edges(), 5, 5, None)[0])
    hubs.number = None
    assert hubs.programs() == (3, 7)


@pytest.mark.parametrize("degrees", [[4] * 6, [1, 24], [7, 7, 7, 4], [5, 0, 11, 3, 6], [25]])
def test_every_edge_of_a_hub_is_in_one_piece(degrees: list[int], small_hubs: None) -> None:
    row = torch.repeat_interleave(torch.arange(len(degrees)), torch.tensor(degrees))
    hubs = found(csr.csr(row, row * 0, len(degrees), 1, None)[0], len(row))
    number, pieces = hubs.programs()
    wanted = {at: -(-degree // 3) for at, degree in enumerate(degrees) if degree > 3}
    assert {int(r): int(n) for r, _, n in hubs.rows[:number]} == wanted
    owners = [k for k in range(number) for _ in range(int(hubs.rows[k, 2]))]
    assert hubs.pieces.tolist() == owners + [-1] * (len(hubs.pieces) - pieces) and len(owners) == pieces


def test_rows_may_be_longer_where_there_are_very_many_edges(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A list says itself from which degree on rows are hubs; it stays so with a self loop more for each row."""
    limits = [csr.most_edges(n) for n in (0, 13, 2_332_486, 2**24 - 1, 2**24, 115_000_000, 124_000_000, 2**31 - 1)]
    assert limits == [128, 128, 128, 128, 256, 1024, 1024, 16384]
    tune(monkeypatch, hub_edges=2, hub_share=3)
    rowptr = csr.csr(*edges(device), 5, 5, None)[0]
    hubs = found(rowptr)
    assert hubs.most_edges == 4
    lengths = rowptr.diff()
    wanted = {at: -(-int(n) // 4) for at, n in enumerate(lengths) if n > 4}
    assert {int(r): int(n) for r, _, n in hubs.rows if n} == wanted and wanted
    csr.give_hubs(rowptr, hubs.rows[:0], hubs.pieces[:0], csr.NO_HUBS, 4)
    row = torch.repeat_interleave(torch.arange(5, device=device), lengths.long())
    with_loops = csr.with_loops(rowptr, row.int(), torch.arange(13, device=device).int(), row, None)[0]
    assert found(with_loops, 18).most_edges == 4


def test_a_recording_is_for_lists_of_one_limit() -> None:
    """Its kernels were given the limit as a number."""

    def given(most: int) -> list[Tensor]:
        memory = torch.arange(64, dtype=torch.int32)
        rowptr = memory[:6]
        csr.give_hubs(rowptr, memory[12:15].view(1, 3), memory[15:17], (1, 2), most)
        return [rowptr, memory[6:12]]

    static = StaticInputs(given(4), [0, 1])
    hubs = csr.given_hubs(static.tensors[0])
    assert hubs is not None and hubs.most_edges == 4
    assert static.fits(given(4)) and not static.fits(given(8))


def test_too_few_edges_for_a_hub(device: str) -> None:
    rowptr = csr.csr(*edges(device), 5, 5, None)[0]
    assert csr.hubs(rowptr, 13) is None and csr.given_hubs(rowptr) is None


def test_a_list_does_not_outlive_its_rowptr(small_hubs: None) -> None:
    """Changed in place, copied, pickled, cloned: the list is made again."""
    rowptr = csr.csr(*edges(), 5, 5, None)[0]
    old = found(rowptr)
    rowptr.copy_(torch.tensor([0, 13, 13, 13, 13, 13]))
    assert found(rowptr) is not old and found(rowptr).number == (1, 5)
    written = io.BytesIO()
    torch.save(rowptr, written)
    written.seek(0)
    for other in (copy.deepcopy(rowptr), rowptr.clone(), torch.load(written, weights_only=False)):
        assert found(other) is not found(rowptr) and found(other).number == (1, 5)


def test_inference_mode(small_hubs: None) -> None:
    with torch.inference_mode():
        rowptr = csr.csr(*edges(), 5, 5, None)[0]
        assert found(rowptr).number == (2, 4) and found(rowptr) is found(rowptr)


def weighted(heads: int, channels: int) -> Region:
    b = Builder(Space.DESTINATION)
    w, x = b.input(0, Space.EDGE, (1, 1), "float32"), b.input(1, Space.SOURCE, (heads, channels), "float32")
    return b.finish([Output(b.reduce("sum", b.op("mul", w, x)), "float32", (heads * channels,))])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_lists_are_made_once_for_forward_and_backward(
    small_hubs: None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lists survive the op, autograd and the op of the gradient; gradients by the other end have their own."""
    pytest.importorskip("triton")
    needs_interpreter("triton", device)
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    made: list[Tensor] = []

    def counted(make: csr.Find) -> csr.Find:
        def count(rowptr: Tensor, most: int, num_edges: int) -> csr.Hubs:
            made.append(rowptr)
            return make(rowptr, most, num_edges)

        return count

    monkeypatch.setattr(csr, "_find_hubs", counted(csr._find_hubs))
    monkeypatch.setattr(device_layouts, "find_hubs", counted(device_layouts.find_hubs))
    launch.kernel.cache_clear()
    launch.runner.cache_clear()
    try:
        row, col = edges(device)
        walks = [*torch.ops.gnncompile.csr(row, col, 5, 5, None), *torch.ops.gnncompile.csr(col, row, 5, 5, None)]
        w, x = torch.randn(13, device=device), torch.randn(5, 6, device=device)
        for _ in range(2):
            w, x = w.detach().requires_grad_(), x.detach().requires_grad_()
            (y,) = torch.ops.gnncompile.region([w, x], walks, weighted(1, 6).spec)
            y.square().sum().backward()
        assert len(made) == 2
        expected = torch.zeros(5, 6, device=device).index_add(0, row, w[:, None] * x[col])
        torch.testing.assert_close(y, expected)
        gradients = torch.autograd.grad(expected.square().sum(), [w, x])
        torch.testing.assert_close([w.grad, x.grad], list(gradients))
    finally:
        launch.kernel.cache_clear()
        launch.runner.cache_clear()


@pytest.mark.gpu
def test_hubs_while_a_cuda_graph_is_captured(small_hubs: None) -> None:
    """A list that a graph makes is the graph's: not remembered, and the number of hubs stays unknown."""
    row, col = edges("cuda")
    rowptr = csr.csr(row, col, 5, 5, None)[0]
    bare = rowptr.clone()
    csr.csr(row, col, 5, 5, None)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        bad_indices.check_pending()
        assert found(rowptr).programs() == (3, 7)  # not known before the capture
        hubs = found(bare)
        assert hubs.programs() == (3, 7) and csr.given_hubs(bare) is None
    graph.replay()
    torch.cuda.synchronize()
    assert hubs.rows[:2].tolist() == HUBS and found(rowptr).programs() == (2, 4)
