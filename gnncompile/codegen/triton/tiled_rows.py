"""Splits off what a tiled region computes per row, as regions that are not tiled.

Such a region reads values per edge that the walk in tiles stores, and reduces them over the edges of each row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gnncompile.ir.builder import Builder
from gnncompile.ir.costs import row_bytes
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import HALVES, LAYERS, Output, Region, Space, behind

ROW_RESULTS = (*REDUCTIONS, "ties")
"""Operations that give a value per row from values per edge."""

_COMPARING = ("reduce_max", "reduce_min", "ties", "softmax", "eq", "ne", "lt", "le", "gt", "ge")


@dataclass
class RowPart:
    """Some outputs per row that are computed together.

    Attributes:
        outputs: Their positions among the outputs of the tiled region.
        nodes: The nodes that the part computes.
        leaves: The values per edge that the part reads from memory.
        compares: Whether values are compared. Then leaves must not be rounded.
    """

    outputs: list[int]
    nodes: set[int] = field(default_factory=set)
    leaves: set[int] = field(default_factory=set)
    compares: bool = False

    def region(self, whole: Region, dtypes: dict[int, str]) -> Region:
        """Returns the part as a region. Its tensors are those of the region `whole`, then the leaves in order."""
        b, copies = Builder(whole.by, whole.unmasked), dict[int, int]()
        leaves = sorted(self.leaves)
        for i in sorted(self.nodes | self.leaves):
            node = whole.nodes[i]
            if i in self.leaves:
                copies[i] = b.input(whole.count + leaves.index(i), Space.EDGE, node.shape, dtypes[i])
            else:
                copies[i] = b.emit(replace(node, args=tuple(copies[a] for a in node.args)))
        outputs = [whole.outputs[k] for k in self.outputs]
        return b.finish([Output(copies[out.node], out.dtype, out.trailing) for out in outputs])


def row_parts(region: Region) -> list[RowPart]:
    """Returns the parts of the outputs per row. Those that share a reduction, or read the same edges, are together."""
    cutter, parts = _Cutter(region), list[RowPart]()
    found = [cutter.part(k) for k, out in enumerate(region.outputs) if region.per_row(out)]
    if region.factor in HALVES and any(part.compares for part in found):  # results per edge are rounded
        found = [cutter.part(k, reads_kept=False) for part in found for k in part.outputs]
    for part in found:
        for other in [p for p in parts if cutter.share_reductions(p, part) or cutter.share_edges(p, part)]:
            parts.remove(other)
            part = RowPart(
                [*other.outputs, *part.outputs],
                other.nodes | part.nodes,
                other.leaves | part.leaves,
                other.compares or part.compares,
            )
        parts.append(part)
    return parts


class _Cutter:
    """Finds where the part of an output ends: at values behind layers, which the walk in tiles computes."""

    def __init__(self, region: Region) -> None:
        self.region, self.nodes = region, region.nodes
        self.layered, self.by_row = set[int](), set[int]()
        self.near = set[int]()
        """Values that follow from inputs and from outputs per edge, which are stored anyway."""
        self.kept = {out.node: out.dtype for out in region.outputs if region.per_edge(out)}
        self.types = {out.dtype for out in region.outputs if region.per_row(out)}
        for i, node in enumerate(region.nodes):
            if node.op in LAYERS or not self.layered.isdisjoint(node.args):
                self.layered.add(i)
            if node.op in (*ROW_RESULTS, "softmax") or not self.by_row.isdisjoint(node.args):
                self.by_row.add(i)
            if i not in self.layered or i in self.kept or (node.op in POINTWISE and self.near.issuperset(node.args)):
                self.near.add(i)

    def part(self, k: int, reads_kept: bool = True) -> RowPart:
        """Returns the part of one output. `reads_kept`: whether it may read results per edge in place of operands."""
        part = RowPart([k])
        todo = [self.region.outputs[k].node]
        while todo:
            i = todo.pop()
            if i in part.nodes or i in part.leaves:
                continue
            if self._is_leaf(i) or (reads_kept and self._is_less_to_read(i)):
                part.leaves.add(i)
            else:
                part.nodes.add(i)
                todo.extend(self.nodes[i].args)
        part.compares = any(self.nodes[i].op in _COMPARING for i in part.nodes)
        return part

    def share_reductions(self, one: RowPart, other: RowPart) -> bool:
        """Whether two parts reduce the same value."""
        return any(self.nodes[i].op in (*ROW_RESULTS, "softmax") for i in one.nodes & other.nodes)

    def share_edges(self, one: RowPart, other: RowPart) -> bool:
        """Whether two parts read the same values per edge, in the same type."""
        alike = one.compares == other.compares and len(self.types) == 1
        return alike and not self._values_read(one).isdisjoint(self._values_read(other))

    def _values_read(self, part: RowPart) -> set[int]:
        """Returns the values per edge that a part reads from memory."""
        return part.leaves | {i for i in part.nodes if self._reads_edges(i)}

    def _is_leaf(self, i: int) -> bool:
        """Whether a part reads a value from memory, since the walk in tiles computes it by layers."""
        node = self.nodes[i]
        if i not in self.layered or i in self.by_row:
            return False
        # A gradient finds a maximum again only if a walk computes it as well: kernels by rows round otherwise.
        if node.op not in POINTWISE or i in self.kept or self.region.exact:
            return True
        if i in self.near:
            return False
        behind_layers = [self.nodes[a].shape[1] for a in set(node.args) if a in self.layered]
        return sum(behind_layers) >= node.shape[1]

    def _is_less_to_read(self, i: int) -> bool:
        """Whether a value without layers is stored anyway, in the type of all rows, and less to read than its operands.

        The others are computed again. A gradient per edge is often a sum of rows that lie in memory.
        """
        node, dtype = self.nodes[i], self.kept.get(i)
        if self.types != {dtype} or dtype not in (self.region.factor, self.region.compute):
            return False
        if node.op not in POINTWISE or i in self.by_row or self.region.exact:
            return False
        operands = [self.nodes[a] for a in behind(self.nodes, [i]) if self._reads_edges(a)]
        return sum(map(row_bytes, operands)) > row_bytes(replace(node, dtype=dtype))

    def _reads_edges(self, i: int) -> bool:
        """Whether a node reads another row for each edge of a row."""
        node = self.nodes[i]
        return node.op == "input" and node.space in self.region.edge_spaces
