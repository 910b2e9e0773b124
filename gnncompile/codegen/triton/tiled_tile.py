"""Chooses how the programs of a walk in tiles work."""

from __future__ import annotations

from dataclasses import dataclass

from gnncompile import tuning
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.codegen.triton.tiled_work import TiledWork
from gnncompile.ir.region import HALVES
from gnncompile.tile_sizes import WalkTile


@dataclass(frozen=True)
class TiledTile:
    """How the programs of a walk in tiles work.

    Attributes:
        edges: Edges of a tile, a power of two.
        num_warps: Warps of a program.
        programs: Programs that a multiprocessor runs at a time.
        keeps_weights: Whether a program loads all weights once, into shared memory. Otherwise it loads them for each
            tile.
        stages: Triton's ``num_stages``: what products read is loaded ``stages - 1`` tiles ahead.
    """

    edges: int
    num_warps: int
    programs: int
    keeps_weights: bool
    stages: int = 1

    @property
    def registers(self) -> int:
        """Most registers of a thread. With more, fewer programs would fit on a multiprocessor."""
        return _registers(self.num_warps, self.programs)


def choose_tiled_tile(plan: TiledPlan, phase: Phase) -> TiledTile:
    """Returns the tile for a phase. It depends on the operations, widths and types only.

    Regions that compare values for equality all have one tile: a gradient must find again the maxima of its forward, so
    both must round alike.
    """
    work = TiledWork(plan, phase)
    tile, exact = _walk_tile(plan, work), plan.region.exact
    keeps_weights = 0 < work.weights <= tuning.TILES.tiled_weights and not exact
    programs = _programs(plan, tile, work)
    stages = tile.stages if _can_prefetch(tile, programs, work) and not exact else 1
    return TiledTile(tile.edges, tile.warps, programs, keeps_weights, stages)


def _walk_tile(plan: TiledPlan, work: TiledWork) -> WalkTile:
    tiles = tuning.TILES
    table = tiles.tiled_halves if plan.factor in HALVES else tiles.tiled_floats
    if plan.region.exact:
        return table[-1][1]
    times = work.layers if plan.factor in HALVES else 2 if plan.region.double else 1
    return tuning.choice(table, work.width * times)


def _programs(plan: TiledPlan, tile: WalkTile, work: TiledWork) -> int:
    """Returns how many programs a multiprocessor runs: fewer if only then the values of a tile fit in its registers.

    At least two of them remain: while one waits for memory, another computes. A walk of 16-bit rows with little
    arithmetic mostly waits for memory. Loading rows ahead helps it more than a third program.
    """
    tiles, halves = tuning.TILES, plan.factor in HALVES
    others = tiles.registers_of_layer * work.layers if halves else tiles.other_registers
    needed = work.waiting * tile.edges // (tile.warps * 32) + others
    fitting = [n for n in range(2, tile.programs + 1) if _registers(tile.warps, n) >= needed]
    ahead = [n for n in fitting if _can_prefetch(tile, n, work)]
    waits = halves and work.instructions <= tiles.tiled_arithmetic
    return max(ahead if waits and ahead else fitting, default=min(2, tile.programs))


def _registers(warps: int, programs: int) -> int:
    """Returns the most registers of a thread with which so many programs fit on a multiprocessor."""
    return min(255, tuning.TILES.registers // (programs * warps * 32) // 8 * 8)


def _can_prefetch(tile: WalkTile, programs: int, work: TiledWork) -> bool:
    """Whether loading rows ahead pays: the tile needs them at once, and shared memory has room for them.

    Vectors of a few numbers would be loaded ahead as well, number by number. On an H200 that makes float32 walks of
    EGNN up to 1.7 times as long.
    """
    tiles = tuning.TILES
    needed = work.weights + tile.edges * (work.bytes_of_rows + work.bytes_of_exchange) + tiles.shared_memory_of_program
    return work.begins_with_rows and not work.reads_vectors and programs * needed <= tiles.shared_memory
