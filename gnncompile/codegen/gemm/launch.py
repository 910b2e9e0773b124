"""Launches the kernels of this package. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import MOST_READ, MOST_SIDE_BY_SIDE, arithmetic, kernels, shares
from gnncompile.codegen.gemm.weights import Way, Weight, ready, storage_order, weight_read
from gnncompile.codegen.triton.launcher import Kernel, Launch, unit_of
from gnncompile.codegen.triton.tile import NARROWEST, power_of_two
from gnncompile.device import HALVES
from gnncompile.tile_sizes import ProductTile

_sums = Kernel(shares.sums, num_warps=tuning.TILES.short_warps)


def _epilogue_columns(dtype: torch.dtype) -> int:
    """Returns the columns of a tile that are finished at a time if another matrix is read.

    With all 128 of a tile, the values do not fit into registers: in 16 bits, a gradient of silu spills 1,160 bytes. On
    an H200, a float32 product of 300,000 rows with a weight of 64 x 128 to which a matrix is added takes 112
    microseconds with 64 columns at a time, and 122 with 32. In 16 bits, 64 columns were not tried.
    """
    return 32 if dtype in HALVES else 64


Factors = tuple[Tensor, Tensor]
"""The factors of a product, a matrix and a weight of one dtype, float32 or of 16 bits. The matrix is ``[rows, depth]``,
contiguous. The weight is ``[depth, columns]``; it may be a view, as a slice or the transpose of a parameter.
"""


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
    factors = (one,) if other is None else (one, other)
    _launch_by_rows(factors, added, relu, ending(gate is not None), [] if gate is None else [gate], [out])


def by_rows_with_epilogue(
    one: Factors,
    other: Factors | None,
    added: Tensor | None,
    relu: bool,
    read: Sequence[Tensor],
    spec: str,
    outs: Sequence[Tensor],
) -> None:
    """Writes the results of an epilogue: see :func:`by_rows` and :func:`gnncompile.codegen.gemm.arithmetic.epilogue`.

    Args:
        one: The factors of the product.
        other: The factors of a second product, or None.
        added: What is added to the products; may be the first of `outs`.
        relu: Whether a ReLU comes before the epilogue.
        read: Up to :data:`gnncompile.codegen.gemm.MOST_READ` tensors that the epilogue reads, contiguous.
        spec: The region of the epilogue. Its first tensor is the sum of the products and `added`.
        outs: Up to :data:`gnncompile.codegen.gemm.MOST_WRITTEN` results, ``[rows, columns]``, contiguous.
    """
    factors = (one,) if other is None else (one, other)
    _launch_by_rows(factors, added, relu, arithmetic.epilogue(spec), read, outs)


def epilogue(matrix: Tensor, relu: bool, read: Sequence[Tensor], spec: str, outs: Sequence[Tensor]) -> None:
    """Writes the results of an epilogue on a matrix, ``[rows, columns]``: see :func:`by_rows_with_epilogue`.

    The kernel of products does it: the matrix is added to the product of two matrices without columns and rows.
    """
    nothing = matrix.new_empty((matrix.size(0), 0)), matrix.new_empty((0, matrix.size(1)))
    by_rows_with_epilogue(nothing, None, matrix, relu, read, spec, outs)


def _launch_by_rows(
    factors: Sequence[Factors],
    added: Tensor | None,
    relu: bool,
    epilogue: Any,
    read: Sequence[Tensor],
    outs: Sequence[Tensor],
) -> None:
    """Launches products with weights. `epilogue` writes their sum to `outs`; it also reads the tensors of `read`."""
    rows = outs[0].size(0)
    ways = tuple([(*right.shape, *right.stride()) for _, right in factors])
    plan = plan_by_rows(factors[0][0].dtype, rows <= tuning.TILES.few_rows, ways, (kind_of(added), relu, epilogue))
    matrices = [
        m for (left, right), read in zip(factors, plan.weights, strict=True) for m in (left, ready(right, read))
    ]
    others = [*read, *[outs[0]] * (MOST_READ - len(read))]
    plan.kernel(
        -(-rows // plan.rows) * plan.across,
        (*matrices[:2], *matrices[-2:], outs[0] if added is None else added, *others, outs[0], outs[-1]),
        (rows, *plan.numbers),
        plan.constants,
    )


def ending(gated: bool) -> Any:
    """Returns the epilogue of a product that is only written: with zeros where a gate is closed, or as it is."""
    return kernels.write_gated if gated else kernels.write


def kind_of(added: Tensor | None) -> str:
    """Returns what is added to products, as kernels call it."""
    return "nothing" if added is None else "row" if added.dim() == 1 else "matrix"


class RowsPlan(NamedTuple):
    """The launch of products with weights, without its tensors.

    Attributes:
        kernel: The kernel.
        rows: Rows of a program.
        across: Programs for all columns of these rows.
        numbers: The numbers of the launch after the number of rows.
        constants: The constants of the kernel.
        weights: What the kernel reads of each weight.
    """

    kernel: Kernel
    rows: int
    across: int
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    weights: tuple[Weight, ...]


@lru_cache(maxsize=1024)
def plan_by_rows(dtype: torch.dtype, few: bool, ways: tuple[Way, ...], ends: tuple[Any, ...]) -> RowsPlan:
    """Returns the launch of one product with a weight, or of the sum of two.

    Args:
        dtype: The dtype of all matrices.
        few: Whether there are few rows.
        ways: How the weights lie in memory.
        ends: The kind of what is added, whether negative results become zeros, and the function of the epilogue.
    """
    columns = ways[0][1]
    tile, split = _tile(dtype, few, max(way[0] for way in ways), columns)
    if dtype is torch.float32 and len(ways) > 1:
        # Triton 3.6 writes wrong code where weights of odd widths lie in memory in different ways.
        split = split or storage_order(ways[0])[0] != storage_order(ways[1])[0]
    weights = tuple(weight_read(dtype, way, tile, split) for way in ways)
    first, last = weights[0], weights[-1]
    across, unit = -(-columns // tile.columns), unit_of(dtype, columns)
    numbers = first.units, last.units, columns // unit, across
    # A tile for which no other matrix is read is written in one piece, which is as fast or faster.
    most = tile.columns if ends[0] != "matrix" and ends[2] is kernels.write else _epilogue_columns(dtype)
    constants = (unit, *first.constants, len(ways) > 1, *last.constants, *ends, most, *tile[:3])
    return RowsPlan(_by_rows(tile, dtype), tile.rows, across, numbers, constants, weights)


@lru_cache(maxsize=32)
def _by_rows(tile: ProductTile, dtype: torch.dtype) -> Kernel:
    return Kernel(kernels.by_rows, num_warps=_warps(dtype), num_stages=tile.stages, maxnreg=tile.registers)


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
    ways = {(*right.shape, *right.stride()) for right in rights}
    biased = sum([(row is not None) << k for k, row in enumerate(added)])
    plan = _plan_side_by_side(left.dtype, ways.pop(), len(rights), biased) if len(ways) == 1 else None
    if plan is None:
        for right, row, out in zip(rights, added, outs, strict=True):
            by_rows((left, right), None, row, None, False, out)
        return
    rows = left.size(0)
    added_rows = [out if row is None else row for row, out in zip(added, outs, strict=True)]
    plan.kernel(
        -(-rows // plan.rows) * plan.across * len(rights),
        (left, *_filled_up(rights), *_filled_up(added_rows), *_filled_up(outs)),
        (rows, *plan.numbers),
        plan.constants,
    )


@lru_cache(maxsize=256)
def _plan_side_by_side(dtype: torch.dtype, way: Way, many: int, biased: int) -> RowsPlan | None:
    """Returns the launch of `many` products of the same rows; None if there are gaps in the weights.

    Bit `k` of `biased` tells whether a row is added to product `k`.
    """
    depth, columns = way[:2]
    if storage_order(way) not in ((False, columns), (True, depth)):
        return None
    tile, _ = _tile(dtype, False, depth, columns)
    weight = weight_read(dtype, way, tile, split=False)
    across, unit = -(-columns // tile.columns), unit_of(dtype, columns)
    numbers, constants = (weight.units, columns // unit, across), (many, unit, *weight.constants, biased, *tile[:3])
    return RowsPlan(_side_by_side(tile, dtype), tile.rows, across, numbers, constants, (weight,))


@lru_cache(maxsize=16)
def _side_by_side(tile: ProductTile, dtype: torch.dtype) -> Kernel:
    return Kernel(kernels.side_by_side, num_warps=_warps(dtype), num_stages=tile.stages)


def _filled_up(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns a tensor for each of the four parameters of a kernel, which reads no more than the given ones."""
    return [*tensors, *[tensors[0]] * (MOST_SIDE_BY_SIDE - len(tensors))]


