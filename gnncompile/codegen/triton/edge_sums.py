"""Writes the kernel of a region that sums over all edges, not per row: gradients of linear-layer weights."""

from __future__ import annotations

from functools import cached_property

from gnncompile.codegen.triton.plan import Pass
from gnncompile.codegen.triton.text import masked
from gnncompile.codegen.triton.tile import padded
from gnncompile.codegen.triton.writer import Writer


class EdgeSumsWriter(Writer):
    """Writes a kernel whose programs each walk an equal share of all edges, and store the sums over their share.

    Edges are walked in the order of their rows. Row values are loaded for each edge, by the edge's row index;
    consecutive edges of a tile often share a row.

    A sum of features times a value per edge may be a matrix product over the edges of a step, ``features.T @ value``,
    which the GPU's matrix units compute (:func:`gnncompile.codegen.triton.tile.sums_by_products`). Other sums take a
    multiply-add for each feature and element.
    """

    @cached_property
    def parameters(self) -> list[str]:
        """The names of the kernel's arguments, in order."""
        nodes = [self.region.nodes[i] for i in self.plan.need]
        reads_rows = any(n.op == "input" and n.space is self.region.by for n in nodes)
        return [*self._read_tensors(), *(["rows"] if reads_rows else []), "partial", "num_rows"]

    def _rows(self) -> None:
        self.line("program = tl.program_id(0).to(tl.int64)")
        self.line("total = tl.load(rowptr + num_rows)")
        self.line("share = tl.cdiv(total, tl.num_programs(0))")
        self.line("begin = program * share")
        self.line("end = tl.minimum(begin + share, total)")

    def _open_loop(self, loop: Pass) -> None:
        super()._open_loop(loop)
        if "rows" in self.parameters:
            self.line("row = tl.load(rows + position, mask=inside, other=0).to(tl.int64)")
            self.line(f"row = {self.expand('row', 'edge')}")

    def _body(self) -> None:
        self._rows_before(0)
        self._pass(0)
        for i in self.plan.loops[0].reductions:
            self._store_sum(i)

    def _start(self, i: int) -> None:
        node = self.region.nodes[i]
        if i in self.products:
            lengths = [padded(self.region.features(i)), self.extent("channel", node.shape[1])]
            self.line(f"acc{i} = tl.full({lengths}, 0.0, {self.compute})")
            return
        shape = self.tile_shape(node.shape, 1 if i in self.plan.every_step else self.tile.edges)
        for k in range(self.region.features(i)):
            self.line(f"acc{i}_{k} = tl.full({shape}, 0.0, {self.compute})")

    def _accumulate(self, i: int) -> None:
        node = self.region.nodes[i]
        features, value = node.args
        if i in self.products:
            factor, zeros = self.region.nodes[features].dtype, self.tile_shape(node.shape, self.tile.edges)
            self.line(f"x = tl.where(alive, {self.operand(value)}, tl.full({zeros}, 0.0, {self.compute}))")
            self.line(f"acc{i} = plus_product(acc{i}, tl.trans(features{features}), x.to(tl.{factor}))")
            return
        self.line(f"x = tl.where(alive, {self.operand(value)}, 0.0)")
        for k in range(self.region.features(i)):
            text = f"c{features}_{k} * x"
            self.line(f"acc{i}_{k} += {self._over_edges(text, node.shape) if i in self.plan.every_step else text}")

    def _store_sum(self, i: int) -> None:
        node = self.region.nodes[i]
        offset, masks = self.feature(node.shape)
        if i in self.products:
            length = self.region.features(i)
            masks += self.feature_masks(length, "[:, None]")
            place = f"{self.plan.offsets[i]} + feature{length}[:, None] * {node.shape[1]}{offset}"
            self.line(f"tl.store(partial + program * {self.plan.partial_length} + {place}, acc{i}{masked(masks)})")
            return
        for k in range(self.region.features(i)):
            total = f"acc{i}_{k}" if i in self.plan.every_step else self._over_edges(f"acc{i}_{k}", node.shape)
            at = self.plan.offsets[i] + k * node.shape[0] * node.shape[1]
            self.line(
                f"tl.store(partial + program * {self.plan.partial_length} + {at}{offset}, {total}{masked(masks)})"
            )
