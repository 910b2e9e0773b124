"""Writes the Triton statements that load, compute and store values."""

from __future__ import annotations

from gnncompile.codegen.triton.bits import PackedBools
from gnncompile.codegen.triton.edge_linears import EdgeLinears
from gnncompile.codegen.triton.flatten_heads import FlatRows
from gnncompile.codegen.triton.kernel_text import KernelText
from gnncompile.codegen.triton.plan import Schedule
from gnncompile.codegen.triton.text import masked, pointwise_arguments, pointwise_text
from gnncompile.codegen.triton.tile import Tile
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir import philox
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import (
    BITS,
    BOOL,
    FEATURE_REDUCTIONS,
    FEATURE_SUMS,
    SEED,
    SOFTMAX_ROWS,
    Node,
    Output,
    Region,
    Space,
)


class ValueWriter(KernelText):
    """A kernel text with methods that add the statements of one value: its load, computation or store."""

    def __init__(self, region: Region, plan: Schedule, tile: Tile) -> None:
        super().__init__(region, plan, tile)
        self.bits, self.linears, self.flat = PackedBools(self), EdgeLinears(self), FlatRows(self)

    def _bind(self, i: int, name: str, text: str) -> None:
        self.line(f"{name} = {text}")
        self.names[i] = name

    def _compute(self, i: int) -> None:
        """Adds the statements of a value that is neither a constant nor a reduction over edges."""
        node = self.region.nodes[i]
        letter = {self.region.by: "i", self.region.by.opposite: "j", Space.PARAMETER: "p"}.get(node.space, "e")
        if node.op in SOFTMAX_ROWS:
            self.names[i] = f"{'max' if node.op == 'softmax_max' else 'sum'}{node.args[0]}"
        elif node.op == "softmax":
            self._bind(i, f"alpha{i}", f"tl.exp({self.operand(node.args[0])} - max{i}) / sum{i}")
        elif node.op == "input":
            if i not in self.region.only_columns:
                text = self.bits.load(i) if node.dtype == BITS else self._load(node)
                self._bind(i, f"{letter}{i}", text)
        elif node.op in FEATURE_REDUCTIONS:
            self._bind(i, f"{letter}{i}", self._over_features(node))
        elif node.op == "dropout":
            self._dropout(i, f"{letter}{i}")
        elif node.op == "linear":
            self._bind(i, f"{letter}{i}", self.linears.linear(i))
        elif node.op == "transposed":
            self._bind(i, f"{letter}{i}", self.linears.transposed(i))
        elif node.op in POINTWISE:
            self._bind(i, f"{letter}{i}", self._pointwise(node))
        else:
            raise UnsupportedRegion(f"no Triton code for the operation {node.op!r}")
        if i in self.region.columns:
            self.linears.columns(i)

    def _load(self, node: Node) -> str:
        if self.flat.holds(node):
            text = self.flat.load(node)
        else:
            offset, masks = self.place(node)
            text = f"tl.load(t{node.value}{offset}{masked(masks, other='0')})"
        if node.dtype == SEED:
            return text
        return f"{text} != 0" if node.dtype == BOOL else f"{text}.to({self.compute})"

    def _dropout(self, i: int, name: str) -> None:
        """Adds the factors of dropout. Lanes after the last edge or feature hold arbitrary values."""
        node = self.region.nodes[i]
        place = self.feature(node.shape)[0].removeprefix(" + ") or "0"
        p = node.number
        seed, least, scale = self.names[node.args[0]], philox.threshold(p), philox.scale(p)
        self.line(f"word, _, _, _ = tl.philox({seed}, edge_at.to(tl.uint32), {place}, 0, 0, {philox.ROUNDS})")
        kept, dropped = (f"tl.full((), {literal}, {self.compute})" for literal in (scale, 0.0))
        self._bind(i, name, f"tl.where(word >= tl.full((), {least}, tl.uint32), {kept}, {dropped})")

    def _over_features(self, node: Node) -> str:
        arg = self.region.nodes[node.args[0]]
        axis, at = ("head", 0) if node.op.endswith("heads") else ("channel", 1)
        function, neutral = ("sum", "0.0") if node.op in FEATURE_SUMS else ("max", 'float("-inf")')
        text, length = self.operand(node.args[0]), arg.shape[at]
        if length == 1:
            return text
        if self.padded(axis, length):
            text = f"tl.where({axis}{length}_in, {text}, {neutral})"
        folded = f"tl.{function}({text})"
        if not self._alone(node):
            folded = f"tl.{function}({text}, {self.axes.index(axis)}, keep_dims=True)"
        return f"({folded} + 0.0)" if function == "sum" else folded  # torch's sums start from a positive zero

    def _alone(self, node: Node) -> bool:
        """Whether a value is a single number for the whole program."""
        one_row = self.tile.rows == 1 or node.space is Space.PARAMETER
        return node.shape == (1, 1) and one_row and not self.varies(node)

    def _pointwise(self, node: Node) -> str:
        args = pointwise_arguments(self.region, node, self.operand)
        if node.op in ("and", "or"):
            alone = [self._alone(self.region.nodes[a]) for a in node.args]
            if alone[0] != alone[1]:  # Triton's interpreter can't apply & and | to a single bool and a tile
                one, tile = args if alone[0] else reversed(args)
                return f"tl.where({one}, {tile}, False)" if node.op == "and" else f"tl.where({one}, True, {tile})"
        return pointwise_text(self.region, node, args)

    def _store(self, k: int, out: Output) -> None:
        node = self.region.nodes[out.node]
        if out.dtype == BITS:
            self.bits.store(k, out.node)
            return
        text = self.operand(out.node)
        if out.dtype != BOOL:
            text = f"{text}.to(tl.{out.dtype})"
        elif not node.boolean:
            text = f"({text} != 0)"
        rows = Node(node.op, (), self.region.by, node.shape) if node.space is Space.PARAMETER else node
        offset, masks = self.place(rows)
        # If programs share a row, each program stores a value that is not split: the same bits, by the same code.
        self.line(f"tl.store(out{k}{offset}, {text}{masked(masks)})")
