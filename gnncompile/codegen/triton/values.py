"""Writes the values of a Triton kernel: where they stand in memory, how they are computed, how they are stored.

Every value is a tile whose axes are, in this order, those of (row, edge, head, channel) that the region has more than
one of. A value keeps length 1 on axes it does not vary along, and Triton broadcasts it; a value with one element per
program is a scalar. Feature axes are padded to powers of two: padded lanes hold anything and are masked where a feature
axis is summed and where a value is stored. Lanes behind the last edge of a row hold anything as well, and are masked
where edges are reduced.
"""

from __future__ import annotations

import re

from gnncompile.codegen.triton import bits, edge_linears, flatten_heads
from gnncompile.codegen.triton.plan import Schedule, edgewise
from gnncompile.codegen.triton.text import literal, masked, without_parentheses
from gnncompile.codegen.triton.tile import Tile, power_of_two
from gnncompile.errors import Unsupported
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
    Shape,
    Space,
)

FEATURE_AXES = ("head", "channel")


class ValueWriter:
    """Grows a text, statement by statement.

    Attributes:
        names: What stands in it for a value, by its position in the region.
        lines: The statements.
    """

    def __init__(self, region: Region, plan: Schedule, tile: Tile) -> None:
        self.region, self.plan, self.tile = region, plan, tile
        self.compute = f"tl.{region.compute}"
        many = {
            "row": tile.rows > 1,
            "edge": plan.passes > 0,
            "head": region.grid[0] > 1,
            "channel": region.grid[1] > 1,
        }
        self.axes = [name for name, used in many.items() if used]
        self.block = "tl.program_id(1)"  # of a row that programs share
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.indent = 1

    def line(self, text: str) -> None:
        """Adds a statement at the present depth."""
        self.lines.append("    " * self.indent + text)

    # -- axes and addresses ---------------------------------------------------------------------------------------

    def expand(self, text: str, *axes: str) -> str:
        """Indexes a vector (or a matrix) over `axes` so that it broadcasts against every tile."""
        slots = [":" if a in axes else "None" for a in self.axes]
        return text if len(slots) == len(axes) else f"{text}[{', '.join(slots)}]"

    def extent(self, axis: str, length: int) -> int:
        """Tile length of a feature axis on which a value has `length` elements."""
        return min(power_of_two(length), self.tile.extent(self.region.grid, FEATURE_AXES.index(axis)))

    def padded(self, axis: str, length: int) -> bool:
        """Whether a feature axis has lanes that stand for no element: in a block, or in blocks that wider rows need."""
        extent = self.extent(axis, length)
        narrower = extent < power_of_two(length) and length < self.region.grid[FEATURE_AXES.index(axis)]
        return length % extent != 0 or narrower

    def feature(self, shape: Shape) -> tuple[str, list[str]]:
        """Offset of an element within its row, after a leading plus, and the masks that it needs."""
        heads, channels = shape
        terms, masks = [], []
        if heads > 1:
            terms.append(f"head{heads} * {channels}" if channels > 1 else f"head{heads}")
            masks += [f"head{heads}_in"] if self.padded("head", heads) else []
        if channels > 1:
            terms.append(f"channel{channels}")
            masks += [f"channel{channels}_in"] if self.padded("channel", channels) else []
        return "".join(f" + {t}" for t in terms), masks

    def varies(self, node: Node) -> bool:
        """Whether a value differs from edge to edge of those that the program's loop walks."""
        return edgewise(self.region, node)

    def index(self, node: Node) -> str:
        """What numbers the rows of a value."""
        rows = {Space.EDGE: "edge_at", Space.ORDERED: "here", self.region.by.opposite: "other", self.region.by: "row"}
        return rows[node.space]

    def place(self, node: Node) -> tuple[str, list[str]]:
        """Offset of a value's elements in its tensor, after a leading plus, and the masks that it needs."""
        offset, masks = self.feature(node.shape)
        width = node.shape[0] * node.shape[1]
        if node.space is Space.PARAMETER:
            return offset, masks
        index = self.index(node)
        if self.varies(node):
            masks = ["alive", *masks]
        elif self.tile.rows > 1:
            masks = ["row_in", *masks]
        return f" + {index}" + (f" * {width}" if width > 1 else "") + offset, masks

    def tile_shape(self, shape: Shape, edges: int) -> str:
        """The lengths of a tile that holds a value of this shape for so many edges."""
        lengths = {
            "row": self.tile.rows,
            "edge": edges,
            "head": self.extent("head", shape[0]),
            "channel": self.extent("channel", shape[1]),
        }
        return f"[{', '.join(str(lengths[a]) for a in self.axes)}]"

    def row_shape(self, shape: Shape) -> str:
        """The lengths of a tile that holds a value of this shape per row, as sums over its edges have."""
        return "()" if self.tile.rows == 1 and shape == (1, 1) else self.tile_shape(shape, 1)

    # -- values ---------------------------------------------------------------------------------------------------

    def _bind(self, i: int, name: str, text: str) -> None:
        self.line(f"{name} = {text}")
        self.names[i] = name

    def _compute(self, i: int) -> None:
        """Computes one value that is neither a constant nor a reduction."""
        node = self.region.nodes[i]
        letter = {self.region.by: "i", self.region.by.opposite: "j", Space.PARAMETER: "p"}.get(node.space, "e")
        if node.op in SOFTMAX_ROWS:
            self.names[i] = f"{'max' if node.op == 'softmax_max' else 'sum'}{node.args[0]}"
        elif node.op == "softmax":
            self._bind(i, f"alpha{i}", f"tl.exp({self.operand(node.args[0])} - max{i}) / sum{i}")
        elif node.op == "input":
            if i not in self.region.only_columns:
                text = bits.load(self, i) if node.dtype == BITS else self._load(node)
                self._bind(i, f"{letter}{i}", text)
        elif node.op in FEATURE_REDUCTIONS:
            self._bind(i, f"{letter}{i}", self._over_features(node))
        elif node.op == "dropout":
            self._dropout(i, f"{letter}{i}")
        elif node.op == "linear":
            self._bind(i, f"{letter}{i}", edge_linears.linear(self, i))
        elif node.op == "transposed":
            self._bind(i, f"{letter}{i}", edge_linears.transposed(self, i))
        elif node.op in POINTWISE:
            self._bind(i, f"{letter}{i}", self._pointwise(node))
        else:
            raise Unsupported(f"no Triton code for the operation {node.op!r}")
        if i in self.region.columns:
            edge_linears.columns(self, i)

    def _load(self, node: Node) -> str:
        if flatten_heads.is_flat(self, node):
            text = flatten_heads.load(self, node)
        else:
            offset, masks = self.place(node)
            text = f"tl.load(t{node.value}{offset}{masked(masks, other='0')})"
        if node.dtype == SEED:
            return text
        return f"{text} != 0" if node.dtype == BOOL else f"{text}.to({self.compute})"

    def _dropout(self, i: int, name: str) -> None:
        """What dropout multiplies with; lanes behind the last edge or feature hold anything."""
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
        return f"({folded} + 0.0)" if function == "sum" else folded  # torch's sums begin with a positive zero

    def _alone(self, node: Node) -> bool:
        """Whether a value is one number for the whole program."""
        one_row = self.tile.rows == 1 or node.space is Space.PARAMETER
        return node.shape == (1, 1) and one_row and not self.varies(node)

    def _pointwise(self, node: Node) -> str:
        nodes = [self.region.nodes[a] for a in node.args]
        typed = nodes[1:] if node.op == "where" else nodes
        # A literal takes its type from the other operand; without one, Triton would compute in float32.
        bare = POINTWISE[node.op].bare and any(n.op != "const" for n in typed)
        args = [self.operand(a, bare) for a in node.args]
        if node.op in ("and", "or"):
            args = [a if n.boolean else f"({a} != 0)" for a, n in zip(args, nodes, strict=True)]
            alone = [self._alone(n) for n in nodes]
            if alone[0] != alone[1]:  # Triton's interpreter joins no single bool with a tile of them
                one, tile = args if alone[0] else reversed(args)
                return f"tl.where({one}, {tile}, False)" if node.op == "and" else f"tl.where({one}, True, {tile})"
        text = POINTWISE[node.op].triton.format(*args)
        if node.op == "sqrt" and self.region.compute == "float32":  # tl.sqrt takes subnormal numbers for 0
            text = f"tl.sqrt_rn({args[0]})"
        return without_parentheses(re.sub(r"\bT\b", self.compute, text))

    def operand(self, i: int, bare: bool = False) -> str:
        """The text that stands for a value; a constant's, unless `bare`, with its type."""
        node = self.region.nodes[i]
        if node.op != "const":
            return self.names[i]
        if node.negative_zero:  # Triton's literals of 0 are positive
            return f"(tl.full((), 0.0, {self.compute}) * -1.0)"
        number = literal(node.number)
        return number if bare else f"tl.full((), {number}, {self.compute})"

    def _store(self, k: int, out: Output) -> None:
        node = self.region.nodes[out.node]
        if out.dtype == BITS:
            bits.store(self, k, out.node)
            return
        text = self.operand(out.node)
        if out.dtype != BOOL:
            text = f"{text}.to(tl.{out.dtype})"
        elif not node.boolean:
            text = f"({text} != 0)"
        rows = Node(node.op, (), self.region.by, node.shape) if node.space is Space.PARAMETER else node
        offset, masks = self.place(rows)
        # Where programs share a row, each of them stores a narrow value: the same bits, by the same code.
        self.line(f"tl.store(out{k}{offset}, {text}{masked(masks)})")
