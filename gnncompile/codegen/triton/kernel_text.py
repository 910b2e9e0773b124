"""The text of a Triton kernel as it grows, the axes of its tiles, and the names of its values.

Every value is a tile whose axes are, in this order, those of (row, edge, head, channel) that the region has more than
one of. A value keeps length 1 on axes it does not vary along, and Triton broadcasts it; a value with one element per
program is a scalar. Feature axes are padded to powers of two: padded lanes hold anything and are masked where a feature
axis is summed and where a value is stored. Lanes after the last edge of a row hold anything as well, and are masked
where edges are reduced.
"""

from __future__ import annotations

from gnncompile.codegen.triton.plan import Schedule, edgewise, every_step
from gnncompile.codegen.triton.text import literal
from gnncompile.codegen.triton.tile import Tile, power_of_two
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import Node, Region, Shape, Space

FEATURE_AXES = ("head", "channel")


def combining(node: Node) -> str:
    """The name of the function that combines two values of a reduction; empty where values are added up."""
    return REDUCTIONS[node.op].triton_function if node.op in REDUCTIONS else ""


class KernelText:
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

    # -- operands and reductions ----------------------------------------------------------------------------------

    def operand(self, i: int, bare: bool = False) -> str:
        """The text that stands for a value; a constant's, unless `bare`, with its type."""
        node = self.region.nodes[i]
        if node.op != "const":
            return self.names[i]
        if node.negative_zero:  # Triton's literals of 0 are positive
            return f"(tl.full((), 0.0, {self.compute}) * -1.0)"
        number = literal(node.number)
        return number if bare else f"tl.full((), {number}, {self.compute})"

    def over_lanes(self, i: int, text: str) -> str:
        """Reduces a tile over its edge axis, as its accumulator is."""
        node = self.region.nodes[i]
        return self.over_edges(text, node.shape, combining(node)) if every_step(node) else text

    def over_edges(self, text: str, shape: Shape, combine: str = "") -> str:
        """Reduces a tile over its edge axis; one element per program becomes a scalar."""
        scalar = self.tile.rows == 1 and shape == (1, 1)
        axis = "None" if scalar else str(self.axes.index("edge"))
        keep = "" if scalar else ", keep_dims=True"
        if combine:
            return f"tl.reduce({text}, {axis}, _{combine}{keep})"
        return f"tl.sum({text}{'' if scalar else f', {axis}'}{keep})"
