"""Triton kernels for products and sums over many rows. See :mod:`gnncompile.codegen.gemm.parts` for float32."""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.gemm.parts import dot, parts, plus_parts, sum_of_terms


@triton.jit
def sum_of_share(
    left_ptr,
    right_ptr,
    second_ptr,
    partial_ptr,
    size,
    tile,
    part,
    rows,
    share,
    depth,
    columns,
    SUMS: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """A tile of ``left.T @ right`` of one share of the rows, to the same part of ``[shares, size]``.

    SUMS: behind it the sum of left's rows. FACTOR: None, or a function of :mod:`gnncompile.codegen.gemm.arithmetic`
    that computes the right matrix, from `right_ptr` and `second_ptr`.
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
        if FACTOR is None:
            y = tl.load(
                right_ptr + at[:, None] * columns + j[None, :],
                mask=(here < end)[:, None] & (j < columns)[None, :],
                other=0.0,
            )
        else:
            y = FACTOR(right_ptr, second_ptr, here, j, end, columns)
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
    second_ptr,
    other_left_ptr,
    other_right_ptr,
    other_second_ptr,
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
    FACTOR: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    OTHER_DEPTH_UNIT: tl.constexpr,
    OTHER_COLUMN_UNIT: tl.constexpr,
    OTHER_SUMS: tl.constexpr,
    OTHER_FACTOR: tl.constexpr,
    OTHER_DEPTH: tl.constexpr,
    OTHER_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``left.T @ right`` of each share of the rows: ``[rows, depth].T @ [rows, columns]``, to ``[shares, ...]``.

    SUMS: behind it the sum of the left matrix's rows, ``[depth]``. FACTOR: see :func:`sum_of_share`. TWO: behind both
    the same of two other matrices.
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
                second_ptr,
                partial_ptr,
                size,
                tile,
                part,
                rows,
                share,
                depth,
                columns,
                SUMS,
                FACTOR,
                DEPTH,
                COLUMNS,
                ROWS,
            )
        else:
            sum_of_share(
                other_left_ptr,
                other_right_ptr,
                other_second_ptr,
                behind,
                size,
                tile - tiles,
                part,
                rows,
                share,
                other_depth,
                other_columns,
                OTHER_SUMS,
                OTHER_FACTOR,
                OTHER_DEPTH,
                OTHER_COLUMNS,
                ROWS,
            )
    else:
        tile, part = at % tiles, at // tiles
        sum_of_share(
            left_ptr,
            right_ptr,
            second_ptr,
            partial_ptr,
            size,
            tile,
            part,
            rows,
            share,
            depth,
            columns,
            SUMS,
            FACTOR,
            DEPTH,
            COLUMNS,
            ROWS,
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
