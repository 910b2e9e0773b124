"""Builds regions. Equal values become one node, and operations with a neutral constant are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gnncompile.exc import InvalidRegionError
from gnncompile.ir.pointwise import POINTWISE
from gnncompile.ir.region import (
    BOOL,
    COMPUTE,
    FEATURE_REDUCTIONS,
    FEATURE_SUMS,
    INDEX,
    Node,
    Output,
    Region,
    Shape,
    Space,
    behind,
)


def broadcast(*shapes: Shape) -> Shape:
    """The common shape of feature shapes.

    Raises:
        ValueError: An axis has two different lengths, neither of them 1.
    """
    axes: list[int] = []
    for lengths in zip(*shapes, strict=True):
        wide = {n for n in lengths if n != 1}
        if len(wide) > 1:
            raise InvalidRegionError(f"feature shapes {shapes} do not broadcast")
        axes.append(wide.pop() if wide else 1)
    return (axes[0], axes[1])


def join(by: Space, spaces: Sequence[Space]) -> Space:
    """The space of a pointwise operation on values of the given spaces, in a region walked by `by`."""
    wide = {s for s in spaces if s is not Space.PARAMETER}
    if not wide:
        return Space.PARAMETER
    return by if wide == {by} else Space.EDGE


class Builder:
    """Builds one region, node by node. A value is the index of its node; methods that add a node return its index."""

    def __init__(self, by: Space, unmasked: bool = False, tiled: bool = False) -> None:
        self.by, self.unmasked, self.tiled = by, unmasked, tiled
        self.nodes: list[Node] = []
        self._known: dict[Node, int] = {}

    @classmethod
    def of(cls, region: Region) -> Builder:
        """Returns a builder that already holds the nodes of a region, at the same indices."""
        b = cls(region.by, region.unmasked, region.tiled)
        for node in region.nodes:
            b.emit(node)
        return b

    @property
    def double(self) -> bool:
        """Whether a float64 input has been added so far. Values of earlier inputs have float32 digits at most."""
        return any(node.dtype == "float64" for node in self.nodes)

    def emit(self, node: Node) -> int:
        """Returns the index of `node`; adds the node unless an equal node exists."""
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return self._known[node]

    def input(self, position: int, space: Space, shape: Shape, dtype: str) -> int:
        """Adds an input that reads the rows of the region's tensor at index `position`."""
        return self.emit(Node("input", (), space, shape, dtype, position))

    def through_index(self, position: int, index: int, shape: Shape, dtype: str) -> int:
        """Adds an input that reads, for each edge, the row that an index names of the tensor at index `position`.

        Args:
            position: The position of a tensor ``[any number of rows, ...]``.
            index: The position of the index, int32 ``[num_edges]``, in the order of the edge list. -1 reads zeros.
            shape: Feature shape of a row.
            dtype: Type of the tensor.
        """
        read = self.input(index, Space.EDGE, (1, 1), INDEX)
        return self.emit(Node("input", (read,), Space.EDGE, shape, dtype, position))

    def const(self, value: float) -> int:
        """Adds a constant."""
        return self.emit(Node("const", (), Space.PARAMETER, (1, 1), COMPUTE, float(value)))

    def constant(self, value: int) -> float | None:
        """Returns the number that a value holds, or None if the value is not a constant."""
        node = self.nodes[value]
        return node.number if node.op == "const" else None

    def op(self, name: str, *args: int) -> int:
        """Adds a pointwise operation of :data:`POINTWISE`."""
        if name == "on_edges":
            return self.on_edges(args[0])
        if POINTWISE[name].result != BOOL and name not in ("where", "float"):
            # Arithmetic takes a bool as 0 or 1; torch's own ops on two bools would be logical.
            args = tuple(self.op("float", a) if self.nodes[a].boolean else a for a in args)
        folded = self._simplify(name, args)
        if folded is not None:
            return folded
        nodes = [self.nodes[a] for a in args]
        shape = broadcast(*(n.shape for n in nodes))
        dtype = POINTWISE[name].result
        if name == "where" and nodes[1].boolean and nodes[2].boolean:
            dtype = BOOL
        return self.emit(Node(name, tuple(args), join(self.by, [n.space for n in nodes]), shape, dtype))

    def on_edges(self, value: int) -> int:
        """Returns the value with a row per edge, so that a region can store it per edge."""
        node = self.nodes[value]
        if node.space is Space.EDGE:
            return value
        dtype = BOOL if node.boolean else COMPUTE
        return self.emit(Node("on_edges", (value,), Space.EDGE, node.shape, dtype))

    def _simplify(self, name: str, args: tuple[int, ...]) -> int | None:
        """Returns the other operand if one operand is neutral, or a shorter way to the same value; None without either.

        No operand is dropped whose NaN or infinity must reach the result.
        """
        if name == "div" and (inner := self._under_sigmoid(args[1])) is not None:
            return self.op("mul", args[0], self.op("sigmoid", inner))
        if name in ("add", "mul") and self.constant(args[0]) is not None:
            args = (args[1], args[0])
        last = self.constant(args[-1])
        if name in ("mul", "div") and last == 1.0:
            return args[0]
        # x + 0.0 differs from x where x is -0.0; x - 0.0 and x + -0.0 always equal x.
        if last == 0.0 and (name, math.copysign(1.0, last)) in (("sub", 1.0), ("add", -1.0)):
            return args[0]
        return None

    def _under_sigmoid(self, divisor: int) -> int | None:
        """Returns `x` if a divisor is ``1 + exp(-x)``, as torch takes ``silu(x)`` apart; else None."""
        node = self.nodes[divisor]
        if node.op != "add":
            return None
        for one, other in (node.args, node.args[::-1]):
            power = self.nodes[one]
            if self.constant(other) == 1.0 and power.op == "exp" and self.nodes[power.args[0]].op == "neg":
                return self.nodes[power.args[0]].args[0]
        return None

    def sum_axis(self, value: int, axis: int) -> int:
        """Adds a sum over feature axis 0 (heads) or 1 (channels). The summed axis stays, with length 1."""
        return self.over_features(FEATURE_SUMS[axis], value)

    def over_features(self, name: str, value: int) -> int:
        """Adds a reduction `name` of :data:`FEATURE_REDUCTIONS`, unless its axis already has length 1."""
        node, axis = self.nodes[value], FEATURE_REDUCTIONS.index(name) % 2
        if node.shape[axis] == 1:
            return value
        shape = (1, node.shape[1]) if axis == 0 else (node.shape[0], 1)
        return self.emit(Node(name, (value,), node.space.computed, shape))

    def sum_to(self, value: int, shape: Shape, full: Shape) -> int:
        """Sums over the feature axes that broadcasting from `shape` to `full` expanded: the gradient of broadcasting.

        `value` stands for a value of shape `full`. Where an axis of `value` has length 1, all entries along that axis
        are equal, so the sum is a product with the length.
        """
        for axis in (0, 1):
            if shape[axis] == 1 and full[axis] != 1:
                if self.nodes[value].shape[axis] == 1:
                    value = self.op("mul", value, self.const(full[axis]))
                else:
                    value = self.sum_axis(value, axis)
        return value

    def softmax(self, value: int) -> int:
        """Adds a softmax over the edges of each row."""
        return self.emit(Node("softmax", (value,), Space.EDGE, self.nodes[value].shape))

    def softmax_row(self, which: str, softmax: int) -> int:
        """Adds the row maximum (``"softmax_max"``) or the row sum (``"softmax_sum"``) of a softmax node."""
        return self.emit(Node(which, (softmax,), self.by, self.nodes[softmax].shape))

    def ties(self, extremum: int) -> int:
        """Adds the number of edges of each row that reach the row's maximum or minimum."""
        return self.emit(Node("ties", (extremum,), self.by, self.nodes[extremum].shape))

    def sharers(self, extremum: int) -> int:
        """Adds the number of values that share the gradient of an extremum.

        These are the edges that reach the extremum, and one more where the extremum is 0. torch's ``scatter_reduce``
        starts from a zero, which then takes a share as well.
        """
        return self.op("add", self.ties(extremum), self.op("eq", extremum, self.const(0)))

    def dropout(self, seed: int, p: float, shape: Shape) -> int:
        """Adds the factors by which dropout multiplies a value per edge of this shape.

        Args:
            seed: An input that holds the seed.
            p: The probability of a zero, ``0 < p < 1``.
            shape: Feature shape of the value.
        """
        return self.emit(Node("dropout", (seed,), Space.EDGE, shape, COMPUTE, float(p)))

    def linear(self, features: int, weights: int) -> int:
        """Adds a linear layer of the features of each edge. `weights` is an input with a row for each feature."""
        return self.emit(Node("linear", (features, weights), Space.EDGE, self.nodes[weights].shape))

    def transposed(self, value: int, weights: int, features: int) -> int:
        """Adds the dot products of a value per edge with each row of weights. The weights have `features` rows."""
        return self.emit(Node("transposed", (value, weights), Space.EDGE, (1, features)))

    def outer(self, features: int, value: int, shape: Shape) -> int:
        """Adds, for each edge feature, the sum over all edges of the feature times a value broadcast to `shape`."""
        return self.emit(Node("outer", (features, value), Space.FEATURE, shape))

    def over_all_edges(self, value: int, shape: Shape) -> int:
        """Adds the sum over all edges of a value broadcast to `shape`."""
        return self.outer(self.on_edges(self.const(1)), value, shape)

    def reduce(self, kind: str, value: int) -> int:
        """Adds a reduction over the edges of each row; `kind` is ``"sum"``, ``"max"`` or ``"min"``."""
        return self.emit(Node(f"reduce_{kind}", (value,), self.by, self.nodes[value].shape))

    def again(self, node: Node, args: Sequence[int]) -> int:
        """Adds the operation of a node of another region, applied to `args`.

        The node may be no input, no softmax and no row value of a softmax or an extremum.
        """
        if node.op == "const":
            return self.const(node.number)
        if node.op == "dropout":
            return self.dropout(args[0], node.number, node.shape)
        if node.op in FEATURE_REDUCTIONS:
            return self.over_features(node.op, args[0])
        if node.op.startswith("reduce_"):
            return self.reduce(node.op.removeprefix("reduce_"), args[0])
        if node.op == "linear":
            return self.linear(args[0], args[1])
        if node.op == "transposed":
            return self.transposed(args[0], args[1], node.shape[1])
        if node.op == "outer":
            return self.outer(args[0], args[1], node.shape)
        return self.op(node.op, *args)

    def finish(self, outputs: Sequence[Output]) -> Region:
        """Returns the region with these outputs, without the values that no output needs.

        Inputs keep their tensor positions. A tensor that no value reads has no input node.
        """
        needed = sorted(behind(self.nodes, (o.node for o in outputs)))
        place = {old: new for new, old in enumerate(needed)}
        nodes = []
        for old in needed:
            n = self.nodes[old]
            nodes.append(Node(n.op, tuple(place[a] for a in n.args), n.space, n.shape, n.dtype, n.value))
        kept = tuple(Output(place[o.node], o.dtype, o.trailing) for o in outputs)
        return Region(self.by, tuple(nodes), kept, self.unmasked, self.tiled)
