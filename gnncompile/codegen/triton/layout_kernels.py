"""Triton kernels for layouts in packages: they list hubs and their pieces, note bad indices, and compute seals.

See :mod:`gnncompile.codegen.triton.hub_lists`, :func:`gnncompile.codegen.triton.sized.any_of` and
:mod:`gnncompile.codegen.triton.seals`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pieces_of(rowptr_ptr, row, num_rows, longest):
    """The pieces of each row, 0 for rows that are no hubs."""
    inside = row < num_rows
    degree = tl.load(rowptr_ptr + row + 1, mask=inside, other=0) - tl.load(rowptr_ptr + row, mask=inside, other=0)
    return tl.where(degree > longest, (degree + (longest - 1)) // longest, 0)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "longest", "fewest"])
def count(rowptr_ptr, counts_ptr, num_rows, num_blocks, longest, fewest, BLOCK: tl.constexpr):
    """Writes the numbers of large hubs, of other hubs, and of the pieces of both, for a block of rows: [4, blocks]."""
    block = tl.program_id(0)
    pieces = pieces_of(rowptr_ptr, block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), num_rows, longest)
    large = pieces >= fewest
    small = (pieces > 0) & (pieces < fewest)
    tl.store(counts_ptr + block, tl.sum(large.to(tl.int32), 0))
    tl.store(counts_ptr + num_blocks + block, tl.sum(small.to(tl.int32), 0))
    tl.store(counts_ptr + 2 * num_blocks + block, tl.sum(tl.where(large, pieces, 0), 0))
    tl.store(counts_ptr + 3 * num_blocks + block, tl.sum(tl.where(small, pieces, 0), 0))


@triton.jit(do_not_specialize=["num_blocks"])
def sum_up(counts_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr):
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
def place(rowptr_ptr, counts_ptr, totals_ptr, hubs_ptr, num_rows, num_blocks, longest, fewest, BLOCK: tl.constexpr):
    """Writes the row, the first piece and the number of pieces of each hub. Large hubs come first."""
    block = tl.program_id(0)
    row = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pieces = pieces_of(rowptr_ptr, row, num_rows, longest)
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
def own(totals_ptr, hubs_ptr, pieces_ptr, most_hubs, most_pieces, BLOCK: tl.constexpr):
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


@triton.jit(do_not_specialize=["number"])
def note(flags_ptr, noted_ptr, number, BLOCK: tl.constexpr):
    """Sets a bool if one of `number` bools is true. All programs that write it write the same."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    flags = tl.load(flags_ptr + at, mask=at < number, other=0)
    found = tl.max(flags.to(tl.int32), 0) > 0
    tl.store(noted_ptr, found, mask=found)


@triton.jit
def weight(position):
    """The odd number that an entry is multiplied by, as in :mod:`gnncompile.ops.seal`."""
    mixed = (position + 1) * -0x61C8864680B583EB
    return ((mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * -0x3B314601E57A13AD) | 1


@triton.jit(do_not_specialize=["number", "part", "size"])
def seal(values_ptr, total_ptr, number, part, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds a tensor's share of a seal to a sum. `BITS` is the width of floats, whose bits count, or 0 for integers."""
    first = part.to(tl.int64) << 40
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + at, mask=at < number, other=0)
    if BITS == 16:
        values = values.to(tl.int16, bitcast=True)
    if BITS == 32:
        values = values.to(tl.int32, bitcast=True)
    if BITS == 64:
        values = values.to(tl.int64, bitcast=True)
    found = tl.sum(values.to(tl.int64) * weight(first + at), 0)
    if tl.program_id(0) == 0:
        last = first + (1 << 39)
        found += number.to(tl.int64) * weight(last) + size.to(tl.int64) * weight(last + 1)
    tl.atomic_add(total_ptr, found, sem="relaxed")
