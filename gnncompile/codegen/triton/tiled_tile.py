"""Chooses how the programs of a walk in tiles work."""

from __future__ import annotations

from dataclasses import dataclass

from gnncompile import tuning
from gnncompile.codegen.triton.tiled_layers import HALVES, matrix, padded
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_plan import TiledPlan

_BYTES = {"float64": 8, "float32": 6}
"""Bytes of a weight in shared memory: three bfloat16 parts for float32."""


@dataclass(frozen=True)
class TiledTile:
    """How the programs of a walk in tiles work.

    Attributes:
        edges: Edges of a tile, a power of two.
        num_warps: Warps of a program.
        programs: Programs that a multiprocessor runs at a time.
        keeps_weights: Whether a program loads all weights once, into shared memory. Otherwise it loads them for each
            tile.
    """

    edges: int
    num_warps: int
    programs: int
    keeps_weights: bool

    @property
    def registers(self) -> int:
        """Most registers of a thread. With more, fewer programs would fit on a multiprocessor."""
        threads = self.programs * self.num_warps * 32
        return min(255, tuning.TILES.registers // threads // 8 * 8)


def choose_tiled_tile(plan: TiledPlan, phase: Phase) -> TiledTile:
    """Returns the tile for a phase. It depends on the widths and types of values only.

    Regions that compare values for equality all have one tile: a gradient must find again the maxima of its forward, so
    both must round alike.
    """
    tiles, region = tuning.TILES, plan.region
    width = max((padded(region.nodes[i].shape[1]) for i in phase.need), default=1)
    wide = tiles.tiled_widest if region.exact else width * (2 if region.double else 1)
    layers = [(plan.layers[i], region.nodes[i]) for i in plan.layers_of(phase)]
    weights = {(name, node.op, matrix(region, node)) for name, node in layers}
    size = sum(padded(rows) * padded(columns) for _, _, (rows, columns) in weights) * _BYTES.get(plan.factor, 2)
    tile = tuning.choice(tiles.tiled_halves if plan.factor in HALVES else tiles.tiled_floats, wide)
    return TiledTile(*tile, 0 < size <= tiles.tiled_weights and not region.exact)
