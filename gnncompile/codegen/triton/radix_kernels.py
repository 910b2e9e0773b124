"""Triton kernels of a radix sort, which sorts edges by row, stably: from the lowest digit of the rows to the highest.

See :mod:`gnncompile.codegen.triton.radix_sort`. The digit of an edge's row is called its bin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.triton.sort_kernels import INDICES, SIZES, write_keys


@triton.jit
def bin_of(key, inside, shift, BINS: tl.constexpr):
    """The bin of each key, by the digit above `shift` bits; BINS for entries behind the last."""
    return tl.where(inside, (key >> shift) & (BINS - 1), BINS)


@triton.jit
def store_counts(counts_ptr, key, inside, shift, BINS: tl.constexpr):
    """Writes how many keys of this program are in each bin."""
    found = tl.histogram(tl.minimum(bin_of(key, inside, shift, BINS), BINS - 1), BINS)
    bins = tl.arange(0, BINS)
    behind = tl.sum(1 - inside.to(tl.int32), 0)  # they were counted in the last bin
    found -= tl.where(bins == BINS - 1, behind, 0)
    tl.store(counts_ptr + tl.program_id(0) * BINS + bins, found.to(counts_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=INDICES)
def count_rows(
    index_ptr,
    other_ptr,
    alive_ptr,
    key_ptr,
    counts_ptr,
    bad_ptr,
    number,
    num_rows,
    num_columns,
    WRAP_ROWS: tl.constexpr,
    WRAP_COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Writes the keys to sort by and the counts of their lowest digit, and sets a bool if an edge is out of range."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = write_keys(
        index_ptr,
        other_ptr,
        alive_ptr,
        key_ptr,
        bad_ptr,
        at,
        number,
        num_rows,
        num_columns,
        WRAP_ROWS,
        WRAP_COLUMNS,
        MASKED,
    )
    store_counts(counts_ptr, key, at < number, 0, BINS)


@triton.jit(do_not_specialize=["number", "shift"])
def count(key_ptr, counts_ptr, number, shift, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Writes the counts of a later digit."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(key_ptr + at, mask=at < number, other=0)
    store_counts(counts_ptr, key, at < number, shift, BINS)


@triton.jit
def in_order(values, lane, BITS: tl.constexpr):
    """Sorts ``2 ** BITS`` values, by a bitonic network. (Triton's own sort takes its interpreter seconds.)"""
    for bit in tl.static_range(BITS):
        for down in tl.static_range(bit + 1):
            other = tl.gather(values, lane ^ (1 << (bit - down)), 0)
            takes_smaller = ((lane >> (bit - down)) & 1) == ((lane >> (bit + 1)) & 1)
            values = tl.where(takes_smaller, tl.minimum(values, other), tl.maximum(values, other))
    return values


@triton.jit(do_not_specialize=["blocks"])
def scan(counts_ptr, earlier_ptr, totals_ptr, blocks, BINS: tl.constexpr, SCANNED: tl.constexpr, MANY: tl.constexpr):
    """Writes how many keys of each bin are in the blocks before each block, and in all blocks, for SCANNED bins."""
    bins = tl.program_id(0) * SCANNED + tl.arange(0, SCANNED)
    total = tl.zeros([SCANNED], tl.int32)
    for start in range(0, blocks, MANY):
        block = start + tl.arange(0, MANY)[:, None]
        at = block * BINS + bins[None, :]
        counts = tl.load(counts_ptr + at, mask=block < blocks, other=0).to(tl.int32)
        tl.store(earlier_ptr + at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=block < blocks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + bins, total)


@triton.jit(do_not_specialize=["number", "shift"])
def scatter(
    key_ptr,
    order_ptr,
    counts_ptr,
    earlier_ptr,
    totals_ptr,
    new_key_ptr,
    new_order_ptr,
    number,
    shift,
    BITS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Sorts keys by one digit. Before the first, keys are in the order of the edges, so `order` is not read."""
    size: tl.constexpr = 1 << BITS
    block, lane = tl.program_id(0), tl.arange(0, size)
    own = block * size + lane
    key = tl.load(key_ptr + own, mask=own < number, other=0)
    digit = bin_of(key, own < number, shift, BINS)
    # No two numbers are the same, so edges of a bin keep their order.
    ranked = in_order(digit << BITS | lane, lane, BITS)

    bins = tl.arange(0, BINS)
    total = tl.load(totals_ptr + bins)
    counts = tl.load(counts_ptr + block * BINS + bins).to(tl.int32)
    # Of a bin's first edge in this block: its place among all edges, less its place in the block.
    offset = tl.cumsum(total, 0) - total + tl.load(earlier_ptr + block * BINS + bins) - (tl.cumsum(counts, 0) - counts)
    place = lane + tl.gather(offset, tl.minimum(ranked >> BITS, BINS - 1), 0)
    own = block * size + (ranked & (size - 1))
    inside = own < number
    tl.store(new_key_ptr + place, tl.load(key_ptr + own, mask=inside, other=0), mask=inside)
    order = tl.load(order_ptr + own, mask=inside & (shift > 0), other=0)
    tl.store(new_order_ptr + place, tl.where(shift > 0, order, own), mask=inside)
