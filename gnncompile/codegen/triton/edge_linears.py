"""Writes Triton statements for linear layers of edge features; ``c5_2`` is feature 2 of value 5.

A layer of 16-bit features and weights is a matrix product over the edges of a step, ``features @ weights``, which the
GPU's matrix units compute. They sum in float32. Other layers are a multiply-add for each feature and element of the
tile. Their features are loaded in words of 64 bits where possible, which halves the number of loads. All lanes of a
warp load the same word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from gnncompile.codegen.triton.text import masked
from gnncompile.codegen.triton.tile import layers_by_products, padded, reads_many_weights, sums_by_products
from gnncompile.codegen.triton.values import ValueWriter
from gnncompile.ir.region import LAYERS, Node, Region, Shape

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


def _per_word(node: Node) -> int:
    """Returns the number of features per loaded word; 1 where features are loaded one by one."""
    per_word = 64 // _BITS.get(node.dtype, 64)
    return per_word if node.op == "input" and node.shape[1] % per_word == 0 else 1


def read_one_by_one(region: Region, products: Collection[int] = ()) -> frozenset[int]:
    """Returns the values whose features are read one by one: by layers and sums that are no `products`."""
    readers = [n for at, n in enumerate(region.nodes) if n.op in ("linear", "outer") and at not in products]
    return frozenset(n.args[0] for n in readers)


def read_as_words(region: Region, products: Collection[int] = ()) -> frozenset[int]:
    """Returns the positions of tensors that are read in words, whose addresses must be multiples of 8 bytes.

    Args:
        region: The region.
        products: The layers and sums that are matrix products, which read features as tiles.
    """
    read = [region.nodes[at] for at in read_one_by_one(region, products) if _per_word(region.nodes[at]) > 1]
    return frozenset(position for node in read for position in node.positions)


_ALIGNED = 1024
"""An offset that keeps the alignment of a pointer."""


class LayerWriter(ValueWriter):
    """A writer of values that also writes linear layers of edge features, and ``transposed`` nodes."""

    @cached_property
    def products(self) -> frozenset[int]:
        """The layers, or the sums over all edges, that are matrix products."""
        return layers_by_products(self.region, self.tile) | sums_by_products(self.region)

    @cached_property
    def _one_by_one(self) -> frozenset[int]:
        return read_one_by_one(self.region, self.products)

    @cached_property
    def _as_tiles(self) -> frozenset[int]:
        """The values whose features products read, as one tile of edges and features."""
        return frozenset(self.region.nodes[at].args[0] for at in self.products)

    def _product_axes(self) -> None:
        """Writes the axes of the features of products."""
        for length in sorted({self.region.features(i) for i in self.products}):
            self.line(f"feature{length} = tl.arange(0, {padded(length)})")

    def _load_weights(self, values: Sequence[int]) -> None:
        """Writes, before a loop that computes these values, the loads of the weights of products."""
        for i in values:
            if i not in self.products:
                continue
            node = self.region.nodes[self.region.nodes[i].args[1]]
            length, (place, masks) = self.region.features(i), self.feature(node.shape)
            place = f"t{node.value} + feature{length}[:, None] * {node.shape[1]}{place}"
            masks = masks + self.feature_masks(length, "[:, None]")
            self.line(f"weights{i} = tl.trans(tl.load({place}{masked(masks, other='0')}))")

    def feature_masks(self, length: int, axes: str) -> list[str]:
        """Returns the mask of a block of `length` features, if the block has more rows or columns."""
        return [f"(feature{length}{axes} < {length})"] if padded(length) > length else []

    def _load_features(self, i: int) -> None:
        """Writes the load of value `i`, features of edges, as one tile of edges and features."""
        node = self.region.nodes[i]
        length, (place, masks) = node.shape[1], self.place(node.space, node.shape[1], (1, 1))
        masks = masks + self.feature_masks(length, "[None, :]")
        self.line(f"features{i} = tl.load(t{node.value}{place} + feature{length}[None, :]{masked(masks, other='0')})")

    def _layer_product(self, i: int) -> str:
        """Returns the text of a layer as a product.

        The product is taken of the transposed matrices: matrix units multiply blocks of at least 16 rows and 8 columns,
        and a step has few edges.
        """
        node = self.region.nodes[i]
        lengths = f"[{self.extent('channel', node.shape[1])}, {self.tile.edges}]"
        features = f"tl.trans(features{node.args[0]})"
        return f"tl.trans(dot(weights{i}, {features}, tl.full({lengths}, 0.0, {self.compute})))"

    def _compute(self, i: int) -> None:
        if self.region.nodes[i].op in LAYERS:
            self._bind(i, self._linear(i) if self.region.nodes[i].op == "linear" else self._transposed(i))
        else:
            super()._compute(i)
        if i in self._as_tiles:
            self._load_features(i)
        if i in self._one_by_one:
            self._columns(i)

    def _columns(self, i: int) -> None:
        """Writes a variable for each feature of value `i`: a tile whose head and channel axes have length 1."""
        node = self.region.nodes[i]
        per_word, length = _per_word(node), node.shape[1]
        if node.op != "input":
            for k in range(length):
                self.line(f"c{i}_{k} = {self._one_channel(i, k)}")
            return
        place, masks = self.place(node.space, 1, (1, 1))
        if per_word > 1:
            self.line(f"words{i} = t{node.value}.to(tl.pointer_type(tl.int64)){place} * {length // per_word}")
        for k in range(length):
            if per_word == 1:
                text = f"tl.load(t{node.value}{place} * {length} + {k}{masked(masks, other='0')})"
            else:
                if k % per_word == 0:
                    self.line(f"word = tl.load(words{i} + {k // per_word}{masked(masks, other='0')})")
                bits = _BITS[node.dtype]
                part = f"(word >> {k % per_word * bits})" if k % per_word else "word"
                text = f"{part}.to(tl.int{bits}).to(tl.{node.dtype}, bitcast=True)"
            self.line(f"c{i}_{k} = {text}.to({self.compute})")

    def _one_channel(self, i: int, k: int) -> str:
        length = self.region.nodes[i].shape[1]
        if length == 1:
            return self.operand(i)
        axis = self.axes.index("channel")
        return f"tl.sum(tl.where(channel{length} == {k}, {self.operand(i)}, 0.0), {axis}, keep_dims=True)"

    def _linear(self, i: int) -> str:
        """Writes a linear layer except its last multiply-add, whose text it returns."""
        if i in self.products:
            return self._layer_product(i)
        features, at = self.region.nodes[i].args
        total = ""
        for k, row in enumerate(self._weights(i, at)):
            if total:
                self.line(f"e{i} = {total}")
            total = f"e{i} + c{features}_{k} * {row}" if k else f"c{features}_{k} * {row}"
        return total

    def _transposed(self, i: int) -> str:
        """Writes the dot products with all rows of the weights, side by side; returns the text of the last step."""
        node = self.region.nodes[i]
        value, at = node.args
        shape, length, total = self.region.nodes[at].shape, node.shape[1], ""
        for k, row in enumerate(self._weights(i, at)):
            if total:
                self.line(f"e{i} = {total}")
            total = self._sum_of_features(f"{self.operand(value)} * {row}", shape)
            if k:
                total = f"tl.where(channel{length} == {k}, {total}, e{i})"
        return total

    def _weights(self, i: int, at: int) -> list[str]:
        """Returns loads of the rows of weights that a layer reads.

        If a region has many weights, the compiler must not keep them in registers. So each address then gets an offset
        that depends on the loop variable; it is always 0, which the compiler can't know.
        """
        node = self.region.nodes[at]
        size = node.shape[0] * node.shape[1]
        offset, masks = self.feature(node.shape)
        if reads_many_weights(self.region, self.tile.num_warps):
            self.line(f"never = tl.where(start < 0, {_ALIGNED}, 0)")
            offset = f" + never{offset}"
        rows = []
        for k in range(self.region.features(i)):
            text = f"tl.load(t{node.value} + {k * size}{offset}{masked(masks, other='0')})"
            rows.append(f"{text}.to({self.compute})")
        return rows

    def _sum_of_features(self, text: str, shape: Shape) -> str:
        for axis, length in zip(("head", "channel"), shape, strict=True):
            if length > 1:
                text = f"tl.where({axis}{length}_in, {text}, 0.0)" if self.padded(axis, length) else text
                text = f"tl.sum({text}, {self.axes.index(axis)}, keep_dims=True)"
        return text
