"""The mean and the variance of each column of a matrix with many rows, in two launches. Imports Triton.

Each program takes a share of the rows. It sums differences from the mean of its first rows, so that nothing cancels.
The shares are joined by the formula of Chan, Golub and LeVeque (1979), "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances".
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.device import ALIGNMENT
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
    here = (begin + row < end)[:, None] & (j < columns)[None, :]
    first = tl.load(matrix_ptr + (begin + row).to(tl.int64)[:, None] * columns + j[None, :], mask=here, other=0.0)
    pivot = tl.sum(first.to(tl.float32), 0) / tl.minimum(end - begin, BLOCK_ROWS)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in tl.range(begin, end, BLOCK_ROWS, num_stages=STAGES):
        at = start + row
        there = (at < end)[:, None] & (j < columns)[None, :]
        x = tl.load(matrix_ptr + at.to(tl.int64)[:, None] * columns + j[None, :], mask=there, other=0.0)
        off = tl.where(there, x.to(tl.float32) - pivot[None, :], 0.0)
        total += off
        squares += off * off
    count = (end - begin).to(tl.float32)
    off = tl.sum(total, 0) / count
    around = tl.sum(squares, 0) - off * off * count
    out = partial_ptr + part.to(tl.int64) * 2 * columns + j
    tl.store(out, pivot + off, mask=j < columns)
    tl.store(out + columns, tl.where(around < 0, 0.0, around), mask=j < columns)


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
        total += tl.where(there, means * count[:, None], 0.0)
    mean = tl.sum(total, 0) / rows.to(tl.float32)
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

    The order of additions depends only on the shape of the matrix.

    Args:
        matrix: ``[rows, columns]``, contiguous, float32 or of 16 bits.
        correction: What is taken from the number of rows in the divisor of the variance.
        var: ``[columns]``, float32, contiguous.
        mean: The same.
    """
    rows, columns = matrix.shape
    plan = _plan(matrix.dtype, rows, columns, correction, tuning.MOMENTS, tuning.TILES.processors)
    partial = torch.empty((plan.shares, 2, columns), dtype=torch.float32, device=matrix.device)
    of_shares, programs, numbers, constants = plan.first
    of_shares(programs, (matrix, partial), numbers, constants)
    joined, programs, numbers, constants = plan.second
    joined(programs, (partial, var, mean), numbers, constants)


_Launch = tuple[Kernel, int, tuple[int, ...], tuple[Any, ...]]
"""A launch without its tensors: the kernel, its programs, its numbers and its constants."""


class _Plan(NamedTuple):
    """The number of shares, and both launches."""

    shares: int
    first: _Launch
    second: _Launch


@lru_cache(maxsize=1024)
def _plan(dtype: torch.dtype, rows: int, columns: int, correction: int, table: MomentsTile, processors: int) -> _Plan:
    across, unit = triton.cdiv(columns, table.columns), gcd(ALIGNMENT // dtype.itemsize, columns)
    share = table.rows * max(1, triton.cdiv(rows * across, table.rows * table.programs * processors))
    shares, units, wide = triton.cdiv(rows, share), columns // unit, triton.cdiv(columns, table.joined[1])
    of_shares, joined = _kernels(dtype, table.warps)
    return _Plan(
        shares,
        (of_shares, shares * across, (rows, share, units, across), (unit, table.rows, table.columns, table.stages)),
        (joined, wide, (rows, share, shares, units), (unit, correction, *table.joined)),
    )


@lru_cache(maxsize=16)
def _kernels(dtype: torch.dtype, warps: int) -> tuple[Kernel, Kernel]:
    """Returns the kernels for matrices of a dtype."""
    return Kernel(moments_of_shares, num_warps=warps), Kernel(join_moments, num_warps=warps)
