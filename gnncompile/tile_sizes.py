"""The sizes of the tiles and steps of Triton programs, which :mod:`gnncompile.tuning` has numbers for."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """A step of a Triton program that walks one row.

    Attributes:
        elements: Elements of the step's tile for each warp.
        stages: Triton's ``num_stages``: the loads of a step are issued ``stages - 1`` steps ahead.
    """

    elements: int
    stages: int


class ShortRows(NamedTuple):
    """The work of a program that walks rows with few edges.

    Attributes:
        rows: Rows of a program, by the elements of a row, as pairs of the least number and the choice.
        edges: Edges of each row per step, for one head; for several heads it is one edge.
        channels: Elements of a row for each warp. Rows of several heads, and those with a softmax, have fewer.
        widest: Most elements of a row.
    """

    rows: tuple[tuple[int, int], ...]
    edges: int
    channels: int
    widest: int


class WalkTile(NamedTuple):
    """The work of a program that walks edges in tiles.

    Attributes:
        edges: Edges of a tile, a power of two. With 64 and more, Triton multiplies by Hopper's ``wgmma``.
        warps: Warps of the program.
        programs: Most programs that a multiprocessor runs at a time.
        stages: Triton's ``num_stages``: rows are loaded ``stages - 1`` steps ahead, if shared memory has room for them.
    """

    edges: int
    warps: int
    programs: int
    stages: int = 1


class ProductTile(NamedTuple):
    """The size of the work of one program that computes a product with a weight.

    Attributes:
        rows: Rows of the result that a program computes.
        columns: Columns of the result that a program computes.
        depth: Columns of the left matrix that a step reads.
        stages: Triton's ``num_stages``: a step's loads are issued ``stages - 1`` steps ahead.
        registers: Most registers of a thread; None sets no limit. With fewer, more programs share a multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    registers: int | None = None


class MomentsTile(NamedTuple):
    """The work of the programs that compute means and variances of columns.

    Attributes:
        rows: Rows that a program reads per step.
        columns: Columns that a program reads.
        stages: The rows of a step are loaded ``stages - 1`` steps ahead.
        programs: Programs per multiprocessor.
        warps: Warps of a program.
        joined: Shares that a program joins per step, and its columns.
    """

    rows: int
    columns: int
    stages: int
    programs: int
    warps: int
    joined: tuple[int, int]


H200_PRODUCTS = (
    (0, ProductTile(128, 16, 32, 3, 128)),
    (17, ProductTile(64, 64, 32, 3, 128)),
    (65, ProductTile(64, 128, 32, 3, 168)),
)
"""The tiles of float32 products of many rows on an H200, by the columns of the weight. With 128 registers of a thread,
four programs share a multiprocessor, and three with 168."""
