"""Writes arithmetic on rows as nodes of a region, after differentiation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Shape, Space
from gnncompile.passes.analysis import aten, is_one, is_packed, is_tensor, same_size, value
from gnncompile.passes.pointwise import POINTWISE, NotFusable, Slots

_DEEPEST = 24
"""Most operations that are computed one from the other."""


class RowArithmetic:
    """Writes row-wise arithmetic as nodes of a region, for the rules of :data:`gnncompile.passes.pointwise.POINTWISE`.

    Args:
        builder: The region so far.
        rows: A tensor with the region's rows, ``[rows, ...]``.
        shape: The feature shape of a row.
        tensors: The tensors that the region reads so far.

    Attributes:
        tensors: The tensors that the region reads.
        values: The index of the region's node for each node of the graph that it holds.
    """

    def __init__(self, builder: Builder, rows: torch.Tensor, shape: Shape, tensors: Sequence[fx.Node] = ()) -> None:
        self.builder, self.by, self.shape = builder, builder.by, shape
        self.double = builder.double
        self.tensors = list(tensors)
        self.values: dict[fx.Node, int] = {}
        self.num_rows, self.rank, self.device = rows.shape[0], rows.dim() - 1, rows.device
        self._positions: dict[tuple[fx.Node, Space, Shape], int] = {}
        self._depth = 0

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """Returns the region node of an operand of a pointwise operation, broadcast as torch does."""
        if isinstance(arg, (bool, int, float)):
            return self.builder.const(float(arg))
        if not is_tensor(arg):
            raise NotFusable("an operand is a symbolic number")
        if self._repeats_a_row(arg):
            return self.operand(arg.args[0], of, slots, strict)
        if arg in self.values:
            return self.values[arg]
        number = number_of(arg)
        if number is not None:
            return self.builder.const(number)
        if value(arg).device != self.device:
            raise NotFusable("an operand is on another device")
        if len(arg.users) == 1 and self.computable(arg):
            with suppress(NotFusable):
                return self.compute(arg)
        return self.input(arg)

    def compute(self, node: fx.Node) -> int:
        """Returns the region node of an operation. Raises NotFusable, without changes, if the region can't hold it."""
        if self._depth == _DEEPEST:
            raise NotFusable("it is too long")
        before = len(self.tensors), dict(self._positions)
        self._depth += 1
        try:
            return POINTWISE[node.target](self, node, (), False)
        except NotFusable:
            del self.tensors[before[0] :]
            self._positions = before[1]
            raise
        finally:
            self._depth -= 1

    def fills_rows(self, at: int) -> bool:
        """Whether a region node has the width of the region's rows, and may differ from row to row."""
        node = self.builder.nodes[at]
        return node.space is not Space.PARAMETER and node.shape == self.shape

    def input(self, node: fx.Node) -> int:
        """Returns the region node that reads a tensor. Raises NotFusable if the region can't read it."""
        fake = value(node)
        if not fake.dtype.is_floating_point and fake.dtype != torch.bool:
            raise NotFusable(f"an operand has type {fake.dtype}")
        if (fake.dtype == torch.float64) != self.double and fake.dtype != torch.bool:
            raise NotFusable("an operand has another precision")
        if not is_packed(fake):
            raise NotFusable("an operand would have to be copied")
        own_rows = self.has_rows(node)
        space = self.by if own_rows else Space.PARAMETER
        shape = self._shape(fake.shape[1:] if own_rows else fake.shape)
        key = node, space, shape
        if key not in self._positions:
            self._positions[key] = len(self.tensors)
            self.tensors.append(node)
        return self.builder.input(self._positions[key], space, shape, storage_type(fake.dtype))

    def _repeats_a_row(self, node: fx.Node) -> bool:
        """Whether a tensor is one row, expanded to all rows."""
        if node.target is not aten.expand.default or not self.has_rows(node):
            return False
        source: Any = node.args[0]
        row, repeated = value(source).shape[-self.rank :], value(node).shape[1:]
        return not self.has_rows(source) and len(row) == self.rank and all(map(same_size, row, repeated))

    def _shape(self, sizes: Sequence[Any]) -> Shape:
        """Returns the feature shape (heads, channels) of an operand with these sizes."""
        while len(sizes) > self.rank and is_one(sizes[0]):
            sizes = sizes[1:]
        if len(sizes) > self.rank:
            raise NotFusable("an operand has rows of its own")
        heads, channels = self.shape
        if self.rank < 2:  # a row is flat, whether or not the region has heads
            found = self.shape if sizes and not is_one(sizes[0]) else (1, 1)
        else:
            wide = [not is_one(s) for s in (1, 1, *sizes)[-2:]]
            found = heads if wide[0] else 1, channels if wide[1] else 1
        if found[0] * found[1] != _count(sizes):
            raise NotFusable("an operand is wider than the result")
        return found

    def computable(self, node: fx.Node) -> bool:
        """Whether a node is arithmetic of a kind and dtype that the region computes. Shapes are not checked."""
        if node.op != "call_function" or node.target not in POINTWISE or not is_tensor(node):
            return False
        if value(node).dtype == torch.bool:  # a mask: comparing once more costs less than storing it
            compared = [value(n) for n in node.all_input_nodes]
            return bool(compared) and all(map(self._fits, compared))
        return self._fits(value(node))

    def _fits(self, fake: Any) -> bool:
        """Whether a tensor is floating, and is float64 exactly if the region computes in float64."""
        floating = isinstance(fake, torch.Tensor) and fake.dtype.is_floating_point
        return floating and (fake.dtype == torch.float64) == self.double

    def has_rows(self, node: fx.Node) -> bool:
        """Whether a tensor has the region's rows, and as many axes as its other rows."""
        return value(node).dim() == self.rank + 1 and self.same_rows(node)

    def same_rows(self, node: fx.Node) -> bool:
        """Whether the first axis of a tensor is the region's rows."""
        fake = value(node)
        return bool(fake.dim() > 0 and same_size(fake.shape[0], self.num_rows))


def number_of(node: fx.Node) -> float | None:
    """Returns the number that a tensor without axes is made of, or None for other tensors, and if its type cuts it."""
    args: Any = node.args
    if node.target is aten.full.default and not args[0]:
        number = args[1]
    elif node.target is aten.scalar_tensor.default:
        number = args[0]
    else:
        return None
    fits = isinstance(number, int) or (isinstance(number, float) and value(node).dtype.is_floating_point)
    return float(number) if fits else None


def _count(sizes: Sequence[Any]) -> int:
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            raise NotFusable("an operand has a symbolic width")
        count *= size
    return count
