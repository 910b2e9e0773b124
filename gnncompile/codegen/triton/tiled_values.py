"""Writes the Triton statements that load, compute and store the values of a tile of edges.

Every value is a block ``[edges, channels]``. A parameter has one row, and a value of one channel has one column. Other
channels are padded to a power of two, at least 16. Padded columns hold arbitrary values, which layers, sums and stores
mask. The rows of a tile that lie behind the last edge load what that edge loads, so most loads need no mask. Sums and
stores leave these rows out. A value that a product with ones adds up is 0 there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from gnncompile.codegen.triton.text import constant, literal, masked, pointwise_arguments, pointwise_text
from gnncompile.codegen.triton.tile import padded
from gnncompile.codegen.triton.tiled_layers import is_product, is_wide_row, matrix
from gnncompile.codegen.triton.tiled_phases import Phase
from gnncompile.codegen.triton.tiled_plan import TiledPlan
from gnncompile.codegen.triton.tiled_tile import TiledTile
from gnncompile.exc import UnsupportedRegion
from gnncompile.ir import philox
from gnncompile.ir.bits import PER_WORD, words
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import BITS, FEATURE_SUMS, INDEX, SEED, Node, Space

NEVER = 1024
"""An offset that keeps the alignment of a pointer. It is never added, which the compiler can't know."""


