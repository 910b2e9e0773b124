"""Finds sums weighted by a softmax. A Triton kernel computes such a sum in the same pass as the softmax itself.

Let `m` be the largest logit so far. The kernel sums ``exp(logit - m) x``, and rescales the sum by a factor whenever `m`
grows (M. Milakov and N. Gimelshein, *Online normalizer calculation for softmax*, 2018; T. Dao et al.,
*FlashAttention*, 2022). So each row is gathered only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gnncompile.ir.region import Node, Region, behind


class WeightedSum(NamedTuple):
    """The summand of a weighted sum: a product of a softmax and other factors.

    Attributes:
        softmax: Index of the softmax, which is a factor once.
        factors: Indices of the other factors, which do not depend on the softmax.
    """

    softmax: int
    factors: tuple[int, ...]


def weighted_sums(region: Region) -> dict[int, WeightedSum]:
    """Returns the sums over edges that are weighted by a softmax, by the index of their node."""
    found = {i: _apart(region.nodes, node.args[0]) for i, node in enumerate(region.nodes) if node.op == "reduce_sum"}
    return {i: one for i, one in found.items() if one is not None}


def _apart(nodes: Sequence[Node], at: int) -> WeightedSum | None:
    if nodes[at].op == "softmax":
        return WeightedSum(at, ())
    if nodes[at].op != "mul":
        return None
    for one, other in (nodes[at].args, nodes[at].args[::-1]):
        inner = _apart(nodes, one)
        if inner is not None and inner.softmax not in behind(nodes, [other]):
            return WeightedSum(inner.softmax, (*inner.factors, other))
    return None
