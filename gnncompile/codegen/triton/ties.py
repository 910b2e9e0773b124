"""How many edges of a row reach its maximum or minimum, counted by a Triton kernel in the pass that finds it.

Whenever edges of a step, or the pieces of a hub, move the extremum, the count begins again. All lanes of an accumulator
count for themselves, where it has lanes, and those that reach the extremum of the row are added up. A NaN is reached by
no edge, so it leaves 0.
"""

from __future__ import annotations

from gnncompile.codegen.triton.kernel_text import KernelText


class TieCounter:
    """Writes the statements that count ties."""

    def __init__(self, text: KernelText) -> None:
        self.text = text

    def accumulate(self, i: int) -> None:
        """Counts edges of a step; the extremum has taken them into account."""
        extremum = self.text.region.nodes[i].args[0]
        value = self.text.operand(self.text.region.nodes[extremum].args[0])
        self._count(i, f"tl.where(alive & ({value} == acc{extremum}), 1.0, 0.0)")

    def merge(self, i: int, counts: str) -> None:
        """Adds the counts of pieces, whose extrema, ``piece``, are part of that of the row."""
        extremum = self.text.region.nodes[i].args[0]
        self._count(i, f"tl.where(piece{extremum} == acc{extremum}, {counts}, 0.0)")

    def _count(self, i: int, more: str) -> None:
        extremum = self.text.region.nodes[i].args[0]
        self.text.line(
            f"acc{i} = tl.where(before{extremum} == acc{extremum}, acc{i}, 0.0) + {self.text.over_lanes(i, more)}"
        )

    def join_lanes(self, i: int) -> str:
        """The count of the whole row, or piece, whose extremum is ``top``."""
        extremum = self.text.region.nodes[i].args[0]
        reach = f"tl.where(acc{extremum} == top{extremum}, acc{i}, 0.0)"
        return self.text.over_edges(reach, self.text.region.nodes[i].shape)
