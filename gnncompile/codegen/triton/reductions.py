"""Writes reductions over the edges of a row: their accumulators, their steps, and their results.

A lane is an edge of a step. A reduction of a wide row combines the edges of each step. Others keep lanes, which are
combined after the loop.

**Softmax.** A softmax and the sums that it weights are computed in one pass. In the kernel, ``m`` is the running
maximum and ``s`` the running sum of exponentials. A step multiplies all running sums by ``keep``, and adds each edge
with factor ``weight``. If each step combines a weighted sum, all lanes of a row share one running maximum. Otherwise
every lane has its own maximum.

**Ties.** The edges that reach a maximum or minimum are counted in the pass that finds the extremum. Whenever edges of a
step, or pieces of a hub, change the extremum, the count starts again. If an accumulator has lanes, each lane counts for
itself. After the loop, the counts of those lanes are added up that reach the row's extremum. No edge equals a NaN, so
the count of a NaN is 0.
"""

from __future__ import annotations

from gnncompile.codegen.triton.edge_linears import LayerWriter
from gnncompile.codegen.triton.text import exponential
from gnncompile.ir.reductions import PROPAGATE, REDUCTIONS
from gnncompile.ir.region import Shape


class ReductionWriter(LayerWriter):
    """A writer of values that also writes reductions over the edges of a row."""

    def _scale(self, old: str, new: str) -> str:
        """Returns the factor of sums with maximum `old` where the maximum becomes `new`."""
        return f"tl.where({old} == {new}, 1.0, {exponential(self.compute, f'{old} - {new}')})"

    def _starts(self, i: int) -> list[str]:
        """Returns the start value of each accumulator. Lanes without an edge hold it too: it never changes a result.

        A softmax has two accumulators, its maximum and its sum.
        """
        op = self.region.nodes[i].op
        if op == "softmax":
            return ['float("-inf")', "0.0"]
        return ["0.0" if op == "ties" else REDUCTIONS[op].triton_start]

    def _start(self, i: int) -> None:
        """Writes the accumulators before the loop."""
        softmax, shape = self.region.nodes[i].op == "softmax", self.region.nodes[i].shape
        combined = i in (self.plan.shared_maxima if softmax else self.plan.every_step)
        lengths = self.tile_shape(shape, 1 if combined else self.tile.edges)
        if softmax and combined and self.tile.rows == 1 and shape == (1, 1):
            lengths = "()"
        for name, start in zip(("m", "s") if softmax else ("acc",), self._starts(i), strict=True):
            self.line(f"{name}{i} = tl.full({lengths}, {start}, {self.compute})")

    def _accumulate(self, i: int) -> None:
        """Writes a step: adds the edges of a tile to an accumulator."""
        node, plan = self.region.nodes[i], self.plan
        if node.op == "softmax":
            self._add_logits(i)
        elif i in plan.weighted_sums:
            softmax, factors = plan.weighted_sums[i]
            product = " * ".join([f"weight{softmax}", *map(self.operand, factors)])
            self._combine(i, f"tl.where(alive, {product}, 0.0)")
        elif node.op == "ties":
            extremum = node.args[0]
            value = self.operand(self.region.nodes[extremum].args[0])
            reached = f"acc{extremum}" if i in plan.counted else self.operand(extremum)
            self._combine(i, f"tl.where(alive & ({value} == {reached}), 1.0, 0.0)")
        else:
            source, value = self.region.nodes[node.args[0]], self.operand(node.args[0])
            zero_already = source.op == "input" and source.space in plan.edge_spaces
            adds = not REDUCTIONS[node.op].triton_function
            masked = value if adds and zero_already else f"tl.where(alive, {value}, {self._starts(i)[0]})"
            self._combine(i, masked)

    def _merge(self, i: int, partials: list[str]) -> None:
        """Writes a step of a hub: adds the partial results of pieces, one piece per lane, in the order of `_starts`."""
        plan = self.plan
        if self.region.nodes[i].op == "softmax":
            maximum, total = partials
            self.line(f"x = {maximum}")
            self._raise_maximum(i, self._scale("x", "top"), f"{total} * weight{i}")
        elif i in plan.weighted_sums:
            self._combine(i, f"{partials[0]} * weight{plan.weighted_sums[i].softmax}")
        elif i in plan.counted:
            extremum = plan.counted[i]
            self._combine(i, f"tl.where(piece{extremum} == acc{extremum}, {partials[0]}, 0.0)")
        elif i in plan.counted.values():
            self.line(f"piece{i} = {partials[0]}")
            self._combine(i, f"piece{i}")
        else:
            self._combine(i, partials[0])

    def _combine(self, i: int, masked: str) -> None:
        """Combines a tile with the accumulator of a reduction. Masked lanes hold the reduction's start value."""
        node, plan, combine = self.region.nodes[i], self.plan, self._function(i)
        if i in plan.every_step:
            masked = self._over_edges(masked, node.shape, combine)
        if combine:
            if i in plan.counted.values():
                self.line(f"before{i} = acc{i}")
            self.line(f"acc{i} = {REDUCTIONS[node.op].triton.format(f'acc{i}', masked)}")
        elif i in plan.weighted_sums:
            self.line(f"acc{i} = acc{i} * keep{plan.weighted_sums[i].softmax} + {masked}")
        elif i in plan.counted:
            extremum = plan.counted[i]
            self.line(f"acc{i} = tl.where(before{extremum} == acc{extremum}, acc{i}, 0.0) + {masked}")
        else:
            self.line(f"acc{i} += {masked}")

    def _function(self, i: int) -> str:
        """Returns the name of the Triton function that combines two values of a reduction; empty for sums."""
        op = self.region.nodes[i].op
        return REDUCTIONS[op].triton_function if op in REDUCTIONS else ""

    def _over_edges(self, text: str, shape: Shape, combine: str = "") -> str:
        """Returns a tile reduced over its edge axis. One element per program becomes a scalar."""
        scalar = self.tile.rows == 1 and shape == (1, 1)
        axis = "None" if scalar else str(self.axes.index("edge"))
        keep = "" if scalar else ", keep_dims=True"
        if combine:
            return f"tl.reduce({text}, {axis}, _{combine}{keep})"
        return f"tl.sum({text}{'' if scalar else f', {axis}'}{keep})"

    def _finish(self, i: int) -> None:
        """Writes the result of a row, 0 for a row without edges. An infinite maximum makes the sum of a softmax NaN."""
        total, *sums = self._results(i)
        if sums:
            self.line(f"sum{i} = tl.where(occupied, sum{i} + (max{i} - max{i}), 0.0)")
            self.line(f"max{i} = tl.where(occupied, max{i}, 0.0)")
            return
        if i in self.plan.weighted_sums:
            total = f"tl.where(occupied, {total} / sum{self.plan.weighted_sums[i].softmax}, 0.0)"
        elif self._function(i):
            total = f"tl.where(occupied, {total}, 0.0)"
        if total == f"acc{i}":
            self.names[i] = total
        else:
            self._bind(i, total)

    def _results(self, i: int) -> list[str]:
        """Returns the accumulators reduced over the lanes, in the order of :meth:`_starts`."""
        node, plan = self.region.nodes[i], self.plan
        if node.op == "softmax":
            self._join_lanes(i)
            return [f"max{i}", f"sum{i}"]
        if i in plan.every_step:
            return [f"acc{i}"]
        lanes = f"acc{i}"
        if i in plan.counted:
            lanes = f"tl.where(acc{plan.counted[i]} == top{plan.counted[i]}, acc{i}, 0.0)"
        elif i in plan.weighted_sums and plan.weighted_sums[i].softmax not in plan.shared_maxima:
            lanes += f" * share{plan.weighted_sums[i].softmax}"
        total = self._over_edges(lanes, node.shape, self._function(i))
        if i in plan.counted.values():
            self.line(f"top{i} = {total}")
            return [f"top{i}"]
        return [total]

    # -- the softmax ----------------------------------------------------------------------------------------------

    def _add_logits(self, i: int) -> None:
        """Writes the statements that add the logits of a step."""
        self.line(f'x = tl.where(alive, {self.operand(self.region.nodes[i].args[0])}, float("-inf"))')
        if i in self.plan.shared_maxima:
            self._raise_maximum(i, f"tl.where(alive, {self._scale('x', 'top')}, 0.0)", f"weight{i}")
            return
        # One exponential is enough: of the old maximum and the new logit, the larger has exponential 1.
        self.line(
            f"scale = tl.where(m{i} == x, 1.0, {exponential(self.compute, f'-tl.abs(m{i} - x)')})",
            f"keep{i} = tl.where(x > m{i}, scale, 1.0)",
            f"weight{i} = tl.where(x > m{i}, 1.0, scale)",
            f"s{i} = s{i} * keep{i} + weight{i}",
            f"m{i} = tl.maximum(m{i}, x, {PROPAGATE})",
        )

    def _raise_maximum(self, i: int, weight: str, added: str) -> None:
        """Writes the statements that add lanes with maxima ``x``; ``top`` is the new maximum."""
        shape, largest = self.region.nodes[i].shape, "x"
        if i in self.plan.shared_maxima:
            largest, added = self._over_edges("x", shape, "maximum"), self._over_edges(added, shape)
        self.line(
            f"top = tl.maximum(m{i}, {largest}, {PROPAGATE})",
            f"keep{i} = {self._scale(f'm{i}', 'top')}",
            f"weight{i} = {weight}",
            f"s{i} = s{i} * keep{i} + {added}",
            f"m{i} = top",
        )

    def _join_lanes(self, i: int) -> None:
        """Writes ``max`` and ``sum`` of a row or piece, and ``share``, the factor of each lane's sums in the total."""
        shape = self.region.nodes[i].shape
        if i in self.plan.shared_maxima:
            self.line(f"max{i} = m{i}", f"sum{i} = s{i}")
            return
        self.line(f"max{i} = {self._over_edges(f'm{i}', shape, 'maximum')}")
        # Lanes or pieces whose logits are all -inf must not turn their row into NaN.
        self.line(f"share{i} = {self._scale(f'm{i}', f'max{i}')}")
        self.line(f"sum{i} = {self._over_edges(f's{i} * share{i}', shape)}")
