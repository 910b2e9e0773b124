"""Launches the kernels of :mod:`gnncompile.codegen.triton_products`. Imports Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gnncompile.codegen import triton_products as kernels
from gnncompile.codegen.triton_launcher import Kernel

_BLOCK = 1024
"""Elements that a program splits."""

_PROCESSORS = 132
"""Multiprocessors of the GPUs that these kernels were tuned on."""

_TILE = 4096
"""Elements that a program of :func:`sums` reads at a time."""

_JOINED = 128, 16
"""Of how many shares, and how many elements of each, a program puts together at a time."""

_FEW = 2**14
"""Most rows for which each program splits the weight itself: a launch more costs as much as products of so few. With
64 channels, 10,000 rows take 4.9 us in this way and 6.7 us in the other, the library 6.9 (H200); 30,000 take 9."""

_split = Kernel(kernels.split, num_warps=4)
_sums = Kernel(kernels.sums, num_warps=4)
_join = Kernel(kernels.join, num_warps=4)


def by_rows(left: Tensor, right: Tensor, added: Tensor | None, gate: Tensor | None, relu: bool, out: Tensor) -> None:
    """Writes ``left @ right + added``.

    Args:
        left: float32 ``[rows, depth]``, contiguous; depth is a multiple of 4.
        right: float32 ``[depth, columns]``, or a transposed view of a contiguous matrix.
        added: float32 ``[columns]`` or ``[rows, columns]``, contiguous; may be `out`.
        gate: float32 ``[rows, columns]``, contiguous: zeros are written where it is not positive.
        relu: Whether to write zeros for what is negative.
        out: float32 ``[rows, columns]``, contiguous.
    """
    rows, depth = left.shape
    columns = right.size(1)
    transposed = not right.is_contiguous()
    if transposed and not right.t().is_contiguous():
        right, transposed = right.contiguous(), False
    tile = kernels.FEW if rows <= _FEW else kernels.MANY
    of = _shape(depth, columns, tile)
    lies = "columns" if transposed else "rows"
    if tile is kernels.MANY:
        weight, right, lies = right, torch.empty(of.parts, dtype=torch.bfloat16, device=left.device), "parts"
        _split(of.splitters, (weight, right), (depth, columns, *of.parts[1:]), (transposed, _BLOCK))
    kind = "nothing" if added is None else "row" if added.dim() == 1 else "matrix"
    _by_rows(tile)(
        -(-rows // tile.rows) * of.across,
        (left, right, out if added is None else added, out if gate is None else gate, out),
        (rows, depth // 4, columns // of.unit, of.across),
        (*of.constants, lies, kind, relu, gate is not None, tile.rows, tile.columns, tile.depth),
    )


@lru_cache(maxsize=2)
def _by_rows(tile: kernels.Tile) -> Kernel:
    return Kernel(kernels.by_rows, num_warps=kernels.WARPS, num_stages=tile.stages)


@dataclass(frozen=True)
class _Shape:
    """What follows from the size of a weight.

    Attributes:
        parts: Size of its parts.
        splitters: Programs that write them.
        across: Programs side by side.
        unit: What divides its columns.
        constants: Blocks one above the other, whether they are full, and the unit.
    """

    parts: tuple[int, int, int]
    splitters: int
    across: int
    unit: int
    constants: tuple[int, bool, int]


@lru_cache(maxsize=4096)
def _shape(depth: int, columns: int, tile: kernels.Tile) -> _Shape:
    blocks, across = -(-depth // tile.depth), -(-columns // tile.columns)
    high, wide, unit = blocks * tile.depth, across * tile.columns, 1 if columns % 4 else 4
    return _Shape((3, high, wide), -(-high * wide // _BLOCK), across, unit, (blocks, depth == high, unit))


def over_rows(left: Tensor, right: Tensor, out: Tensor, sums: Tensor | None) -> None:
    """Writes ``left.T @ right``, the same for the same numbers of rows and columns on every call.

    Args:
        left: float32 ``[rows, depth]``, contiguous; depth is a multiple of 4.
        right: float32 ``[rows, columns]``, likewise.
        out: float32 ``[depth, columns]``, contiguous.
        sums: float32 ``[depth]``, contiguous, for ``left.sum(0)``.
    """
    rows, depth = left.shape
    columns = right.size(1)
    high, wide = _block(depth), _block(columns)
    tiles = -(-depth // high) * -(-columns // wide)
    # Narrow tiles leave room for several programs on a multiprocessor.
    programs = _PROCESSORS * {128: 1, 96: 2, 64: 3}[(high + wide) // 2]
    share, shares = _shares(rows, programs // tiles, kernels.SUMMED)
    size = depth * columns + (0 if sums is None else depth)
    partial = left.new_empty((shares, size))
    _over_rows(8 if high + wide == 256 else 4)(
        tiles * shares,
        (left, right, partial),
        (rows, depth // 4, columns // 4, share),
        (sums is not None, high, wide, kernels.SUMMED),
    )
    _joined(partial, out, out if sums is None else sums)


def sums(rows: Tensor, out: Tensor) -> None:
    """Writes ``rows.sum(0)``, the same for the same numbers of rows and columns on every call.

    Args:
        rows: float32 ``[rows, columns]``, contiguous; columns are a multiple of 4.
        out: float32 ``[columns]``, contiguous.
    """
    count, columns = rows.shape
    wide = _block(columns)
    high = _TILE // wide
    across = -(-columns // wide)
    share, shares = _shares(count, 2 * _PROCESSORS // across, high)
    partial = rows.new_empty((shares, columns))
    _sums(shares * across, (rows, partial), (count, columns // 4, share), (high, wide))
    _joined(partial, out, out)


def _joined(partial: Tensor, first: Tensor, second: Tensor) -> None:
    """Writes the sum over all shares, ``[shares, size]``: its beginning to `first`, what is behind it to `second`."""
    shares, size = partial.shape
    programs = -(-size // _JOINED[1])
    _join(programs, (partial, first, second), (shares, size // 4, first.numel() // 4), _JOINED)


@lru_cache(maxsize=2)
def _over_rows(warps: int) -> Kernel:
    return Kernel(kernels.over_rows, num_warps=warps, num_stages=kernels.STAGES)


def _shares(rows: int, most: int, block: int) -> tuple[int, int]:
    """Rows of a share, a multiple of `block`, and how many shares there are, one or at most so many."""
    share = -(-rows // (max(most, 1) * block)) * block
    return share, -(-rows // share)


def _block(columns: int) -> int:
    return 128 if columns > 64 else 64
