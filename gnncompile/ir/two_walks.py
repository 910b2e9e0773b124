"""Splits a region into two walks: the first one over some of the edges, the second one over the others.

The first walk gives partial results for each row. The second walk reads them, and gives the results of the region. The
results of a softmax are joined as in online softmax (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867).
"""

from __future__ import annotations

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
    factors = {at: _factors(region, at) for at in region.reductions}
    known = {at: found for at, found in factors.items() if found is not None}
    return _Split(region, known).made() if len(known) == len(factors) and _only_reduced(region) else None


def _factors(region: Region, reduction: int) -> tuple[int, ...] | None:
    """Returns the softmax by which a sum is weighted, or nothing if there is none; None if the sum can't be divided."""
    node = region.nodes[reduction]
    return _softmaxes(region, node.args[0]) if node.op == "reduce_sum" else None


def _softmaxes(region: Region, at: int) -> tuple[int, ...] | None:
    """Returns the softmax that is a factor of a value, or nothing if it depends on none; None for other values."""
    node = region.nodes[at]
    if not _reduced(region, at):
        return ()
    if node.op == "softmax":
        return None if _reduced(region, node.args[0]) else (at,)
    found = [_softmaxes(region, a) for a in node.args] if node.op == "mul" else [None]
    chosen = [one for one in found if one]
    return chosen[0] if len(chosen) == 1 and None not in found else None


def _reduced(region: Region, at: int) -> bool:
    """Whether a value depends on all edges of its row."""
    node = region.nodes[at]
    ends = node.op in ("softmax", *SOFTMAX_ROWS, "ties") or at in region.reductions
    return ends or any(_reduced(region, a) for a in node.args)


def _only_reduced(region: Region) -> bool:
    """Whether all values that depend on all edges of a row, and that are no weights of sums, are rows."""
    weighted = {at for at, n in enumerate(region.nodes) if n.space is Space.EDGE and _reduced(region, at)}
    readers = [n for n in region.nodes if n.space is not Space.EDGE and n.op not in ("reduce_sum", *SOFTMAX_ROWS)]
    return not any(n.op == "ties" or weighted.intersection(n.args) for n in readers)


@dataclass
class _Split:
    """Writes both halves of a region.

    Attributes:
        factors: For each sum over edges, the softmax by which it is weighted, or nothing.
        partial: The values whose partial results the first half gives.
    """

    region: Region
    factors: dict[int, tuple[int, ...]]
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
            largest, total, weights = self._softmax(b, softmax)
            joined |= {b.softmax_row("softmax_max", softmax): largest, b.softmax_row("softmax_sum", softmax): total}
            # A row without edges has no sum to divide by; its results are 0.
            whole = b.op("where", b.op("eq", total, b.const(0)), b.const(1), total)
            for at in (at for at, found in self.factors.items() if found == (softmax,)):
                halves = [b.op("mul", value, weight) for value, weight in zip(self._pair(b, at), weights, strict=True)]
                joined[at] = b.op("div", b.op("add", *halves), whole)
        for at in (at for at, found in self.factors.items() if not found):
            joined[at] = b.op("add", *self._pair(b, at))
        return joined

    def _softmax(self, b: Builder, softmax: int) -> tuple[int, int, tuple[int, int]]:
        """Returns the maximum and the sum of a softmax over all edges, and the share of the sum of each half."""
        maxima = [self._given(b, "softmax_max", softmax), b.softmax_row("softmax_max", softmax)]
        sums = [self._given(b, "softmax_sum", softmax), b.softmax_row("softmax_sum", softmax)]
        # A half without edges of a row has the maximum 0, which is not one of the row's values.
        empty = [b.op("eq", one, b.const(0)) for one in sums]
        maxima = [
            b.op("where", here, other, mine) for here, mine, other in zip(empty, maxima, maxima[::-1], strict=True)
        ]
        largest = b.op("where", b.op("gt", *maxima), *maxima)
        first, second = (
            b.op("mul", total, b.op("exp", b.op("sub", mine, largest)))
            for total, mine in zip(sums, maxima, strict=True)
        )
        return largest, b.op("add", first, second), (first, second)

    def _pair(self, b: Builder, at: int) -> tuple[int, int]:
        return self._given(b, "sum", at), at

    def _given(self, b: Builder, kind: str, at: int) -> int:
        """Adds a partial result as an input of the second half."""
        self.partial.append((kind, at))
        position = self.region.count + len(self.partial) - 1
        return b.input(position, self.region.by, self.region.nodes[at].shape, self.region.compute)

    def _row(self, b: Builder, at: int, joined: dict[int, int]) -> int:
        """Returns the value of a row over all edges."""
        node = self.region.nodes[at]
        if at in joined:
            return joined[at]
        if not _reduced(self.region, at):
            return at
        return b.again(node, [self._row(b, a, joined) for a in node.args])
