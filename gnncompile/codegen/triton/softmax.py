"""Writes a softmax over the edges of a row, and the sums that it weights, in one pass.

A lane is an edge of a step. If a weighted sum is so wide that each step combines its edges, all lanes of a row share
one running maximum. Otherwise every lane has its own maximum, and lanes are combined after the loop. In the kernel,
``m`` is the running maximum and ``s`` the running sum of exponentials. A step multiplies all running sums by ``keep``,
and adds each edge with factor ``weight``.
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
        """Writes the initial maximum, -inf, and the initial sum, 0."""
        node = self.text.region.nodes[i]
        shape = (
            self.text.row_shape(node.shape)
            if shares_maximum(self.text.region, self.text.plan, i)
            else self.text.tile_shape(node.shape, self.text.tile.edges)
        )
        self.text.line(f'm{i} = tl.full({shape}, float("-inf"), {self.text.compute})')
        self.text.line(f"s{i} = tl.full({shape}, 0.0, {self.text.compute})")

    def accumulate(self, i: int) -> None:
        """Writes the statements that add the logits of a step."""
        node = self.text.region.nodes[i]
        self.text.line(f'x = tl.where(alive, {self.text.operand(node.args[0])}, float("-inf"))')
        if shares_maximum(self.text.region, self.text.plan, i):
            self._add(i, f"tl.where(alive, {_scale('x', 'top')}, 0.0)", f"weight{i}")
            return
        # One exponential is enough: of the old maximum and the new logit, the larger has exponential 1.
        self.text.line(f"scale = tl.where(m{i} == x, 1.0, tl.exp(-tl.abs(m{i} - x)))")
        self.text.line(f"keep{i} = tl.where(x > m{i}, scale, 1.0)")
        self.text.line(f"weight{i} = tl.where(x > m{i}, 1.0, scale)")
        self.text.line(f"s{i} = s{i} * keep{i} + weight{i}")
        self.text.line(f"m{i} = tl.maximum(m{i}, x, {PROPAGATE})")

    def merge(self, i: int, maximum: str, total: str) -> None:
        """Writes the statements that add the maxima and the sums of pieces, one piece per lane."""
        self.text.line(f"x = {maximum}")
        self._add(i, _scale("x", "top"), f"{total} * weight{i}")

    def _add(self, i: int, weight: str, added: str) -> None:
        """Writes the statements that add lanes with maxima ``x``; ``top`` is the new maximum."""
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
        """Writes ``max`` and ``sum`` of a row or piece, and ``share``, the factor of each lane's sums in the total."""
        shape = self.text.region.nodes[i].shape
        if shares_maximum(self.text.region, self.text.plan, i):
            self.text.line(f"max{i} = m{i}")
            self.text.line(f"sum{i} = s{i}")
            return
        self.text.line(f"max{i} = {self.text.over_edges(f'm{i}', shape, 'maximum')}")
        # Lanes or pieces whose logits are all -inf must not turn their row into NaN.
        self.text.line(f"share{i} = {_scale(f'm{i}', f'max{i}')}")
        self.text.line(f"sum{i} = {self.text.over_edges(f's{i} * share{i}', shape)}")

    def finish(self, i: int) -> None:
        """Writes a row's maximum and sum, 0 for a row without edges. An infinite maximum makes the sum NaN."""
        self.join_lanes(i)
        self.text.line(f"sum{i} = tl.where(occupied, sum{i} + (max{i} - max{i}), 0.0)")
        self.text.line(f"max{i} = tl.where(occupied, max{i}, 0.0)")
