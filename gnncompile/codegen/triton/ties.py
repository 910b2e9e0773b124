"""Counts the edges of a row that reach its maximum or minimum, in the pass of a Triton kernel that finds the extremum.

Whenever edges of a step, or pieces of a hub, change the extremum, the count starts again. If an accumulator has lanes,
each lane counts for itself. After the loop, the counts of those lanes are added up that reach the row's extremum. No
edge equals a NaN, so the count of a NaN is 0.
"""

from __future__ import annotations

from gnncompile.codegen.triton.kernel_text import KernelText


class TieCounter:
    """Writes the statements that count ties."""

    def __init__(self, text: KernelText) -> None:
        self.text = text

    def accumulate(self, i: int) -> None:
        """Writes the count of a step's edges. The extremum must already include these edges."""
        extremum = self.text.region.nodes[i].args[0]
        value = self.text.operand(self.text.region.nodes[extremum].args[0])
        self._count(i, f"tl.where(alive & ({value} == acc{extremum}), 1.0, 0.0)")

    def merge(self, i: int, counts: str) -> None:
        """Adds the counts of pieces. The row's extremum must already include the pieces' extrema, ``piece``."""
        extremum = self.text.region.nodes[i].args[0]
        self._count(i, f"tl.where(piece{extremum} == acc{extremum}, {counts}, 0.0)")

    def _count(self, i: int, more: str) -> None:
        extremum = self.text.region.nodes[i].args[0]
        self.text.line(
            f"acc{i} = tl.where(before{extremum} == acc{extremum}, acc{i}, 0.0) + {self.text.over_lanes(i, more)}"
        )

    def join_lanes(self, i: int) -> str:
        """Returns the text of the count of a whole row or piece, whose extremum is ``top``."""
        extremum = self.text.region.nodes[i].args[0]
        reach = f"tl.where(acc{extremum} == top{extremum}, acc{i}, 0.0)"
        return self.text.over_edges(reach, self.text.region.nodes[i].shape)
