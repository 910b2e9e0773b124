"""Writes Triton statements for linear layers of edge features; ``c5_2`` is feature 2 of value 5.

A layer is a multiply-add for each feature and element of the tile. Features are loaded in words of 64 bits where
possible, which halves the number of loads. All lanes of a warp load the same word.
"""

from __future__ import annotations

from dataclasses import replace

from gnncompile.codegen.triton.costs import reads_many_weights
from gnncompile.codegen.triton.kernel_text import KernelText
from gnncompile.codegen.triton.text import masked
from gnncompile.ir.region import Node, Region, Shape

_BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


def _per_word(node: Node) -> int:
    """Returns the number of features per loaded word; 1 where features are loaded one by one."""
    per_word = 64 // _BITS.get(node.dtype, 64)
    return per_word if node.op == "input" and node.shape[1] % per_word == 0 else 1


def read_as_words(region: Region) -> frozenset[int]:
    """Returns the positions of tensors that are read in words, whose addresses must be multiples of 8 bytes."""
    read = [region.nodes[at] for at in region.columns if _per_word(region.nodes[at]) > 1]
    return frozenset(position for node in read for position in node.positions)


_ALIGNED = 1024
"""An offset that keeps the alignment of a pointer."""


class EdgeLinears:
    """Writes the statements of linear layers of edge features, and of ``transposed`` nodes."""

    def __init__(self, text: KernelText) -> None:
        self.text = text

    def columns(self, i: int) -> None:
        """Writes a variable for each feature of value `i`: a tile whose head and channel axes have length 1."""
        node = self.text.region.nodes[i]
        per_word, length = _per_word(node), node.shape[1]
        if node.op != "input":
            for k in range(length):
                self.text.line(f"c{i}_{k} = {self._one_channel(i, k)}")
            return
        place, masks = self.text.place(replace(node, shape=(1, 1)))
        if per_word > 1:
            self.text.line(f"words{i} = t{node.value}.to(tl.pointer_type(tl.int64)){place} * {length // per_word}")
        for k in range(length):
            if per_word == 1:
                text = f"tl.load(t{node.value}{place} * {length} + {k}{masked(masks, other='0')})"
            else:
                if k % per_word == 0:
                    self.text.line(f"word = tl.load(words{i} + {k // per_word}{masked(masks, other='0')})")
                bits = _BITS[node.dtype]
                part = f"(word >> {k % per_word * bits})" if k % per_word else "word"
                text = f"{part}.to(tl.int{bits}).to(tl.{node.dtype}, bitcast=True)"
            self.text.line(f"c{i}_{k} = {text}.to({self.text.compute})")

    def _one_channel(self, i: int, k: int) -> str:
        length = self.text.region.nodes[i].shape[1]
        if length == 1:
            return self.text.operand(i)
        axis = self.text.axes.index("channel")
        return f"tl.sum(tl.where(channel{length} == {k}, {self.text.operand(i)}, 0.0), {axis}, keep_dims=True)"

    def linear(self, i: int) -> str:
        """Writes a linear layer except its last multiply-add, whose text it returns."""
        features, at = self.text.region.nodes[i].args
        total = ""
        for k, row in enumerate(self._rows(i, at)):
            if total:
                self.text.line(f"e{i} = {total}")
            total = f"e{i} + c{features}_{k} * {row}" if k else f"c{features}_{k} * {row}"
        return total

    def transposed(self, i: int) -> str:
        """Writes the dot products with all rows of the weights, side by side; returns the text of the last step."""
        node = self.text.region.nodes[i]
        value, at = node.args
        shape, length, total = self.text.region.nodes[at].shape, node.shape[1], ""
        for k, row in enumerate(self._rows(i, at)):
            if total:
                self.text.line(f"e{i} = {total}")
            total = self._sum_of_features(f"{self.text.operand(value)} * {row}", shape)
            if k:
                total = f"tl.where(channel{length} == {k}, {total}, e{i})"
        return total

    def _rows(self, i: int, at: int) -> list[str]:
        """Returns loads of the rows of weights that a layer reads.

        If a region has many weights, the compiler must not keep them in registers. So each address then gets an offset
        that depends on the loop variable; it is always 0, which the compiler can't know.
        """
        node = self.text.region.nodes[at]
        size = node.shape[0] * node.shape[1]
        offset, masks = self.text.feature(node.shape)
        if reads_many_weights(self.text.region, self.text.tile.num_warps):
            self.text.line(f"never = tl.where(start < 0, {_ALIGNED}, 0)")
            offset = f" + never{offset}"
        rows = []
        for k in range(self.text.region.features(i)):
            text = f"tl.load(t{node.value} + {k * size}{offset}{masked(masks, other='0')})"
            rows.append(f"{text}.to({self.text.compute})")
        return rows

    def _sum_of_features(self, text: str, shape: Shape) -> str:
        for axis, length in zip(("head", "channel"), shape, strict=True):
            if length > 1:
                text = f"tl.where({axis}{length}_in, {text}, 0.0)" if self.text.padded(axis, length) else text
                text = f"tl.sum({text}, {self.text.axes.index(axis)}, keep_dims=True)"
        return text
