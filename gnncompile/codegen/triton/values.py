"""Writes the Triton statements that load, compute and store values.

Every value is a tile. Its axes come from (row, edge, head, channel), in this order. An axis is left out if the kernel
has only one element on it. A value has length 1 on axes along which it does not vary, and Triton broadcasts it. A value
with one element per program is a scalar.

Feature axes are padded to powers of two. Padded lanes hold arbitrary values; sums over a feature axis and stores mask
them. Lanes after the last edge of a row hold arbitrary values too; reductions over edges mask them.
"""

from __future__ import annotations

from gnncompile.codegen.triton.plan import Part, Schedule
from gnncompile.codegen.triton.text import constant, exponential, masked, pointwise_arguments, pointwise_text
from gnncompile.codegen.triton.tile import Tile, power_of_two, streams_edges
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir import philox
from gnncompile.ir.bits import PER_WORD, packable, words
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import (
    BITS,
    BOOL,
    FEATURE_REDUCTIONS,
    FEATURE_SUMS,
    INDEX,
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
    """Collects the text of a kernel, statement by statement, and adds the statements of one value after another.

    Attributes:
        names: The expression for each value in the text, by node index.
        lines: The statements so far.
    """

    def __init__(self, region: Region, plan: Schedule, tile: Tile, part: Part) -> None:
        self.region, self.plan, self.tile, self.part = region, plan, tile, part
        self.compute = f"tl.{region.compute}"
        many = {
            "row": tile.rows > 1,
            "edge": plan.passes > 0,
            "head": region.grid[0] > 1,
            "channel": region.grid[1] > 1,
        }
        self.axes = [name for name, used in many.items() if used]
        opposite, by = region.by.opposite, region.by
        self.index = {Space.EDGE: "edge_at", Space.ORDERED: "here", opposite: "other", by: "row"}  # of a space's rows
        self.letters = {by: "i", opposite: "j", Space.PARAMETER: "p"}
        self.block = "tl.program_id(1)"  # the block of features, where several programs share a row
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.indent = 1

    def line(self, *texts: str) -> None:
        """Adds statements at the current indentation."""
        self.lines += ["    " * self.indent + text for text in texts]

    def _bind(self, i: int, text: str) -> None:
        """Adds the statement that names value `i`."""
        name = f"{self.letters.get(self.region.nodes[i].space, 'e')}{i}"
        self.line(f"{name} = {text}")
        self.names[i] = name

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

    def place(self, space: Space, width: int, shape: Shape, row: str | None = None) -> tuple[str, list[str]]:
        """Returns the offset of the elements of `shape` in rows of `width` elements, with a leading plus, and masks.

        The rows are those of a space, or those that an index names. Lanes without an edge have the index -1.
        """
        offset, masks = self.feature(shape)
        if space is Space.PARAMETER:
            return offset, masks
        if row is not None:
            masks = [f"({row} >= 0)", *masks]
        elif space in self.plan.edge_spaces:
            masks = ["alive", *masks]
        elif self.tile.rows > 1:
            masks = ["row_in", *masks]
        return f" + {row or self.index[space]}" + (f" * {width}" if width > 1 else "") + offset, masks

    def tile_shape(self, shape: Shape, edges: int) -> str:
        """Returns the lengths of a tile for a value of this feature shape and this number of edges, as text."""
        lengths = {
            "row": self.tile.rows,
            "edge": edges,
            "head": self.extent("head", shape[0]),
            "channel": self.extent("channel", shape[1]),
        }
        return f"[{', '.join(str(lengths[a]) for a in self.axes)}]"

    # -- rows of several heads ------------------------------------------------------------------------------------
    #
    # Heads and channels of a row are contiguous in memory, but Triton 3.6 does not notice. Triton spreads the edges of
    # a step over lanes that should hold other heads, so that a sum over edges takes shuffles. Such rows are therefore
    # read as rows of one head, and reshaped in registers. The kernels of a GAT layer (4 heads of 32 channels, compiled
    # for an H200) then use 80 registers and 11 shuffles, instead of 121 and 73. Triton 3.7 needs no flat load. Loads
    # that are issued a step ahead go through shared memory, which gives them the right layout without a flat load.

    def is_flat(self, node: Node) -> bool:
        """Whether an input is read as a row of one head: a value per edge whose heads are all in one program."""
        in_sequence = node.op == "input" and node.dtype != BITS and not node.through_index
        if not in_sequence or self.tile.stages > 1 or min(node.shape) == 1:
            return False
        extents = self.extent("head", node.shape[0]), self.extent("channel", node.shape[1])
        return node.space in self.plan.edge_spaces - {self.region.by} and extents == node.shape

    def flat(self, text: str) -> str:
        """Returns the text of a value per edge, with a further axis for the elements of a row."""
        return f"{text}[{':, ' if self.tile.rows > 1 else ''}:, None]"

    # -- values ---------------------------------------------------------------------------------------------------

    def operand(self, i: int, bare: bool = False) -> str:
        """Returns the expression for a value. A constant has its type, unless `bare`."""
        node = self.region.nodes[i]
        return self.names[i] if node.op != "const" else constant(node, self.compute, "()", bare)

    def _compute(self, i: int) -> None:
        """Adds the statements of a value that is neither a constant, nor a layer, nor a reduction over edges."""
        node = self.region.nodes[i]
        if node.op in SOFTMAX_ROWS:
            self.names[i] = f"{'max' if node.op == 'softmax_max' else 'sum'}{node.args[0]}"
        elif node.op == "softmax":
            self.line(f"alpha{i} = {self._softmax(i)}")
            self.names[i] = f"alpha{i}"
        elif node.op == "input":
            if i not in self.region.only_columns:
                self._bind(i, self._load_bits(node) if node.dtype == BITS else self._load(node))
        elif node.op in FEATURE_REDUCTIONS:
            self._bind(i, self._over_features(node))
        elif node.op == "dropout":
            self._bind(i, self._dropout(node))
        elif node.op in POINTWISE:
            self._bind(i, self._pointwise(node))
        else:
            raise UnsupportedRegion(f"no Triton code for the operation {node.op!r}")

    def _softmax(self, i: int) -> str:
        """Returns the text of a softmax. A gradient that looks for a maximum again computes it by plain operations."""
        logit = f"{self.operand(self.region.nodes[i].args[0])} - max{i}"
        if self.compute == "tl.float32" and not self.region.exact:
            return f"{exponential(self.compute, logit)} * reciprocal(sum{i})"
        return f"tl.exp({logit}) / sum{i}"

    def _eviction(self, node: Node) -> str:
        """Returns the argument of a load or store by which rows leave the L2 cache first; ``""`` for other rows.

        Rows of edges and rows that are walked are read and written once. If the rows of edges are wide, they would push
        the rows that are gathered out of the cache.
        """
        in_order = node.space in (Space.EDGE, Space.ORDERED, self.region.by) and not node.through_index
        once = in_order and min(node.shape) > 1
        return ', eviction_policy="evict_first"' if once and streams_edges(self.region) else ""

    def _load(self, node: Node) -> str:
        width, eviction = node.shape[0] * node.shape[1], self._eviction(node)
        if self.is_flat(node):
            place = f"t{node.value} + flat_{self.index[node.space]} * {width} + element{width}"
            rows = f"tl.load({place}, mask=flat_alive, other=0{eviction})"
            text = f"tl.reshape({rows}, {self.tile_shape(node.shape, self.tile.edges)})"
        else:
            row = self.names[node.args[0]] if node.through_index else None
            offset, masks = self.place(node.space, width, node.shape, row)
            other = "-1" if node.dtype == INDEX else "0"
            text = f"tl.load(t{node.value}{offset}{masked(masks, other=other)}{eviction})"
        if node.dtype == SEED:
            return text
        if node.dtype == INDEX:
            return f"{text}.to(tl.int64)"
        return f"{text} != 0" if node.dtype == BOOL else f"{text}.to({self.compute})"

    def _dropout(self, node: Node) -> str:
        """Returns the factors of dropout. Lanes after the last edge or feature hold arbitrary values."""
        place = self.feature(node.shape)[0].removeprefix(" + ") or "0"
        p = node.number
        seed, least, scale = self.names[node.args[0]], philox.threshold(p), philox.scale(p)
        self.line(f"word, _, _, _ = tl.philox({seed}, edge_at.to(tl.uint32), {place}, 0, 0, {philox.ROUNDS})")
        kept, dropped = (f"tl.full((), {literal}, {self.compute})" for literal in (scale, 0.0))
        return f"tl.where(word >= tl.full((), {least}, tl.uint32), {kept}, {dropped})"

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
        return node.shape == (1, 1) and one_row and node.space not in self.plan.edge_spaces

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
            self._store_bits(k, out.node)
            return
        text = self.operand(out.node)
        if out.dtype != BOOL:
            text = f"{text}.to(tl.{out.dtype})"
        elif not node.boolean:
            text = f"({text} != 0)"
        space = self.region.by if node.space is Space.PARAMETER else node.space
        offset, masks = self.place(space, node.shape[0] * node.shape[1], node.shape)
        # If programs share a row, each program stores a value that is not split: the same bits, by the same code.
        self.line(f"tl.store(out{k}{offset}, {text}{masked(masks)}{self._eviction(node)})")

    # -- packed bools (see gnncompile.ir.bits) --------------------------------------------------------------------

    def _load_bits(self, node: Node) -> str:
        """Returns the text of an input's bools. Each word is loaded once, and expanded to one lane per bit.

        A walk by source takes 322 us that way (H200, 128 channels, 2.3M edges). If every lane loaded its word itself,
        the walk would take 437 us.
        """
        shape = self._bits_shape(node)
        at, mask = self._bits_address(node, shape)
        self.line(f"words = tl.load(t{node.value} + {at}, mask={mask}, other=0)")
        bits = f"tl.reshape(words, {[*shape[:-1], 1]}) >> tl.arange(0, {shape[-1]})[{'None, ' * (len(shape) - 1)}:]"
        return f"(tl.reshape({bits}, {self.tile_shape(node.shape, self.tile.edges)}) & 1) != 0"

    def _store_bits(self, k: int, i: int) -> None:
        """Writes the bools of value `i` to output `k`. Each lane shifts one bit to its place; a sum makes the word."""
        node = self.region.nodes[i]
        shape = self._bits_shape(node)
        kept = " & ".join(["alive", *self.feature(node.shape)[1], self.operand(i)])
        place = f"channel{node.shape[1]} % {PER_WORD}" if node.shape[1] > 1 else "0"
        self.line(f"bit = tl.where({kept}, tl.full((), 1, tl.int32) << {place}, 0)")
        self.line(f"words = tl.sum(tl.reshape(bit, {shape}), {len(shape) - 1})")
        at, mask = self._bits_address(node, shape)
        self.line(f"tl.store(out{k} + {at}, words, mask={mask})")

    def _bits_shape(self, node: Node) -> list[int]:
        """Returns the lengths of a tile of bits: its edge axes, heads, words per head and bits per word."""
        heads, channels = self.extent("head", node.shape[0]), self.extent("channel", node.shape[1])
        if channels < power_of_two(node.shape[1]) or not packable(node.shape):
            raise UnsupportedRegion(
                f"no packed bools of shape {node.shape} where a program has {heads} x {channels} of them"
            )
        edges = [self.tile.edges] if self.tile.rows == 1 else [self.tile.rows, self.tile.edges]
        per_word = min(channels, PER_WORD)
        return [*edges, heads, channels // per_word, per_word]

    def _bits_address(self, node: Node, shape: list[int]) -> tuple[str, str]:
        """Returns the offset of a tile's words within the tensor, and their mask."""
        (heads, channels), (padded_heads, padded_words) = node.shape, shape[-3:-1]
        edges = "None, " * (len(shape) - 3)
        column = [*shape[:-3], 1, 1]
        a_head = words((1, channels))
        head, word = f"tl.arange(0, {padded_heads})[{edges}:, None]", f"tl.arange(0, {padded_words})[{edges}None, :]"
        masks = [f"tl.reshape(inside, {column})"]
        masks += [f"({head} < {heads})"] if padded_heads > heads else []
        masks += [f"({word} < {a_head})"] if padded_words > a_head else []
        return f"tl.reshape(edge_at, {column}) * {words(node.shape)} + {head} * {a_head} + {word}", " & ".join(masks)
