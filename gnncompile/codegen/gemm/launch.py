"""Launches the kernels of :mod:`gnncompile.codegen.gemm.kernels`. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile.codegen.gemm import kernels
from gnncompile.codegen.triton.launcher import Kernel

_BLOCK = 1024
"""Number of elements that a program of ``kernels.split`` splits."""

_PROCESSORS = 132
"""Number of multiprocessors of the GPUs that these kernels were tuned on."""

_TILE = 4096
"""Number of elements that a program of :func:`sums` reads per step."""

_JOINED = 128, 16
"""Number of shares that a program of ``kernels.join`` adds up per step, and number of elements of each share."""

_LEAST = 3, 5
"""Least number of steps per share in :func:`over_rows`, for one product and for two. A share has fewer steps if
otherwise fewer than :data:`_ENOUGH` shares would be left."""

_ENOUGH = 60
"""Least number of shares to which :data:`_LEAST` may reduce the shares. With 10,000 rows and 64 channels, one product
takes 10.0 us in 105 shares and 10.5 us in 157. Two products take 12.8 us and 2.0 MiB in 63 shares, 12.7 us and 5.0 MiB
in 157. With 2,708 rows, 43 shares take 8.3 us and 22 shares 10.7 us (H200)."""

_FEW = 2**14
"""Largest number of rows for which each program splits the weight itself. For so few rows, the extra launch of
``kernels.split`` costs as much as the product. With 64 channels and 10,000 rows, this way takes 4.9 us, a launch of
``kernels.split`` and the product 6.7 us, the library 6.9 us (H200); 30,000 rows take 9 us."""

_split = Kernel(kernels.split, num_warps=4)
_sums = Kernel(kernels.sums, num_warps=4)
_join = Kernel(kernels.join, num_warps=4)


Factors = tuple[Tensor, Tensor]
"""The factors of a product, a matrix and a weight. The matrix is float32 ``[rows, depth]``, contiguous, with a depth
that is a multiple of 4. The weight is float32 ``[depth, columns]``, contiguous or the transposed view of a contiguous
matrix; another weight is copied.
"""


def by_rows(
    one: Factors, other: Factors | None, added: Tensor | None, gate: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Writes a product, or the sum of two products, plus `added`, to `out`.

    Args:
        one: The factors of the product.
        other: The factors of a second product, or None.
        added: float32 ``[columns]`` or ``[rows, columns]``, contiguous; may be `out`. None adds nothing.
        gate: float32 ``[rows, columns]``, contiguous. Zeros are written where `gate` is not positive.
        relu: Whether to write zeros in place of negative results.
        out: float32 ``[rows, columns]``, contiguous.
    """
    rows, columns = out.shape
    tile = kernels.TILE_OF_FEW if rows <= _FEW else kernels.TILE_OF_MANY
    terms = [_term(*factors, tile) for factors in ((one,) if other is None else (one, other))]
    first, last = terms[0], terms[-1]
    across, unit = -(-columns // tile.columns), 1 if columns % 4 else 4
    kind = "nothing" if added is None else "row" if added.dim() == 1 else "matrix"
    ends = kind, relu, gate is not None
    _by_rows(tile)(
        -(-rows // tile.rows) * across,
        (*first.matrices, *last.matrices, out if added is None else added, out if gate is None else gate, out),
        (rows, first.depth // 4, last.depth // 4, columns // unit, across),
        (unit, *first.constants, other is not None, *last.constants, *ends, tile.rows, tile.columns, tile.depth),
    )


@lru_cache(maxsize=2)
def _by_rows(tile: kernels.Tile) -> Kernel:
    return Kernel(kernels.by_rows, num_warps=kernels.WARPS, num_stages=tile.stages)


class _Term(NamedTuple):
    """The arguments of the kernel for one product.

    Attributes:
        matrices: The matrix, and the weight or its three bfloat16 parts.
        depth: The length of the axis that both factors share.
        constants: The number of blocks along the depth, whether all blocks are full, and the weight's memory layout.
    """

    matrices: tuple[Tensor, Tensor]
    depth: int
    constants: tuple[int, bool, str]


def _term(left: Tensor, right: Tensor, tile: kernels.Tile) -> _Term:
    depth, columns = right.shape
    transposed = not right.is_contiguous()
    if transposed and not right.t().is_contiguous():
        right, transposed = right.contiguous(), False
    blocks = -(-depth // tile.depth)
    lies = "columns" if transposed else "rows"
    if tile is kernels.TILE_OF_MANY:
        weight, size, lies = right, (blocks * tile.depth, -(-columns // tile.columns) * tile.columns), "parts"
        right = torch.empty((3, *size), dtype=torch.bfloat16, device=left.device)
        _split(-(-size[0] * size[1] // _BLOCK), (weight, right), (depth, columns, *size), (transposed, _BLOCK))
    return _Term((left, right), depth, (blocks, depth == blocks * tile.depth, lies))


class OverRows(NamedTuple):
    """The arguments of a product over rows, ``left.T @ right``.

    Attributes:
        left: float32 ``[rows, depth]``, contiguous; depth is a multiple of 4.
        right: float32 ``[rows, columns]``, contiguous; columns is a multiple of 4.
        out: float32 ``[depth, columns]``, contiguous, for the product.
        sums: float32 ``[depth]``, contiguous, for ``left.sum(0)``; None if the sum is not needed.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    sums: Tensor | None

    @property
    def results(self) -> list[Tensor]:
        """The tensors to write."""
        return [self.out] if self.sums is None else [self.out, self.sums]


def over_rows(one: OverRows, other: OverRows | None = None) -> None:
    """Writes one product over rows, or two with the same number of rows.

    Sums are added in an order that depends only on the sizes, so equal inputs always give equal bits.
    """
    both = [one] if other is None else [one, other]
    rows = one.left.size(0)
    widths = [(p.left.size(1), p.right.size(1)) for p in both]
    blocks = [(_block(depth), _block(columns)) for depth, columns in widths]
    tiles = sum(-(-d // high) * -(-c // wide) for (d, c), (high, wide) in zip(widths, blocks, strict=True))
    largest = max(high + wide for high, wide in blocks)
    # With narrow tiles, several programs fit on a multiprocessor.
    most = _PROCESSORS * {128: 1, 96: 2, 64: 3}[largest // 2] // tiles
    share, shares = _shares(rows, most, kernels.SUMMED, _LEAST[len(both) - 1])
    results = [result for p in both for result in p.results]
    partial = one.left.new_empty((shares, sum(result.numel() for result in results)))
    last = both[-1]
    _over_rows(8 if largest == 256 else 4)(
        tiles * shares,
        (one.left, one.right, last.left, last.right, partial),
        (rows, share, *(width // 4 for width in (*widths[0], *widths[-1]))),
        (other is not None, one.sums is not None, *blocks[0], last.sums is not None, *blocks[-1], kernels.SUMMED),
    )
    _joined(partial, results)


def sums(rows: Tensor, out: Tensor) -> None:
    """Writes ``rows.sum(0)``. The order of additions depends only on the shape of `rows`.

    Args:
        rows: float32 ``[rows, columns]``, contiguous; columns is a multiple of 4.
        out: float32 ``[columns]``, contiguous.
    """
    count, columns = rows.shape
    wide = _block(columns)
    high = _TILE // wide
    across = -(-columns // wide)
    share, shares = _shares(count, 2 * _PROCESSORS // across, high)
    partial = rows.new_empty((shares, columns))
    _sums(shares * across, (rows, partial), (count, columns // 4, share), (high, wide))
    _joined(partial, [out])


def _joined(partial: Tensor, results: Sequence[Tensor]) -> None:
    """Sums `partial`, ``[shares, size]``, over the shares; splits the sum, in order, among up to four results."""
    shares, size = partial.shape
    ends = [*accumulate(result.numel() for result in results), *[size] * 3]
    _join(
        -(-size // _JOINED[1]),
        (partial, *results, *[partial] * (4 - len(results))),
        (shares, *(end // 4 for end in (size, *ends[:3]))),
        _JOINED,
    )


@lru_cache(maxsize=2)
def _over_rows(warps: int) -> Kernel:
    return Kernel(kernels.over_rows, num_warps=warps, num_stages=kernels.STAGES)


def _shares(rows: int, most: int, block: int, least: int = 1) -> tuple[int, int]:
    """Splits rows into shares; returns the number of rows per share, a multiple of `block`, and the number of shares.

    There are at most `most` shares, or one if `most` is 0; without rows there are none. A share has at least `least`
    blocks, unless fewer than :data:`_ENOUGH` shares would be left.
    """
    share = max(-(-rows // (max(most, 1) * block)), min(least, rows // (_ENOUGH * block)), 1) * block
    return share, -(-rows // share)


def _block(columns: int) -> int:
    return 128 if columns > 64 else 64
