"""Tracks the padded dimensions of a captured graph, their numbers of valid rows, and masks of valid rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from gnncompile import _compat
from gnncompile.layout import batch_metadata
from gnncompile.layout.batch_metadata import RowLimit
from gnncompile.passes.analysis import aten, is_switch, is_tensor, value
from gnncompile.passes.context import Context, PaddedInputs
from gnncompile.passes.log import PADDING, not_padded, user_line
from gnncompile.passes.padded import masked_reductions

SELECTED = 2**32
"""Row types from this number on are rows that a mask selects. They are unknown outside the graph."""

RowTypes = tuple[int | None, ...]
"""The row types of a dimension, one for each of its concatenated parts; None for a part without padding."""


def single(kinds: RowTypes | None) -> int | None:
    """Returns the row type of a padded dimension with one part, or None for other dimensions."""
    return kinds[0] if kinds is not None and len(kinds) == 1 else None


def expression(size: Any) -> sympy.Expr:
    """Returns a size as an expression of symbols."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


class PaddedGraph:
    """The padded dimensions of a graph, with methods that mask or count their valid rows."""

    def __init__(self, ctx: Context, known: PaddedInputs) -> None:
        self.ctx, self.known = ctx, known
        self.kinds: dict[sympy.Expr, RowTypes] = {symbol: (kind,) for symbol, kind in known.sizes.items()}
        self.repeats: dict[sympy.Expr, int] = {}
        self.values: dict[fx.Node, int] = dict(known.values)
        """From index tensors to the row type that they index. Their padded entries index padded rows."""
        self.given: set[fx.Node] = set(known.tensors)
        """Padded tensors whose values come unchanged from the inputs. All their entries are indices in range."""
        self.numbers: dict[int, fx.Node] = {}
        self.last_input = ctx.inputs_first()

        self.at: fx.Node = self.last_input
        """The node that is being rewritten. Errors name its line."""

    def refuse(self, why: str) -> _compat.Recapture:
        """Returns the error to raise, with the line of the current node."""
        return not_padded(why, user_line(self.at))

    def limit(self, kind: int, number: int | None, is_excluded: bool = False) -> None:
        """Notes that the graph needs at least `number` valid rows of a type, or another number if `is_excluded`.

        Raises:
            Recapture: The current mini-batch has another number of rows. This call then runs unpadded.
        """
        batch = batch_metadata.current()
        if kind >= SELECTED:
            return
        if batch is None:
            raise self.refuse("asks for a size of the mini-batch")
        one = RowLimit(kind, batch.kinds[kind], number, is_excluded)
        if one not in self.ctx.log.limits:
            self.ctx.log.limits.append(one)
        if not one.is_met(batch):
            raise _compat.Recapture(_compat.Setting.ROWS, one, f"the model takes {one}", PADDING, user_line(self.at))

    def of(self, size: Any) -> RowTypes | None:
        """Returns the row types of a dimension with this size, or None if it is not padded."""
        if not isinstance(size, torch.SymInt):
            return None
        expr = size.node.expr
        if expr in self.kinds:
            return self.kinds[expr]
        if not expr.free_symbols & set(self.known.sizes):
            return None
        raise self.refuse(f"a size of {expr} is none of the mini-batch's")

    def dims(self, node: Any) -> dict[int, RowTypes]:
        """Returns the padded dimensions of a tensor, with their row types."""
        if not is_tensor(node):
            return {}
        found = {d: self.of(s) for d, s in enumerate(value(node).shape)}
        return {d: kinds for d, kinds in found.items() if kinds is not None}

    def is_padded_number(self, node: Any) -> bool:
        """Whether an integer depends on the size of a bucket."""
        found = node.meta.get("val") if isinstance(node, fx.Node) else node
        return isinstance(found, torch.SymInt) and bool(found.node.expr.free_symbols & set(self.known.sizes))

    def meets_padding(self, node: fx.Node) -> bool:
        """Whether a node reads or makes a padded value. Switches of grad mode and autocast do not count."""
        reads = any(self._is_padded(n) for n in node.all_input_nodes)
        return (reads or self._is_padded(node)) and not is_switch(node)

    def _is_padded(self, node: fx.Node) -> bool:
        found = node.meta.get("val")
        sizes = [s for t in (found if isinstance(found, (tuple, list)) else [found]) for s in getattr(t, "shape", [t])]
        return any(self.is_padded_number(s) for s in sizes)

    def number(self, kind: int) -> fx.Node:
        """Returns the number of valid rows of a row type, as a tensor without dimensions."""
        if kind not in self.numbers:
            with self.ctx.graph.inserting_after(self.last_input):
                self.numbers[kind] = self.ctx.call(aten.select.int, self.known.counts, 0, kind)
        return self.numbers[kind]

    def add_kind(self, size: Any, number: fx.Node) -> None:
        """Adds a row type for rows that a mask selects, with their padded size and their number of valid rows."""
        kind = SELECTED + len(self.kinds)
        self.kinds[expression(size)], self.numbers[kind] = (kind,), number

    def count(self, kinds: Sequence[RowTypes], sizes: Sequence[Any]) -> fx.Node:
        """Returns the product of the numbers of valid rows along padded dimensions, as a tensor."""
        true = [self._true(parts, size) for parts, size in zip(kinds, sizes, strict=True)]
        return functools.reduce(lambda one, other: self.ctx.call(aten.mul.Tensor, one, other), true)

    def _true(self, kinds: RowTypes, size: Any) -> fx.Node:
        """Returns the number of valid rows of a padded dimension, as a tensor."""
        kind = single(kinds)
        if kind is None:
            raise self.refuse("how many true rows there are is not known where several tensors are joined")
        times = self.repeats.get(expression(size), 1)
        return self.number(kind) if times == 1 else self.ctx.call(aten.mul.Tensor, self.number(kind), times)

    def mask(self, node: fx.Node, dims: Sequence[int] | None = None) -> fx.Node:
        """Returns a mask of the valid entries along padded dimensions (only `dims`), which broadcasts to the tensor."""
        rank, made = value(node).dim(), None
        padded = {d: kinds for d, kinds in self.dims(node).items() if dims is None or d in dims}
        for dim, kinds in padded.items():
            one = self._mask_of(node, dim, kinds)
            shape = [1] * rank
            shape[dim] = -1
            one = self.ctx.call(aten.view.default, one, shape)
            made = one if made is None else self.ctx.call(aten.logical_and.default, made, one)
        assert made is not None
        return made

    def _mask_of(self, node: fx.Node, dim: int, kinds: RowTypes) -> fx.Node:
        limit = self._true(kinds, value(node).shape[dim])
        size = self.ctx.call(aten.sym_size.int, node, dim)
        places = self.ctx.call(aten.arange.default, size, dtype=torch.int64, device=value(node).device)
        return self.ctx.call(aten.lt.Tensor, places, limit)

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Replaces a node by another one."""
        node.replace_all_uses_with(new)
        self.ctx.graph.erase_node(node)

    def numbers_as(self, node: fx.Node, source: Any) -> None:
        """Notes that an index tensor indexes the same row type as `source`."""
        if source in self.values:
            self.values[node] = self.values[source]
        if source in self.given:
            self.given.add(node)

    def cleared(self, node: fx.Node, fill: float = 0) -> fx.Node:
        """Returns the tensor with its padding filled."""
        return self.ctx.inline(masked_reductions.cleared, node, self.mask(node), fill, like=self.at)
