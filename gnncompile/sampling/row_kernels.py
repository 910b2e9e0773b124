"""Triton kernels that gather rows of features, from one place or from a cache and another place."""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.sampling.kernels import REPEATED

HALF = tl.constexpr(2**31)
"""The number of rows is passed as two numbers below HALF."""


@triton.jit(do_not_specialize=["rows_high", "rows_low", "number", "tiles"])
def gather_rows(
    out_ptr,
    index_ptr,
    x_ptr,
    cache_ptr,
    slot_ptr,
    end_ptr,
    counter_ptr,
    reads_ptr,
    position_ptr,
    rows_high,
    rows_low,
    number,
    tiles,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ENDS: tl.constexpr,
    CACHED: tl.constexpr,
    TALLIES: tl.constexpr,
    MOVED: tl.constexpr,
    SECTOR: tl.constexpr,
    COUNTERS: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Copies `number` rows of SIZE words. A tile is WIDTH words of ROWS rows, and programs take tiles in turn.

    With ENDS, only the first ``max(end, 1)`` rows are copied, or `end` rows with MOVED. With CACHED, a row with a slot
    is read from the cache, and counters count the valid rows and those read from the cache. With TALLIES,
    ``reads[node]`` counts the valid rows of each node. With MOVED, row i of the index goes to row ``position[i]``.
    """
    columns: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tile // columns * ROWS + tl.arange(0, ROWS).to(tl.int64)
        word = (tile % columns) * WIDTH + tl.arange(0, WIDTH)
        inside = at < number
        valid = inside
        if ENDS:
            end = tl.load(end_ptr)
            valid = inside & (at < end)
            inside = valid if MOVED else inside & (at < tl.maximum(end, 1))
        node = tl.load(index_ptr + at, mask=inside, other=0).to(tl.int64)
        good = (node >= 0) & (node < rows_high.to(tl.int64) * HALF + rows_low)
        tl.device_assert(good, "node: found a row outside of x", mask=inside)
        exists = inside & good
        words = (word < SIZE)[None, :]
        from_x = exists
        if CACHED:
            slot = tl.load(slot_ptr + node, mask=exists, other=-1).to(tl.int64)
            hit = slot >= 0
            from_x = exists & (slot < 0)
            cached = tl.load(cache_ptr + slot[:, None] * SIZE + word[None, :], mask=(exists & hit)[:, None] & words)
        value = tl.load(x_ptr + node[:, None] * SIZE + word[None, :], mask=from_x[:, None] & words)
        if CACHED:
            value = tl.where(hit[:, None], cached, value)
        to = tl.load(position_ptr + at, mask=exists, other=0) if MOVED else at
        tl.store(out_ptr + to[:, None] * SIZE + word[None, :], value, mask=exists[:, None] & words)
        if tile % columns == 0:
            if CACHED:
                counter = counter_ptr + (tile // columns) % COUNTERS * SECTOR
                tl.atomic_add(counter, tl.sum(valid.to(tl.int64), axis=0), sem="relaxed")
                tl.atomic_add(counter + 1, tl.sum((valid & hit).to(tl.int64), axis=0), sem="relaxed")
            if TALLIES:
                tl.atomic_add(reads_ptr + node, tl.full((ROWS,), 1, tl.int32), mask=valid & good, sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def repeat_rows(
    out_ptr,
    end_ptr,
    number,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Copies the first rows over and over to the rows from `end` on, as padded nodes repeat the first nodes."""
    columns: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    end = tl.load(end_ptr)
    valid = tl.maximum(end, 1)
    begin = (program // columns).to(tl.int64) * ROWS
    if begin + ROWS > valid:
        at = begin + tl.arange(0, ROWS)
        word = (program % columns) * WIDTH + tl.arange(0, WIDTH)
        mask = ((at >= valid) & (at < number))[:, None] & (word < SIZE)[None, :]
        first = (at - end) % tl.minimum(valid, REPEATED)
        value = tl.load(out_ptr + first[:, None] * SIZE + word[None, :], mask=mask)
        tl.store(out_ptr + at[:, None] * SIZE + word[None, :], value, mask=mask)
