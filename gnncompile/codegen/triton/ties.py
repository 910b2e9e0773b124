"""How many edges of a row reach its maximum or minimum, counted by a Triton kernel in the pass that finds it.

Whenever edges of a step, or the pieces of a hub, move the extremum, the count begins again. All lanes of an accumulator
count for themselves, where it has lanes, and those that reach the extremum of the row are added up. A NaN is reached by
no edge, so it leaves 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnncompile.ir.region import Region, Space, behind

if TYPE_CHECKING:
    from gnncompile.codegen.triton.writer import Writer


def counted(region: Region) -> dict[int, int]:
    """The ties that are counted in the pass of their extremum, by their positions, and that extremum.

    Those of an extremum that a later pass compares each edge with anyway are counted there.
    """
    nodes = region.nodes
    wanted = behind(nodes, (o.node for o in region.outputs))
    compared = [set(nodes[i].args) for i in wanted if nodes[i].space is Space.EDGE]
    found = {i: nodes[i].args[0] for i in sorted(wanted) if nodes[i].op == "ties"}
    return {i: at for i, at in found.items() if not any({at, *nodes[at].args} <= args for args in compared)}


def accumulate(w: Writer, i: int) -> None:
    """Counts edges of a step; the extremum has taken them into account."""
    extremum = w.region.nodes[i].args[0]
    value = w.operand(w.region.nodes[extremum].args[0])
    _count(w, i, f"tl.where(alive & ({value} == acc{extremum}), 1.0, 0.0)")


def merge(w: Writer, i: int, counts: str) -> None:
    """Adds the counts of pieces, whose extrema, ``piece``, are part of that of the row."""
    extremum = w.region.nodes[i].args[0]
    _count(w, i, f"tl.where(piece{extremum} == acc{extremum}, {counts}, 0.0)")


def _count(w: Writer, i: int, more: str) -> None:
    extremum = w.region.nodes[i].args[0]
    w.line(f"acc{i} = tl.where(before{extremum} == acc{extremum}, acc{i}, 0.0) + {w.over_lanes(i, more)}")


def join_lanes(w: Writer, i: int) -> str:
    """The count of the whole row, or piece, whose extremum is ``top``."""
    extremum = w.region.nodes[i].args[0]
    reach = f"tl.where(acc{extremum} == top{extremum}, acc{i}, 0.0)"
    return w.over_edges(reach, w.region.nodes[i].shape)
