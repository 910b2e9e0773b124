"""What kernels of products read of their weights: as they lie in memory, copied, or in parts. Imports Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import scaled
from gnncompile.codegen.triton.launcher import Kernel, unit_of
from gnncompile.device import HALVES
from gnncompile.tile_sizes import ProductTile

split_kernel = Kernel(scaled.split, num_warps=tuning.TILES.short_warps)
"""Splits weights into float16 parts."""

_LONGEST_PITCH = 2**31
"""Limit of the distance of two rows of a weight in memory, which kernels take as an int32."""

Way = tuple[int, int, int, int]
"""How a weight lies in memory: its depth, its columns, and its two strides."""


class Weight(NamedTuple):
    """What a kernel reads of a weight.

    Attributes:
        becomes: "itself", or what is made of it beforehand: a "copy" without gaps, or "parts" in float16.
        units: The length of the axis that both factors share, in units.
        constants: The unit, the number of blocks along the depth, whether all blocks are full, and how the weight lies
            in memory.
        padded: The size of each part.
        pitch: The distance of two rows or columns of the weight.
        transposed: Whether columns lie together.
    """

    becomes: str
    units: int
    constants: tuple[int, int, bool, str]
    padded: tuple[int, int]
    pitch: int
    transposed: bool


def weight_read(dtype: torch.dtype, way: Way, tile: ProductTile, split: bool) -> Weight:
    """Returns what a kernel reads of a weight. `split` says whether any weight is split beforehand.

    A float32 weight with gaps between its rows is always split: the kernel that splits it knows the distance of two
    rows.
    """
    depth, columns = way[:2]
    transposed, pitch = storage_order(way)
    has_gaps = pitch != (depth if transposed else columns)
    copied = pitch is None or (has_gaps and dtype in HALVES)
    if copied or pitch is None:
        transposed, pitch, has_gaps = False, columns, False
    blocks = -(-depth // tile.depth)
    in_parts = split or has_gaps
    lies = "parts" if in_parts else "columns" if transposed else "rows"
    padded = blocks * tile.depth, -(-columns // tile.columns) * tile.columns
    unit = unit_of(dtype, depth)
    constants = unit, blocks, depth == blocks * tile.depth, lies
    becomes = ("parts of a copy" if copied else "parts") if in_parts else "copy" if copied else "itself"
    return Weight(becomes, depth // unit, constants, padded, pitch, transposed)


def ready(weight: Tensor, read: Weight) -> Tensor:
    """Returns what a kernel reads of a weight: itself, a copy, or its two float16 parts."""
    if read.becomes == "itself":
        return weight
    if read.becomes != "parts":
        weight = weight.contiguous()
    if read.becomes == "copy":
        return weight
    high, wide = read.padded
    return in_parts(weight, weight.size(0), weight.size(1), read.pitch, (high, wide), read.transposed)


def in_parts(
    weight: Tensor, depth: int, columns: int, pitch: int, padded: tuple[int, int], transposed: bool = False
) -> Tensor:
    """Returns a float32 weight in parts, with zeros around it: see :func:`gnncompile.codegen.gemm.scaled.split`.

    Args:
        weight: The weight, ``[depth, columns]``, or any tensor that begins with it.
        depth: Its depth.
        columns: Its columns.
        pitch: The distance of two of its rows in memory, or of two columns if they lie together.
        padded: The size of each part.
        transposed: Whether columns lie together.
    """
    parts = torch.empty(elements_of_parts(padded), dtype=torch.float16, device=weight.device)
    block = tuning.TILES.split_block
    numbers = (depth, columns, pitch, *padded)
    split_kernel(-(-padded[0] * padded[1] // block), (weight, parts), numbers, (transposed, block))
    return parts


def elements_of_parts(padded: tuple[int, int]) -> int:
    """Returns the float16 elements of a weight in two parts of a size, with the float32 power behind them."""
    return 2 * padded[0] * padded[1] + 2


def storage_order(way: Way) -> tuple[bool, int | None]:
    """Returns whether columns of a weight lie together in memory, rather than rows, and the distance of two of them.

    The distance is None if neither rows nor columns lie together, or if kernels can't take it.
    """
    depth, columns, down, across = way
    if (columns == 1 or across == 1) and (depth == 1 or down == columns):
        return False, columns
    if (depth == 1 or down == 1) and (columns == 1 or across == depth):
        return True, depth
    transposed = across != 1
    pitch = across if transposed else down
    return transposed, pitch if 1 in (down, across) and pitch < _LONGEST_PITCH else None
