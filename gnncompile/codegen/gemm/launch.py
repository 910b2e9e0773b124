"""Launches the kernels of :mod:`gnncompile.codegen.gemm.kernels`. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import MOST_SIDE_BY_SIDE, kernels
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.device import ALIGNMENT, HALVES
from gnncompile.tile_sizes import ProductTile

_split = Kernel(kernels.split, num_warps=tuning.TILES.short_warps)
_sums = Kernel(kernels.sums, num_warps=tuning.TILES.short_warps)


Factors = tuple[Tensor, Tensor]
"""The factors of a product, a matrix and a weight of one dtype, float32 or of 16 bits. The matrix is ``[rows, depth]``,
contiguous. The weight is ``[depth, columns]``; it may be a view, as a slice or the transpose of a parameter.
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
        added: ``[columns]`` or ``[rows, columns]``, contiguous; may be `out`. None adds nothing.
        gate: ``[rows, columns]``, contiguous. Zeros are written where `gate` is not positive.
        relu: Whether to write zeros in place of negative results.
        out: ``[rows, columns]``, contiguous, of the dtype of all other tensors.
    """
    rows, columns = out.shape
    tile, split = _tile(out)
    if out.dtype is torch.float32 and other is not None:
        # Triton 3.6 writes wrong code where weights of odd widths lie in memory in different ways.
        split = split or _lies(one[1])[0] != _lies(other[1])[0]
    terms = [_term(*factors, tile, split) for factors in ((one,) if other is None else (one, other))]
    first, last = terms[0], terms[-1]
    across, unit = -(-columns // tile.columns), _unit(out.dtype, columns)
    kind = "nothing" if added is None else "row" if added.dim() == 1 else "matrix"
    ends = kind, relu, gate is not None
    _by_rows(tile, out.dtype)(
        -(-rows // tile.rows) * across,
        (*first.matrices, *last.matrices, out if added is None else added, out if gate is None else gate, out),
        (rows, first.units, last.units, columns // unit, across),
        (unit, *first.constants, other is not None, *last.constants, *ends, tile.rows, tile.columns, tile.depth),
    )


@lru_cache(maxsize=16)
def _by_rows(tile: ProductTile, dtype: torch.dtype) -> Kernel:
    return Kernel(kernels.by_rows, num_warps=_warps(dtype), num_stages=tile.stages)


def side_by_side(
    left: Tensor, rights: Sequence[Tensor], added: Sequence[Tensor | None], outs: Sequence[Tensor]
) -> None:
    """Writes ``left @ right + row`` for several weights of one shape, by one launch if they lie in memory the same way.

    Args:
        left: ``[rows, depth]``, contiguous, of 16 bits.
        rights: Up to :data:`gnncompile.codegen.gemm.MOST_SIDE_BY_SIDE` weights, ``[depth, columns]``, of any strides.
        added: A row ``[columns]`` for each weight, or None.
        outs: ``[rows, columns]`` each, contiguous.
    """
    rows, columns = outs[0].shape
    ways = {_lies(right) for right in rights}
    if len(ways) > 1 or not ways <= {(False, columns), (True, left.size(1))}:  # else all alike, without gaps
        for right, row, out in zip(rights, added, outs, strict=True):
            by_rows((left, right), None, row, None, False, out)
        return
    tile, _ = _tile(outs[0])
    term = _term(left, rights[0], tile, split=False)
    across, unit = -(-columns // tile.columns), _unit(left.dtype, columns)
    added_rows = [out if row is None else row for row, out in zip(added, outs, strict=True)]
    four = (matrix for given in (rights, added_rows, outs) for matrix in _filled_up(given))
    _side_by_side(tile, left.dtype)(
        -(-rows // tile.rows) * across * len(rights),
        (left, *four),
        (rows, term.units, columns // unit, across),
        (len(rights), unit, *term.constants, sum((row is not None) << k for k, row in enumerate(added)), *tile[:3]),
    )


@lru_cache(maxsize=16)
def _side_by_side(tile: ProductTile, dtype: torch.dtype) -> Kernel:
    return Kernel(kernels.side_by_side, num_warps=_warps(dtype), num_stages=tile.stages)


def _filled_up(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns a tensor for each of the four parameters of a kernel, which reads no more than the given ones."""
    return [*tensors, *[tensors[0]] * (MOST_SIDE_BY_SIDE - len(tensors))]


def _tile(out: Tensor) -> tuple[ProductTile, bool]:
    """Returns the tile of a product with a weight, and whether weights are split into parts beforehand."""
    rows, columns = out.shape
    if out.dtype in HALVES:
        table = tuning.HALF_PRODUCTS
        return table.narrow if columns <= table.narrow.columns else table.wide, False
    few = rows <= tuning.TILES.few_rows
    return tuning.TILES.product_of_few if few else tuning.TILES.product_of_many, not few


