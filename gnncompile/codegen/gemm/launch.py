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
"""Elements that a program splits."""

_PROCESSORS = 132
"""Multiprocessors of the GPUs that these kernels were tuned on."""

_TILE = 4096
"""Elements that a program of :func:`sums` reads at a time."""

_JOINED = 128, 16
"""Of how many shares, and how many elements of each, a program puts together at a time."""

_LEAST = 3, 5
"""Fewest steps of a program that sums up one product over rows, or two, where :data:`_ENOUGH` shares have as many."""

_ENOUGH = 60
"""Fewest shares that are left for the sake of :data:`_LEAST`. Of 10,000 rows and 64 channels, 105 shares of one product
take 10.0 us, 157 take 10.5; 63 of two take 12.8 us and 2.0 MiB, 157 take 12.7 us and 5.0 MiB. Of 2,708 rows, 43 shares
take 8.3 us, 22 take 10.7 (H200)."""

_FEW = 2**14
"""Most rows for which each program splits the weight itself: a launch more costs as much as products of so few. With
64 channels, 10,000 rows take 4.9 us in this way and 6.7 us in the other, the library 6.9 (H200); 30,000 take 9."""

_split = Kernel(kernels.split, num_warps=4)
_sums = Kernel(kernels.sums, num_warps=4)
_join = Kernel(kernels.join, num_warps=4)


Factors = tuple[Tensor, Tensor]
"""A matrix, float32 ``[rows, depth]``, contiguous, of a depth that is a multiple of 4; and a weight, float32
``[depth, columns]``, or a transposed view of a contiguous matrix.
"""


def by_rows(
    one: Factors, other: Factors | None, added: Tensor | None, gate: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Writes a product, or the sum of two, plus `added`.

    Args:
        one: What is multiplied.
        other: The same of another product.
        added: float32 ``[columns]`` or ``[rows, columns]``, contiguous; may be `out`.
        gate: float32 ``[rows, columns]``, contiguous: zeros are written where it is not positive.
        relu: Whether to write zeros for what is negative.
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
    """A product as the kernel takes it.

    Attributes:
        matrices: The matrix, and the weight or its parts.
        depth: What both share.
        constants: Blocks one above the other, whether they are full, and how the weight is there.
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
    """A product over rows, ``left.T @ right``.

    Attributes:
        left: float32 ``[rows, depth]``, contiguous; depth is a multiple of 4.
        right: float32 ``[rows, columns]``, likewise.
        out: float32 ``[depth, columns]``, contiguous.
        sums: float32 ``[depth]``, contiguous, for ``left.sum(0)``.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    sums: Tensor | None

    @property
    def results(self) -> list[Tensor]:
        """What is to be written."""
        return [self.out] if self.sums is None else [self.out, self.sums]


def over_rows(one: OverRows, other: OverRows | None = None) -> None:
    """Writes one or two products over as many rows, the same for the same sizes on every call."""
    both = [one] if other is None else [one, other]
    rows = one.left.size(0)
    widths = [(p.left.size(1), p.right.size(1)) for p in both]
    blocks = [(_block(depth), _block(columns)) for depth, columns in widths]
    tiles = sum(-(-d // high) * -(-c // wide) for (d, c), (high, wide) in zip(widths, blocks, strict=True))
    largest = max(high + wide for high, wide in blocks)
    # Narrow tiles leave room for several programs on a multiprocessor.
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
    _joined(partial, [out])


def _joined(partial: Tensor, results: Sequence[Tensor]) -> None:
    """Writes the sum over all shares, ``[shares, size]``, to up to four results, one behind the other."""
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
    """Rows of a share, a multiple of `block`, and the number of shares: `most` or fewer, at least one unless there are
    no rows.

    Each share has at least `least` blocks, or as many as leave :data:`_ENOUGH` shares.
    """
    share = max(-(-rows // (max(most, 1) * block)), min(least, rows // (_ENOUGH * block)), 1) * block
    return share, -(-rows // share)


def _block(columns: int) -> int:
    return 128 if columns > 64 else 64
