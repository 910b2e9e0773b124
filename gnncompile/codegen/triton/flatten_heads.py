"""Reads rows of several heads as rows of one, and takes them apart in registers.

Heads and channels of a row stand side by side in memory, which Triton 3.6 does not see: it gives the edges of a step to
the lanes of a warp that would have other heads, so that to add them up takes shuffles. The kernels of a GAT layer (4
heads of 32 channels, compiled for an H200) come to 121 registers and 73 shuffles like that, and to 80 and 11 so; Triton
3.7 writes the latter either way. Where rows are asked for a step ahead, they pass through shared memory, and are
written as they are needed.
"""

from __future__ import annotations

from gnncompile.codegen.triton.kernel_text import KernelText
from gnncompile.codegen.triton.plan import edgewise
from gnncompile.ir.region import BITS, Node


class FlatRows:
    """Writes reads of rows of several heads as rows of one."""

    def __init__(self, text: KernelText) -> None:
        self.text = text

    def holds(self, node: Node) -> bool:
        """Whether an input is read like that: a wide value per edge, of which a program has all."""
        if node.op != "input" or node.dtype == BITS or not edgewise(self.text.region, node):
            return False
        extents = [self.text.extent(axis, length) for axis, length in zip(("head", "channel"), node.shape, strict=True)]
        return self.text.tile.stages == 1 and min(node.shape) > 1 and extents == list(node.shape)

    def axis(self, width: int) -> str:
        """The elements of a row."""
        return f"tl.arange(0, {width})[{'None, ' * self._edge_axes()}:]"

    def expand(self, name: str) -> str:
        """What there is per edge, beside the elements of a row."""
        return f"{name}[{':, ' * self._edge_axes()}None]"

    def load(self, node: Node) -> str:
        """The tile of an input."""
        width = node.shape[0] * node.shape[1]
        place = f"t{node.value} + flat_{self.text.index(node)} * {width} + element{width}"
        rows = f"tl.load({place}, mask=flat_alive, other=0)"
        return f"tl.reshape({rows}, {self.text.tile_shape(node.shape, self.text.tile.edges)})"

    def _edge_axes(self) -> int:
        return 2 if self.text.tile.rows > 1 else 1
