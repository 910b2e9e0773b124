"""Triton kernels that sort the edges of a layout by row, stably, and add self loops to it.

See :mod:`gnncompile.codegen.triton.sorting`. An index may be a row of edge_index, which begins at any address.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.triton.layout_kernels import count_smaller

SIZES = ["number", "num_rows", "num_columns"]
INDICES = ["index_ptr", "other_ptr", "alive_ptr"]


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
def write_keys(
    index_ptr,
    other_ptr,
    alive_ptr,
    key_ptr,
    bad_ptr,
    at,
    number,
    num_rows,
    num_columns,
    WRAP_ROWS: tl.constexpr,
    WRAP_COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Writes the keys to sort by, and sets a bool if an edge is out of range. Returns the keys."""
    key, bad = key_of(
        index_ptr, other_ptr, alive_ptr, at, number, num_rows, num_columns, WRAP_ROWS, WRAP_COLUMNS, MASKED
    )
    tl.store(key_ptr + at, key, mask=at < number)
    found = tl.max(bad.to(tl.int32), 0) > 0
    tl.store(bad_ptr, found, mask=found)
    return key


@triton.jit
def column_of(other_ptr, at, inside, num_columns):
    """The column of each edge, within the graph."""
    column = tl.load(other_ptr + at, mask=inside, other=0).to(tl.int64)
    column = tl.where(column < 0, column + num_columns, column)
    return tl.minimum(tl.maximum(column, 0), tl.maximum(num_columns - 1, 0)).to(tl.int32)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=INDICES)
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


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=INDICES)
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
    write_keys(
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


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["other_ptr"])
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
    """Writes the layout of sorted keys. The edges of a row are found by a search."""
    edge_programs = (number + (BLOCK - 1)) // BLOCK
    own = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) < edge_programs:
        inside = own < number
        order = tl.load(order_ptr + own, mask=inside, other=0)
        tl.store(col_ptr + own, column_of(other_ptr, order, inside, num_columns), mask=inside)
        tl.store(edge_ptr + own, order.to(tl.int32), mask=inside)
    else:
        row = own - edge_programs.to(tl.int64) * BLOCK
        begin = count_smaller(key_ptr, number, 1, tl.minimum(row, num_rows))
        tl.store(rowptr_ptr + row, begin.to(tl.int32), mask=row <= num_rows)


@triton.jit(do_not_specialize=["number", "num_rows"], do_not_specialize_on_alignment=["alive_ptr"])
def keep(rowptr_ptr, edge_ptr, alive_ptr, kept_ptr, number, num_rows, BLOCK: tl.constexpr):
    """Writes 1 for each edge of a layout that has a row and is alive, and 0 for the others."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < number
    edge = tl.load(edge_ptr + at, mask=inside, other=0)
    alive = tl.load(alive_ptr + edge, mask=inside, other=0) != 0
    tl.store(kept_ptr + at, (alive & (at < tl.load(rowptr_ptr + num_rows))).to(tl.int32), mask=inside)


@triton.jit
def kept_before(sums_ptr, at, inside, last, MASKED: tl.constexpr):
    """The edges before a place of the layout that are kept."""
    if MASKED:
        return tl.load(sums_ptr + at - 1, mask=inside & (at > 0), other=0)
    return tl.minimum(at, last).to(tl.int32)


@triton.jit(do_not_specialize=["number", "num_rows"])
def add_loops(
    rowptr_ptr,
    col_ptr,
    edge_ptr,
    sums_ptr,
    new_rowptr_ptr,
    new_col_ptr,
    new_edge_ptr,
    number,
    num_rows,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a layout with a self loop after the edges of each row. Edges that are not kept go after the last row.

    The sums tell how many edges are kept up to each place; without a mask they are not read.
    """
    edge_programs = (number + (BLOCK - 1)) // BLOCK
    own = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(rowptr_ptr + num_rows)
    if tl.program_id(0) < edge_programs:
        inside = own < number
        row = count_smaller(rowptr_ptr + 1, num_rows, 1, own + 1)  # the rows that end before the edge, or with it
        before = kept_before(sums_ptr, own, inside, last, MASKED)
        kept = row < num_rows
        total = last
        if MASKED:
            kept = tl.load(sums_ptr + own, mask=inside, other=0) > before
            total = tl.load(sums_ptr + number - 1)
        place = tl.where(kept, before + row, own + (total + num_rows - before))
        tl.store(new_col_ptr + place, tl.load(col_ptr + own, mask=inside, other=0), mask=inside)
        tl.store(new_edge_ptr + place, tl.load(edge_ptr + own, mask=inside, other=0), mask=inside)
    else:
        row = own - edge_programs.to(tl.int64) * BLOCK
        is_row = row < num_rows
        begin = tl.load(rowptr_ptr + row, mask=row <= num_rows, other=0)
        end = tl.load(rowptr_ptr + row + 1, mask=is_row, other=0)
        tl.store(
            new_rowptr_ptr + row,
            kept_before(sums_ptr, begin, row <= num_rows, last, MASKED) + row,
            mask=row <= num_rows,
        )
        place = kept_before(sums_ptr, end, is_row, last, MASKED) + row
        tl.store(new_col_ptr + place, row, mask=is_row)
        tl.store(new_edge_ptr + place, number + row, mask=is_row)
