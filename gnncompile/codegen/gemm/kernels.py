"""Triton kernels for matrix products on tensor cores.

Float32 weights that many rows meet are split beforehand: see :mod:`gnncompile.codegen.gemm.scaled`. If there are few
rows, programs split both factors as in :mod:`gnncompile.codegen.gemm.parts`, which saves a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnncompile.codegen.gemm.parts import dot, parts, plus_parts, sum_of_terms
from gnncompile.codegen.gemm.scaled import power_of_parts, scaled_product


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
    if RIGHT == "parts":
        power = power_of_parts(right_ptr, size)
    small = tl.zeros_like(total)
    for start in range(0, BLOCKS * DEPTH, DEPTH):
        down = start + k
        mask = exists if WHOLE else exists & (down[None, :] < depth)
        x = tl.load(left + start, mask=mask, other=0.0)
        if RIGHT == "parts":
            y = right_ptr + down[:, None] * padded_columns + column[None, :]
            total += scaled_product(x, tl.load(y), tl.load(y + size), power)
        else:
            if RIGHT == "rows":
                y = right_ptr + down[:, None] * columns + column[None, :]
            else:
                y = right_ptr + down[:, None] + column[None, :] * depth
            there = (down[:, None] < depth) & (column[None, :] < columns)
            weight = tl.load(y, mask=there, other=0.0)
            if x.dtype == tl.float32:
                y_high, y_middle, y_low = parts(weight)
                x_high, x_middle, x_low = parts(x)
                total, small = plus_parts(total, small, x_high, x_middle, x_low, y_high, y_middle, y_low)
            else:
                total = dot(x, weight, total)
    if RIGHT != "parts" and left_ptr.dtype.element_ty == tl.float32:
        total = sum_of_terms(total, small)
    return total


@triton.jit
def tile_of_products(
    left_ptr,
    right_ptr,
    other_left_ptr,
    other_right_ptr,
    row,
    column,
    rows,
    depth,
    other_depth,
    columns,
    padded,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    RIGHT: tl.constexpr,
    TWO: tl.constexpr,
    OTHER_BLOCKS: tl.constexpr,
    OTHER_WHOLE: tl.constexpr,
    OTHER_RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Some rows and columns of ``left @ right``, or of the sum of two products, in float32; see :func:`by_rows`."""
    exists = row[:, None] < rows
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = add_product(
        total, left_ptr, right_ptr, row, column, exists, depth, columns, padded, BLOCKS, WHOLE, RIGHT, DEPTH
    )
    if TWO:
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
    return total


@triton.jit(do_not_specialize=["rows", "depth_units", "other_depth_units", "units", "across"])
def by_rows(
    left_ptr,
    right_ptr,
    other_left_ptr,
    other_right_ptr,
    added_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    out_ptr,
    other_out_ptr,
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
    EPILOGUE: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``left @ right + added``: ``[rows, depth] @ [depth, columns]``. TWO: plus the product of two other matrices.

    Depths and columns come in units of 16 bytes or less, so that Triton knows how many numbers can be read at once; the
    size of the parts comes in blocks.
    WHOLE: depth is a multiple of DEPTH. RIGHT: the right matrix is there in "parts", or lies in memory by "rows" or by
    "columns". ADDED: "nothing", "row" (``[columns]``) or "matrix". RELU: zeros take the place of negative numbers.
    EPILOGUE: a function that gets the result and writes it: :func:`write`, :func:`write_gated`, or one of
    :mod:`gnncompile.codegen.gemm.arithmetic`. It may read up to three tensors, and write two. MOST: the most columns
    that it gets at a time.
    """
    columns = units * UNIT
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    start = (tl.program_id(0) % across) * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    total = tile_of_products(
        left_ptr,
        right_ptr,
        other_left_ptr,
        other_right_ptr,
        row,
        column,
        rows,
        depth_units * DEPTH_UNIT,
        other_depth_units * OTHER_DEPTH_UNIT,
        columns,
        across * COLUMNS,
        BLOCKS,
        WHOLE,
        RIGHT,
        TWO,
        OTHER_BLOCKS,
        OTHER_WHOLE,
        OTHER_RIGHT,
        ROWS,
        COLUMNS,
        DEPTH,
    )
    finish(
        total,
        added_ptr,
        first_ptr,
        second_ptr,
        third_ptr,
        out_ptr,
        other_out_ptr,
        row,
        start,
        rows,
        columns,
        ADDED,
        RELU,
        EPILOGUE,
        MOST,
    )


@triton.jit
def write(product, first_ptr, second_ptr, third_ptr, out_ptr, other_out_ptr, row, column, rows, columns):
    """An epilogue: writes the product."""
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out_ptr + at, product.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_gated(product, gate_ptr, second_ptr, third_ptr, out_ptr, other_out_ptr, row, column, rows, columns):
    """An epilogue: writes zeros where a matrix is not positive, and the product elsewhere."""
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, tl.where(gate <= 0, 0.0, product).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish(
    total,
    added_ptr,
    first_ptr,
    second_ptr,
    third_ptr,
    out_ptr,
    other_out_ptr,
    row,
    start,
    rows,
    columns,
    ADDED: tl.constexpr,
    RELU: tl.constexpr,
    EPILOGUE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Adds what is added to a tile of products, and calls an epilogue.

    What an epilogue reads might not fit into registers for all columns, so this is done for MOST columns at a time.
    Start is the first column of the tile. ADDED and RELU: see :func:`by_rows`. EPILOGUE: a function such as
    :func:`write`, which gets the results.
    """
    wide: tl.constexpr = total.shape[1]
    if wide > MOST:
        half: tl.constexpr = wide // 2
        # In the layout of a product, no number is moved.
        both = tl.split(tl.permute(tl.reshape(total, (total.shape[0], 2, half)), (0, 2, 1)))
        for k in tl.static_range(2):
            finish(
                both[k],
                added_ptr,
                first_ptr,
                second_ptr,
                third_ptr,
                out_ptr,
                other_out_ptr,
                row,
                start + k * half,
                rows,
                columns,
                ADDED,
                RELU,
                EPILOGUE,
                MOST,
            )
    else:
        column = start + tl.arange(0, wide)
        if ADDED == "row":
            total += tl.load(added_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        if ADDED == "matrix":
            at = row[:, None].to(tl.int64) * columns + column[None, :]
            exists = (row[:, None] < rows) & (column[None, :] < columns)
            total += tl.load(added_ptr + at, mask=exists, other=0.0).to(tl.float32)
        if RELU:
            total = tl.where(total < 0, 0.0, total)
        EPILOGUE(total, first_ptr, second_ptr, third_ptr, out_ptr, other_out_ptr, row, column, rows, columns)


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