def _tile(dtype: torch.dtype, few: bool, depth: int, columns: int) -> tuple[ProductTile, bool]:
    """Returns the tile of a product with a weight, and whether weights are split into parts beforehand.

    Args:
        dtype: The dtype of all matrices.
        few: Whether there are few rows.
        depth: The rows of the weight, those of the larger one if there are two.
        columns: Its columns.
    """
    is_split = dtype not in HALVES
    if is_split and few:
        return tuning.TILES.product_of_few, False
    table = tuning.TILES.product_of_many if is_split else tuning.HALF_PRODUCTS.tiles
    tile = tuning.choice(table, columns)
    half = tile.columns // 2
    if is_split and 0 < columns % tile.columns <= half:
        # At least half of the last tile would be empty.
        tile = tuning.choice(table, half)
    return tile._replace(depth=min(tile.depth, max(power_of_two(depth), NARROWEST))), is_split


def _warps(dtype: torch.dtype) -> int:
    return tuning.HALF_PRODUCTS.warps if dtype in HALVES else tuning.TILES.product_warps


class OverRows(NamedTuple):
    """The arguments of a product over rows, ``left.T @ right``.

    Attributes:
        left: ``[rows, depth]``, contiguous, float32 or of 16 bits.
        right: ``[rows, columns]``, contiguous, of the same dtype.
        out: ``[depth, columns]``, contiguous, for the product. All results of a launch have one floating dtype, that of
            the matrices or another one.
        sums: ``[depth]``, contiguous, for ``left.sum(0)``; None if the sum is not needed.
        second: The second tensor that the right matrix is computed from. `right` is the first one then.
        spec: The region that computes the right matrix: see :func:`gnncompile.codegen.gemm.arithmetic.factor`. None if
            `right` is the right matrix.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    sums: Tensor | None
    second: Tensor | None = None
    spec: str | None = None

    @property
    def results(self) -> list[Tensor]:
        """The tensors to write."""
        return [self.out] if self.sums is None else [self.out, self.sums]

    @property
    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that a kernel reads."""
        return self.left, self.right, self.right if self.second is None else self.second


