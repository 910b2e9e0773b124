"""Triton kernels that sort the edges of a layout by row, stably. See :mod:`gnncompile.codegen.triton.sorting`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(
    index_ptr,
    other_ptr,
    alive_ptr,
    at,
    number,
    num_rows,
    num_columns,
    WRAP_ROWS: tl.constexpr,
    WRAP_COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The row of each edge, `num_rows` for edges to drop, more behind the last; and whether it is out of range."""
    inside = at < number
    row = tl.load(index_ptr + at, mask=inside, other=0).to(tl.int64)
    column = tl.load(other_ptr + at, mask=inside, other=0).to(tl.int64)
    bad = (row >= num_rows) | (column >= num_columns)
    bad |= (row < -num_rows) if WRAP_ROWS else (row < 0)
    bad |= (column < -num_columns) if WRAP_COLUMNS else (column < 0)
    row = tl.where(row < 0, row + num_rows, row)
    dropped = bad
    if MASKED:
        dropped = bad | (tl.load(alive_ptr + at, mask=inside, other=1) == 0)
    key = tl.where(dropped, num_rows, row).to(tl.int32)
    return tl.where(inside, key, num_rows + 1), bad & inside


@triton.jit
def column_of(other_ptr, at, inside, num_columns):
    """The column of each edge, within the graph."""
    column = tl.load(other_ptr + at, mask=inside, other=0).to(tl.int64)
    column = tl.where(column < 0, column + num_columns, column)
    return tl.minimum(tl.maximum(column, 0), tl.maximum(num_columns - 1, 0)).to(tl.int32)


@triton.jit(do_not_specialize=["number", "num_rows", "num_columns"])
def rank(
    index_ptr,
    other_ptr,
    alive_ptr,
    rowptr_ptr,
    col_ptr,
    edge_ptr,
    bad_ptr,
    number,
    num_rows,
    num_columns,
    WRAP_ROWS: tl.constexpr,
    WRAP_COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sorts few edges at once: each edge counts those before it, and each row those of smaller rows."""
    edge_programs = (number + (BLOCK - 1)) // BLOCK
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = own - edge_programs * BLOCK
    of_edges = tl.program_id(0) < edge_programs
    key, _ = key_of(
        index_ptr, other_ptr, alive_ptr, own, number, num_rows, num_columns, WRAP_ROWS, WRAP_COLUMNS, MASKED
    )
    key = tl.where(of_edges, key, row)
    last = tl.where(of_edges, own, 0)
    count = tl.zeros([BLOCK], tl.int32)
    found = tl.zeros([STEP], tl.int32)
    for start in range(0, number, STEP):
        at = start + tl.arange(0, STEP)
        other, bad = key_of(
            index_ptr, other_ptr, alive_ptr, at, number, num_rows, num_columns, WRAP_ROWS, WRAP_COLUMNS, MASKED
        )
        smaller = other[None, :] < key[:, None]
        before = (other[None, :] == key[:, None]) & (at[None, :] < last[:, None])
        count += tl.sum((smaller | before).to(tl.int32), 1)
        found = tl.maximum(found, bad.to(tl.int32))
    inside = of_edges & (own < number)
    tl.store(col_ptr + count, column_of(other_ptr, own, inside, num_columns), mask=inside)
    tl.store(edge_ptr + count, own, mask=inside)
    tl.store(rowptr_ptr + row, count, mask=(row >= 0) & (row <= num_rows))
    wrong = tl.max(found, 0) > 0
    tl.store(bad_ptr, wrong, mask=wrong & (tl.program_id(0) == edge_programs))


@triton.jit(do_not_specialize=["number", "num_rows", "num_columns"])
def keys(
    index_ptr,
    other_ptr,
    alive_ptr,
    key_ptr,
    bad_ptr,
    number,
    num_rows,
    num_columns,
    WRAP_ROWS: tl.constexpr,
    WRAP_COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the keys to sort by, and sets a bool if an edge is out of range."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, bad = key_of(
        index_ptr, other_ptr, alive_ptr, at, number, num_rows, num_columns, WRAP_ROWS, WRAP_COLUMNS, MASKED
    )
    tl.store(key_ptr + at, key, mask=at < number)
    found = tl.max(bad.to(tl.int32), 0) > 0
    tl.store(bad_ptr, found, mask=found)


@triton.jit(do_not_specialize=["number", "num_rows", "num_columns"])
def place(
    key_ptr,
    order_ptr,
    other_ptr,
    rowptr_ptr,
    col_ptr,
    edge_ptr,
    number,
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    """Writes the layout of sorted keys. Rows are found by binary search."""
    edge_programs = (number + (BLOCK - 1)) // BLOCK
    own = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) < edge_programs:
        inside = own < number
        order = tl.load(order_ptr + own, mask=inside, other=0)
        tl.store(col_ptr + own, column_of(other_ptr, order, inside, num_columns), mask=inside)
        tl.store(edge_ptr + own, order.to(tl.int32), mask=inside)
    else:
        row = own - edge_programs.to(tl.int64) * BLOCK
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + number
        for _ in range(32):  # the first edge of the row or of a later one is in [low, high]
            middle = low + (high - low) // 2
            open_ = low < high
            smaller = tl.load(key_ptr + middle, mask=open_, other=0) < row
            low = tl.where(open_ & smaller, middle + 1, low)
            high = tl.where(open_ & (smaller == 0), middle, high)
        tl.store(rowptr_ptr + row, low, mask=row <= num_rows)
