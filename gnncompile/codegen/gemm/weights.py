"""What kernels of products read of their weights: as they lie in memory, copied, or in parts. Imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.codegen.gemm import scaled
from gnncompile.codegen.triton.launcher import Kernel, unit_of
from gnncompile.device import HALVES
from gnncompile.tile_sizes import ProductTile

_split = Kernel(scaled.split, num_warps=tuning.TILES.short_warps)
_find_largest = Kernel(scaled.find_largest, num_warps=tuning.TILES.short_warps)

_SCANNED = 2**15
"""Most numbers of a weight that each program reads to find the largest. On an H200 a launch that splits 128 x 128
numbers takes 5 microseconds, and one for 256 x 256 numbers 11."""

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
    return in_parts(weight, (weight.size(0), weight.size(1)), read.padded, read.pitch, read.transposed)


def in_parts(
    weight: Tensor, size: tuple[int, int], padded: tuple[int, int], pitch: int, transposed: bool = False
) -> Tensor:
    """Returns a weight in float16 parts, with zeros around it: see :func:`gnncompile.codegen.gemm.scaled.split`.

    Args:
        weight: The weight, ``[depth, columns]``, or a tensor whose memory begins with it.
        size: Its depth and its columns.
        padded: The size of each part.
        pitch: The distance of two of its rows in memory, or of two columns if they lie together.
        transposed: Whether columns lie together.
    """
    parts = torch.empty(elements_of_parts(padded), dtype=torch.float16, device=weight.device)
    for kernel, programs, constants in splitting(size, padded, transposed):
        kernel(programs, (weight, parts), (*size, pitch, *padded), constants)
    return parts


def splitting(
    size: tuple[int, int], padded: tuple[int, int], transposed: bool = False
) -> list[tuple[Kernel, int, tuple[Any, ...]]]:
    """Returns the kernels that split a weight, in order, each with its number of programs and its constants.

    A kernel takes the weight and its parts, then five numbers: depth, columns, pitch, and both sizes of a part.

    Args:
        size: The depth and the columns of the weight.
        padded: The size of a part.
        transposed: Whether columns lie together.
    """
    is_found, block = size[0] * size[1] > _SCANNED, tuning.TILES.split_block
    last = _split, -(-padded[0] * padded[1] // block), (transposed, is_found, block)
    return [(_find_largest, _stripes(size[transposed]), (transposed,)), last] if is_found else [last]


def elements_of_parts(padded: tuple[int, int]) -> int:
    """Returns the float16 elements of a weight in two parts of a size, with what kernels write behind them.

    This is the power of two, and the largest number of each stripe, in float32.
    """
    return 2 * padded[0] * padded[1] + 2 * (1 + _stripes(max(padded)))


def _stripes(rows: int) -> int:
    high: int = scaled.HIGH.value
    return -(-rows // high)


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
