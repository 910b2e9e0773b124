"""Launches the kernels of :mod:`gnncompile.codegen.gemm.kernels`. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import kernels
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.tile_sizes import ProductTile

_split = Kernel(kernels.split, num_warps=tuning.TILES.short_warps)
_sums = Kernel(kernels.sums, num_warps=tuning.TILES.short_warps)
_join = Kernel(kernels.join, num_warps=tuning.TILES.short_warps)


Factors = tuple[Tensor, Tensor]
"""The factors of a product, a matrix and a weight. The matrix is float32 ``[rows, depth]``, contiguous. The weight is
float32 ``[depth, columns]``; it may be a view, as a slice or the transpose of a parameter.
"""

_LONGEST_PITCH = 2**31
"""Limit of the distance of two rows of a weight in memory, which kernels take as an int32."""


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
    few = rows <= tuning.TILES.few_rows
    tile = tuning.TILES.product_of_few if few else tuning.TILES.product_of_many
    terms = [_term(*factors, tile, not few) for factors in ((one,) if other is None else (one, other))]
    first, last = terms[0], terms[-1]
    across, unit = -(-columns // tile.columns), _unit(columns)
    kind = "nothing" if added is None else "row" if added.dim() == 1 else "matrix"
    ends = kind, relu, gate is not None
    _by_rows(tile)(
        -(-rows // tile.rows) * across,
        (*first.matrices, *last.matrices, out if added is None else added, out if gate is None else gate, out),
        (rows, first.units, last.units, columns // unit, across),
        (unit, *first.constants, other is not None, *last.constants, *ends, tile.rows, tile.columns, tile.depth),
    )


@lru_cache(maxsize=2)
def _by_rows(tile: ProductTile) -> Kernel:
    return Kernel(kernels.by_rows, num_warps=tuning.TILES.product_warps, num_stages=tile.stages)


class _Term(NamedTuple):
    """The arguments of the kernel for one product.

    Attributes:
        matrices: The matrix, and the weight or its three bfloat16 parts.
        units: The length of the axis that both factors share, in units.
        constants: The unit, the number of blocks along the depth, whether all blocks are full, and how the weight lies
            in memory.
    """

    matrices: tuple[Tensor, Tensor]
    units: int
    constants: tuple[int, int, bool, str]


def _term(left: Tensor, right: Tensor, tile: ProductTile, split: bool) -> _Term:
    """Returns the arguments for one product. `split` says whether any weight is split beforehand.

    A weight with gaps between its rows is always split: the kernel that splits it knows the distance of two rows.
    """
    depth, columns = right.shape
    transposed, pitch = _lies(right)
    if pitch is None:
        right, transposed, pitch = right.contiguous(), False, columns
    blocks = -(-depth // tile.depth)
    lies = "columns" if transposed else "rows"
    if split or pitch != (depth if transposed else columns):
        weight, size, lies = right, (blocks * tile.depth, -(-columns // tile.columns) * tile.columns), "parts"
        right = torch.empty((3, *size), dtype=torch.bfloat16, device=left.device)
        block = tuning.TILES.split_block
        _split(-(-size[0] * size[1] // block), (weight, right), (depth, columns, pitch, *size), (transposed, block))
    unit = _unit(depth)
    return _Term((left, right), depth // unit, (unit, blocks, depth == blocks * tile.depth, lies))


def _lies(weight: Tensor) -> tuple[bool, int | None]:
    """Returns whether columns of a weight lie together in memory, rather than rows, and the distance of two of them.

    The distance is None if neither rows nor columns lie together, or if kernels can't take it.
    """
    if weight.is_contiguous():
        return False, weight.size(1)
    if weight.t().is_contiguous():
        return True, weight.size(0)
    down, across = weight.stride()
    transposed = across != 1
    pitch = across if transposed else down
    return transposed, pitch if 1 in (down, across) and pitch < _LONGEST_PITCH else None


def _unit(*widths: int) -> int:
    """Returns the largest of 4, 2 and 1 that divides all widths: as many numbers of a row are read at once."""
    return gcd(4, *widths)


class OverRows(NamedTuple):
    """The arguments of a product over rows, ``left.T @ right``.

    Attributes:
        left: float32 ``[rows, depth]``, contiguous.
        right: float32 ``[rows, columns]``, contiguous.
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
    both, table = [one] if other is None else [one, other], tuning.TILES
    rows = one.left.size(0)
    widths = [(p.left.size(1), p.right.size(1)) for p in both]
    blocks = [(_block(depth), _block(columns)) for depth, columns in widths]
    tiles = sum(-(-d // high) * -(-c // wide) for (d, c), (high, wide) in zip(widths, blocks, strict=True))
    largest = max(high + wide for high, wide in blocks)
    # With narrow tiles, several programs fit on a multiprocessor.
    most = table.processors * tuning.choice(table.over_rows_programs, largest) // tiles
    share, shares = _shares(rows, most, table.over_rows_step, table.steps_per_share[len(both) - 1])
    results = [result for p in both for result in p.results]
    partial = one.left.new_empty((shares, sum(result.numel() for result in results)))
    last, units = both[-1], [[_unit(width) for width in pair] for pair in widths]
    _over_rows(tuning.choice(table.over_rows_warps, largest))(
        tiles * shares,
        (one.left, one.right, last.left, last.right, partial),
        (rows, share, *(width // _unit(width) for width in (*widths[0], *widths[-1]))),
        (
            other is not None,
            *(*units[0], one.sums is not None, *blocks[0]),
            *(*units[-1], last.sums is not None, *blocks[-1]),
            table.over_rows_step,
        ),
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
    high = tuning.TILES.summed_elements // wide
    across = -(-columns // wide)
    share, shares = _shares(count, tuning.TILES.summed_programs * tuning.TILES.processors // across, high)
    partial = rows.new_empty((shares, columns))
    _sums(shares * across, (rows, partial), (count, columns // 4, share), (high, wide))
    _joined(partial, [out])


def _joined(partial: Tensor, results: Sequence[Tensor]) -> None:
    """Sums `partial`, ``[shares, size]``, over the shares; splits the sum, in order, among up to four results."""
    (shares, size), joined = partial.shape, tuning.TILES.joined
    ends = [*accumulate(result.numel() for result in results), *[size] * 3]
    unit = _unit(*ends)
    _join(
        -(-size // joined[1]),
        (partial, *results, *[partial] * (4 - len(results))),
        (shares, *(end // unit for end in (size, *ends[:3]))),
        (unit, *joined),
    )


@lru_cache(maxsize=2)
def _over_rows(warps: int) -> Kernel:
    return Kernel(kernels.over_rows, num_warps=warps, num_stages=tuning.TILES.over_rows_stages)


def _shares(rows: int, most: int, block: int, least: int = 1) -> tuple[int, int]:
    """Splits rows into shares; returns the number of rows per share, a multiple of `block`, and the number of shares.

    There are at most `most` shares, or one if `most` is 0; without rows there are none. A share has at least `least`
    blocks, unless fewer than ``tuning.TILES.enough_shares`` shares would be left.
    """
    share = max(-(-rows // (max(most, 1) * block)), min(least, rows // (tuning.TILES.enough_shares * block)), 1) * block
    return share, -(-rows // share)


def _block(columns: int) -> int:
    return tuning.choice(tuning.TILES.over_rows_width, columns)
