"""Text of a softmax over the edges of a row, and of the sums that it weighs, in one pass.

A lane is an edge of a step. Where a sum is so wide that its edges meet in each step, all edges of a row share one
maximum so far; elsewhere every lane has its own, and lanes meet behind the loop. ``m`` is the maximum so far, ``s`` the
sum of exponentials, ``keep`` what a step leaves of all sums, ``weight`` what it adds an edge with.
"""

from __future__ import annotations

from gnncompile.codegen.triton.kernel_text import KernelText
from gnncompile.codegen.triton.plan import shares_maximum
from gnncompile.ir.reductions import PROPAGATE


def _scale(old: str, new: str) -> str:
    return f"tl.where({old} == {new}, 1.0, tl.exp({old} - {new}))"


class OnlineSoftmax:
    """Writes the statements of a softmax over the edges of a row."""

    def __init__(self, text: KernelText) -> None:
        self.text = text

    def start(self, i: int) -> None:
        """Nothing is added up yet."""
        node = self.text.region.nodes[i]
        shape = (
            self.text.row_shape(node.shape)
            if shares_maximum(self.text.region, self.text.plan, i)
            else self.text.tile_shape(node.shape, self.text.tile.edges)
        )
        self.text.line(f'm{i} = tl.full({shape}, float("-inf"), {self.text.compute})')
        self.text.line(f"s{i} = tl.full({shape}, 0.0, {self.text.compute})")

    def accumulate(self, i: int) -> None:
        """Adds the logits of a step."""
        node = self.text.region.nodes[i]
        self.text.line(f'x = tl.where(alive, {self.text.operand(node.args[0])}, float("-inf"))')
        if shares_maximum(self.text.region, self.text.plan, i):
            self._add(i, f"tl.where(alive, {_scale('x', 'top')}, 0.0)", f"weight{i}")
            return
        # One exponential serves both cases: the larger of the old maximum and the new logit has exponential 1.
        self.text.line(f"scale = tl.where(m{i} == x, 1.0, tl.exp(-tl.abs(m{i} - x)))")
        self.text.line(f"keep{i} = tl.where(x > m{i}, scale, 1.0)")
        self.text.line(f"weight{i} = tl.where(x > m{i}, 1.0, scale)")
        self.text.line(f"s{i} = s{i} * keep{i} + weight{i}")
        self.text.line(f"m{i} = tl.maximum(m{i}, x, {PROPAGATE})")

    def merge(self, i: int, maximum: str, total: str) -> None:
        """Adds the maxima and the sums of pieces, one in each lane."""
        self.text.line(f"x = {maximum}")
        self._add(i, _scale("x", "top"), f"{total} * weight{i}")

    def _add(self, i: int, weight: str, added: str) -> None:
        """Adds lanes whose maxima are ``x``, ``top`` being the new maximum."""
        shape = self.text.region.nodes[i].shape
        largest = "x"
        if shares_maximum(self.text.region, self.text.plan, i):
            largest, added = self.text.over_edges("x", shape, "maximum"), self.text.over_edges(added, shape)
        self.text.line(f"top = tl.maximum(m{i}, {largest}, {PROPAGATE})")
        self.text.line(f"keep{i} = {_scale(f'm{i}', 'top')}")
        self.text.line(f"weight{i} = {weight}")
        self.text.line(f"s{i} = s{i} * keep{i} + {added}")
        self.text.line(f"m{i} = top")

    def join_lanes(self, i: int) -> None:
        """``max`` and ``sum`` of the whole row, or piece, and ``share``, what the sums of each lane count there."""
        shape = self.text.region.nodes[i].shape
        if shares_maximum(self.text.region, self.text.plan, i):
            self.text.line(f"max{i} = m{i}")
            self.text.line(f"sum{i} = s{i}")
            return
        self.text.line(f"max{i} = {self.text.over_edges(f'm{i}', shape, 'maximum')}")
        # Lanes, or pieces, whose logits are all -inf must not make a NaN of their row.
        self.text.line(f"share{i} = {_scale(f'm{i}', f'max{i}')}")
        self.text.line(f"sum{i} = {self.text.over_edges(f's{i} * share{i}', shape)}")

    def finish(self, i: int) -> None:
        """The maximum and the sum of a row: 0 where it has no edge, and no number if its largest logit is infinite."""
        self.join_lanes(i)
        self.text.line(f"sum{i} = tl.where(occupied, sum{i} + (max{i} - max{i}), 0.0)")
        self.text.line(f"max{i} = tl.where(occupied, max{i}, 0.0)")
