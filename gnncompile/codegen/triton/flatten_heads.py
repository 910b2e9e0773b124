"""Writes loads that read a row of several heads as a row of one head, and reshape it in registers.

Heads and channels of a row are contiguous in memory, but Triton 3.6 does not notice. Triton spreads the edges of a step
over lanes that should hold other heads, so that a sum over edges takes shuffles. The kernels of a GAT layer (4 heads of
32 channels, compiled for an H200) then use 121 registers and 73 shuffles; with flat loads they use 80 and 11. Triton
3.7 produces the latter either way. Loads that are issued a step ahead go through shared memory, which gives them the
right layout without a flat load.
"""

from __future__ import annotations

from gnncompile.codegen.triton.kernel_text import KernelText
from gnncompile.codegen.triton.plan import edgewise
from gnncompile.ir.region import BITS, Node


class FlatRows:
    """Writes loads of rows of several heads as rows of one head."""

    def __init__(self, text: KernelText) -> None:
        self.text = text

    def holds(self, node: Node) -> bool:
        """Whether an input is loaded flat: a value per edge with several heads and channels, all in one program."""
        if node.op != "input" or node.dtype == BITS or not edgewise(self.text.region, node):
            return False
        extents = [self.text.extent(axis, length) for axis, length in zip(("head", "channel"), node.shape, strict=True)]
        return self.text.tile.stages == 1 and min(node.shape) > 1 and extents == list(node.shape)

    def axis(self, width: int) -> str:
        """Returns the text that numbers the elements of a row of `width` elements."""
        return f"tl.arange(0, {width})[{'None, ' * self._edge_axes()}:]"

    def expand(self, name: str) -> str:
        """Returns the text of a value per edge, with a further axis for the elements of a row."""
        return f"{name}[{':, ' * self._edge_axes()}None]"

    def load(self, node: Node) -> str:
        """Returns the text that loads an input and reshapes it to its tile."""
        width = node.shape[0] * node.shape[1]
        place = f"t{node.value} + flat_{self.text.index(node)} * {width} + element{width}"
        rows = f"tl.load({place}, mask=flat_alive, other=0)"
        return f"tl.reshape({rows}, {self.text.tile_shape(node.shape, self.text.tile.edges)})"

    def _edge_axes(self) -> int:
        return 2 if self.text.tile.rows > 1 else 1
