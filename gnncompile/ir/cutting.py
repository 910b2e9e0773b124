"""Cuts a backward into stages. The backward is first written as expressions in one scratch builder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gnncompile.ir import linear
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import LAYERS, Node, Output, Shape, Space
from gnncompile.ir.stages import Operand, Stage


def elements(nodes: Iterable[Node]) -> int:
    """Returns the number of elements in one row of each value, added up over the values."""
    return sum(n.shape[0] * n.shape[1] for n in nodes)


def trailing(shape: Shape) -> tuple[int, ...]:
    """Returns the trailing tensor shape of a value: (heads, channels), or (channels,) for a single head."""
    return shape if shape[0] != 1 else shape[1:]


@dataclass
class Stages:
    """Cuts expressions of the scratch builder into stages.

    Attributes:
        scratch: The builder that holds the expressions.
        operands: The origin of each tensor that an input of `scratch` reads.
        compute: The dtype that the region computes in.
        stages: The stages so far.
        temporaries: The number of outputs of all stages so far.
    """

    scratch: Builder
    operands: list[Operand]
    compute: str
    stages: list[Stage] = field(default_factory=list)
    temporaries: int = 0

    def add(self, by: Space, roots: Sequence[tuple[int, bool, str]]) -> list[int]:
        """Adds one stage and returns the indices of its temporaries, one per root. Equal roots share a temporary.

        Args:
            by: The space whose rows the stage walks.
            roots: (expression, whether to sum the expression over edges, dtype) for each output of the stage.
        """
        if not roots:
            return []
        b = Builder(by, self.scratch.unmasked)
        copy = Transplant(self.scratch, b, self.operands)
        outputs: list[Output] = []
        found: dict[tuple[int, bool, str], int] = {}
        stores_edges = self.scratch.tiled or any(
            not reduce and self.scratch.nodes[value].space is Space.EDGE for value, reduce, _ in roots
        )
        for value, reduce, dtype in dict.fromkeys(roots):
            node = copy(value)
            if reduce:
                # Where values are stored per edge, their dot products are computed for each edge anyway.
                node = b.reduce("sum", node) if stores_edges else self._sum(b, node, copy.used)
            found[value, reduce, dtype] = self.temporaries + len(outputs)
            outputs.append(Output(node, dtype, trailing(b.nodes[node].shape)))
        b.tiled = self.scratch.tiled and any(n.op in LAYERS for n in b.nodes)
        self.stages.append(Stage(b.finish(outputs), tuple(copy.used)))
        self.temporaries += len(outputs)
        return [found[root] for root in roots]

    def _sum(self, b: Builder, value: int, used: Sequence[Operand]) -> int:
        """Adds the sum of a value over the edges of each row.

        Operands other than the forward's inputs are taken to be finite in rows without edges.
        """
        rows = {at for at, n in enumerate(b.nodes) if n.op == "input" and used[int(n.value or 0)].kind != "input"}
        return linear.sum_over_edges(b, value, finite=rows)

    def load(self, temporary: int, space: Space, like: int, dtype: str | None = None) -> int:
        """Returns the scratch expression that reads a temporary; it has the feature shape of `like`.

        The temporary has the type that the region computes in, unless `dtype` names another.
        """
        self.operands.append(Operand("temporary", temporary))
        return self.scratch.input(len(self.operands) - 1, space, self.scratch.nodes[like].shape, dtype or self.compute)


class Transplant:
    """Copies expressions from `scratch` into `target`.

    `used` collects the operands that the copies read, in the order of the target's tensors. `copied` maps scratch
    values to target values that exist already.
    """

    def __init__(
        self, scratch: Builder, target: Builder, operands: list[Operand], copied: dict[int, int] | None = None
    ) -> None:
        self.scratch, self.target, self.operands = scratch, target, operands
        self.used: list[Operand] = []
        self.copied = dict(copied or {})

    def __call__(self, value: int) -> int:
        """Returns the copy of a value; makes the copy on first use."""
        if value not in self.copied:
            self.copied[value] = self._copy(self.scratch.nodes[value])
        return self.copied[value]

    def _copy(self, node: Node) -> int:
        if node.op == "input":
            index = tuple(self(a) for a in node.args)
            return self.target.emit(replace(node, args=index, value=self._position(node)))
        return self.target.again(node, [self(a) for a in node.args])

    def _position(self, node: Node) -> int:
        """Returns the tensor position of an input in the target.

        A tensor in walk order comes in both orders; the target reads the order of its own walk.
        """
        operand = self.operands[int(node.value or 0)]
        wanted = [replace(operand, index=operand.index + k) for k in range(len(node.positions))]
        if self.target.by is not self.scratch.by:
            wanted.reverse()
        if wanted[0] not in self.used:
            self.used += wanted
        return self.used.index(wanted[0])
