"""Splits a region into two walks: the first one over some of the edges, the second one over the others.

The first walk gives partial results for each row. The second walk reads them, and gives the results of the region. The
results of a softmax are joined as in online softmax (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import BITS, SOFTMAX_ROWS, Output, Region, Space


@dataclass(frozen=True)
class TwoWalks:
    """The two halves of a region.

    Attributes:
        first: Takes the region's tensors. Gives partial results per row ``[rows, heads, channels]``, in the type that
            the region computes in.
        second: Takes the region's tensors, then the partial results. Gives the region's outputs.
    """

    first: Region
    second: Region


@lru_cache(maxsize=4096)
def two_walks(region: Region) -> TwoWalks | None:
    """Returns the two halves of a region; None if its edges can't be divided.

    Edges can be divided if the region gives rows only, as sums over edges of values that do not depend on other
    reductions. Such a value may be a product with one softmax over the edges.
    """
    if region.tiled or not region.reductions or not all(map(region.per_row, region.outputs)):
        return None
    if any(n.space is Space.ORDERED and n.dtype == BITS for n in region.inputs):
        return None  # several edges share a word
    factors = _factors(region)
    return None if factors is None or not _only_reduced(region, factors) else _Split(region, factors).made()


def _factors(region: Region) -> dict[int, tuple[int, ...]] | None:
    """Returns the softmax by which each sum over edges is weighted, or nothing; None if a sum can't be divided."""
    reduced, weights = _reduced(region), _weights(region)
    found: dict[int, tuple[int, ...]] = {}
    for at in region.reductions:
        node = region.nodes[at]
        if node.op != "reduce_sum" or (node.args[0] in reduced and node.args[0] not in weights):
            return None
        found[at] = (weights[node.args[0]],) if node.args[0] in weights else ()
    return found


def _weights(region: Region) -> dict[int, int]:
    """Returns the values of which a softmax is a factor that depends on no other reduction, with that softmax."""
    reduced = _reduced(region)
    found: dict[int, int] = {}
    for at, node in enumerate(region.nodes):
        if node.op == "softmax" and node.args[0] not in reduced:
            found[at] = at
        elif node.op == "mul" and [a in reduced for a in node.args].count(True) == 1:
            (weight,) = (a for a in node.args if a in reduced)
            if weight in found:
                found[at] = found[weight]
    return found


@lru_cache(maxsize=256)
def _reduced(region: Region) -> frozenset[int]:
    """Returns the values that depend on all edges of their row."""
    found: set[int] = set()
    for at, node in enumerate(region.nodes):
        ends = node.op in ("softmax", *SOFTMAX_ROWS, "ties") or at in region.reductions
        if ends or not found.isdisjoint(node.args):
            found.add(at)
    return frozenset(found)


def _only_reduced(region: Region, factors: Mapping[int, tuple[int, ...]]) -> bool:
    """Whether all values that depend on all edges of a row, and that are no weights of sums, are rows."""
    softmaxes = {one for found in factors.values() for one in found}
    weighted = {at for at in _reduced(region) if region.nodes[at].space is Space.EDGE}
    for node in region.nodes:
        if node.op == "ties" or (node.op in SOFTMAX_ROWS and node.args[0] not in softmaxes):
            return False
        reads = node.space is not Space.EDGE and node.op not in ("reduce_sum", *SOFTMAX_ROWS)
        if reads and weighted.intersection(node.args):
            return False
    return True