def _warps(dtype: torch.dtype) -> int:
    return tuning.HALF_PRODUCTS.warps if dtype in HALVES else tuning.TILES.product_warps


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

    A float32 weight with gaps between its rows is always split: the kernel that splits it knows the distance of two
    rows.
    """
    depth, columns = right.shape
    transposed, pitch = _lies(right)
    has_gaps = pitch != (depth if transposed else columns)
    if pitch is None or (has_gaps and right.dtype in HALVES):
        right, transposed, pitch, has_gaps = right.contiguous(), False, columns, False
    blocks = -(-depth // tile.depth)
    lies = "columns" if transposed else "rows"
    if split or has_gaps:
        weight, size, lies = right, (blocks * tile.depth, -(-columns // tile.columns) * tile.columns), "parts"
        right = torch.empty((3, *size), dtype=torch.bfloat16, device=left.device)
        block = tuning.TILES.split_block
        _split(-(-size[0] * size[1] // block), (weight, right), (depth, columns, pitch, *size), (transposed, block))
    unit = _unit(left.dtype, depth)
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


def _unit(dtype: torch.dtype, *widths: int) -> int:
    """Returns the largest power of two, up to 16 bytes, that divides all widths: so many numbers are read at once."""
    return gcd(ALIGNMENT // dtype.itemsize, *widths)


class OverRows(NamedTuple):
    """The arguments of a product over rows, ``left.T @ right``.

    Attributes:
        left: ``[rows, depth]``, contiguous, float32 or of 16 bits.
        right: ``[rows, columns]``, contiguous, of the same dtype.
        out: ``[depth, columns]``, contiguous, for the product. All results of a launch have one floating dtype, that of
            the matrices or another one.
        sums: ``[depth]``, contiguous, for ``left.sum(0)``; None if the sum is not needed.
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
    """Writes one product over rows, or two with the same number of rows and of the same dtype.

    Sums are added in an order that depends only on the sizes, so equal inputs always give equal bits.
    """
    both = (one,) if other is None else (one, other)
    widths = tuple((p.left.size(1), p.right.size(1), p.sums is not None) for p in both)
    plan = _plan(one.left.dtype, one.left.size(0), widths)
    results, last = [result for p in both for result in p.results], both[-1]
    partial = one.left.new_empty((plan.shares, plan.size), dtype=torch.float32)
    factors = one.left, one.right, last.left, last.right
    plan.kernel(plan.programs, (*factors, partial), plan.numbers, plan.constants)
    _joined(partial, results)


class _Plan(NamedTuple):
    """The launch of products over rows, without its tensors.

    Attributes:
        kernel: The kernel.
        programs: How many programs there are.
        numbers: The numbers of the launch.
        constants: The constants of the kernel.
        shares: How many shares the rows are in.
        size: The elements of the results of a share.
    """

    kernel: Kernel
    programs: int
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    shares: int
    size: int


@lru_cache(maxsize=1024)
def _plan(dtype: torch.dtype, rows: int, products: tuple[tuple[int, int, bool], ...]) -> _Plan:
    """Returns the launch of one product over rows, or of two: their depths, columns, and whether they sum rows."""
    widths = [(depth, columns) for depth, columns, _ in products]
    blocks = [(_block(depth), _block(columns)) for depth, columns in widths]
    tiles = sum(-(-d // high) * -(-c // wide) for (d, c), (high, wide) in zip(widths, blocks, strict=True))
    largest = max(high + wide for high, wide in blocks)
    step, programs = _summing(dtype, largest, len(products))
    least = tuning.TILES.steps_per_share[len(products) - 1]
    share, shares = _shares(rows, tuning.TILES.processors * programs // tiles, step, least)
    units = [[_unit(dtype, width) for width in pair] for pair in widths]
    counts = [width // unit for k in (0, -1) for width, unit in zip(widths[k], units[k], strict=True)]
    constants = (
        len(products) == 2,
        *(*units[0], products[0][2], *blocks[0]),
        *(*units[-1], products[-1][2], *blocks[-1]),
        step,
    )
    size = sum(depth * columns + depth * sums for depth, columns, sums in products)
    return _Plan(_over_rows(dtype, largest), tiles * shares, (rows, share, *counts), constants, shares, size)


def _summing(dtype: torch.dtype, largest: int, products: int) -> tuple[int, int]:
    """Returns the rows per step of products over rows, and the programs per multiprocessor.

    Args:
        dtype: The dtype of the matrices.
        largest: The sum of both sides of the largest tile. With narrow tiles, several programs fit on a multiprocessor.
        products: The number of products in the launch.
    """
    table, halves = tuning.TILES, tuning.HALF_PRODUCTS
    if dtype not in HALVES:
        return table.over_rows_step, tuning.choice(table.over_rows_programs, largest)
    return halves.over_rows_step, products if largest <= halves.most_together else 1


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
    unit = _unit(partial.dtype, *ends)
    _join(results[0].dtype)(
        -(-size // joined[1]),
        (partial, *_filled_up(results)),
        (shares, *(end // unit for end in (size, *ends[:3]))),
        (unit, *joined),
    )


@lru_cache(maxsize=16)
def _over_rows(dtype: torch.dtype, largest: int) -> Kernel:
    """Returns the kernel of products over rows, for a largest sum of both sides of a tile."""
    table, halves = tuning.TILES, tuning.HALF_PRODUCTS
    if dtype in HALVES:
        warps, stages = (tuning.choice(given, largest) for given in (halves.over_rows_warps, halves.over_rows_stages))
    else:
        warps, stages = tuning.choice(table.over_rows_warps, largest), table.over_rows_stages
    return Kernel(kernels.over_rows, num_warps=warps, num_stages=stages)


@lru_cache(maxsize=4)
def _join(dtype: torch.dtype) -> Kernel:
    """Returns the kernel that adds up shares, to results of a dtype."""
    return Kernel(kernels.join, num_warps=tuning.TILES.short_warps)


def _shares(rows: int, most: int, block: int, least: int = 1) -> tuple[int, int]:
    """Splits rows into shares; returns the number of rows per share, a multiple of `block`, and the number of shares.

    There are at most `most` shares, or one if `most` is 0; without rows there are none. A share has at least `least`
    blocks, unless fewer than ``tuning.TILES.enough_shares`` shares would be left.
    """
    share = max(-(-rows // (max(most, 1) * block)), min(least, rows // (tuning.TILES.enough_shares * block)), 1) * block
    return share, -(-rows // share)


def _block(columns: int) -> int:
    return tuning.choice(tuning.TILES.over_rows_width, columns)
