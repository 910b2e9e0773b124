"""Writes a region, or a part of its work, as the text of a Python module with one Triton kernel. Needs no Triton."""

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
    """The module's text; its kernel takes the arguments that :func:`gnncompile.codegen.triton.writer.parameters` lists.

    Args:
        region: What to compute.
        tile: The tile; chosen by the width of the region if left out.
        part: Which part of the work.

    Raises:
        UnsupportedRegion: The region can't be expressed; the message says why.
    """
    plan = schedule(region)
    tile = tile or choose_tile(region, plan)
    writer = SeveralBothWriter if part.walks == "both" and tile.rows > 1 else _WRITERS[part.walks]
    return writer(region, plan, tile, part).module()
