"""The text of a Triton kernel while it is written, the axes of its tiles, and the names of its values.

Every value is a tile. Its axes come from (row, edge, head, channel), in this order. An axis is left out if the kernel
has only one element on it. A value has length 1 on axes along which it does not vary, and Triton broadcasts it. A value
with one element per program is a scalar.

Feature axes are padded to powers of two. Padded lanes hold arbitrary values; sums over a feature axis and stores mask
them. Lanes after the last edge of a row hold arbitrary values too; reductions over edges mask them.
"""

from __future__ import annotations

from gnncompile.codegen.triton.plan import Schedule, edgewise, every_step
from gnncompile.codegen.triton.text import constant
from gnncompile.codegen.triton.tile import Tile, power_of_two
from gnncompile.ir.reductions import REDUCTIONS
from gnncompile.ir.region import Node, Region, Shape, Space

FEATURE_AXES = ("head", "channel")


def combining(node: Node) -> str:
    """Returns the name of the Triton function that combines two values of a reduction; empty for sums."""
    return REDUCTIONS[node.op].triton_function if node.op in REDUCTIONS else ""


class KernelText:
    """Collects the text of a kernel, statement by statement.

    Attributes:
        names: The expression for each value in the text, by node index.
        lines: The statements so far.
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
        self.block = "tl.program_id(1)"  # the block of features, where several programs share a row
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.indent = 1

    def line(self, text: str) -> None:
        """Adds a statement at the current indentation."""
        self.lines.append("    " * self.indent + text)

    # -- axes and addresses ---------------------------------------------------------------------------------------

    def expand(self, text: str, *axes: str) -> str:
        """Returns `text`, a vector or matrix over `axes`, indexed so that it broadcasts against every tile."""
        slots = [":" if a in axes else "None" for a in self.axes]
        return text if len(slots) == len(axes) else f"{text}[{', '.join(slots)}]"

    def extent(self, axis: str, length: int) -> int:
        """Returns the tile length of a feature axis on which a value has `length` elements."""
        return min(power_of_two(length), self.tile.extent(self.region.grid, FEATURE_AXES.index(axis)))

    def padded(self, axis: str, length: int) -> bool:
        """Whether a feature axis has lanes without an element: in a block, or in blocks that only wider values need."""
        extent = self.extent(axis, length)
        narrower = extent < power_of_two(length) and length < self.region.grid[FEATURE_AXES.index(axis)]
        return length % extent != 0 or narrower

    def feature(self, shape: Shape) -> tuple[str, list[str]]:
        """Returns the offset of an element within its row, with a leading plus, and the masks for the element."""
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
        """Whether a value differs between the edges that the program's loop walks."""
        return edgewise(self.region, node)

    def index(self, node: Node) -> str:
        """Returns the name of the row index of a value, in the kernel."""
        rows = {Space.EDGE: "edge_at", Space.ORDERED: "here", self.region.by.opposite: "other", self.region.by: "row"}
        return rows[node.space]

    def place(self, node: Node) -> tuple[str, list[str]]:
        """Returns the offset of a value's elements in its tensor, with a leading plus, and the masks for them."""
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
        """Returns the lengths of a tile for a value of this feature shape and this number of edges, as text."""
        lengths = {
            "row": self.tile.rows,
            "edge": edges,
            "head": self.extent("head", shape[0]),
            "channel": self.extent("channel", shape[1]),
        }
        return f"[{', '.join(str(lengths[a]) for a in self.axes)}]"

    def row_shape(self, shape: Shape) -> str:
        """Returns the lengths of a tile for a row value of this feature shape, such as a sum over edges, as text."""
        return "()" if self.tile.rows == 1 and shape == (1, 1) else self.tile_shape(shape, 1)

    # -- operands and reductions ----------------------------------------------------------------------------------

    def operand(self, i: int, bare: bool = False) -> str:
        """Returns the expression for a value. A constant has its type, unless `bare`."""
        node = self.region.nodes[i]
        return self.names[i] if node.op != "const" else constant(node, self.compute, "()", bare)

    def over_lanes(self, i: int, text: str) -> str:
        """Returns a tile reduced over its edge axis if the reduction does so at every step, else the tile itself."""
        node = self.region.nodes[i]
        return self.over_edges(text, node.shape, combining(node)) if every_step(node) else text

    def over_edges(self, text: str, shape: Shape, combine: str = "") -> str:
        """Returns a tile reduced over its edge axis. One element per program becomes a scalar."""
        scalar = self.tile.rows == 1 and shape == (1, 1)
        axis = "None" if scalar else str(self.axes.index("edge"))
        keep = "" if scalar else ", keep_dims=True"
        if combine:
            return f"tl.reduce({text}, {axis}, _{combine}{keep})"
        return f"tl.sum({text}{'' if scalar else f', {axis}'}{keep})"
