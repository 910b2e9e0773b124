"""The values of a region's forward, as its backward computes them: from the forward's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnncompile.ir.builder import Builder
from gnncompile.ir.reductions import REDUCTIONS, gradient_of
from gnncompile.ir.region import BITS, HALVES, STATISTICS, Node, Region, Space
from gnncompile.ir.stages import Operand


def selected_dtype(nodes: Sequence[Node], at: int) -> str | None:
    """Returns the 16-bit dtype of the rows from which a maximum or minimum takes its elements; otherwise None.

    In this dtype the extremum is not rounded.
    """
    node = nodes[at]
    rows = nodes[node.args[0]] if gradient_of(node.op) == "ties" else None
    return rows.dtype if rows is not None and rows.op == "input" and rows.dtype in HALVES else None


def _types_of_states(region: Region) -> set[str]:
    """Returns the types in which a gradient may read values per edge that the forward returns.

    A tiled region whose tensors all have one type of 16 bits may round them to it, as eager does. A region that is not
    tiled computes most values again at little cost. Where values are compared with others than 0, a rounded value might
    compare otherwise than in the forward, and statistics of a softmax fit the values that are not rounded.
    """
    alike = {n.dtype for n in region.inputs if n.is_number} == {region.factor}
    exact = region.exact or bool(region.softmaxes) or _orders_numbers(region)
    return {region.compute, region.factor} if region.tiled and alike and not exact else {region.compute}


def _orders_numbers(region: Region) -> bool:
    """Whether a region asks which of two values is larger, unless one is 0: no rounding changes the side of 0."""
    nodes = region.nodes
    compared = [n for n in nodes if n.op in ("lt", "le", "gt", "ge")]
    return any(all(nodes[a].op != "const" or nodes[a].number != 0 for a in n.args) for n in compared)


class ForwardValues:
    """Writes values of the forward as expressions of a scratch builder.

    Args:
        region: The forward.
        b: The scratch builder.
        reads_states: Whether values per edge that the forward returns are read from there, instead of being computed
            again. A returned ReLU also tells where its argument was positive.

    Attributes:
        operands: What the expressions read.
    """

    def __init__(self, region: Region, b: Builder, reads_states: bool) -> None:
        self.region, self.b, self.reads_states = region, b, reads_states
        self.operands: list[Operand] = []
        self._values: dict[int, int] = {}
        self._types_of_states = _types_of_states(region)

    def value(self, at: int) -> int:
        """Returns the expression of a forward value."""
        if at not in self._values:
            self._values[at] = self._expression(at, self.region.nodes[at])
        return self._values[at]

    def _expression(self, at: int, node: Node) -> int:
        if self._is_output(at, {BITS}):
            return self.saved(at)
        if self.reads_states and node.space is Space.EDGE and node.op != "input":
            if self._is_output(at, self._types_of_states):
                return self.saved(at)
            relu = self._relu_of(at, node)
            if relu is not None:
                return self.b.op("le", self.saved(relu), self.b.const(0))
        return self._again(at, node)

    def _is_output(self, at: int, types: set[str]) -> bool:
        return any(o.node == at and o.dtype in types for o in self.region.outputs)

    def _relu_of(self, at: int, node: Node) -> int | None:
        """Returns a ReLU among the outputs whose argument the comparison at `at` compares with 0, or None.

        Its sign survives that a type of 16 bits stores it, as in torch's own gradient of ReLU.
        """
        if node.op != "le":
            return None
        nodes, zero = self.region.nodes, node.args[1]
        if nodes[zero].op != "const" or nodes[zero].number != 0:
            return None
        relu = ("where", (at, zero, node.args[0]))
        return next((o.node for o in self.region.outputs if (nodes[o.node].op, nodes[o.node].args) == relu), None)

    def _again(self, at: int, node: Node) -> int:
        if node.op == "input":
            position = self._position(Operand("input", int(node.value or 0)))
            return self.b.emit(replace(node, args=tuple(self.value(a) for a in node.args), value=position))
        if node.op == "softmax":
            return self.b.op("div", self.exponential(at), self._statistic("softmax_sum", at))
        if node.op in (*REDUCTIONS, *STATISTICS, "outer"):
            return self.saved(at)
        return self.b.again(node, [self.value(a) for a in node.args])

    def exponential(self, softmax: int) -> int:
        """Returns the exponential of a softmax's logits, less their maximum."""
        logits = self.value(self.region.nodes[softmax].args[0])
        return self.b.op("exp", self.b.op("sub", logits, self._statistic("softmax_max", softmax)))

    def _statistic(self, which: str, softmax: int) -> int:
        nodes = self.region.nodes
        return self.saved(next(i for i, n in enumerate(nodes) if n.op == which and n.args == (softmax,)))

    def saved(self, at: int) -> int:
        """Reads a forward value from an output, if possible from one that is not rounded; marks a missing output."""
        found = [k for k, o in enumerate(self.region.outputs) if o.node == at]
        unrounded = (self.region.compute, BITS, selected_dtype(self.region.nodes, at))
        exact = [k for k in found if self.region.outputs[k].dtype in unrounded]
        if not found:
            return self.operand(Operand("missing", at), self.region.by, self.region.nodes[at], self.region.compute)
        k = (exact or found)[0]
        node = self.region.nodes[at]
        space = node.space if self.region.per_edge(self.region.outputs[k]) else self.region.by
        return self.operand(Operand("output", k), space, node, self.region.outputs[k].dtype)

    def operand(self, operand: Operand, space: Space, like: Node, dtype: str | None = None) -> int:
        """Returns the input that reads an operand, with the shape of a forward node."""
        return self.b.input(self._position(operand), space, like.shape, dtype or like.dtype)

    def _position(self, operand: Operand) -> int:
        if operand not in self.operands:
            self.operands.append(operand)
        return self.operands.index(operand)