class TileValues:
    """Collects the statements of a walk in tiles.

    Attributes:
        names: The expression for each value in the text, by node index.
        lines: The statements so far.
        sums_by_product: The sums over all edges that are taken by products with ones.
        summed_operands: The values that these sums add up. They are 0 behind the last edge.
    """

    def __init__(self, plan: TiledPlan, phase: Phase, tile: TiledTile) -> None:
        self.plan, self.phase, self.region, self.tile = plan, phase, plan.region, tile
        self.compute = f"tl.{plan.region.compute}"
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.sums_by_product = plan.sums_by_product(phase)
        self.summed_operands = {self.region.nodes[i].args[1] for i in self.sums_by_product}
        self.factors: dict[tuple[int, int], str] = {}  # the names of values of a width as factors of products
        self.recent: set[int] = set()  # wide rows that were loaded after the last product
        self.old: set[int] = set()  # wide rows that were loaded before
        self.indent = 1

    def line(self, text: str) -> None:
        """Adds a statement at the current indentation."""
        self.lines.append("    " * self.indent + text)

    # -- axes -----------------------------------------------------------------------------------------------------

    def axis(self, length: int) -> None:
        """Writes the channel indices of values of this length, and their mask."""
        if length == 1:
            return
        self.line(f"c{length} = tl.arange(0, {padded(length)})[None, :]")
        if padded(length) != length:
            self.line(f"c{length}_in = c{length} < {length}")

    def columns(self, length: int) -> tuple[str, list[str]]:
        """Returns the offset of a column within a row, with a leading plus, and the masks for it."""
        if length == 1:
            return "", []
        return f" + c{length}", [f"c{length}_in"] if padded(length) != length else []

    # -- operands -------------------------------------------------------------------------------------------------

    def operand(self, i: int, bare: bool = False) -> str:
        """Returns the expression for a value. A constant has its type, unless `bare`."""
        node = self.region.nodes[i]
        return self.names[i] if node.op != "const" else constant(node, self.compute, "[1, 1]", bare)

    def edgewise(self, i: int, length: int) -> str:
        """Returns a value as a block with a row per edge, and `length` channels, 1 or those of the value."""
        node = self.region.nodes[i]
        if node.space is not Space.PARAMETER and node.shape[1] == length:
            return self.operand(i)
        return f"tl.broadcast_to({self.operand(i)}, [{self.tile.edges}, {padded(length)}])"

    def zeroed(self, i: int, length: int) -> str:
        """Returns the same with zeros in padded columns."""
        masks, value = self.columns(length)[1], self.edgewise(i, length)
        return f"tl.where({masks[0]}, {value}, 0.0)" if masks else value

    # -- values ---------------------------------------------------------------------------------------------------

    def value(self, i: int) -> None:
        """Adds the statements of a value, unless it is a constant or the weights of a matrix product."""
        node = self.region.nodes[i]
        if node.op == "const" or (node.space is Space.FEATURE and not self._is_vector(i)):
            return
        is_read = node.op == "input" or i in self.phase.loads
        if not is_read:
            self.load_again(node.args)
        if is_read:
            text = self._read(i)
            if is_wide_row(node):
                self.recent.add(i)
        elif node.op == "dropout":
            text = self._dropout(node)
        elif node.op in ("linear", "transposed"):
            text = self._layer(i, node)
        elif node.op == "on_edges":
            text = self.edgewise(node.args[0], node.shape[1])
        elif node.op in POINTWISE:
            args = pointwise_arguments(self.region, node, self.operand)
            text = pointwise_text(self.region, node, args)
        else:
            text = self._over_channels(node)
        if i in self.summed_operands and not is_read:
            text = f"tl.where(alive, {text}, 0.0)"
        letter = {Space.PARAMETER: "p", Space.FEATURE: "p"}.get(node.space, "e")
        self.names[i] = f"{letter}{i}"
        self.line(f"{letter}{i} = {text}")
        if i in self.plan.layers and not is_read:
            self.age()

    def age(self) -> None:
        """Marks the rows that were loaded so far: a product that takes many registers has come in between."""
        self.old |= self.recent
        self.recent.clear()

    def load_again(self, values: Iterable[int]) -> None:
        """Writes loads of wide rows that were loaded before the last product. They need not wait in registers."""
        for i in sorted(self.old.intersection(values)):
            self.line(f"{self.names[i]} = {self._read(i, again=True)}")
            self.old.remove(i)
            self.recent.add(i)

    def _is_vector(self, weights: int) -> bool:
        """Whether a layer reads weights as one row of numbers."""
        readers = self._readers(weights)
        return any(n.op in ("linear", "transposed") and not is_product(self.region, n) for n in readers)

    @cached_property
    def _made(self) -> list[Node]:
        """The nodes that the phase computes or reads from the region's tensors."""
        return [self.region.nodes[i] for i in self.phase.need if i not in self.phase.loads]

    def _readers(self, weights: int) -> list[Node]:
        return [node for node in self._made if weights in node.args[1:]]

    def _read(self, i: int, again: bool = False) -> str:
        """Returns the load of an input, or of a value that an earlier phase stored."""
        node, masks = self.region.nodes[i], ["alive"] if i in self.summed_operands else []
        if i in self.phase.loads:
            return self._load(self.plan.places[i], self.row_of_stored(i), masks, node.shape[1], node.boolean, again)
        if node.dtype == SEED:
            return f"tl.load(t{node.value})"
        if node.dtype == BITS:
            return self._load_bits(node)
        if node.dtype == INDEX:
            return f"tl.load(t{node.value} + edge_at).to(tl.int64)"
        weights = node.space is Space.FEATURE
        length = max(matrix(self.region, self._readers(i)[0])) if weights else node.shape[1]
        if node.through_index:
            row = self.names[node.args[0]]
            masks = [f"({row} >= 0)", *masks]  # -1 reads zeros
        else:
            row = "" if node.space in (Space.PARAMETER, Space.FEATURE) else self.index(node.space)
        return self._load(f"t{node.value}", row, masks, length, node.boolean, again)

    def row_of_stored(self, i: int) -> str:
        """Returns the name of the row index of a value that a walk stores for others."""
        return "share_at" if i in self.plan.brief else "edge_at"

    def _load(self, tensor: str, row: str, masks: list[str], length: int, boolean: bool, again: bool) -> str:
        """Returns the load of rows of a tensor, given by their numbers, or of its only row if `row` is empty."""
        offset, inside = self.columns(length)
        masks = [*masks, *inside]
        at = offset or " + tl.zeros([1, 1], tl.int32)"
        if row:
            at = f" + {row}{f' * {length}' if length > 1 else ''}{offset}"
        # An equal load would be merged with the first one.
        policy = ', eviction_policy="evict_last"' if again else ""
        text = f"tl.load({tensor}{at}{masked(masks, other='0')}{policy})"
        return f"{text} != 0" if boolean else f"{text}.to({self.compute})"

    def _load_bits(self, node: Node) -> str:
        length = node.shape[1]
        column = f"c{length}" if length > 1 else "0"
        word = f" + edge_at * {words(node.shape)} + {column} // {PER_WORD}"
        mask = masked(self.columns(length)[1], other="0")
        return f"((tl.load(t{node.value}{word}{mask}) >> ({column} % {PER_WORD})) & 1) != 0"

    def index(self, space: Space) -> str:
        """Returns the name of the row index of an input, in the kernel."""
        by = self.region.by
        return {Space.EDGE: "edge_at", Space.ORDERED: "here", by.opposite: "other", by: "own"}[space]

    def _dropout(self, node: Node) -> str:
        seed, least = self.names[node.args[0]], philox.threshold(node.number)
        column = f"c{node.shape[1]}" if node.shape[1] > 1 else "0"
        self.line(f"word, _, _, _ = tl.philox({seed}, edge_at.to(tl.uint32), {column}, 0, 0, {philox.ROUNDS})")
        kept, dropped = (f"tl.full([1, 1], {x}, {self.compute})" for x in (literal(philox.scale(node.number)), 0.0))
        return f"tl.where(word >= tl.full([1, 1], {least}, tl.uint32), {kept}, {dropped})"

    def _over_channels(self, node: Node) -> str:
        if node.op not in ("sum_channels", "max_channels"):
            raise UnsupportedRegion(f"tiles: no Triton code for the operation {node.op!r}")
        text, length = self.operand(node.args[0]), self.region.nodes[node.args[0]].shape[1]
        function, neutral = ("sum", "0.0") if node.op in FEATURE_SUMS else ("max", 'float("-inf")')
        if masks := self.columns(length)[1]:
            text = f"tl.where({masks[0]}, {text}, {neutral})"
        folded = f"tl.{function}({text}, 1, keep_dims=True)"
        return f"{folded} + 0.0" if function == "sum" else folded  # torch's sums start from a positive zero

    # -- layers ---------------------------------------------------------------------------------------------------

    def _layer(self, i: int, node: Node) -> str:
        """Returns the text of a layer. A layer of one feature or one channel is no product of matrices."""
        value, weights = node.args
        rows, columns = matrix(self.region, node)
        taken = rows if node.op == "linear" else columns
        if i not in self.plan.layers:
            product = f"{self.edgewise(value, taken)} * {self.names[weights]}"
            if taken == 1:
                return product
            masks = self.columns(taken)[1]
            product = f"tl.where({masks[0]}, {product}, 0.0)" if masks else product
            return f"tl.sum({product}, 1, keep_dims=True)"
        x = self.factor(value, taken)
        if self.tile.keeps_weights:
            name = self.kept_weights(i)
            if self.plan.factor == "float32":
                return f"scaled_product({x}, {name}_high, {name}_low, {name}_power)"
            return f"product({x}, {name})"
        if self.plan.factor == "float32":
            return f"layer_of_parts({x}, {self.plan.layers[i]} + never, {self._sizes(node)})"
        return f"layer({x}, {self.plan.layers[i]} + never, {self._sizes(node)})"

    def factor(self, i: int, length: int) -> str:
        """Returns a value as a factor of products with `length` inputs, in the type of factors.

        If others read the value as well, the factor gets a variable, so that the compiler does not compute it twice.
        """
        text, name = f"({self.zeroed(i, length)}).to(tl.{self.plan.factor})", f"f{i}_{length}"
        if not self._is_computed(i) or self._reads(i) < 2:
            return text
        if (i, length) not in self.factors:
            self.factors[i, length] = name
            self.line(f"{name} = once({text})")
        return name

    def _is_computed(self, i: int) -> bool:
        node = self.region.nodes[i]
        return node.op not in ("input", "const") and node.space is Space.EDGE and i not in self.phase.loads

    def _reads(self, i: int) -> int:
        """Returns how often a phase reads or stores a value."""
        region, phase = self.region, self.phase
        readers = [*self._made, *(region.nodes[k] for k in phase.sums)]
        written = [*phase.stores, *(region.outputs[k].node for k in phase.outputs)]
        return sum(i in node.args for node in readers) + (i in written)

    def kept_weights(self, i: int) -> str:
        """Returns the name of the block with a layer's weights."""
        letters = self.plan.layers[i]
        return f"{letters}_{self.region.nodes[i].op}"

    def keep_weights(self) -> None:
        """Writes the loads of weights that stay for all tiles."""
        done: set[str] = set()
        for i in self.plan.layers_of(self.phase):
            name, node = self.kept_weights(i), self.region.nodes[i]
            if name in done:
                continue
            done.add(name)
            rows, columns = matrix(self.region, node)
            depth = padded(rows if node.op == "linear" else columns)
            if self.plan.factor == "float32":
                size = padded(rows) * padded(columns)
                for k, part in enumerate(("high", "low")):
                    start = f"{self.plan.layers[i]} + {k * size}"
                    self.line(f"{name}_{part} = weights_of_part({start}, {depth}, {self._sizes(node)})")
                self.line(f"{name}_power = power_of_parts({self.plan.layers[i]}, {size})")
            else:
                block = f"weights({self.plan.layers[i]}, {depth}, {self._sizes(node)})"
                self.line(f"{name} = {block}.to(tl.{self.plan.factor})")

    def _sizes(self, node: Node) -> str:
        """Returns the last arguments of the functions that read weights.

        For parts, these are the numbers of a part, the steps to the next input and to the next column, and the
        padded columns. Otherwise they are the inputs, the columns, these steps, and the padded columns.
        """
        rows, columns = matrix(self.region, node)
        forward = node.op == "linear"
        given = columns if forward else rows
        stride = padded(columns) if self.plan.factor == "float32" else columns
        down, across = (stride, 1) if forward else (1, stride)
        if self.plan.factor == "float32":
            return f"{padded(rows) * stride}, {down}, {across}, {padded(given)}"
        return f"{rows if forward else columns}, {given}, {down}, {across}, {padded(given)}"
