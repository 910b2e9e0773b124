"""Chooses the tile of a tiled region: its edges and warps, and where sums are kept."""

from __future__ import annotations

from dataclasses import dataclass

from gnncompile import tuning
from gnncompile.codegen.triton.tiled_plan import TiledPlan, padded


@dataclass(frozen=True)
class TiledTile:
    """How the programs of a walk in tiles work.

    Attributes:
        edges: Edges of a tile, a power of two.
        num_warps: Warps of a program.
        sums_in_registers: Whether sums over all edges stay in registers. Otherwise each tile adds to them in memory.
        programs: Most programs that share the edges.
    """

    edges: int
    num_warps: int
    sums_in_registers: bool
    programs: int


def choose_tiled_tile(plan: TiledPlan) -> TiledTile:
    """Returns the tile for a region. It depends on the widths and types of values only.

    Regions that compare values for equality have one tile: a gradient must find again the maxima of its forward, so
    both must round alike.
    """
    tiles, nodes = tuning.TILES, plan.region.nodes
    width = max((padded(nodes[i].shape[1]) for i in plan.need), default=1)
    summed = sum(
        padded(rows) * padded(columns) for rows, columns in map(plan.matrix, map(nodes.__getitem__, plan.outers))
    )
    wide = width * (2 if plan.region.double else 1)
    warps = tuning.choice(tiles.tiled_warps, wide)
    edges = tuning.choice(tiles.tiled_edges, wide)
    programs = tiles.processors * tuning.choice(tiles.tiled_programs, wide)
    return TiledTile(edges, warps, summed <= warps * tiles.tiled_sums, programs)
