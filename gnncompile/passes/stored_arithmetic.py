"""Writes arithmetic that kernels compute again from what lies in memory, after differentiation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Shape
from gnncompile.passes.analysis import aten, has_kernel, is_tensor, readers
from gnncompile.passes.pointwise import NotFusable, Slots
from gnncompile.passes.row_arithmetic import RowArithmetic

_MOST_NODES = 64
"""Most nodes of a region."""
_MOST_STEPS = 256
"""Most operations that are tried, those that turn out not to fit included."""
_VIEWS = {aten.permute.default, aten.t.default, aten.detach.default}


class StoredArithmetic(RowArithmetic):
    """A region that reads only what lies in memory in any case.

    Args:
        builder: The region so far.
        rows: A tensor with the region's rows, ``[rows, ...]``.
        shape: The feature shape of a row.
        most: Most tensors that the region may read.
    """

    def __init__(self, builder: Builder, rows: torch.Tensor, shape: Shape, most: int) -> None:
        super().__init__(builder, rows, shape)
        self.most = most
        self._steps = 0

    def compute(self, node: fx.Node) -> int:
        """Returns the region node of an operation. Raises NotFusable, without changes, if the region can't hold it."""
        before = dict(self.values)
        if self._steps == _MOST_STEPS:
            raise NotFusable("it is too long")
        self._steps += 1
        try:
            return super().compute(node)
        except NotFusable:
            self.values = before
            raise

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """Returns the region node of an operand.

        Arithmetic is computed again, from what it is made of. A result of arithmetic that lies in memory in any case
        is read instead if computing it again would take more than one tensor that the region does not read yet.
        """
        if not is_tensor(arg) or arg in self.values or not self.computable(arg):
            return super().operand(arg, of, slots, strict)
        most, lies = self.most, self.lies(arg)
        self.most = min(most, self.count() + 1) if lies else most
        try:
            at = self.compute(arg)
        except NotFusable:
            if not lies:
                raise
            self.most = most
            at = self.input(arg)
        finally:
            self.most = most
        self.values[arg] = at
        return at

    def input(self, node: fx.Node) -> int:
        """Returns the region node that reads a tensor."""
        if node not in self.tensors and self.counts(node) and self.count() >= self.most:
            raise NotFusable("it reads too many tensors")
        if not self.lies(node):
            raise NotFusable("an operand would have to be stored")
        if len(self.builder.nodes) > _MOST_NODES:
            raise NotFusable("it is too long")
        return super().input(node)

    def lies(self, node: fx.Node) -> bool:
        """Whether a tensor lies in memory in any case."""
        return is_stored(node)

    def counts(self, node: fx.Node) -> bool:
        """Whether a tensor is one of those of which the region may read only a few."""
        return True

    def count(self) -> int:
        """Returns the number of such tensors that the region reads so far."""
        return sum(map(self.counts, self.tensors))


def is_stored(node: fx.Node) -> bool:
    """Whether a tensor lies in memory whatever Inductor fuses: an input, or what kernels that it calls make or read."""
    if node.op == "placeholder" or has_kernel(node):
        return True
    return any(user.op == "output" or has_kernel(user) for user, _ in readers(node, _views))


def _views(node: fx.Node) -> bool:
    return node.target in _VIEWS
