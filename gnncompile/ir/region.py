"""The region: one gather -> message -> (segment softmax) -> reduce program over the edges of a graph.

A region is a straight-line program. Every value lives in one space (a row per source node, destination node or
edge, or a single parameter row) and has a feature shape of exactly two axes, (heads, channels). The edges of one
row (a destination, or a source for most gradients) are walked together, in the order of a CSR layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

from gnncompile.exc import InvalidRegionError
from gnncompile.ir.reductions import REDUCTIONS as REDUCTIONS

Shape = tuple[int, int]


class Space(str, Enum):
    """Where the rows of a value live.

    ``ORDERED`` is for inputs that have a row per edge in the order in which the region walks the edges, while the rows
    of an ``EDGE`` are in the order of the edge list. Such an input comes in both orders: the tensor at the position
    behind it is in the order of a walk by the other end, which gradients read.

    ``FEATURE`` has a row for each feature of the edges: the weights of a linear layer of these, transposed.
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
        """Where what is computed from a value's rows, one by one, lives."""
        return Space.EDGE if self is Space.ORDERED else self


BOOL = "bool"
BITS = "bits"
"""Type of bools that are stored packed, per edge: see :mod:`gnncompile.ir.bits`."""
SEED = "int64"
"""Type of a seed: a tensor of one element, read by dropout alone."""
COMPUTE = "compute"
"""Type of every float intermediate: float32, or float64 where an input is float64."""

SOFTMAX_ROWS = ("softmax_max", "softmax_sum")
STATISTICS = (*SOFTMAX_ROWS, "ties")
"""Row values that a walk finds beside a softmax or an extremum."""
FEATURE_SUMS = ("sum_heads", "sum_channels")
FEATURE_MAXIMA = ("max_heads", "max_channels")
"""They have no gradient: they keep exponentials in range, and the result does not depend on them."""
FEATURE_REDUCTIONS = (*FEATURE_SUMS, *FEATURE_MAXIMA)
LAYERS = ("linear", "transposed", "outer")
"""A linear layer of the features of each edge, what hands a gradient back to these, and the gradient of the weights."""

