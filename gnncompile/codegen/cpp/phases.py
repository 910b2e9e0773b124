"""Cuts a tiled region into phases: loops over the edges of a tile, with products of matrices in between.

A value that a product takes is kept for the whole tile, in a *buffer* with a row per edge. So is the result of each
product. A phase is a region of its own: its inputs are the tensors of the whole region and earlier buffers, its outputs
are buffers, or the outputs of the whole region in the last phase. Products that follow a phase read its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from gnncompile.exc import UnsupportedRegion
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import LAYERS, Node, Output, Region, Space


@dataclass(frozen=True)
class Buffer:
    """The rows of a value for each edge of a tile.

    Attributes:
        node: The value.
        width: The elements of a row, `heads * channels`.
    """

    node: int
    width: int


@dataclass(frozen=True)
class Product:
    """A product of matrices.

    Attributes:
        node: The ``"linear"``, ``"transposed"`` or ``"outer"`` node.
        op: Its operation.
        first: The buffer of its first argument.
        other: The tensor position of the weights, or the second buffer of an ``"outer"``.
        result: The buffer that it fills; -1 for an ``"outer"``, which is added up over all tiles.
    """

    node: int
    op: str
    first: int
    other: int
    result: int


@dataclass(frozen=True)
class Phase:
    """One loop over the edges of a tile, and the products that follow it.

    Attributes:
        region: The values of the loop. An input at position ``region.count`` of the whole region, or a later one, is a
            buffer.
        fills: The buffers that the first outputs of `region` fill.
        stores: The outputs of the whole region that the other outputs of `region` are.
        products: The products that follow.
    """

    region: Region
    fills: tuple[int, ...]
    stores: tuple[int, ...]
    products: tuple[Product, ...]


@dataclass
class Phases:
    """The phases of a region.

    Attributes:
        phases: The phases in order. The last one reduces, and writes all outputs but those of products.
        buffers: The buffers.
        sums: The ``"outer"`` nodes that are products.
    """

    phases: list[Phase] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


def phases(region: Region) -> Phases:
    """Returns the phases of a tiled region.

    Raises:
        UnsupportedRegion: The region has a softmax over edges, or a product of a broadcast value.
    """
    if region.softmaxes:
        raise UnsupportedRegion("C++ kernel: a softmax over edges is not computed in tiles")
    return _Cutter(region).cut()


class _Cutter:
    def __init__(self, region: Region) -> None:
        self.region, self.nodes = region, region.nodes
        self.made = Phases()
        self.level: list[int] = []
        for node in self.nodes:
            below = max((self.level[a] for a in node.args), default=0)
            self.level.append(below + (node.op in ("linear", "transposed")))
        self.last = max(self.level, default=0)
        self.places: dict[int, int] = {}

    def cut(self) -> Phases:
        """Returns the phases."""
        products = [at for at, n in enumerate(self.nodes) if n.op in LAYERS and not self._adds_up(at)]
        wanted = {a for at in products for a in self._factors(at)}
        self.made.sums = [at for at in products if self.nodes[at].op == "outer"]
        for level in range(self.last + 1):
            fills = [a for a in sorted(wanted) if self.level[a] == level and a not in self.places]
            region, stores = self._phase(fills, level == self.last)
            filled = tuple(self._buffer(a) for a in fills)
            now = [at for at in products if self._due(at) == level]
            self.made.phases.append(Phase(region, filled, stores, tuple(self._product(at) for at in now)))
        return self.made

    def _adds_up(self, at: int) -> bool:
        """Whether a sum over all edges has one feature that is a number: a loop adds the value up."""
        node = self.nodes[at]
        return node.op == "outer" and self.region.features(at) == 1

    def _factors(self, at: int) -> tuple[int, ...]:
        """Returns the values that a product takes from buffers."""
        node = self.nodes[at]
        return node.args if node.op == "outer" else node.args[:1]

    def _due(self, at: int) -> int:
        """Returns the phase after which a product runs."""
        return max(self.level[a] for a in self._factors(at))

    def _buffer(self, at: int) -> int:
        if at not in self.places:
            self.places[at] = len(self.made.buffers)
            self.made.buffers.append(Buffer(at, prod(self.nodes[at].shape)))
        return self.places[at]

    def _product(self, at: int) -> Product:
        node = self.nodes[at]
        first, other = (self.nodes[a] for a in node.args)
        taken = {"linear": first.shape, "transposed": other.shape, "outer": node.shape}[node.op]
        given = other if node.op == "outer" else first
        if node.op != "linear" and given.shape != taken:
            raise UnsupportedRegion(f"C++ kernel: a product takes rows of {taken}, found {given.shape}")
        if node.op == "outer":
            return Product(at, node.op, self.places[node.args[0]], self.places[node.args[1]], -1)
        return Product(at, node.op, self.places[node.args[0]], int(other.value or 0), self._buffer(at))

    def _phase(self, fills: list[int], last: bool) -> tuple[Region, tuple[int, ...]]:
        """Returns the region of a phase, and the outputs of the whole region that it stores."""
        b = Builder(self.region.by, self.region.unmasked)
        copy = self._copier(b)
        outputs = [Output(b.on_edges(copy(a)), self.region.compute, (prod(self.nodes[a].shape),)) for a in fills]
        stores = tuple(k for k, o in enumerate(self.region.outputs) if last and o.node not in self.made.sums)
        outputs += [replace(self.region.outputs[k], node=copy(self.region.outputs[k].node)) for k in stores]
        return b.finish(outputs), stores

    def _copier(self, b: Builder) -> Callable[[int], int]:
        """Returns a function that copies a value into a builder; values in buffers become inputs."""
        known: dict[int, int] = {}

        def copy(root: int) -> int:
            for at in sorted(self._needed(root)):
                if at not in known:
                    known[at] = self._copy(b, at, known)
            return known[root]

        return copy

    def _copy(self, b: Builder, at: int, known: dict[int, int]) -> int:
        node = self.nodes[at]
        if at in self.places:
            position = self.region.count + self.places[at]
            return b.input(position, Space.EDGE, node.shape, self.region.compute)
        return b.emit(Node(node.op, tuple(known[a] for a in node.args), node.space, node.shape, node.dtype, node.value))

    def _needed(self, root: int) -> Iterator[int]:
        """Yields the values that a value is computed from, up to values in buffers."""
        met: set[int] = set()
        todo = [root]
        while todo:
            at = todo.pop()
            if at not in met:
                met.add(at)
                yield at
                todo.extend(() if at in self.places else self.nodes[at].args)
