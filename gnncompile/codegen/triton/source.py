"""Writes a region, or a part of its work, as a Python module with one Triton kernel. Does not import Triton."""

from __future__ import annotations

from gnncompile.codegen.triton.edge_sums import EdgeSumsWriter
from gnncompile.codegen.triton.hubs import BothWriter, HubWriter, PieceWriter, SeveralBothWriter
from gnncompile.codegen.triton.plan import WHOLE, Part, schedule
from gnncompile.codegen.triton.tile import Tile, choose_tile
from gnncompile.codegen.triton.writer import Writer
from gnncompile.ir.region import Region

_WRITERS = {
    "all": Writer,
    "ordinary": Writer,
    "pieces": PieceWriter,
    "both": BothWriter,
    "hubs": HubWriter,
    "edges": EdgeSumsWriter,
}


def source(region: Region, tile: Tile | None = None, part: Part = WHOLE) -> str:
    """Returns the text of a module. :func:`gnncompile.codegen.triton.writer.parameters` lists its kernel's arguments.

    Args:
        region: The region to compute.
        tile: The tile. None chooses a tile by the region.
        part: The part of the work that the kernel does.

    Raises:
        UnsupportedRegion: The region can't be expressed as a Triton kernel; the message says why.
    """
    plan = schedule(region)
    tile = tile or choose_tile(region, plan)
    writer = SeveralBothWriter if part.walks == "both" and tile.rows > 1 else _WRITERS[part.walks]
    return writer(region, plan, tile, part).module()
