"""Writes arithmetic on the elements of matrices as a region, for kernels of products that compute it."""

from __future__ import annotations

import torch
from torch import fx

from gnncompile.ir.bits import storage_type
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ir.verify import verify
from gnncompile.passes.analysis import value
from gnncompile.passes.stored_arithmetic import StoredArithmetic


class MatrixArithmetic(StoredArithmetic):
    """A region without edges, whose rows are those of a matrix. It reads only what lies in memory in any case.

    Args:
        like: The matrix, ``[rows, columns]``.
        most: Most tensors that the region may read.
        before: Reads only tensors that are computed before this node, if it is given.
    """

    def __init__(self, like: torch.Tensor, most: int, before: fx.Node | None = None) -> None:
        super().__init__(Builder(Space.DESTINATION), like, (1, int(like.shape[1])), most)
        self.before = before

    def read_first(self, product: fx.Node) -> int:
        """Makes a product the region's first tensor, and returns its node."""
        self.values[product] = at = self.input(product)
        return at

    def lies(self, node: fx.Node) -> bool:
        """Whether a tensor lies in memory in any case, early enough."""
        return super().lies(node) and (self.before is None or node < self.before or node is self.before)

    def finish(self, nodes: list[fx.Node]) -> Region | None:
        """Returns the region whose outputs are nodes that it holds; None if kernels of products can't compute it.

        They can't where all rows of an output are equal, and where values must round as in other kernels: where they
        are compared for equality, and where equal products are subtracted from one another (see
        :attr:`gnncompile.ir.region.Region.exact` and ``contracts``).
        """
        columns = self.shape[1]
        if not all(self.fills_rows(self.values[node]) for node in nodes):
            return None
        outputs = [Output(self.values[node], storage_type(value(node).dtype), (columns,)) for node in nodes]
        region = self.builder.finish(outputs)
        verify(region)
        return None if region.exact or not region.contracts else region
