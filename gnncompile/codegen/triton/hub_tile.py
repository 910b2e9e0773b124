"""Chooses tiles for hubs: for the programs that walk their pieces, and for the programs that join the pieces."""

from __future__ import annotations

from dataclasses import replace

from gnncompile.codegen.triton.costs import (
    HEAVY,
    WEIGHTS,
    arithmetic,
    in_wide_lanes,
    is_bandwidth_bound,
    needs_whole_rows,
    weights,
    wide_lanes,
    wide_streams,
)
from gnncompile.codegen.triton.plan import WIDE, Schedule
from gnncompile.codegen.triton.tile import ELEMENTS, Tile, power_of_two
from gnncompile.ir.region import Region

MOST_EDGES = 128
"""Most edges per step of a piece, and most pieces per step of a joining program."""

JOINING_WARPS = 8
"""Warps of a joining program: a program that joins the pieces of a hub."""

FEW_WARPS = 2
"""Warps of a joining program if a row has one head and at least :data:`WIDE` channels, which several programs share.
Most hubs have few pieces, and hubs with many pieces have programs of their own. A sum over 2.3M edges, whose longest
row has 13,000, takes 208.5 us with 2 warps and 213.8 us with 8 (128 channels, float32; 115.7 and 120.9 us in bfloat16).
A sum over one hub of 100,000 edges takes 1 us more. An extra 1 us is little compared to 37 us with 64 channels, but
much compared to 13 us with 16 channels."""

JOINED_CHANNELS = 32
"""Most channels of a joining program. It reads 782 pieces in 13 steps with 128 channels, and in 7 steps with 32."""

LARGE_CHANNELS = 4
"""Most channels of a joining program for a large hub: a hub with more pieces than the joining program of other hubs
reads in a step. In microseconds on an H200, for a hub of 100,000 edges among 100,000 rows without edges, by channels x
pieces per step:

=============  =======  =======  =======  ===================
width          16x256   8x512    4x1024   edges spread evenly
=============  =======  =======  =======  ===================
64, float32    39.2     37.4     36.8     33.7
128, float32   69.8     67.9     67.2     63.7
64, bfloat16   23.3     21.4     20.8     17.5
128, bfloat16  39.5     37.6     36.8     33.8
=============  =======  =======  =======  ===================
"""

LARGE_PIECES = 1024
"""Most pieces per step of a large hub's joining program. With few channels, a step has no more elements than others."""

BESIDE = 4096
"""Most elements per warp in a step of a piece, where other programs of the same launch walk several rows each. The
limit is half as high if the kernel does more than sum rows (see :func:`_elements_beside`)."""

BESIDE_IN_LANES = 1024
"""The same limit for narrow rows, whose lanes are combined after the loop. An accumulator then has a register for each
element."""


def hub_tile(region: Region, plan: Schedule, tile: Tile) -> Tile | None:
    """Returns the tile for pieces of hubs, given the `tile` for the other rows; None if no edges are walked.

    Most rows are too short to fill a step, but a piece is not, so its step has more edges. The pieces of a sum of 128
    channels take 23 us with 32 edges per step, and 30 us with 16. A step has fewer edges if several wide values per
    edge are read or written, so that ptxas spills no registers. It has no more edges than `tile` if arithmetic
    dominates. If ties are counted, a step stays in registers until its maximum is known: 32 edges of 128 channels take
    190, 16 edges take 100.
    """
    if plan.passes == 0:
        return None
    beside = tile.rows > 1 and plan.passes == 1
    tile = replace(tile, rows=1, steps=1)
    if arithmetic(region, plan) > HEAVY or weights(region) > WEIGHTS:
        return tile
    width = tile.width(region.grid)
    elements = tile.num_warps * ELEMENTS // min(power_of_two(wide_streams(region, plan)), 4)
    if width > WIDE and is_bandwidth_bound(region, plan) and not plan.counted:
        elements *= 2
    lanes = [i for i in plan.counted if in_wide_lanes(region, region.nodes[i])]
    if lanes:  # accumulators as large as the tile: two for each extremum whose ties are counted
        elements //= 2 * power_of_two(len(lanes))
    elif any(wide_lanes(region, plan, step) for step in range(plan.passes)):
        elements //= 2
    if beside:
        elements = _elements_beside(region, plan, elements, tile.num_warps)
    return replace(tile, edges=min(max(elements // width, tile.edges), MOST_EDGES))


def _elements_beside(region: Region, plan: Schedule, elements: int, num_warps: int) -> int:
    """Returns the elements of a step of a piece, if other programs of the same launch walk several rows each.

    All programs of a launch get as many registers as a piece needs. With more than 64 registers per thread, fewer than
    32 programs of one warp fit on a multiprocessor. The following holds for 64 channels in float32, compiled for an
    H200. A sum takes 64 registers. A maximum with its ties takes 60, and 112 with twice the number of edges.
    """
    most = BESIDE if region.grid[0] * region.grid[1] >= WIDE else BESIDE_IN_LANES
    elements = min(elements, num_warps * most)
    if any(n.op == "softmax" and in_wide_lanes(region, n) for n in region.nodes):
        return elements // 4  # each lane has a maximum and a sum for every channel
    alone = arithmetic(region, plan) == 0 and not plan.counted and not region.softmaxes
    return elements if alone else elements // 2


def joining_tile(region: Region, tile: Tile) -> Tile:
    """Returns the tile of a hub's joining programs. `tile` is the tile of the pieces.

    A hub may have hundreds of pieces. So each program has few channels, unless channels are reduced.
    """
    if not tile.heads and not needs_whole_rows(region):
        tile = replace(tile, channels=min(tile.channels, JOINED_CHANNELS))
    width = tile.width(region.grid)
    few = width <= JOINED_CHANNELS and region.grid[0] * region.grid[1] >= WIDE
    warps = FEW_WARPS if few else JOINING_WARPS
    return replace(tile, edges=min(max(warps * ELEMENTS // 2 // width, 1), MOST_EDGES), num_warps=warps)


def large_tile(region: Region, tile: Tile) -> Tile | None:
    """Returns the joining tile of large hubs: hubs with more pieces than `tile`, for other hubs, reads in a step.

    More programs share a row, and each has fewer channels and reads more pieces per step. A step has no more elements,
    so the kernel needs no more registers. Returns None if a step would have no more pieces than `tile` has.
    """
    if tile.heads or needs_whole_rows(region):
        return None
    large = replace(tile, channels=min(tile.channels, LARGE_CHANNELS))
    elements = max(tile.edges * tile.width(region.grid), tile.num_warps * ELEMENTS // 8)
    pieces = min(elements // large.width(region.grid), LARGE_PIECES)
    return replace(large, edges=pieces) if pieces > tile.edges else None


def large_programs(region: Region, tile: Tile) -> int:
    """Returns the number of joining programs of a large hub for each program of another hub, whose tile is `tile`.

    Returns 0 if large hubs have no tile of their own.
    """
    large = large_tile(region, tile)
    return 0 if large is None else -(-large.across(region.grid) // tile.across(region.grid))
