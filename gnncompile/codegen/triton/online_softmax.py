"""Sums weighed by a softmax, which a Triton kernel adds up in the same pass as the softmax itself.

Before the largest logit is known, the sum is of ``exp(logit - m) x`` with the largest so far for `m`, and a factor
brings it up to date for each larger one (M. Milakov and N. Gimelshein, *Online normalizer calculation for softmax*,
2018; T. Dao et al., *FlashAttention*, 2022). So all rows of a step are gathered once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gnncompile.ir.region import Node, Region, behind


class WeightedSum(NamedTuple):
    """What is summed, as a product.

    Attributes:
        softmax: Position of the softmax that is a factor once.
        factors: Positions of the other factors, which do not depend on it.
    """

    softmax: int
    factors: tuple[int, ...]


def weighted_sums(region: Region) -> dict[int, WeightedSum]:
    """The sums over edges that are weighed by a softmax, by their positions."""
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
