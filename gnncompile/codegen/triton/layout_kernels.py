"""Triton kernels for layouts: they list hubs and their pieces, invert degrees, replace bad indices, and compute seals.

See :mod:`gnncompile.codegen.triton.hub_lists`, :func:`gnncompile.codegen.triton.sized.bounded` and
:mod:`gnncompile.codegen.triton.seals`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_smaller(sorted_ptr, number, apart, value, WAYS: tl.constexpr = 8):
    """How many of `number` sorted numbers, so far apart, are smaller than each value.

    A step reads some numbers at once, since it waits for one as long as for several.
    """
    low = tl.zeros_like(value)
    rest = number  # the answer is in [low, low + rest]
    while rest > 0:
        part = rest // WAYS + 1
        found = tl.zeros_like(value)
        for way in tl.static_range(1, WAYS):
            at = low + (way * part - 1)
            found += (tl.load(sorted_ptr + at * apart, mask=at < number, other=2**31 - 1) < value).to(value.dtype)
        low += found * part
        rest = part - 1
    return low


@triton.jit
def pieces_of(rowptr_ptr, row, num_rows, longest):
    """The pieces of each row, 0 for rows that are no hubs."""
    inside = row < num_rows
    degree = tl.load(rowptr_ptr + row + 1, mask=inside, other=0) - tl.load(rowptr_ptr + row, mask=inside, other=0)
    return tl.where(degree > longest, (degree + (longest - 1)) // longest, 0)


@triton.jit
def hubs_of(rowptr_ptr, row, num_rows, longest, fewest):
    """The pieces of each row, and 1 for a large hub, 2**32 for another hub, 0 for other rows, int64."""
    pieces = pieces_of(rowptr_ptr, row, num_rows, longest)
    return pieces, tl.where(pieces >= fewest, 1, (pieces > 0).to(tl.int64) << 32)


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


@triton.jit(do_not_specialize=["num_rows", "longest", "fewest", "most_hubs", "most_pieces"])
def list_few(rowptr_ptr, hubs_ptr, pieces_ptr, num_rows, longest, fewest, most_hubs, most_pieces, BLOCK: tl.constexpr):
    """Lists the hubs of few rows and their pieces, in one program: see `place` and `own`."""
    lane = tl.arange(0, BLOCK)
    # A pair of numbers in an int64: that of large hubs, and that of the others in the upper half.
    hubs = tl.zeros([BLOCK], tl.int64)
    of_hubs = tl.zeros([BLOCK], tl.int64)  # the pieces of both
    for start in range(0, num_rows, BLOCK):
        pieces, pair = hubs_of(rowptr_ptr, start + lane, num_rows, longest, fewest)
        hubs += pair
        of_hubs += pieces * pair
    all_hubs, all_pieces = tl.sum(hubs, 0), tl.sum(of_hubs, 0)
    larges, of_larges = all_hubs & 0xFFFFFFFF, all_pieces & 0xFFFFFFFF
    number, last = (larges + (all_hubs >> 32)).to(tl.int32), (of_larges + (all_pieces >> 32)).to(tl.int32)
    next_hubs, next_pieces = larges << 32, of_larges << 32  # pairs: large hubs come first
    for start in range(0, tl.where(number > 0, num_rows, 0), BLOCK):
        row = start + lane
        pieces, pair = hubs_of(rowptr_ptr, row, num_rows, longest, fewest)
        half = tl.where(pieces >= fewest, 0, 32)
        hub = ((next_hubs + tl.cumsum(pair, 0) - pair) >> half) & 0xFFFFFFFF
        first = ((next_pieces + tl.cumsum(pieces * pair, 0) - pieces * pair) >> half) & 0xFFFFFFFF
        tl.store(hubs_ptr + hub * 3, row, mask=pieces > 0)
        tl.store(hubs_ptr + hub * 3 + 1, first.to(tl.int32), mask=pieces > 0)
        tl.store(hubs_ptr + hub * 3 + 2, pieces, mask=pieces > 0)
        next_hubs += tl.sum(pair, 0)
        next_pieces += tl.sum(pieces * pair, 0)
    tl.debug_barrier()  # other threads read the hubs
    for start in range(0, tl.maximum(most_hubs, most_pieces), BLOCK):
        own_pieces(hubs_ptr, pieces_ptr, start + lane, number, last, most_hubs, most_pieces)


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


@triton.jit(do_not_specialize=["most"])
def order(hubs_ptr, totals_ptr, ordered_ptr, most, BLOCK: tl.constexpr):
    """Writes hubs, at most so many, by falling number of pieces: each counts the hubs before it, and their pieces."""
    number = tl.minimum(tl.load(totals_ptr) + tl.load(totals_ptr + 1), most)
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(hubs_ptr + own * 3, mask=own < number, other=0)
    pieces = tl.load(hubs_ptr + own * 3 + 2, mask=own < number, other=0)
    hub = tl.zeros([BLOCK], tl.int32)
    first = tl.zeros([BLOCK], tl.int32)
    for start in range(0, number, BLOCK):
        at = start + tl.arange(0, BLOCK)
        others = tl.load(hubs_ptr + at * 3 + 2, mask=at < number, other=0)
        larger = others[None, :] > pieces[:, None]
        before = larger | ((others[None, :] == pieces[:, None]) & (at[None, :] < own[:, None]))
        hub += tl.sum(before.to(tl.int32), 1)
        first += tl.sum(tl.where(before, others[None, :], 0), 1)
    tl.store(ordered_ptr + hub * 3, row, mask=own < number)
    tl.store(ordered_ptr + hub * 3 + 1, first, mask=own < number)
    tl.store(ordered_ptr + hub * 3 + 2, pieces, mask=own < number)


@triton.jit(do_not_specialize=["most_hubs", "most_pieces"])
def own(totals_ptr, hubs_ptr, pieces_ptr, most_hubs, most_pieces, BLOCK: tl.constexpr):
    """Writes the hub of each piece, -1 after the last piece, and entries without pieces after the last hub."""
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hubs = tl.load(totals_ptr) + tl.load(totals_ptr + 1)
    last = tl.load(totals_ptr + 2) + tl.load(totals_ptr + 3)
    own_pieces(hubs_ptr, pieces_ptr, piece, hubs, last, most_hubs, most_pieces)


@triton.jit
def own_pieces(hubs_ptr, pieces_ptr, piece, hubs, last, most_hubs, most_pieces):
    """Writes what `own` writes, for a block of pieces, given the numbers of hubs and of pieces."""
    # All hubs before the last that begins with the piece or before it. The first begins with piece 0.
    before = count_smaller(hubs_ptr + 1, hubs, 3, piece + 1) - 1
    tl.store(pieces_ptr + piece, tl.where(piece < last, before, -1), mask=piece < most_pieces)
    unused = (piece >= hubs) & (piece < most_hubs)
    for part in range(3):
        tl.store(hubs_ptr + piece * 3 + part, piece * 0, mask=unused)


@triton.jit(do_not_specialize=["num_rows"])
def invert_degrees(rowptr_ptr, out_ptr, num_rows, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes ``1 / max(edges of the row, 1)``, rounded as a division is."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    begin, end = tl.load(rowptr_ptr + row, mask=inside, other=0), tl.load(rowptr_ptr + row + 1, mask=inside, other=0)
    degree = tl.maximum(end - begin, 1)
    if DOUBLE:
        tl.store(out_ptr + row, 1 / degree.to(tl.float64), mask=inside)
    else:
        tl.store(out_ptr + row, tl.div_rn(tl.full([BLOCK], 1, tl.float32), degree.to(tl.float32)), mask=inside)


@triton.jit(do_not_specialize=["number", "size"])
def bound(index_ptr, safe_ptr, bad_ptr, number, size, WRAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies an index with 0 in place of wrong entries, and sets a bool if there is one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < number
    index = tl.load(index_ptr + at, mask=inside, other=0).to(tl.int64)
    bad = ((index < -size) if WRAPS else (index < 0)) | (index >= size)
    tl.store(safe_ptr + at, tl.where(bad, 0, index), mask=inside)
    found = tl.max((bad & inside).to(tl.int32), 0) > 0
    tl.store(bad_ptr, found, mask=found)


@triton.jit
def weight(position):
    """The odd number that an entry is multiplied by, as in :mod:`gnncompile.ops.seal`."""
    mixed = (position + 1) * -0x61C8864680B583EB
    return ((mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * -0x3B314601E57A13AD) | 1


@triton.jit
def share(values_ptr, number, size, turn, programs, PART: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns int64 ``[BLOCK]``. The sum is what a program adds to a seal for a sealed tensor and the size beside it.

    Args:
        values_ptr: The tensor.
        number: The number of its entries.
        size: The size.
        turn: The program's turn among `programs`: the first block of the tensor is dealt to turn 0, and so on.
        programs: The number of programs.
        PART: The position of the tensor among the sealed tensors.
        BITS: The width of floats, whose bits count, or 0 for integers.
        BLOCK: The entries that are read at once.
    """
    lane = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for block in range(turn, (number + (BLOCK - 1)) // BLOCK, programs):
        at = block * BLOCK + lane
        values = tl.load(values_ptr + at, mask=at < number, other=0)
        if BITS == 16:
            values = values.to(tl.int16, bitcast=True)
        if BITS == 32:
            values = values.to(tl.int32, bitcast=True)
        if BITS == 64:
            values = values.to(tl.int64, bitcast=True)
        total += values.to(tl.int64) * weight(at + (PART << 40))
    if turn == 0:
        counts = tl.where(lane == 0, number.to(tl.int64), size.to(tl.int64))
        total += tl.where(lane < 2, counts * weight(lane + ((PART << 40) + (1 << 39))), 0)
    return total


@triton.jit
def copy(values_ptr, safe_ptr, number, same, FILL: tl.constexpr, BLOCK: tl.constexpr):
    """Copies a tensor, or fills the copy if `same` is false. Blocks are dealt to programs in turn."""
    for block in range(tl.program_id(0), (number + (BLOCK - 1)) // BLOCK, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + at, mask=at < number, other=0)
        tl.store(safe_ptr + at, tl.where(same, values, FILL), mask=at < number)
