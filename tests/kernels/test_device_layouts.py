"""Layouts and lists of hubs that kernels make on a GPU, against those of torch's operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gnncompile.codegen.triton import hub_lists, radix_sort, sorting
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.exc import ArgumentError
from gnncompile.layout import bad_indices, csr
from gnncompile.ops import device_layouts
from tests.harness import needs_interpreter, tune
from tests.kernels.test_triton_sorting import GRAPHS, random_edges

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def by_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_interpreter("triton", device)
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")


def in_process(row: Tensor, column: Tensor, rows: int, columns: int, alive: Tensor | None, *wraps: bool):
    found = device_layouts.csr(row, column, rows, columns, alive, *wraps)
    bad_indices.check_pending(wait=True)
    return found


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_layouts_are_those_of_torch(graph, few, device, monkeypatch):
    monkeypatch.setattr(sorting, "FEW", 10**6 if few else -1)
    rows, columns, edges = GRAPHS[graph]
    alive = (torch.arange(edges) % 3 > 0).to(device)
    for wraps in ((False, False), (True, True)):
        for dtypes in ((torch.int64, torch.int64), (torch.int64, torch.int32), (torch.int16, torch.int64)):
            index, other = (one.to(device) for one in random_edges(rows, columns, edges, wraps, dtypes))
            for keep in (None, alive):
                expected = csr.csr(index.long(), other.long(), rows, columns, keep, *wraps)
                found = in_process(index, other, rows, columns, keep, *wraps)
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours, theirs)
    if not rows:
        return
    # neither contiguous nor at an address that is a multiple of 16
    both = torch.stack(random_edges(rows, columns, edges + 1, (False, False), (torch.int64,) * 2), 1).to(device)[1:]
    found, expected = (make(*both.t(), rows, columns, None) for make in (in_process, csr.csr))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dropped", ["none", "before the layout", "by the loops", "both", "all"])
@pytest.mark.parametrize("graph", ["no edge", "nothing", "one node", "blocks", "more rows than edges"])
def test_self_loops_are_those_of_torch(graph, dropped, device):
    rows, _, edges = GRAPHS[graph]
    index, other = (one.to(device) for one in random_edges(rows, rows, edges, (False, False), (torch.int64,) * 2))
    before, after = ((torch.arange(edges) % step > 0).to(device) for step in (3, 5))
    layout = csr.csr(index, other, rows, rows, before if dropped in ("before the layout", "both") else None)
    alive = after if dropped in ("by the loops", "both") else None
    alive = torch.zeros_like(after) if dropped == "all" else alive
    found, expected = (make(*layout, index, alive) for make in (device_layouts.with_loops, csr.with_loops))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_inverse_degrees_are_those_of_torch(dtype, device):
    """To the last bit: a division in Triton is not rounded as torch's is, unless it is asked to be."""
    for degrees in ([], [0], torch.arange(3000).tolist()):
        rowptr = torch.nn.functional.pad(torch.tensor(degrees, dtype=torch.int64).cumsum(0), (1, 0)).int().to(device)
        found, expected = (make(rowptr, dtype) for make in (device_layouts.inverse_degree, csr.inverse_degree))
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def degrees_of(name: str) -> list[int]:
    made = torch.Generator().manual_seed(1)
    return {
        "no hub": [1, 2, 3, 2],
        "one row": [25],
        "equal": [7, 7, 7, 4, 0, 4],
        "random": torch.randint(0, 30, (70,), generator=made).tolist(),
        "several blocks": [0] * 1500 + [40, 9] + [0] * 1000 + [3, 12, 200],
    }[name]


