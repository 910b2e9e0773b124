"""Triton kernels for matrix products on tensor cores. See :mod:`gnncompile.codegen.gemm.parts` for float32."""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.gemm.parts import dot, parts, plus_parts, sum_of_terms


@triton.jit(do_not_specialize=["depth", "columns", "pitch", "padded_depth", "padded_columns"])
def split(
    matrix_ptr,
    parts_ptr,
    depth,
    columns,
    pitch,
    padded_depth,
    padded_columns,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a matrix ``[depth, columns]`` in parts, ``[3, padded_depth, padded_columns]``, with zeros around it.

    Pitch is the distance of two rows in memory. TRANSPOSED: columns lie together, and pitch is the distance of two.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // padded_columns, at % padded_columns
    source = column.to(tl.int64) * pitch + row if TRANSPOSED else row.to(tl.int64) * pitch + column
    x = tl.load(matrix_ptr + source, mask=(row < depth) & (column < columns), other=0.0)
    high, middle, low = parts(x)
    size = padded_depth * padded_columns
    inside = at < size
    tl.store(parts_ptr + at, high, mask=inside)
    tl.store(parts_ptr + size + at, middle, mask=inside)
    tl.store(parts_ptr + 2 * size + at, low, mask=inside)


@triton.jit
def add_product(
    total,
    left_ptr,
    right_ptr,
    row,
    column,
    exists,
    depth,
    columns,
    padded_columns,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    RIGHT: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``total + left @ right`` of some rows and columns; see :func:`by_rows`."""
    k = tl.arange(0, DEPTH)
    left = left_ptr + row[:, None].to(tl.int64) * depth + k[None, :]
    size = BLOCKS * DEPTH * padded_columns
    small = tl.zeros_like(total)
    for start in range(0, BLOCKS * DEPTH, DEPTH):
        down = start + k
        mask = exists if WHOLE else exists & (down[None, :] < depth)
        x = tl.load(left + start, mask=mask, other=0.0)
        if RIGHT == "parts":
            y = right_ptr + down[:, None] * padded_columns + column[None, :]
            y_high, y_middle, y_low = tl.load(y), tl.load(y + size), tl.load(y + 2 * size)
        else:
            if RIGHT == "rows":
                y = right_ptr + down[:, None] * columns + column[None, :]
            else:
                y = right_ptr + down[:, None] + column[None, :] * depth
            there = (down[:, None] < depth) & (column[None, :] < columns)
            weight = tl.load(y, mask=there, other=0.0)
            if weight.dtype == tl.float32:
                y_high, y_middle, y_low = parts(weight)
        if x.dtype == tl.float32:
            x_high, x_middle, x_low = parts(x)
            total, small = plus_parts(total, small, x_high, x_middle, x_low, y_high, y_middle, y_low)
        else:
            total = dot(x, weight, total)
    if left_ptr.dtype.element_ty == tl.float32:
        total = sum_of_terms(total, small)
    return total


@triton.jit(do_not_specialize=["rows", "depth_units", "other_depth_units", "units", "across"])
def by_rows(
    left_ptr,
    right_ptr,
    other_left_ptr,
    other_right_ptr,
    added_ptr,
    gate_ptr,
    out_ptr,
    rows,
    depth_units,
    other_depth_units,
    units,
    across,
    UNIT: tl.constexpr,
    DEPTH_UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    RIGHT: tl.constexpr,
    TWO: tl.constexpr,
    OTHER_DEPTH_UNIT: tl.constexpr,
    OTHER_BLOCKS: tl.constexpr,
    OTHER_WHOLE: tl.constexpr,
    OTHER_RIGHT: tl.constexpr,
    ADDED: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``left @ right + added``: ``[rows, depth] @ [depth, columns]``. TWO: plus the product of two other matrices.

    Depths and columns come in units of 16 bytes or less, so that Triton knows how many numbers can be read at once; the
    size of the parts comes in blocks.
    WHOLE: depth is a multiple of DEPTH. RIGHT: the right matrix is there in "parts", or lies in memory by "rows" or by
    "columns". ADDED: "nothing", "row" (``[columns]``) or "matrix". GATED: there is a matrix, and where it is not
    positive, zeros are written.
    """
    columns, padded = units * UNIT, across * COLUMNS
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    exists = row[:, None] < rows
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    depth = depth_units * DEPTH_UNIT
    total = add_product(
        total, left_ptr, right_ptr, row, column, exists, depth, columns, padded, BLOCKS, WHOLE, RIGHT, DEPTH
    )
    if TWO:
        other_depth = other_depth_units * OTHER_DEPTH_UNIT
        total = add_product(
            total,
            other_left_ptr,
            other_right_ptr,
            row,
            column,
            exists,
            other_depth,
            columns,
            padded,
            OTHER_BLOCKS,
            OTHER_WHOLE,
            OTHER_RIGHT,
            DEPTH,
        )
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = exists & (column[None, :] < columns)
    if ADDED == "row":
        total += tl.load(added_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if ADDED == "matrix":
        total += tl.load(added_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        total = tl.where(total < 0, 0.0, total)
    if GATED:
        total = tl.where(tl.load(gate_ptr + at, mask=mask, other=0.0) <= 0, 0.0, total)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "depth_units", "units", "across"])
def side_by_side(
    left_ptr,
    first_right_ptr,
    second_right_ptr,
    third_right_ptr,
    fourth_right_ptr,
    first_added_ptr,
    second_added_ptr,
    third_added_ptr,
    fourth_added_ptr,
    first_out_ptr,
    second_out_ptr,
    third_out_ptr,
    fourth_out_ptr,
    rows,
    depth_units,
    units,
    across,
    MANY: tl.constexpr,
    UNIT: tl.constexpr,
    DEPTH_UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    RIGHT: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``left @ right + added`` of one left matrix and up to four others of one shape, each to a result of its own.

    MANY: how many there are. Programs that read the same rows follow each other, so that these stay in the cache.
    ADDED: bit `k` tells whether a row is added to product `k`. For the other arguments see :func:`by_rows`.
    """
    columns, depth = units * UNIT, depth_units * DEPTH_UNIT
    which = tl.program_id(0) % MANY
    at = tl.program_id(0) // MANY
    right_ptr, added_ptr, out_ptr = first_right_ptr, first_added_ptr, first_out_ptr
    if MANY > 1:
        right_ptr = tl.where(which == 1, second_right_ptr, right_ptr)
        added_ptr = tl.where(which == 1, second_added_ptr, added_ptr)
        out_ptr = tl.where(which == 1, second_out_ptr, out_ptr)
    if MANY > 2:
        right_ptr = tl.where(which == 2, third_right_ptr, right_ptr)
        added_ptr = tl.where(which == 2, third_added_ptr, added_ptr)
        out_ptr = tl.where(which == 2, third_out_ptr, out_ptr)
    if MANY > 3:
        right_ptr = tl.where(which == 3, fourth_right_ptr, right_ptr)
        added_ptr = tl.where(which == 3, fourth_added_ptr, added_ptr)
        out_ptr = tl.where(which == 3, fourth_out_ptr, out_ptr)
    row = (at // across) * ROWS + tl.arange(0, ROWS)
    column = (at % across) * COLUMNS + tl.arange(0, COLUMNS)
    exists = row[:, None] < rows
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = add_product(
        total, left_ptr, right_ptr, row, column, exists, depth, columns, across * COLUMNS, BLOCKS, WHOLE, RIGHT, DEPTH
    )
    if ADDED:
        has_row = (ADDED >> which) % 2 > 0
        total += tl.load(added_ptr + column, mask=has_row & (column < columns), other=0.0).to(tl.float32)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=exists & (column[None, :] < columns))


@triton.jit
def sum_of_share(
    left_ptr,
    right_ptr,
    partial_ptr,
    size,
    tile,
    part,
    rows,
    share,
    depth,
    columns,
    SUMS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """A tile of ``left.T @ right`` of one share of the rows, to the same part of ``[shares, size]``.

    SUMS: behind it the sum of left's rows.
    """
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    i = (tile // across) * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
    j = (tile % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.arange(0, BLOCK_ROWS)
    begin = part * share
    end = tl.minimum(begin + share, rows)
    total = tl.zeros((BLOCK_DEPTH, BLOCK_COLUMNS), tl.float32)
    small = tl.zeros((BLOCK_DEPTH, BLOCK_COLUMNS), tl.float32)
    summed = tl.zeros((BLOCK_DEPTH, BLOCK_ROWS), tl.float32)
    for start in range(begin, end, BLOCK_ROWS):
        here = start + row
        at = here.to(tl.int64)
        # The left matrix is read as its transpose: the other way around, the transposed copy would be made of words.
        x = tl.load(
            left_ptr + at[None, :] * depth + i[:, None], mask=(here < end)[None, :] & (i < depth)[:, None], other=0.0
        )
        y = tl.load(
            right_ptr + at[:, None] * columns + j[None, :],
            mask=(here < end)[:, None] & (j < columns)[None, :],
            other=0.0,
        )
        if x.dtype == tl.float32:
            x_high, x_middle, x_low = parts(x)
            y_high, y_middle, y_low = parts(y)
            total, small = plus_parts(total, small, x_high, x_middle, x_low, y_high, y_middle, y_low)
        else:
            total = dot(x, y, total)
        if SUMS:
            summed += x.to(tl.float32)
    if left_ptr.dtype.element_ty == tl.float32:
        total = sum_of_terms(total, small)
    out = partial_ptr + part.to(tl.int64) * size
    tl.store(out + i[:, None] * columns + j[None, :], total, mask=(i < depth)[:, None] & (j < columns)[None, :])
    if SUMS:  # noqa: SIM102 (a constant and a tensor)
        if tile % across == 0:
            tl.store(out + depth * columns + i, tl.sum(summed, 1), mask=i < depth)


@triton.jit(
    do_not_specialize=["rows", "share", "depth_units", "column_units", "other_depth_units", "other_column_units"]
)
def over_rows(
    left_ptr,
    right_ptr,
    other_left_ptr,
    other_right_ptr,
    partial_ptr,
    rows,
    share,
    depth_units,
    column_units,
    other_depth_units,
    other_column_units,
    TWO: tl.constexpr,
    DEPTH_UNIT: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    SUMS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    OTHER_DEPTH_UNIT: tl.constexpr,
    OTHER_COLUMN_UNIT: tl.constexpr,
    OTHER_SUMS: tl.constexpr,
    OTHER_DEPTH: tl.constexpr,
    OTHER_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``left.T @ right`` of each share of the rows: ``[rows, depth].T @ [rows, columns]``, to ``[shares, ...]``.

    SUMS: behind it the sum of the left matrix's rows, ``[depth]``. TWO: behind both the same of two other matrices.
    Widths come in units of 16 bytes or less; DEPTH, COLUMNS and ROWS are those of a tile.
    """
    depth, columns = depth_units * DEPTH_UNIT, column_units * COLUMN_UNIT
    tiles = tl.cdiv(columns, COLUMNS) * tl.cdiv(depth, DEPTH)
    size = depth * columns + depth if SUMS else depth * columns
    at = tl.program_id(0)
    if TWO:
        other_depth = other_depth_units * OTHER_DEPTH_UNIT
        other_columns = other_column_units * OTHER_COLUMN_UNIT
        all_tiles = tiles + tl.cdiv(other_columns, OTHER_COLUMNS) * tl.cdiv(other_depth, OTHER_DEPTH)
        behind = partial_ptr + size
        size += other_depth * other_columns + other_depth if OTHER_SUMS else other_depth * other_columns
        tile, part = at % all_tiles, at // all_tiles
        if tile < tiles:
            sum_of_share(
                left_ptr,
                right_ptr,
                partial_ptr,
                size,
                tile,
                part,
                rows,
                share,
                depth,
                columns,
                SUMS,
                DEPTH,
                COLUMNS,
                ROWS,
            )
        else:
            sum_of_share(
                other_left_ptr,
                other_right_ptr,
                behind,
                size,
                tile - tiles,
                part,
                rows,
                share,
                other_depth,
                other_columns,
                OTHER_SUMS,
                OTHER_DEPTH,
                OTHER_COLUMNS,
                ROWS,
            )
    else:
        tile, part = at % tiles, at // tiles
        sum_of_share(
            left_ptr, right_ptr, partial_ptr, size, tile, part, rows, share, depth, columns, SUMS, DEPTH, COLUMNS, ROWS
        )


@triton.jit(do_not_specialize=["rows", "fours", "share"])
def sums(matrix_ptr, partial_ptr, rows, fours, share, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The sum of each share of the rows of ``[rows, columns]``, to ``[shares, columns]``; columns come in fours."""
    columns = fours * 4
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    part = tl.program_id(0) // across
    j = (tl.program_id(0) % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.arange(0, BLOCK_ROWS)
    begin = part * share
    end = tl.minimum(begin + share, rows)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(begin, end, BLOCK_ROWS):
        here = start + row
        at = here.to(tl.int64)[:, None] * columns + j[None, :]
        total += tl.load(matrix_ptr + at, mask=(here < end)[:, None] & (j < columns)[None, :], other=0.0)
    tl.store(partial_ptr + part * columns + j, tl.sum(total, 0), mask=j < columns)


@triton.jit(do_not_specialize=["shares", "units", "second_at", "third_at", "fourth_at"])
def join(
    partial_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    fourth_ptr,
    shares,
    units,
    second_at,
    third_at,
    fourth_at,
    UNIT: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over all shares, ``[shares, size]``, to four results, one behind the other; some may be empty.

    The size, and where the results begin, come in units of 4, 2 or 1.
    """
    size, second, third, fourth = units * UNIT, second_at * UNIT, third_at * UNIT, fourth_at * UNIT
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.arange(0, SHARES)
    total = tl.zeros((SHARES, BLOCK), tl.float32)
    for start in range(0, shares, SHARES):
        here = start + share
        place = here.to(tl.int64)[:, None] * size + at[None, :]
        total += tl.load(partial_ptr + place, mask=(here < shares)[:, None] & (at < size)[None, :], other=0.0)
    summed = tl.sum(total, 0).to(first_ptr.dtype.element_ty)
    tl.store(first_ptr + at, summed, mask=at < second)
    tl.store(second_ptr + (at - second), summed, mask=(at >= second) & (at < third))
    tl.store(third_ptr + (at - third), summed, mask=(at >= third) & (at < fourth))
    tl.store(fourth_ptr + (at - fourth), summed, mask=(at >= fourth) & (at < size))