ROUNDED_ALIKE = (
    *("input", "const", "add", "sub", "mul", "neg", "abs", "sign", "floor", "ceil", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and", "or", "not", "where", "on_edges", "float", "reduce_max", "reduce_min", "ties"),
)
"""What every generator computes to the last bit."""


@dataclass(frozen=True)
class Node:
    """One value of a region.

    Attributes:
        op: ``"input"``, ``"const"``, a name of :data:`gnncompile.ir.pointwise.POINTWISE`, ``"sum_heads"`` or
            ``"sum_channels"`` (sums over one feature axis, which stays with length 1; likewise ``"max_heads"`` and
            ``"max_channels"``), ``"softmax"`` (over the edges of each row), ``"softmax_max"`` and ``"softmax_sum"``
            (its row maximum and its sum of exponentials), ``"ties"`` (how many edges of a row reach its extremum, 0 if
            that is NaN; of a ``reduce_max`` or a ``reduce_min``), ``"dropout"`` (per edge, what dropout by a seed
            multiplies with: :func:`gnncompile.ir.philox.factors`), ``"linear"`` (of the K features of an edge and K
            rows of weights: the sum of all rows, each times its feature), ``"transposed"`` (of a value per edge and K
            rows of weights: the K dot products of the value with a row), ``"outer"`` (of the K features of an edge and
            a value: for each feature the sum over all edges of the value times it), or one of :data:`REDUCTIONS` (edge
            -> row; a row without edges gives 0).
        args: Earlier nodes, by position.
        space: Where its rows live.
        shape: Feature shape, (heads, channels).
        dtype: The storage type of an input (``"float32"``, ``"bool"``, ``"bits"``, ...), else ``"compute"`` or
            ``"bool"``.
        value: Position among the region's tensors for an input; the number for a constant; the probability of a zero
            for a dropout.
        negative_zero: Whether the number is a negative zero, which compares equal to a positive one.
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
    def differentiable(self) -> bool:
        """Whether a value of this type can have a gradient; what is ordered by a walk is graph structure."""
        return not self.boolean and self.dtype != SEED and self.space is not Space.ORDERED

    @property
    def boolean(self) -> bool:
        """Whether it is a bool, however it is stored."""
        return self.dtype in (BOOL, BITS)

    @property
    def numbers_edges(self) -> bool:
        """Whether computing it takes the place of an edge in the edge list."""
        return self.op == "dropout" or (self.op == "input" and self.space is Space.EDGE)

    @property
    def positions(self) -> range:
        """Positions among the region's tensors that belong to an input."""
        first = int(self.value or 0)
        return range(first, first + (2 if self.space is Space.ORDERED else 1))


def behind(nodes: Sequence[Node], roots: Iterable[int]) -> set[int]:
    """Positions of all that some values are made of, themselves included."""
    found: set[int] = set()
    todo = list(roots)
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo.extend(nodes[at].args)
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
        nodes: Its values, in an order in which they can be computed.
        outputs: What leaves it.
        whole: Whether every edge is walked: none is masked out, so that no value per edge needs a default.
    """

    by: Space
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    whole: bool = False

    @cached_property
    def grid(self) -> Shape:
        """The broadcast feature shape of everything in the region: (heads, channels) of one kernel tile."""
        shapes = [n.shape for at, n in enumerate(self.nodes) if at not in self.only_columns]
        return (max(heads for heads, _ in shapes), max(channels for _, channels in shapes))

    @cached_property
    def columns(self) -> frozenset[int]:
        """Values whose features are read one by one, by linear layers."""
        return frozenset(n.args[0] for n in self.nodes if n.op in ("linear", "outer"))

    @cached_property
    def only_columns(self) -> frozenset[int]:
        """The inputs among them that nothing else reads, so that no tile holds them."""
        whole = {a for n in self.nodes for k, a in enumerate(n.args) if n.op not in ("linear", "outer") or k > 0}
        return frozenset(at for at in self.columns - whole if self.nodes[at].op == "input")

    @cached_property
    def sums_all(self) -> bool:
        """Whether what leaves the region are sums over all edges, and not over those of each row."""
        return any(n.op == "outer" for n in self.nodes)

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        """Input nodes ordered by tensor position."""
        found = [n for n in self.nodes if n.op == "input"]
        return tuple(sorted(found, key=lambda n: int(n.value or 0)))

    @cached_property
    def count(self) -> int:
        """How many tensors a region takes, by the highest position that it reads."""
        return max((n.positions.stop for n in self.inputs), default=0)

    @cached_property
    def softmaxes(self) -> tuple[int, ...]:
        """Positions of the softmax nodes."""
        return tuple(i for i, n in enumerate(self.nodes) if n.op == "softmax")

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Positions of the nodes that reduce the edges of a row."""
        return tuple(i for i, n in enumerate(self.nodes) if n.op in REDUCTIONS)

    @cached_property
    def drops(self) -> bool:
        """Whether values per edge are dropped at random."""
        return any(n.op == "dropout" for n in self.nodes)

    @cached_property
    def walks_edges(self) -> bool:
        """Whether any value lives on edges; a region that does not is plain row-wise arithmetic."""
        return bool(self.reductions) or any(n.space in (Space.EDGE, Space.FEATURE) for n in self.nodes)

    @cached_property
    def numbers_edges(self) -> bool:
        """Whether a walk asks for the place of its edges in the edge list."""
        return any(n.numbers_edges for n in self.nodes) or any(map(self.per_edge, self.outputs))

    @cached_property
    def cotangents(self) -> tuple[tuple[bool, ...], ...]:
        """Which outputs may have a cotangent together: all, the first few (those that are no residuals), or one."""
        count = len(self.outputs)
        cases = {tuple(k < n for k in range(count)) for n in range(1, count + 1)}
        return tuple(sorted(cases | {tuple(k == n for k in range(count)) for n in range(count)}))

    @cached_property
    def needs_opposite(self) -> bool:
        """Whether rows of the other end of the edges are gathered."""
        return any(n.op == "input" and n.space is self.by.opposite for n in self.nodes)

    @cached_property
    def exact(self) -> bool:
        """Whether values are compared for equality, so that every kernel must round alike (no fused multiply-add)."""
        return any(n.op in ("eq", "ne", "reduce_max", "reduce_min") for n in self.nodes)

    @cached_property
    def contracts(self) -> bool:
        """Whether a product and a sum may be rounded once (a fused multiply-add): nowhere in a region that is exact, or
        subtracts a product from another one. Equal products differ by 0, as those of a cross product of a vector with
        itself; of two that are rounded differently a rounding error is left.
        """
        return not self.exact and not any(
            n.op == "sub" and all(self.nodes[a].op == "mul" for a in n.args) for n in self.nodes
        )

    @cached_property
    def rounds(self) -> bool:
        """Whether values are compared for equality that another generator may round otherwise."""
        return self.exact and any(n.op not in ROUNDED_ALIKE for n in self.nodes)

    @cached_property
    def double(self) -> bool:
        """Whether the region computes in float64."""
        return any(n.dtype == "float64" for n in self.nodes) or any(o.dtype == "float64" for o in self.outputs)

    @cached_property
    def compute(self) -> str:
        """The type that the region computes in."""
        return "float64" if self.double else "float32"

    def per_edge(self, output: Output) -> bool:
        """Whether an output has a row per edge, and not one per row of the region."""
        return self.nodes[output.node].space is Space.EDGE

    def features(self, at: int) -> int:
        """How many features of the edges a linear layer reads (or gives, if transposed), or an outer product has."""
        node = self.nodes[at]
        return node.shape[1] if node.op == "transposed" else self.nodes[node.args[0]].shape[1]

    def per_row(self, output: Output) -> bool:
        """Whether an output has a row per row of the region."""
        return not self.per_edge(output) and self.nodes[output.node].op != "outer"

    def rows(self, output: Output, num_rows: Any, num_edges: Any) -> Any:
        """How many rows an output has, on a graph with so many rows and edges."""
        node = self.nodes[output.node]
        if node.op == "outer":
            return self.features(output.node)
        return num_edges if self.per_edge(output) else num_rows

    def cleared(self, output: Output) -> bool:
        """Whether an output must be zero before the walk: masked edges are never walked, and their values read zero."""
        return self.per_edge(output) and not self.whole

    @cached_property
    def spec(self) -> str:
        """The region as a compact string; :func:`parse` is its inverse."""
        nodes = [[n.op, list(n.args), n.space.value, list(n.shape), n.dtype, n.value] for n in self.nodes]
        outputs = [[o.node, o.dtype, list(o.trailing)] for o in self.outputs]
        return json.dumps([FORMAT, self.by.value, nodes, outputs, self.whole], separators=(",", ":"))


FORMAT = 4
"""Version of the string form; a cache written by another version is never read."""


@lru_cache(maxsize=4096)
def parse(spec: str) -> Region:
    """Reads a region back from :attr:`Region.spec`.

    Raises:
        ValueError: The string was written by another version of the format.
    """
    version, *rest = json.loads(spec)
    if version != FORMAT:
        raise InvalidRegionError(f"region spec: found format {version}, expected {FORMAT}; clear the compile caches")

    by, nodes, outputs, whole = rest

    def node(row: list[Any]) -> Node:
        op, args, space, shape, dtype, value = row
        return Node(op, tuple(args), Space(space), (shape[0], shape[1]), dtype, value)

    kept = tuple(Output(o[0], o[1], tuple(o[2])) for o in outputs)
    return Region(Space(by), tuple(node(n) for n in nodes), kept, whole)
