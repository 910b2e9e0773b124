"""The edges per row of the graph that a program is compiled for, by which kernels choose their tiles."""

from __future__ import annotations

from torch import Tensor

from gnncompile import _compat, tuning


def edges_per_row(rowptr: Tensor, col: Tensor) -> int:
    """Returns the edges per row of a layout, from the sizes that are known while a program is compiled.

    Args:
        rowptr: Fake, ``[num_rows + 1]``.
        col: Fake, ``[num_edges]``.

    Returns:
        The average, rounded down. If a size is unknown, it is the least for which rows are not short, since the tile of
        short rows loses more on other graphs than the usual tile loses on theirs.
    """
    pointers, edges = (_compat.size_now(one.shape[0]) for one in (rowptr, col))
    if pointers is None or edges is None:
        return tuning.TILES.several_edges
    return edges // (pointers - 1) if pointers > 1 else 0
