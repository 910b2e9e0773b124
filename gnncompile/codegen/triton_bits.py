"""Writes loads and stores of bools that are packed into words (see :mod:`gnncompile.ir.bits`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnncompile.codegen.triton_plan import power_of_two
from gnncompile.codegen.triton_text import masked
from gnncompile.errors import Unsupported
from gnncompile.ir.bits import PER_WORD, words
from gnncompile.ir.region import Node

if TYPE_CHECKING:
    from gnncompile.codegen.triton_writer import Writer


def load(writer: Writer, node: Node) -> str:
    """The bools of an input: every lane reads the word that holds its own."""
    element, masks = _element(writer, node)
    count = words(node.shape)
    at = f"edge_at * {count} + ({element}) // {PER_WORD}" if count > 1 else "edge_at"
    word = f"tl.load(t{node.value} + {at}{masked(['alive', *masks], other='0')})"
    return f"(({word} >> ({element}) % {PER_WORD}) & 1) != 0"


def store(writer: Writer, k: int, i: int) -> None:
    """The bools of a value, shifted to their places and added up, those of a word by as many lanes."""
    node = writer.region.nodes[i]
    (element, masks), count = _element(writer, node), words(node.shape)
    heads, channels = (writer.extent(axis, n) for axis, n in zip(("head", "channel"), node.shape, strict=True))
    if channels < power_of_two(node.shape[1]) or (heads > 1 and channels != node.shape[1]):
        raise Unsupported(f"no packed bools of shape {node.shape} where a program has {heads} x {channels} of them")
    per_word = min(heads * channels, PER_WORD)
    padded = heads * channels // per_word
    edges = [writer.tile.edges] if writer.tile.rows == 1 else [writer.tile.rows, writer.tile.edges]
    kept = " & ".join(["alive", *masks, writer.operand(i)])
    writer.line(f"bit = tl.where({kept}, tl.full((), 1, tl.int32) << ({element}) % {PER_WORD}, 0)")
    writer.line(f"words = tl.sum(tl.reshape(bit, {[*edges, padded, per_word]}), {len(edges) + 1})")
    writer.line(f"word = tl.arange(0, {padded})[{'None, ' * len(edges)}:]")
    column = [*edges, 1]
    within = f" & (word < {count})" if padded > count else ""
    writer.line(
        f"tl.store(out{k} + tl.reshape(edge_at, {column}) * {count} + word, words, "
        f"mask=tl.reshape(inside, {column}){within})"
    )


def _element(writer: Writer, node: Node) -> tuple[str, list[str]]:
    """The number of an element in its row, and the masks that it needs."""
    offset, masks = writer.feature(node.shape)
    return offset.removeprefix(" + ") or "0", masks
