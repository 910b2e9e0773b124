"""Chooses tiles for hubs: for the programs that walk their pieces, and for the programs that join the pieces."""

from __future__ import annotations

from dataclasses import replace

from gnncompile import tuning
from gnncompile.codegen.triton.plan import Schedule
from gnncompile.codegen.triton.tile import (
    Tile,
    arithmetic,
    in_wide_lanes,
    is_bandwidth_bound,
    is_heavy,
    layers_by_products,
    needs_whole_rows,
    power_of_two,
    reads_many_weights,
    wide_lanes,
    wide_streams,
)
from gnncompile.ir.region import Region


def hub_tile(region: Region, plan: Schedule, tile: Tile) -> Tile | None:
    """Returns the tile for pieces of hubs, given the `tile` for the other rows; None if no edges are walked.

    Most rows are too short to fill a step, but a piece is not, so its step has more edges. A step has fewer edges if
    several wide values per edge are read or written, so that ptxas spills no registers. It has no more edges than
    `tile` if arithmetic dominates, or if layers of pieces are products. If ties are counted, a step stays in registers
    until its maximum is known.
    """
    if plan.passes == 0:
        return None
    tiles, beside = tuning.TILES, tile.rows > 1 and plan.passes == 1
    tile = replace(tile, rows=1, steps=1)
    if is_heavy(region, plan) or reads_many_weights(region) or layers_by_products(region, tile):
        return tile
    width = tile.width(region.grid)
    elements = tile.num_warps * tiles.elements_of_piece // min(power_of_two(wide_streams(region, plan)), 4)
    if width > tiles.combined_width and is_bandwidth_bound(region, plan) and not plan.counted:
        elements *= 2
    lanes = [i for i in plan.counted if in_wide_lanes(region, plan, i)]
    if lanes:  # accumulators as large as the tile: two for each extremum whose ties are counted
        elements //= 2 * power_of_two(len(lanes))
    elif wide_lanes(region, plan):
        elements //= 2
    if beside:
        elements = _elements_beside(region, plan, elements, tile.num_warps)
    return replace(tile, edges=min(max(elements // width, tile.edges), tiles.edges_of_piece))


def _elements_beside(region: Region, plan: Schedule, elements: int, num_warps: int) -> int:
    """Returns the elements of a step of a piece, if other programs of the same launch walk several rows each.

    All programs of a launch get as many registers as a piece needs. With too many registers per thread, fewer programs
    fit on a multiprocessor.
    """
    tiles, row = tuning.TILES, region.grid[0] * region.grid[1]
    most = tiles.beside if row >= tiles.combined_width else tiles.beside_in_lanes
    elements = min(elements, num_warps * most)
    if any(in_wide_lanes(region, plan, i) for i in region.softmaxes):
        return elements // 4  # each lane has a maximum and a sum for every channel
    alone = arithmetic(region, plan) == 0 and not plan.counted and not region.softmaxes
    return elements if alone else elements // 2


def joining_tile(region: Region, tile: Tile) -> Tile:
    """Returns the tile of a hub's joining programs. `tile` is the tile of the pieces.

    A hub may have hundreds of pieces. So each program has few channels, unless channels are reduced.
    """
    tiles = tuning.TILES
    if not tile.heads and not needs_whole_rows(region):
        tile = replace(tile, channels=min(tile.channels, tiles.joined_channels))
    width = tile.width(region.grid)
    few = width <= tiles.joined_channels and region.grid[0] * region.grid[1] >= tiles.combined_width
    warps = tiles.few_warps if few else tiles.joining_warps
    pieces = min(max(warps * tiles.joining_elements // width, 1), tiles.edges_of_piece)
    return replace(tile, edges=pieces, num_warps=warps)


def large_tile(region: Region, tile: Tile) -> Tile | None:
    """Returns the joining tile of large hubs: hubs with more pieces than `tile`, for other hubs, reads in a step.

    More programs share a row, and each has fewer channels and reads more pieces per step. A step has no more elements,
    so the kernel needs no more registers. Returns None if a step would have no more pieces than `tile` has.
    """
    if tile.heads or needs_whole_rows(region):
        return None
    tiles = tuning.TILES
    large = replace(tile, channels=min(tile.channels, tiles.large_channels))
    elements = max(tile.edges * tile.width(region.grid), tile.num_warps * tiles.large_elements)
    pieces = min(elements // large.width(region.grid), tiles.large_pieces)
    return replace(large, edges=pieces) if pieces > tile.edges else None


def large_programs(region: Region, tile: Tile) -> int:
    """Returns the number of joining programs of a large hub for each program of another hub, whose tile is `tile`.

    Returns 0 if large hubs have no tile of their own.
    """
    large = large_tile(region, tile)
    return 0 if large is None else -(-large.across(region.grid) // tile.across(region.grid))
