"""The kernels that sort the edges of a layout on a GPU, against operations of torch's."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gnncompile import _compat
from gnncompile.codegen.triton import radix_sort, sorting
from gnncompile.layout import csr
from tests.harness import needs_interpreter

GRAPHS = {
    "no edge": (5, 4, 0),
    "nothing": (0, 0, 0),
    "one node": (1, 1, 3),
    "duplicates": (3, 2, 200),
    "blocks": (130, 70, 515),
    "more rows than edges": (1200, 7, 40),
}


@pytest.fixture
def device(device: str) -> str:
    """Beside a GPU, kernels are compiled for it and can't read a CPU's memory."""
    needs_interpreter("triton", device)
    return device


def random_edges(
    rows: int, columns: int, edges: int, wraps: tuple[bool, bool], dtypes: tuple[torch.dtype, ...]
) -> list[Tensor]:
    made = torch.Generator().manual_seed(edges)
    lows = [-size if wrap else 0 for size, wrap in zip((rows, columns), wraps, strict=True)]
    return [
        torch.randint(low, size, (edges,), generator=made).to(dtype) if edges else torch.zeros(0, dtype=dtype)
        for low, size, dtype in zip(lows, (rows, columns), dtypes, strict=True)
    ]


def expected(index: Tensor, other: Tensor, alive: Tensor | None, rows: int, columns: int, wraps: tuple[bool, bool]):
    bad = csr.out_of_range(index, other, (rows, columns), wraps)
    index = torch.where(index < 0, index + rows, index)
    other = torch.where(other < 0, other + columns, other)
    return *csr.sorted_edges(index, other, rows, columns, bad if alive is None else bad | ~alive), bool(bad.any())


@pytest.mark.parametrize("wraps", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("way", ["few", "radix", "torch"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_layouts_are_those_of_torch(graph, way, wraps, device, monkeypatch):
    monkeypatch.setattr(sorting, "FEW", 10**6 if way == "few" else -1)
    monkeypatch.setattr(radix_sort, "MOST_EDGES", 10**6 if way == "radix" else -1)
    rows, columns, edges = GRAPHS[graph]
    generator = torch.Generator().manual_seed(1)
    for dtypes in ((torch.int64, torch.int64), (torch.int32, torch.int64)):
        index, other = random_edges(rows, columns, edges, wraps, dtypes)
        alive = torch.rand(edges, generator=generator) < 0.7
        # The rows of an edge_index begin at any address.
        index, other = (torch.cat([one[:0], one.new_zeros(1), one]).to(device)[1:] for one in (index, other))
        cases = [(index, other)]
        if edges > 2:
            worse = index.clone()
            worse[1], worse[2] = rows, -rows - 1
            cases += [(worse, other), (index, other + columns)]
        for first, second in cases:
            for keep in (None, alive.to(device)):
                found = sorting.sort_edges(first, second, keep, rows, columns, wraps)
                *layout, bad = expected(first, second, keep, rows, columns, wraps)
                assert bool(found[3]) == bad
                for ours, theirs in zip(found[:3], layout, strict=True):
                    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [255, 256, 2000])
def test_a_radix_sort_of_several_blocks(rows, device, monkeypatch):
    """One digit or two; with 2,000 rows more blocks than a program reads counts of at once, and a hub.

    Edges to drop have the number of rows as their key, which 256 rows make a key of two digits.
    """
    edges = 17_500 if rows == 2000 else 2_500
    index, other = (one.to(device) for one in random_edges(rows, 90, edges, (False, False), (torch.int64, torch.int64)))
    index[::3] = rows - 7
    alive = torch.arange(edges, device=device) % 5 > 0
    monkeypatch.setattr(sorting, "FEW", -1)
    monkeypatch.setattr(radix_sort, "_scan", radix_sort._scan._replace(constants=(256, 8, 8)))
    found = sorting.sort_edges(index, other, alive, rows, 90)
    *layout, _ = expected(index, other, alive, rows, 90, (False, False))
    for ours, theirs in zip(found[:3], layout, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [65_535, 65_536])
def test_a_radix_sort_has_rows_of_two_digits(rows, device, monkeypatch):
    """One row more is left to torch's sort: the key of edges to drop would have three digits."""
    monkeypatch.setattr(sorting, "FEW", -1)
    index = torch.tensor([rows - 1, 0, 255, 256, rows - 1, 65_000], device=device)
    alive = torch.tensor([True, True, False, True, True, True], device=device)
    found = sorting.sort_edges(index, index, alive, rows, rows)
    *layout, _ = expected(index, index, alive, rows, rows, (False, False))
    for ours, theirs in zip(found[:3], layout, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert radix_sort.fits(rows, 2**20) == (rows == 65_535)
    assert not radix_sort.fits(rows, 2**20 + 1)


def test_packages_know_the_kernels_by_the_names_of_the_sort():
    """The struct in C++ is filled by position."""
    text = re.sub(r"&", "", (Path(_compat.__file__).parent / "aoti_cuda.h").read_text())
    kernels, numbers = re.search(r"struct Sort \{\s*Kernel (.*?);\s*int64_t (.*?);", text, re.DOTALL).groups()
    sort = sorting.entries(torch.int64, torch.int64, True, (False, False))
    names = [entry.function.__name__ for entry in sort.values()]
    assert names == ["rank", "keys", "place", "place", "count_rows", "scan", "scatter", "count"]
    assert kernels.split(", ") == [*sort]
    assert (sort["place"].types[1], sort["place_radix"].types[1]) == (torch.int64, torch.int32)
    values = {"few": sorting.FEW, "radix_edges": 2**20, "radix_rows": 2**16 - 1, "radix_block": 1024, "digit": 8}
    assert numbers.split(", ") == [*sorting.NUMBERS]
    assert sorting.NUMBERS.items() >= values.items()
