"""The region: one gather -> message -> (segment softmax) -> reduce program over the edges of a graph.

A region is a straight-line program. Every value lives in one space: it has a row per source node, per destination
node or per edge, or a single parameter row. Its feature shape has exactly two axes, (heads, channels). A kernel walks
the edges of one row together, in the order of a CSR layout. The row is a destination, or a source in most gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

from gnncompile.exc import InvalidRegionError
from gnncompile.ir.reductions import REDUCTIONS

Shape = tuple[int, int]


class Space(str, Enum):
    """Where the rows of a value live.

    The rows of an ``EDGE`` value are in the order of the edge list. The rows of an ``ORDERED`` input are in the order
    in which the region walks the edges. An ``ORDERED`` input takes two tensors. The tensor at the next position is in
    the order of a walk by the other end of the edges; gradients read it.

    An ``EDGE`` input that takes an index reads rows of any tensor, one for each edge: see :attr:`Node.args`.

    ``FEATURE`` has one row per edge feature. It holds the transposed weights of a linear layer on these features.
    """

    SOURCE = "source"
    DESTINATION = "destination"
    EDGE = "edge"
    ORDERED = "ordered edge"
    PARAMETER = "parameter"
    FEATURE = "edge feature"

    @property
    def opposite(self) -> Space:
        """The other end of an edge."""
        return {Space.SOURCE: Space.DESTINATION, Space.DESTINATION: Space.SOURCE}[self]

    @property
    def computed(self) -> Space:
        """The space of a value that is computed row by row from values in this space."""
        return Space.EDGE if self is Space.ORDERED else self


BOOL = "bool"
BITS = "bits"
"""Type of bools per edge that are packed into words: see :mod:`gnncompile.ir.bits`."""
HALVES = ("bfloat16", "float16")
"""The float types of 16 bits."""
SEED = "int64"
"""Type of a seed: a tensor of one element that only dropout reads."""
INDEX = "int32"
"""Type of an index: a number per edge that only inputs read. See :attr:`Node.args`."""
COMPUTE = "compute"
"""Type of every float intermediate: float32, or float64 where an input is float64."""

SOFTMAX_ROWS = ("softmax_max", "softmax_sum")
STATISTICS = (*SOFTMAX_ROWS, "ties")
"""Row values that a walk finds as by-products of a softmax, a maximum or a minimum."""
FEATURE_SUMS = ("sum_heads", "sum_channels")
FEATURE_MAXIMA = ("max_heads", "max_channels")
"""Maxima over a feature axis. They keep exponentials in range. Results do not depend on them, so they have no gradient.
"""
FEATURE_REDUCTIONS = (*FEATURE_SUMS, *FEATURE_MAXIMA)
LAYERS = ("linear", "transposed", "outer")
"""A linear layer of each edge's features, the gradient of these features, and the gradient of the weights."""

