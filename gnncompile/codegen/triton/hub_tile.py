"""How large a tile is for what is special about hubs: their pieces, and programs that put these together."""

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
"""Most edges per step of a piece, and pieces per step of a program that puts them together."""

JOINING_WARPS = 8
"""Warps of a program that puts the pieces of a hub together."""

FEW_WARPS = 2
"""The same where a row of one head has at least :data:`WIDE` channels, which programs share: most hubs have few pieces,
and those of many are left to other programs. A sum over 2.3M edges, the longest row 13,000, takes 208.5 us where it
takes 213.8 with 8 warps (128 channels, float32; 115.7 and 120.9 in bfloat16). A sum over one hub of 100,000 edges takes
1 us more: little of the 37 us that it takes with 64 channels, much of the 13 with 16."""

JOINED_CHANNELS = 32
"""Most channels of such a program: with 128 it reads 782 pieces in 13 steps, with 32 in 7, one behind the other."""

LARGE_CHANNELS = 4
"""Most channels of a program for a large hub, one with more pieces than a program for other hubs reads at once. In
microseconds on an H200, a hub of 100,000 edges beside as many rows without any, by channels and pieces read at once:

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
"""Most pieces that such a program reads at once: with so few channels no more elements than other programs read."""

BESIDE = 4096
"""Most elements of a step of a piece per warp, where other programs of the launch walk several rows each; half as many
where more is done with rows than to add them up (see :func:`_elements_beside`)."""

BESIDE_IN_LANES = 1024
"""The same for narrow rows, whose edges meet behind the loop: an accumulator has a register for each element."""


def hub_tile(region: Region, plan: Schedule, tile: Tile) -> Tile | None:
    """The tile for pieces of hubs beside `tile` for the other rows.

    None where no edges are walked.

    A piece fills its steps, which most rows are too short for, so it takes more edges at once: the pieces of a sum of
    128 channels take 23 us with 32 edges, 30 with 16. Where several wide values per edge are read or written, fewer, so
    that ptxas spills nothing; where arithmetic takes longest, no more. A step whose ties are counted stays in registers
    as a whole until its maximum is known: 32 edges of 128 channels take 190, 16 take 100.
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
    if lanes:  # the largest accumulators, two of each
        elements //= 2 * power_of_two(len(lanes))
    elif any(wide_lanes(region, plan, step) for step in range(plan.passes)):
        elements //= 2
    if beside:
        elements = _elements_beside(region, plan, elements, tile.num_warps)
    return replace(tile, edges=min(max(elements // width, tile.edges), MOST_EDGES))


def _elements_beside(region: Region, plan: Schedule, elements: int, num_warps: int) -> int:
    """Elements of a step of a piece, in one launch with rows that several share a program.

    All programs have as many registers as a piece. More than 64 a thread would keep some of the 32 programs of one warp
    off each processor. Compiled for an H200, 64 channels in float32, a sum comes to 64, a maximum with its ties to 60,
    with twice as many edges to 112.
    """
    most = BESIDE if region.grid[0] * region.grid[1] >= WIDE else BESIDE_IN_LANES
    elements = min(elements, num_warps * most)
    if any(n.op == "softmax" and in_wide_lanes(region, n) for n in region.nodes):
        return elements // 4  # each edge has a maximum and a sum for every channel
    alone = arithmetic(region, plan) == 0 and not plan.counted and not region.softmaxes
    return elements if alone else elements // 2


def joining_tile(region: Region, tile: Tile) -> Tile:
    """The tile for putting the pieces of a hub together, of which there may be hundreds, by programs of few channels
    each, where no sum over channels needs them all. `tile` is that of the pieces.
    """
    if not tile.heads and not needs_whole_rows(region):
        tile = replace(tile, channels=min(tile.channels, JOINED_CHANNELS))
    width = tile.width(region.grid)
    few = width <= JOINED_CHANNELS and region.grid[0] * region.grid[1] >= WIDE
    warps = FEW_WARPS if few else JOINING_WARPS
    return replace(tile, edges=min(max(warps * ELEMENTS // 2 // width, 1), MOST_EDGES), num_warps=warps)


def large_tile(region: Region, tile: Tile) -> Tile | None:
    """The tile for a hub of more pieces than `tile`, that of other hubs, reads at once: its channels are spread over
    more programs, which read more pieces, but no more elements, so that other hubs lose no registers to it. None where
    it would have no more pieces.
    """
    if tile.heads or needs_whole_rows(region):
        return None
    large = replace(tile, channels=min(tile.channels, LARGE_CHANNELS))
    elements = max(tile.edges * tile.width(region.grid), tile.num_warps * ELEMENTS // 8)
    pieces = min(elements // large.width(region.grid), LARGE_PIECES)
    return replace(large, edges=pieces) if pieces > tile.edges else None


def large_programs(region: Region, tile: Tile) -> int:
    """How many programs a large hub has for each one that other hubs have, whose tile is `tile`; 0 if it is as they."""
    large = large_tile(region, tile)
    return 0 if large is None else -(-large.across(region.grid) // tile.across(region.grid))
