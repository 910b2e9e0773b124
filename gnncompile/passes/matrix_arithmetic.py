"""Writes arithmetic on the elements of matrices as a region, for kernels of products that compute it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import aten, has_kernel, is_tensor, readers, value
from gnncompile.passes.pointwise import NotFusable, Slots
from gnncompile.passes.row_arithmetic import RowArithmetic

_MOST_NODES = 64
"""Most nodes of a region."""
_DEEPEST = 24
"""Most operations that are computed one from the other."""
_MOST_STEPS = 256
"""Most operations that are tried, those that turn out not to fit included."""
_VIEWS = {aten.permute.default, aten.t.default, aten.detach.default}


class MatrixArithmetic(RowArithmetic):
    """A region without edges, whose rows are those of a matrix. It reads only what lies in memory in any case.

    Args:
        like: The matrix, ``[rows, columns]``.
        most: Most tensors that the region may read.
        before: Reads only tensors that are computed before this node, if it is given.
    """

    def __init__(self, like: torch.Tensor, most: int, before: fx.Node | None = None) -> None:
        super().__init__(Builder(Space.DESTINATION), like, (1, int(like.shape[1])))
        self.most, self.before = most, before
        self._depth, self._steps = 0, 0

    def read_first(self, product: fx.Node) -> int:
        """Makes a product the region's first tensor, and returns its node."""
        self.values[product] = at = self.input(product)
        return at

    def compute(self, node: fx.Node) -> int:
        """Returns the region node of an operation. Raises NotFusable, without changes, if the region can't hold it."""
        before = dict(self.values)
        if self._depth == _DEEPEST or self._steps == _MOST_STEPS:
            raise NotFusable("it is too long")
        self._depth, self._steps = self._depth + 1, self._steps + 1
        try:
            return super().compute(node)
        except NotFusable:
            self.values = before
            raise
        finally:
            self._depth -= 1

    def operand(self, arg: Any, of: fx.Node, slots: Slots, strict: bool) -> int:
        """Returns the region node of an operand.

        Arithmetic is computed again, from what it is made of. A result of arithmetic that lies in memory in any case
        is read instead if computing it again would take more than one tensor that the region does not read yet.
        """
        if not is_tensor(arg) or arg in self.values or not self.computable(arg):
            return super().operand(arg, of, slots, strict)
        most, lies = self.most, is_stored(arg) and self._is_early(arg)
        self.most = min(most, len(self.tensors) + 1) if lies else most
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
        if node not in self.tensors and len(self.tensors) == self.most:
            raise NotFusable("it reads too many tensors")
        if not is_stored(node) or not self._is_early(node):
            raise NotFusable("an operand would have to be stored")
        if len(self.builder.nodes) > _MOST_NODES:
            raise NotFusable("it is too long")
        return super().input(node)

    def finish(self, nodes: list[fx.Node]) -> Region | None:
        """Returns the region whose outputs are nodes that it holds; None if its values must round as in other kernels.

        They must where values are compared for equality, and where equal products are subtracted from one another: see
        :attr:`gnncompile.ir.region.Region.exact` and ``contracts``.
        """
        columns = self.shape[1]
        outputs = [Output(self.values[node], storage_type(value(node).dtype), (columns,)) for node in nodes]
        region = self.builder.finish(outputs)
        verify(region)
        return None if region.exact or not region.contracts else region

    def _is_early(self, node: fx.Node) -> bool:
        return self.before is None or node < self.before or node is self.before


def is_stored(node: fx.Node) -> bool:
    """Whether a tensor lies in memory whatever Inductor fuses: an input, or what kernels that it calls make or read."""
    if node.op == "placeholder" or has_kernel(node):
        return True
    return any(user.op == "output" or has_kernel(user) for user, _ in readers(node, _views))


def _views(node: fx.Node) -> bool:
    return node.target in _VIEWS