ROUNDED_ALIKE = (
    *("input", "const", "add", "sub", "mul", "neg", "abs", "sign", "floor", "ceil", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and", "or", "not", "where", "on_edges", "float", "reduce_max", "reduce_min", "ties"),
)
"""Operations whose results are bitwise equal in every generator."""


@dataclass(frozen=True)
class Node:
    """One value of a region.

    Attributes:
        op: The operation, by name:

            - ``"input"``, ``"const"``, or a name of :data:`gnncompile.ir.pointwise.POINTWISE`.
            - ``"sum_heads"``, ``"sum_channels"``, ``"max_heads"``, ``"max_channels"``: a sum or maximum over one
              feature axis, which stays with length 1.
            - ``"softmax"``: over the edges of each row. ``"softmax_max"`` and ``"softmax_sum"`` are the row maximum and
              the sum of exponentials of a softmax.
            - One of :data:`REDUCTIONS`: from edges to their row. A row without edges gives 0.
            - ``"ties"``: the number of a row's edges that reach the result of a ``reduce_max`` or ``reduce_min``. The
              number is 0 if the result is NaN.
            - ``"dropout"``: per edge, the factors of dropout by a seed; see :func:`gnncompile.ir.philox.factors`.
            - ``"linear"``: takes the K features of an edge and K rows of weights. Sums the rows, each times its
              feature.
            - ``"transposed"``: takes a value per edge and K rows of weights. Gives the K dot products of the value with
              a row.
            - ``"outer"``: takes the K features of an edge and a value. For each feature, sums the value times the
              feature over all edges.
        args: Indices of the nodes that the operation takes, all earlier in the region. An input that takes an index
            is gathered through it: each edge reads the row of the tensor that the index names, or zeros if that is -1.
            The tensor may have any number of rows.
        space: Where the value's rows live.
        shape: Feature shape, (heads, channels).
        dtype: The storage type of an input (``"float32"``, ``"bool"``, ``"bits"``, ...), else ``"compute"`` or
            ``"bool"``.
        value: For an input, its position among the region's tensors. For a constant, its number. For a dropout, the
            probability of a zero.
        negative_zero: Whether the number is a negative zero. Node comparison needs this, because -0.0 == 0.0.
    """

    op: str
    args: tuple[int, ...]
    space: Space
    shape: Shape
    dtype: str = COMPUTE
    value: float | int | None = None
    negative_zero: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "negative_zero", self.value == 0 and math.copysign(1.0, self.value) < 0)

    @property
    def number(self) -> float:
        """The number of a constant, or the probability of a dropout."""
        assert self.value is not None
        return float(self.value)

    @property
    def is_one(self) -> bool:
        """Whether the node is the constant 1."""
        return self.op == "const" and self.value == 1

    @property
    def differentiable(self) -> bool:
        """Whether the value can have a gradient. Inputs in ``ORDERED`` space hold graph structure, which has none.

        Inputs that are gathered through an index have none either: gradients of such rows are sums outside of regions.
        """
        return self.is_number and self.space is not Space.ORDERED and not self.through_index

    @property
    def boolean(self) -> bool:
        """Whether the value is a bool, packed or not."""
        return self.dtype in (BOOL, BITS)

    @property
    def is_number(self) -> bool:
        """Whether the value is a number, and neither a bool, a seed nor an index."""
        return not self.boolean and self.dtype not in (SEED, INDEX)

    @property
    def through_index(self) -> bool:
        """Whether the node is an input whose rows are gathered through an index."""
        return self.op == "input" and bool(self.args)

    @property
    def numbers_edges(self) -> bool:
        """Whether computing the value needs an edge's index in the edge list."""
        return self.op == "dropout" or (self.op == "input" and self.space is Space.EDGE)

    @property
    def positions(self) -> range:
        """The positions of an input's tensors among the region's tensors."""
        first = int(self.value or 0)
        return range(first, first + (2 if self.space is Space.ORDERED else 1))


def behind(nodes: Sequence[Node], roots: Iterable[int], given: Container[int] = ()) -> set[int]:
    """Returns the indices of `roots` and of every node that they are computed from, up to the nodes `given`."""
    found: set[int] = set()
    todo = list(roots)
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo.extend(nodes[at].args if at not in given else ())
    return found