@dataclass
class _Split:
    """Writes both halves of a region.

    Attributes:
        factors: For each sum over edges, the softmax by which it is weighted, or nothing.
        partial: The values whose partial results the first half gives.
    """

    region: Region
    factors: Mapping[int, tuple[int, ...]]
    partial: list[tuple[str, int]] = field(default_factory=list)

    def made(self) -> TwoWalks:
        second = Builder.of(self.region)
        joined = self._joined(second)
        outputs = [Output(self._row(second, o.node, joined), o.dtype, o.trailing) for o in self.region.outputs]
        return TwoWalks(self._first(), second.finish(outputs))

    def _first(self) -> Region:
        b = Builder.of(self.region)
        nodes = [at if kind == "sum" else b.softmax_row(kind, at) for kind, at in self.partial]
        return b.finish([Output(node, self.region.compute, b.nodes[node].shape) for node in nodes])

    def _joined(self, b: Builder) -> dict[int, int]:
        """Adds the results over all edges. Returns them by the node of the region."""
        joined: dict[int, int] = {}
        for softmax in dict.fromkeys(one for found in self.factors.values() for one in found):
            both = _Softmax.of(b, *(self._half(b, softmax, given) for given in (True, False)))
            joined |= {b.softmax_row("softmax_max", softmax): both.largest}
            joined |= {b.softmax_row("softmax_sum", softmax): both.total}
            for at in (at for at, found in self.factors.items() if found == (softmax,)):
                joined[at] = both.weighted(b, self._pair(b, at))
        for at in (at for at, found in self.factors.items() if not found):
            joined[at] = b.op("add", *self._pair(b, at))
        return joined

    def _half(self, b: Builder, softmax: int, given: bool) -> tuple[int, int]:
        """Returns the maximum and the sum of a softmax over one half of the edges."""
        make = self._given if given else Builder.softmax_row
        return make(b, "softmax_max", softmax), make(b, "softmax_sum", softmax)

    def _pair(self, b: Builder, at: int) -> tuple[int, int]:
        return self._given(b, "sum", at), at

    def _given(self, b: Builder, kind: str, at: int) -> int:
        """Adds a partial result as an input of the second half."""
        self.partial.append((kind, at))
        position = self.region.count + len(self.partial) - 1
        return b.input(position, self.region.by, self.region.nodes[at].shape, self.region.compute)

    def _row(self, b: Builder, at: int, joined: dict[int, int]) -> int:
        """Returns the value of a row over all edges."""
        if at not in _reduced(self.region):
            return at
        if at not in joined:
            node = self.region.nodes[at]
            joined[at] = b.again(node, [self._row(b, a, joined) for a in node.args])
        return joined[at]


@dataclass(frozen=True)
class _Softmax:
    """A softmax over all edges of each row, joined from both halves.

    Attributes:
        largest: The maximum of the logits.
        total: The sum of the exponentials.
        shares: What each half adds to the sum.
        skipped: Whether each half counts for nothing. It has no edges, or its logits are all minus infinity: then its
            sum is NaN. If both halves are so, the row is NaN as in one walk.
    """

    largest: int
    total: int
    shares: tuple[int, int]
    skipped: tuple[int, int]

    @classmethod
    def of(cls, b: Builder, *halves: tuple[int, int]) -> _Softmax:
        """Joins the maximum and the sum of both halves."""
        maxima, sums = zip(*halves, strict=True)
        # A half without edges of a row has the maximum 0, which is not one of the row's values.
        empty = [b.op("eq", one, b.const(0)) for one in sums]
        none = [b.op("or", empty[k], b.op("eq", maxima[k], b.const(-math.inf))) for k in range(2)]
        first, second = (b.op("and", none[k], b.op("not", none[1 - k])) for k in range(2))
        skipped = (first, second)
        maxima = tuple(b.op("where", b.op("or", empty[k], skipped[k]), maxima[1 - k], maxima[k]) for k in range(2))
        largest = b.op("where", b.op("gt", *maxima), *maxima)
        shares = [
            b.op("where", skipped[k], b.const(0), b.op("mul", sums[k], b.op("exp", b.op("sub", maxima[k], largest))))
            for k in range(2)
        ]
        return cls(largest, b.op("add", *shares), (shares[0], shares[1]), skipped)

    def weighted(self, b: Builder, halves: tuple[int, int]) -> int:
        """Joins the weighted sums of both halves."""
        parts = [b.op("where", self.skipped[k], b.const(0), b.op("mul", halves[k], self.shares[k])) for k in range(2)]
        # A row without edges has no sum to divide by; its results are 0.
        whole = b.op("where", b.op("eq", self.total, b.const(0)), b.const(1), self.total)
        return b.op("div", b.op("add", *parts), whole)
