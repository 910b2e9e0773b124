"""Sums over edges with their dot products taken once per row: the same numbers, and no dot product per edge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gnncompile.ir import linear, reference
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ir.verify import verify
from tests.graphs import layout

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER
HEADS, CHANNELS = 2, 3


class Values:
    """Inputs of a region in float64: rows of both ends, wide and narrow, and narrow ones of the edges."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        wide, narrow = (HEADS, CHANNELS), (HEADS, 1)
        self.row, self.other = b.input(0, D, wide, "float64"), b.input(1, S, wide, "float64")
        self.weight, self.scale = b.input(2, E, narrow, "float64"), b.input(3, D, narrow, "float64")
        self.shift = b.input(4, S, narrow, "float64")
        self.dot = b.sum_axis(self.mul(self.row, self.other), 1)

    def mul(self, *factors: int) -> int:
        return linear._product(self.b, factors)

    def op(self, name: str, *args: int) -> int:
        return self.b.op(name, *args)


CASES: dict[str, Callable[[Values], int]] = {
    "dot": lambda v: v.dot,
    "weighted": lambda v: v.mul(v.weight, v.dot),
    "row factor": lambda v: v.mul(v.scale, v.dot, v.weight),
    "centred by the other end": lambda v: v.mul(v.weight, v.op("sub", v.dot, v.shift)),
    "centred by the row": lambda v: v.mul(v.op("sub", v.dot, v.scale), v.op("exp", v.weight)),
    "negative": lambda v: v.op("neg", v.op("add", v.dot, v.weight)),
    "only a row beside it": lambda v: v.op("add", v.dot, v.scale),
    "factor inside the dot": lambda v: v.b.sum_axis(v.mul(v.row, v.mul(v.other, v.weight)), 1),
}
KEPT: dict[str, Callable[[Values], int]] = {
    "no dot": lambda v: v.mul(v.weight, v.shift),
    "not linear": lambda v: v.op("exp", v.dot),
    "two dots": lambda v: v.mul(v.dot, v.dot),
    "outer product": lambda v: v.mul(v.dot, v.other),
    "divided by a dot": lambda v: v.op("div", v.weight, v.dot),
}


def region(make: Callable[[Values], int], rewrite: bool) -> Region:
    b = Builder(D)
    value = make(Values(b))
    total = linear.sum_over_edges(b, value) if rewrite else b.reduce("sum", value)
    made = b.finish([Output(total, "float64", b.nodes[total].shape)])
    verify(made)
    return made


def dots_on_edges(made: Region) -> int:
    return sum(n.op == "sum_channels" and n.space is Space.EDGE for n in made.nodes)


@pytest.mark.parametrize("case", CASES)
def test_dot_products_move_behind_the_sum(case: str):
    plain, rewritten = region(CASES[case], False), region(CASES[case], True)
    assert dots_on_edges(plain) == 1 and dots_on_edges(rewritten) == 0
    edges = torch.tensor([[0, 2, 0, 0, 3], [1, 0, 1, 4, 2]])
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, HEADS, CHANNELS), (5, HEADS, CHANNELS), (5, HEADS), (4, HEADS), (5, HEADS)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    walk = layout(edges[0], edges[1], 4, None)
    (found,), (expected,) = (reference.run(r, tensors, walk) for r in (rewritten, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", KEPT)
def test_the_rest_is_summed_as_it_stands(case: str):
    assert region(KEPT[case], True) == region(KEPT[case], False)
