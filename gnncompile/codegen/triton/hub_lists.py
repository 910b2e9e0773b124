"""Kernels that list the hubs of a layout, and their pieces, for a program that can't ask the device. Imports Triton.

:func:`gnncompile.layout.csr.hubs` finds them with operations of torch's, which take several times as many launches. A
process keeps its lists; a package makes them in each call. A graph with too few edges for a hub needs no launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton.entry import Entry
from gnncompile.codegen.triton.launcher import Kernel

Launch = Callable[[Entry, list[Tensor], list[Any], Any, list[int]], list[Tensor]]
"""Launches a kernel: ``launch(entry, tensors, numbers, programs, written)``.

Returns the tensors at the positions `written`, as the kernel leaves them. `programs` may be 0.
"""

BLOCK = 1024
"""The rows, or pieces, of a program."""


@triton.jit
def _pieces(rowptr_ptr, row, num_rows, longest):
    """The pieces of each row, 0 for rows that are no hubs."""
    inside = row < num_rows
    degree = tl.load(rowptr_ptr + row + 1, mask=inside, other=0) - tl.load(rowptr_ptr + row, mask=inside, other=0)
    return tl.where(degree > longest, (degree + (longest - 1)) // longest, 0)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "longest", "fewest"])
def _count(rowptr_ptr, counts_ptr, num_rows, num_blocks, longest, fewest, BLOCK: tl.constexpr):
    """Writes the numbers of large hubs, of other hubs, and of the pieces of both, for a block of rows: [4, blocks]."""
    block = tl.program_id(0)
    pieces = _pieces(rowptr_ptr, block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), num_rows, longest)
    large = pieces >= fewest
    small = (pieces > 0) & (pieces < fewest)
    tl.store(counts_ptr + block, tl.sum(large.to(tl.int32), 0))
    tl.store(counts_ptr + num_blocks + block, tl.sum(small.to(tl.int32), 0))
    tl.store(counts_ptr + 2 * num_blocks + block, tl.sum(tl.where(large, pieces, 0), 0))
    tl.store(counts_ptr + 3 * num_blocks + block, tl.sum(tl.where(small, pieces, 0), 0))


@triton.jit(do_not_specialize=["num_blocks"])
def _sum_up(counts_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr):
    """Replaces the numbers of a kind by sums over the blocks before, and writes the total. A program per kind."""
    kind = tl.program_id(0)
    total = tl.zeros([1], tl.int32)
    for start in range(0, num_blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + kind * num_blocks + at, mask=at < num_blocks, other=0)
        tl.store(counts_ptr + kind * num_blocks + at, total + tl.cumsum(count, 0) - count, mask=at < num_blocks)
        total += tl.sum(count, 0)
    tl.store(totals_ptr + kind + tl.arange(0, 1), total)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "longest", "fewest"])
def _place(rowptr_ptr, counts_ptr, totals_ptr, hubs_ptr, num_rows, num_blocks, longest, fewest, BLOCK: tl.constexpr):
    """Writes the row, the first piece and the number of pieces of each hub. Large hubs come first."""
    block = tl.program_id(0)
    row = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pieces = _pieces(rowptr_ptr, row, num_rows, longest)
    large = pieces >= fewest
    small = (pieces > 0) & (pieces < fewest)
    larges, smalls = large.to(tl.int32), small.to(tl.int32)
    of_large, of_small = tl.where(large, pieces, 0), tl.where(small, pieces, 0)
    hub = tl.where(
        large,
        tl.load(counts_ptr + block) + tl.cumsum(larges, 0) - larges,
        tl.load(totals_ptr) + tl.load(counts_ptr + num_blocks + block) + tl.cumsum(smalls, 0) - smalls,
    )
    first = tl.where(
        large,
        tl.load(counts_ptr + 2 * num_blocks + block) + tl.cumsum(of_large, 0) - of_large,
        tl.load(totals_ptr + 2) + tl.load(counts_ptr + 3 * num_blocks + block) + tl.cumsum(of_small, 0) - of_small,
    )
    tl.store(hubs_ptr + hub * 3, row.to(tl.int32), mask=pieces > 0)
    tl.store(hubs_ptr + hub * 3 + 1, first, mask=pieces > 0)
    tl.store(hubs_ptr + hub * 3 + 2, pieces, mask=pieces > 0)


@triton.jit(do_not_specialize=["most_hubs", "most_pieces"])
def _own(totals_ptr, hubs_ptr, pieces_ptr, most_hubs, most_pieces, BLOCK: tl.constexpr):
    """Writes the hub of each piece, -1 after the last piece, and entries without pieces after the last hub."""
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hubs = tl.load(totals_ptr) + tl.load(totals_ptr + 1)
    last = tl.load(totals_ptr + 2) + tl.load(totals_ptr + 3)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + hubs
    for _ in range(31):  # the last hub that begins with the piece or before it is in [low, high)
        middle = (low + high) // 2
        begins = tl.load(hubs_ptr + middle * 3 + 1, mask=middle < hubs, other=0) <= piece
        several = high - low > 1
        low = tl.where(several & begins, middle, low)
        high = tl.where(several & (begins == 0), middle, high)
    tl.store(pieces_ptr + piece, tl.where(piece < last, low, -1), mask=piece < most_pieces)
    unused = (piece >= hubs) & (piece < most_hubs)
    for part in range(3):
        tl.store(hubs_ptr + piece * 3 + part, tl.zeros([BLOCK], tl.int32), mask=unused)


NO_LARGE = 2**30
"""The fewest pieces of a large hub where no hub is large."""

_kernels = {
    "count": (Kernel(_count, num_warps=tuning.TILES.short_warps), ("rowptr", "counts"), 4),
    "sum_up": (Kernel(_sum_up, num_warps=tuning.TILES.short_warps), ("counts", "totals"), 1),
    "place": (Kernel(_place, num_warps=tuning.TILES.short_warps), ("rowptr", "counts", "totals", "hubs"), 4),
    "own": (Kernel(_own, num_warps=tuning.TILES.short_warps), ("totals", "hubs", "pieces"), 2),
}
"""The kernels in the order of their launches, with their pointers and the number of their int32 numbers."""

_WRITTEN = {"count": [1], "sum_up": [0, 1], "place": [3], "own": [1, 2]}


def list_hubs(
    rowptr: Tensor, most: Any, most_pieces: Any, longest: Any, fewest: int, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Returns the tables `rows` and `pieces` of :class:`gnncompile.layout.csr.Hubs`. Large hubs come first.

    Args:
        rowptr: int32 ``[num_rows + 1]``.
        most: The largest possible number of hubs. If it is 0, so must be `most_pieces`, and nothing is launched.
        most_pieces: The largest possible number of pieces.
        longest: The most edges of a row that is no hub, and of a piece.
        fewest: The fewest pieces of a large hub.
        launch: Launches a kernel.
    """
    rows = rowptr.size(0) - 1
    blocks = torch.sym_min(most, 1) * -(-rows // BLOCK)
    sizes = {"counts": (4 * blocks,), "totals": (4,), "hubs": (most, 3), "pieces": (most_pieces,)}
    given = {"rowptr": rowptr, **{name: rowptr.new_empty(size) for name, size in sizes.items()}}
    launches = {
        "count": (blocks, [rows, blocks, longest, fewest]),
        "sum_up": (4 * torch.sym_min(most, 1), [blocks]),
        "place": (blocks, [rows, blocks, longest, fewest]),
        "own": (-(-most_pieces // BLOCK), [most, most_pieces]),
    }
    for name, (programs, numbers) in launches.items():
        kernel, names, count = _kernels[name]
        entry = kernel.entry(names, [torch.int32] * len(names), count, (BLOCK,))
        found = launch(entry, [given[one] for one in names], numbers, programs, _WRITTEN[name])
        given.update(zip([names[at] for at in _WRITTEN[name]], found, strict=True))
    return given["hubs"], given["pieces"]