def over_rows(one: OverRows, other: OverRows | None = None) -> None:
    """Writes one product over rows, or two with the same number of rows and of the same dtype.

    Sums are added in an order that depends only on the sizes, so equal inputs always give equal bits.
    """
    both = (one,) if other is None else (one, other)
    widths = tuple((p.left.size(1), p.out.size(1), p.sums is not None, p.spec) for p in both)
    plan = _plan(one.left.dtype, one.left.size(0), widths)
    results, last = [result for p in both for result in p.results], both[-1]
    partial = torch.empty((plan.shares, plan.size), dtype=torch.float32, device=one.left.device)
    plan.launch(*one.factors, *last.factors, partial)
    _joined(partial, results)


class _Plan(NamedTuple):
    """Products over rows, before their shares are added up.

    Attributes:
        launch: The launch.
        shares: How many shares the rows are in.
        size: The elements of the results of a share.
    """

    launch: Launch
    shares: int
    size: int


@lru_cache(maxsize=1024)
def _plan(dtype: torch.dtype, rows: int, products: tuple[tuple[int, int, bool, str | None], ...]) -> _Plan:
    """Returns the launch of one product over rows, or of two.

    Args:
        dtype: The dtype of the left matrices.
        rows: The number of rows.
        products: The depth of each product, its columns, whether it sums rows, and the region of its right matrix.
    """
    widths = [(depth, columns) for depth, columns, _, _ in products]
    blocks = [(_block(depth), _block(columns)) for depth, columns in widths]
    tiles = sum(-(-d // high) * -(-c // wide) for (d, c), (high, wide) in zip(widths, blocks, strict=True))
    largest = max(high + wide for high, wide in blocks)
    step, programs = _summing(dtype, largest, len(products))
    least = tuning.TILES.steps_per_share[len(products) - 1]
    share, shares = _shares(rows, tuning.TILES.processors * programs // tiles, step, least)
    units = [[unit_of(dtype, width) for width in pair] for pair in widths]
    counts = [width // unit for k in (0, -1) for width, unit in zip(widths[k], units[k], strict=True)]
    constants = (
        len(products) == 2,
        *(*units[0], products[0][2], _factor(products[0][3]), *blocks[0]),
        *(*units[-1], products[-1][2], _factor(products[-1][3]), *blocks[-1]),
        step,
    )
    size = sum(depth * columns + depth * sums for depth, columns, sums, _ in products)
    launch = Launch(_over_rows(dtype, largest), tiles * shares, (rows, share, *counts), constants)
    return _Plan(launch, shares, size)


def _factor(spec: str | None) -> Any:
    return None if spec is None else arithmetic.factor(spec)


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
    shares, size = partial.shape
    launch = _plan_join(results[0].dtype, shares, size, tuple([result.numel() for result in results]))
    launch(partial, *_filled_up(results))


@lru_cache(maxsize=1024)
def _plan_join(dtype: torch.dtype, shares: int, size: int, sizes: tuple[int, ...]) -> Launch:
    """Returns the launch for results of a dtype and these sizes, which lie one behind the other in `size` elements."""
    joined = tuning.TILES.joined
    ends = [*accumulate(sizes), *[size] * 3]
    unit = unit_of(torch.float32, *ends)
    numbers = tuple(end // unit for end in (size, *ends[:3]))
    return Launch(_join(dtype), -(-size // joined[1]), (shares, *numbers), (unit, *joined))


@lru_cache(maxsize=16)
def _over_rows(dtype: torch.dtype, largest: int) -> Kernel:
    """Returns the kernel of products over rows, for a largest sum of both sides of a tile."""
    table, halves = tuning.TILES, tuning.HALF_PRODUCTS
    if dtype in HALVES:
        warps, stages = (tuning.choice(given, largest) for given in (halves.over_rows_warps, halves.over_rows_stages))
    else:
        warps, stages = tuning.choice(table.over_rows_warps, largest), table.over_rows_stages
    return Kernel(shares.over_rows, num_warps=warps, num_stages=stages)


@lru_cache(maxsize=4)
def _join(dtype: torch.dtype) -> Kernel:
    """Returns the kernel that adds up shares, to results of a dtype."""
    return Kernel(shares.join, num_warps=tuning.TILES.short_warps)


def _shares(rows: int, most: int, block: int, least: int = 1) -> tuple[int, int]:
    """Splits rows into shares; returns the number of rows per share, a multiple of `block`, and the number of shares.

    There are at most `most` shares, or one if `most` is 0; without rows there are none. A share has at least `least`
    blocks, unless fewer than ``tuning.TILES.enough_shares`` shares would be left.
    """
    share = max(-(-rows // (max(most, 1) * block)), min(least, rows // (tuning.TILES.enough_shares * block)), 1) * block
    return share, -(-rows // share)


def _block(columns: int) -> int:
    return tuning.choice(tuning.TILES.over_rows_width, columns)


def forget_plans() -> None:
    """Forgets how products are launched. To be called after a change of the tables in :mod:`gnncompile.tuning`."""
    for planned in (plan_by_rows, _plan_side_by_side, _plan, _plan_join):
        planned.cache_clear()
