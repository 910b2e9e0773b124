"""The Triton kernel that packs rows for an exchange, and adds rows that arrived."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["number", "tiles"])
def move_rows(
    out_ptr,
    x_ptr,
    index_ptr,
    number,
    tiles,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    HALVES: tl.constexpr,
    TYPES: tl.constexpr,
):
    """Copies row ``index[i]`` of x to row i of out, or with ADDS adds row i of x to row ``index[i]`` of out.

    There are `number` entries of the index, and rows have SIZE elements. A tile is WIDTH elements of ROWS rows.
    """
    columns: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    tile = tl.program_id(0)
    row = (tile // columns).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tile % columns) * WIDTH + tl.arange(0, WIDTH)
    other = tl.load(index_ptr + row, mask=row < number, other=0).to(tl.int64)
    inside = (row < number)[:, None] & (column < SIZE)[None, :]
    here, there = row[:, None] * SIZE + column[None, :], other[:, None] * SIZE + column[None, :]
    if ADDS:
        arrived, held = tl.load(x_ptr + here, mask=inside), tl.load(out_ptr + there, mask=inside)
        if HALVES:  # types of 16 bits
            arrived = arrived.to(tl.float32)
        tl.store(out_ptr + there, (held + arrived).to(held.dtype), mask=inside)
    else:
        tl.store(out_ptr + here, tl.load(x_ptr + there, mask=inside), mask=inside)