@dataclass(frozen=True)
class Output:
    """A value that leaves the region as a tensor of shape ``[rows, *trailing]`` and type `dtype`."""

    node: int
    dtype: str
    trailing: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A region program.

    Attributes:
        by: The space whose rows own the edges that are walked together.
        nodes: Its values, each after the values that it is computed from.
        outputs: The values that leave the region as tensors.
        unmasked: Whether every edge is walked. Then no edge is masked out, and no value per edge needs a default.
        tiled: Whether edges are walked in tiles: some consecutive edges at a time, in the order of the layout, however
            many rows they belong to. Linear layers are then products of matrices, of any width. Values may have any
            widths side by side, and one walk may give rows, values per edge and sums over all edges.
    """

    by: Space
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    unmasked: bool = False
    tiled: bool = False

    @cached_property
    def grid(self) -> Shape:
        """The broadcast feature shape of all values: the (heads, channels) of one kernel tile."""
        shapes = [n.shape for at, n in enumerate(self.nodes) if at not in self.only_columns]
        return (max(heads for heads, _ in shapes), max(channels for _, channels in shapes))

    @cached_property
    def columns(self) -> frozenset[int]:
        """Indices of values whose features a ``"linear"`` or ``"outer"`` node reads one by one."""
        return frozenset(n.args[0] for n in self.nodes if n.op in ("linear", "outer"))

    @cached_property
    def only_columns(self) -> frozenset[int]:
        """The inputs in :attr:`columns` that no node reads in any other way. No tile holds them."""
        whole = {a for n in self.nodes for k, a in enumerate(n.args) if n.op not in ("linear", "outer") or k > 0}
        return frozenset(at for at in self.columns - whole if self.nodes[at].op == "input")

    @cached_property
    def sums_all(self) -> bool:
        """Whether the outputs are sums over all edges, instead of sums over the edges of each row."""
        return any(n.op == "outer" for n in self.nodes)

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        """The input nodes, ordered by tensor position."""
        found = [n for n in self.nodes if n.op == "input"]
        return tuple(sorted(found, key=lambda n: int(n.value or 0)))

    @cached_property
    def count(self) -> int:
        """The number of tensors that the region takes, from the highest position that it reads."""
        return max((n.positions.stop for n in self.inputs), default=0)

    @cached_property
    def softmaxes(self) -> tuple[int, ...]:
        """Indices of the softmax nodes."""
        return tuple(i for i, n in enumerate(self.nodes) if n.op == "softmax")

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Indices of the nodes that reduce the edges of a row."""
        return tuple(i for i, n in enumerate(self.nodes) if n.op in REDUCTIONS)

    @cached_property
    def drops(self) -> bool:
        """Whether the region has a dropout."""
        return any(n.op == "dropout" for n in self.nodes)

    @cached_property
    def walks_edges(self) -> bool:
        """Whether any value lives on edges. A region without such a value is plain row-wise arithmetic."""
        return bool(self.reductions) or any(n.space in (Space.EDGE, Space.FEATURE) for n in self.nodes)

    @cached_property
    def numbers_edges(self) -> bool:
        """Whether a walk needs the index of its edges in the edge list. A walk in tiles may store values per edge."""
        return self.tiled or any(n.numbers_edges for n in self.nodes) or any(map(self.per_edge, self.outputs))

    @cached_property
    def cotangents(self) -> tuple[tuple[bool, ...], ...]:
        """The sets of outputs that may have cotangents together, each as one bool per output.

        A set is all outputs, the first few outputs (those that are not residuals), or a single output.
        """
        count = len(self.outputs)
        cases = {tuple(k < n for k in range(count)) for n in range(1, count + 1)}
        return tuple(sorted(cases | {tuple(k == n for k in range(count)) for n in range(count)}))

    @cached_property
    def edge_spaces(self) -> frozenset[Space]:
        """The spaces whose values differ from edge to edge of one row."""
        return frozenset({Space.EDGE, Space.ORDERED, self.by.opposite})

    @cached_property
    def needs_opposite(self) -> bool:
        """Whether the region gathers rows of the other end of its edges."""
        return any(n.op == "input" and n.space is self.by.opposite for n in self.nodes)

    @cached_property
    def exact(self) -> bool:
        """Whether values are compared for equality. Then all kernels must round alike, without fused multiply-add."""
        return any(n.op in ("eq", "ne", "reduce_max", "reduce_min") for n in self.nodes)

    @cached_property
    def contracts(self) -> bool:
        """Whether a kernel may use fused multiply-add, which rounds a product and a sum once.

        A region that is exact forbids this. So does a region that subtracts one product from another: equal products
        must differ by 0, as in the cross product of a vector with itself. If only one product is rounded, the
        difference is a rounding error.
        """
        return not self.exact and not any(
            n.op == "sub" and all(self.nodes[a].op == "mul" for a in n.args) for n in self.nodes
        )

    @cached_property
    def rounds(self) -> bool:
        """Whether the region compares values for equality that two generators may round differently."""
        return self.exact and any(n.op not in ROUNDED_ALIKE for n in self.nodes)

    @cached_property
    def double(self) -> bool:
        """Whether the region computes in float64."""
        return any(n.dtype == "float64" for n in self.nodes) or any(o.dtype == "float64" for o in self.outputs)

    @cached_property
    def compute(self) -> str:
        """The type that the region computes in."""
        return "float64" if self.double else "float32"

    @cached_property
    def factor(self) -> str:
        """The type of the factors of products with matrices of weights, and of sums over edges, in walks by tiles.

        It is a type of 16 bits if all weights have this type or, in a region without weights, all tensors. Otherwise it
        is the type that the region computes in.
        """
        floats = [n for n in self.inputs if n.is_number]
        types = {n.dtype for n in floats if n.space is Space.FEATURE} or {n.dtype for n in floats}
        return types.pop() if len(types) == 1 and types <= {*HALVES} and not self.double else self.compute

    def rounds_like(self, other: Region) -> bool:
        """Whether both regions round alike the values that they share.

        Without weights, the type of all tensors decides to which type products round. Comparisons for equality, and a
        difference of products, decide how all kernels of a region round.
        """
        return (self.factor, self.exact, self.contracts) == (other.factor, other.exact, other.contracts)

    def per_edge(self, output: Output) -> bool:
        """Whether an output has a row per edge."""
        return self.nodes[output.node].space is Space.EDGE

    def features(self, at: int) -> int:
        """Returns the number K of edge features of a ``"linear"``, ``"transposed"`` or ``"outer"`` node."""
        node = self.nodes[at]
        return node.shape[1] if node.op == "transposed" else self.nodes[node.args[0]].shape[1]

    def per_row(self, output: Output) -> bool:
        """Whether an output has a row per row of the region."""
        return not self.per_edge(output) and self.nodes[output.node].op != "outer"

    def rows(self, output: Output, num_rows: Any, num_edges: Any) -> Any:
        """Returns the number of rows of an output, on a graph with `num_rows` rows and `num_edges` edges."""
        node = self.nodes[output.node]
        if node.op == "outer":
            return self.features(output.node)
        return num_edges if self.per_edge(output) else num_rows

    def size_of_sum(self, output: Output) -> int:
        """Returns the number of elements of an output that is a sum over all edges."""
        return self.features(output.node) * math.prod(output.trailing)

    def cleared(self, output: Output) -> bool:
        """Whether an output must be zeroed before the walk. The walk skips masked edges, whose values must be zero."""
        return self.per_edge(output) and not self.unmasked

    @cached_property
    def spec(self) -> str:
        """The region as a compact string; :func:`parse` is its inverse."""
        nodes = [[n.op, list(n.args), n.space.value, list(n.shape), n.dtype, n.value] for n in self.nodes]
        outputs = [[o.node, o.dtype, list(o.trailing)] for o in self.outputs]
        return json.dumps([FORMAT, self.by.value, nodes, outputs, self.unmasked, self.tiled], separators=(",", ":"))


FORMAT = 5
"""Version of the string form. A cache from another version is never read."""


@lru_cache(maxsize=4096)
def parse(spec: str) -> Region:
    """Returns the region of a string from :attr:`Region.spec`.

    Raises:
        InvalidRegionError: The string was written by another version of the format.
    """
    version, *rest = json.loads(spec)
    if version != FORMAT:
        raise InvalidRegionError(f"region spec: found format {version}, expected {FORMAT}; clear the compile caches")

    by, nodes, outputs, unmasked, tiled = rest

    def node(row: list[Any]) -> Node:
        op, args, space, shape, dtype, value = row
        return Node(op, tuple(args), Space(space), (shape[0], shape[1]), dtype, value)

    kept = tuple(Output(o[0], o[1], tuple(o[2])) for o in outputs)
    return Region(Space(by), tuple(node(n) for n in nodes), kept, unmasked, tiled)
