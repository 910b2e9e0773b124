"""The mean and the variance of each column of a matrix with many rows, in two launches. Imports Triton.

Each program takes a share of the rows. Each of its lanes updates a mean and a sum of squared differences by Welford's
method, so that nothing cancels. Lanes and shares are joined by the formula of Chan, Golub and LeVeque (1979), "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances".
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton.launcher import Kernel, Launch, unit_of
from gnncompile.tile_sizes import MomentsTile


@triton.jit(do_not_specialize=["rows", "share", "units", "across"])
def moments_of_shares(
    matrix_ptr,
    partial_ptr,
    rows,
    share,
    units,
    across,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The mean of each share of the rows, and the sum of squared differences from it, to ``[shares, 2, columns]``.

    Columns come in units of 16 bytes or less, so that Triton knows how many numbers can be read at once.
    """
    columns = units * UNIT
    part = tl.program_id(0) // across
    j = (tl.program_id(0) % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.arange(0, BLOCK_ROWS)
    begin = part * share
    end = tl.minimum(begin + share, rows)
    mean = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    steps = tl.zeros((1, BLOCK_COLUMNS), tl.float32)
    for start in tl.range(begin, end, BLOCK_ROWS, num_stages=STAGES):
        at = start + row
        there = (at < end)[:, None] & (j < columns)[None, :]
        x = tl.load(matrix_ptr + at.to(tl.int64)[:, None] * columns + j[None, :], mask=there, other=0.0).to(tl.float32)
        steps += 1.0
        off = x - mean
        moved = mean + off * (1.0 / steps)
        squares = tl.where(there, squares + off * (x - moved), squares)
        mean = tl.where(there, moved, mean)
    count = ((end - begin - row + BLOCK_ROWS - 1) // BLOCK_ROWS).to(tl.float32)  # rows of each lane
    count = tl.maximum(count, 0.0)[:, None]
    joined = tl.sum(mean * (count / (end - begin).to(tl.float32)), 0)
    off = mean - joined[None, :]
    out = partial_ptr + part.to(tl.int64) * 2 * columns + j
    tl.store(out, joined, mask=j < columns)
    around = tl.where(count > 0, squares + off * off * count, 0.0)
    tl.store(out + columns, tl.sum(around, 0), mask=j < columns)


@triton.jit(do_not_specialize=["rows", "share", "shares", "units"])
def join_moments(
    partial_ptr,
    var_ptr,
    mean_ptr,
    rows,
    share,
    shares,
    units,
    UNIT: tl.constexpr,
    CORRECTION: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean of all rows, and the variance: the sum of squared differences over ``rows - CORRECTION``."""
    columns = units * UNIT
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, SHARES)
    total = tl.zeros((SHARES, BLOCK), tl.float32)
    for start in range(0, shares, SHARES):
        at = start + part
        there = (at < shares)[:, None] & (j < columns)[None, :]
        count = tl.minimum(rows - at * share, share).to(tl.float32)
        means = tl.load(partial_ptr + at.to(tl.int64)[:, None] * 2 * columns + j[None, :], mask=there, other=0.0)
        total += tl.where(there, means * (count / rows.to(tl.float32))[:, None], 0.0)
    whole = rows.to(tl.float32)
    mean = tl.sum(total, 0) * (whole / whole)  # NaN without rows
    squares = tl.zeros((SHARES, BLOCK), tl.float32)
    for start in range(0, shares, SHARES):
        at = start + part
        there = (at < shares)[:, None] & (j < columns)[None, :]
        count = tl.minimum(rows - at * share, share).to(tl.float32)
        place = partial_ptr + at.to(tl.int64)[:, None] * 2 * columns + j[None, :]
        off = tl.load(place, mask=there, other=0.0) - mean[None, :]
        around = tl.load(place + columns, mask=there, other=0.0)
        squares += tl.where(there, around + off * off * count[:, None], 0.0)
    left = tl.maximum(rows - CORRECTION, 0).to(tl.float32)
    tl.store(mean_ptr + j, mean, mask=j < columns)
    tl.store(var_ptr + j, tl.sum(squares, 0) / left, mask=j < columns)


def write_moments(matrix: Tensor, correction: int, var: Tensor, mean: Tensor) -> None:
    """Writes the variance and the mean of each column. Without rows both are NaN, as in torch.

    The order of additions depends on the shape of the matrix, the kind of GPU, and nothing else.

    Args:
        matrix: ``[rows, columns]``, contiguous, float32 or of 16 bits.
        correction: What is taken from the number of rows in the divisor of the variance.
        var: ``[columns]``, float32, contiguous.
        mean: The same.
    """
    rows, columns = matrix.shape
    if rows >= _MOST:
        for out, found in zip((var, mean), torch.var_mean(matrix.float(), 0, correction=correction), strict=True):
            out.copy_(found)
        return
    plan = _plan(matrix.dtype, rows, columns, correction, tuning.MOMENTS, tuning.TILES.processors)
    partial = torch.empty((plan.shares, 2, columns), dtype=torch.float32, device=matrix.device)
    plan.of_shares(matrix, partial)
    plan.joined(partial, var, mean)


_MOST = 2**31
"""Limit of rows for the kernels, which count them in int32."""


class _Plan(NamedTuple):
    """The number of shares, and both launches."""

    shares: int
    of_shares: Launch
    joined: Launch


@lru_cache(maxsize=1024)
def _plan(dtype: torch.dtype, rows: int, columns: int, correction: int, table: MomentsTile, processors: int) -> _Plan:
    across, unit = triton.cdiv(columns, table.columns), unit_of(dtype, columns)
    share = table.rows * max(1, triton.cdiv(rows * across, table.rows * table.programs * processors))
    shares, units, wide = triton.cdiv(rows, share), columns // unit, triton.cdiv(columns, table.joined[1])
    of_shares, joined = _kernels(dtype, table.warps)
    return _Plan(
        shares,
        Launch(
            of_shares, shares * across, (rows, share, units, across), (unit, table.rows, table.columns, table.stages)
        ),
        Launch(joined, wide, (rows, share, shares, units), (unit, correction, *table.joined)),
    )


@lru_cache(maxsize=16)
def _kernels(dtype: torch.dtype, warps: int) -> tuple[Kernel, Kernel]:
    """Returns the kernels for matrices of a dtype."""
    return Kernel(moments_of_shares, num_warps=warps), Kernel(join_moments, num_warps=warps)