@pytest.mark.parametrize("name", ["no hub", "one row", "equal", "random", "several blocks"])
def test_hubs_are_those_of_torch(name, device, monkeypatch):
    """Hubs with as many pieces may come in another order, and all else follows from the order."""
    tune(monkeypatch, hub_edges=3, hub_share=1000)
    degrees = torch.tensor(degrees_of(name))
    rowptr = torch.nn.functional.pad(degrees.cumsum(0), (1, 0)).int().to(device)
    edges = int(degrees.sum())
    most = csr.most_hubs(len(degrees), edges)
    ours, theirs = (find(rowptr, most, edges) for find in (device_layouts.find_hubs, csr._find_hubs))
    if device == "cuda":
        torch.cuda.synchronize()
    assert ours.programs() == theirs.programs() and ours.most_edges == theirs.most_edges
    number, pieces = ours.programs()
    assert (ours.rows.shape, ours.pieces.shape) == (theirs.rows.shape, theirs.pieces.shape)
    counts = ours.rows[:, 2].tolist()
    assert counts == theirs.rows[:, 2].tolist() and not any(counts[number:])
    table = {int(row): int(count) for row, _, count in ours.rows[:number]}
    assert table == {row: -(-degree // 3) for row, degree in enumerate(degrees.tolist()) if degree > 3}
    assert ours.rows[:number, 1].tolist() == [sum(counts[:at]) for at in range(number)]
    assert ours.pieces.tolist() == theirs.pieces.tolist() and pieces == sum(counts)


def test_new_layouts_have_hubs_where_they_are_found_early(device, monkeypatch):
    tune(monkeypatch, hub_edges=3, hub_share=1000)
    row = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 1, 5])).to(device)
    layout = in_process(row, row, 3, 3, None)
    looped = device_layouts.with_loops(*layout, row, None)
    for one in (layout, looped):
        hubs = csr.given_hubs(one[0])
        assert (hubs is not None) == (device == "cuda")
        if hubs is not None:
            torch.cuda.synchronize()
            assert hubs.programs() == (2, 5 if one is layout else 6)


@pytest.mark.parametrize("wrong", [3, -4, -1])
def test_an_index_out_of_range_is_an_error(wrong, device):
    index = torch.tensor([0, wrong, 2], device=device)
    with pytest.raises(IndexError, match="outside the graph"):
        in_process(index, index.clamp(0, 2), 3, 3, None)
    if wrong == -1:
        in_process(index, index, 3, 3, None, True, True)


def test_ends_of_different_lengths_are_an_error(device):
    index = torch.tensor([0, 1, 2], device=device)
    with pytest.raises(ArgumentError, match="as many of each"):
        device_layouts.csr(index, index[:2], 3, 3, None)


@pytest.mark.parametrize("way, rows", [("few", 200), ("radix", 200), ("radix", 300), ("torch", 300)])
def test_the_kernels_of_a_structure_program_are_begun_ahead(way, rows, device, monkeypatch):
    """Each launch of the example finds its kernel begun, with its dtypes and constants."""
    monkeypatch.setattr(sorting, "FEW", 10**6 if way == "few" else -1)
    monkeypatch.setattr(radix_sort, "MOST_EDGES", 10**6 if way == "radix" else -1)

    def layouts(index, other):
        alive = index != other
        layout = torch.ops.gnncompile.csr(index, other, rows, rows, alive)
        looped = torch.ops.gnncompile.csr_with_loops(*layout, index, alive)
        return looped, torch.ops.gnncompile.inverse_degree(looped[0], "float64")

    begun, launched = set(), set()

    def begin(kernel, types, numbers, constants):
        begun.add((kernel._kernel.__name__, tuple(types), numbers, constants))

    ordinary = Kernel.__call__

    def launch(kernel, programs, tensors, numbers, constants):
        launched.add((kernel._kernel.__name__, tuple(one.dtype for one in tensors), len(numbers), constants))
        ordinary(kernel, programs, tensors, numbers, constants)

    index = torch.randint(rows, (300,), device=device)
    graph = make_fx(layouts, tracing_mode="symbolic")(index, index.flip(0)).graph
    monkeypatch.setattr(Kernel, "compile_ahead", begin)
    monkeypatch.setattr(Kernel, "__call__", launch)
    device_layouts.compile_ahead(graph)
    made = device_layouts.csr(index, index.flip(0), rows, rows, index > 3)
    device_layouts.inverse_degree(device_layouts.with_loops(*made, index, index > 3)[0], "float64")
    hub_lists.find_hubs(made[0], 2, 4, 128)
    assert launched and launched == begun
