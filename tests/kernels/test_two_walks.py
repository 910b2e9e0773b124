"""A region that walks edges from own rows, and then edges from halo rows, gives what it gives at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gnncompile.device import Device
from gnncompile.ir.builder import Builder
from gnncompile.ir.cutting import trailing
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import Output, Region, Space
from gnncompile.ir.two_walks import two_walks
from gnncompile.layout.divided import divided, divided_values
from gnncompile.ops.own_and_halo_edges import halves, walk_halo_edges, walk_own_edges
from gnncompile.runtime import launch
from tests.harness import kernels
from tests.triton_regions import (
    CASES,
    GENERATORS,
    GRAPHS,
    INTERPRETED,
    TOLERANCE,
    Case,
    D,
    Graph,
    S,
    home,
    in_double,
    poisoned,
    random_tensors,
)

SHAPE = "float32", 2, 3


def saved_attention(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """Sums over edges, weighted by two softmaxes, and what a gradient needs of them."""
    b = Builder(D)
    logits = b.op("mul", b.input(0, S, (heads, 1), dtype), b.input(1, D, (heads, 1), dtype))
    values, other = b.input(2, S, (heads, channels), dtype), b.input(3, D, (heads, channels), dtype)
    first, second = b.softmax(logits), b.softmax(b.op("neg", logits))
    sums = [b.reduce("sum", b.op("mul", one, b.op("mul", values, other))) for one in (first, second)]
    sums.append(b.op("add", b.reduce("sum", values), sums[0]))
    rows = [b.softmax_row(which, one) for one in (first, second) for which in ("softmax_max", "softmax_sum")]
    return b.finish([Output(at, dtype, trailing(b.nodes[at].shape)) for at in (*sums, *rows)])


def weights_of_edges(by: Space, dtype: str, heads: int, channels: int) -> Region:
    """A sum of neighbours by weights in the order of the walk, as of graph convolutions, with an epilogue."""
    b = Builder(D)
    weight = b.input(1, Space.ORDERED, (heads, 1), dtype)  # takes tensor 2 as well
    total = b.reduce("sum", b.op("mul", weight, b.input(0, S, (heads, channels), dtype)))
    y = b.op("add", total, b.input(3, D, (heads, channels), dtype))
    return b.finish([Output(y, dtype, (heads, channels))])


CAN_DIVIDE = [case for case in (*CASES, saved_attention, weights_of_edges) if two_walks(case(D, *SHAPE)) is not None]
FEW = {"mean", "saved_attention", "weights_of_edges"}
"""The regions that run in Triton's interpreter, which is slow."""


def values_of(region: Region, graph: Graph, special: bool) -> list[Tensor]:
    """Returns random tensors; the last row of each holds an infinity or NaN with `special`."""
    tensors, rows = random_tensors(region, graph), [int(n.value or 0) for n in region.inputs if n.space in (S, D)]
    for k, tensor in enumerate(tensors):
        if special and k in rows and tensor.is_floating_point() and tensor.size(0) > 1:
            tensor[-1] = (math.inf, -math.inf, math.nan)[k % 3]
    return tensors


class Halves:
    """A region, the kernels of its halves, and a check of both."""

    def __init__(self, region: Region, device: str) -> None:
        self.region, self.device, both = region, device, halves(region.spec)
        self.whole, self.first, self.second = (
            launch.Call(one.spec, torch.device(device).type) for one in (region, both.first, both.second)
        )
        self.gathered = [int(n.value or 0) for n in region.inputs if n.space is S]

    def check(self, graph: Graph, num_halo: int, special: bool) -> None:
        """Compares both halves with the reference in float64."""
        region, own = self.region, graph.num_cols - num_halo
        tensors, layout = values_of(region, graph, special), graph.layout("cpu")
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        given, walk = [t.to(self.device) for t in tensors], [t.to(self.device) for t in layout]
        halo, found = torch.empty(num_halo, 0, device=self.device), poisoned(region, graph, self.device)
        early = [t.clone() for t in given]
        for k in self.gathered:
            early[k][own:] = 77  # halo rows have not arrived yet
        partial = walk_own_edges(self.first, region.spec, early, walk, halo, self.gathered[0])
        assert (partial is not None) == (4 * num_halo >= max(own, 1))
        kernels = (self.whole, self.second)
        walk_halo_edges(kernels, region.spec, given, walk, found, halo, self.gathered[0], partial)
        for out, one, wanted in zip(region.outputs, found, run(in_double(region), wide, layout), strict=True):
            limit = TOLERANCE[out.dtype]
            torch.testing.assert_close(one.cpu().double(), wanted.double(), rtol=limit, atol=limit, equal_nan=True)


@INTERPRETED
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("case", CAN_DIVIDE, ids=lambda case: case.__name__)
def test_edges_from_own_rows_and_then_from_halo_rows(case: Case, generator: str) -> None:
    device = home(generator)
    if generator == "triton" and device == "cpu" and case.__name__ not in FEW:
        pytest.skip("is tested with C++ and on GPUs")
    with kernels(generator):
        both = Halves(case(D, *SHAPE), device)
        for graph in GRAPHS.values():
            for num_halo in {graph.num_cols // 8, graph.num_cols // 2, graph.num_cols}:
                both.check(graph, num_halo, special=False)
            both.check(graph, graph.num_cols // 2, special=True)


def test_which_regions_are_divided() -> None:
    names = {case.__name__ for case in CASES} - {case.__name__ for case in CAN_DIVIDE}
    without_sums = {"degree_and_constants", "row_wise"}
    per_edge = {"attention_gradient", "edge_values", "vector_dots", "weighed_sums"}
    assert names == without_sums | per_edge | {"max_and_min", "several"}  # these give maxima


def _region(outputs: Callable[[Builder, int, int], list[int]]) -> Region:
    """A region of a softmax of gathered numbers, and of gathered values."""
    b = Builder(D)
    logits, values = b.input(0, S, (1, 1), "float64"), b.input(1, S, (1, 2), "float64")
    found = outputs(b, logits, values)
    return b.finish([Output(at, "float64", trailing(b.nodes[at].shape)) for at in found])


def _logits_of_a_sum(b: Builder, logits: int, values: int) -> list[int]:
    shifted = b.op("sub", logits, b.reduce("sum", logits))
    return [b.reduce("sum", b.op("mul", b.softmax(shifted), values))]


def _squares(b: Builder, logits: int, values: int) -> list[int]:
    weight = b.softmax(logits)
    return [b.reduce("sum", b.op("mul", b.op("mul", weight, weight), values))]


def _of_another_softmax(b: Builder, logits: int, values: int) -> list[int]:
    return [b.reduce("sum", values), b.softmax_row("softmax_max", b.softmax(logits))]


def _deviations(b: Builder, logits: int, values: int) -> list[int]:
    return [b.reduce("sum", b.op("sub", values, b.reduce("sum", values)))]


def _sum_of_weights_plus_one(b: Builder, logits: int, values: int) -> list[int]:
    return [b.reduce("sum", b.op("add", b.softmax(logits), values))]


REFUSED = [_logits_of_a_sum, _squares, _of_another_softmax, _deviations, _sum_of_weights_plus_one]


@pytest.mark.parametrize("outputs", REFUSED)
def test_sums_that_depend_on_all_edges_are_not_divided(outputs: Callable[[Builder, int, int], list[int]]) -> None:
    assert two_walks(_region(outputs)) is None


def test_packed_values_of_edges_are_not_divided() -> None:
    b = Builder(D)
    kept = b.op("float", b.input(0, Space.ORDERED, (1, 2), "bits"))
    total = b.reduce("sum", b.op("mul", kept, b.input(2, S, (1, 2), "float32")))
    assert two_walks(b.finish([Output(total, "float32", (2,))])) is None


def test_values_that_are_used_often_take_no_longer() -> None:
    def recurrence(b: Builder, logits: int, values: int) -> list[int]:
        for _ in range(60):
            values = b.op("add", values, b.op("mul", values, values))
        return [b.op("mul", b.reduce("sum", values), b.reduce("sum", values))]

    assert two_walks(_region(recurrence)) is not None  # three times as long for each step would not end


MASKED = [
    [-math.inf, -math.inf, 0.0, 1.0],
    [0.0, 1.0, -math.inf, -math.inf],
    [-math.inf] * 4,
    [0.0, -math.inf, 2.0, 1.0],
]


@pytest.mark.parametrize("logits", MASKED)
@pytest.mark.parametrize("own", [0, 1, 2, 3, 4])
def test_masked_logits_in_one_half(logits: list[float], own: int) -> None:
    """One row over all four columns, and one without edges."""
    region = _region(lambda b, logit, values: [
        b.reduce("sum", b.op("mul", weight := b.softmax(logit), values)),
        b.softmax_row("softmax_max", weight),
        b.softmax_row("softmax_sum", weight),
    ])  # fmt: skip
    tensors = [torch.tensor(logits, dtype=torch.float64).view(4, 1), torch.arange(8.0).double().view(4, 2)]
    layout = Layout(*(torch.tensor(t, dtype=torch.int32) for t in ([0, 4, 4], [0, 1, 2, 3], [0, 1, 2, 3])))
    parts, both = divided(layout, own), two_walks(region)
    assert parts is not None and both is not None
    partial = run(both.first, tensors, Layout(*parts.halves[0]))
    found = run(both.second, [*tensors, *partial], Layout(*parts.halves[1]))
    for one, wanted in zip(found, run(region, tensors, layout), strict=True):
        torch.testing.assert_close(one, wanted, equal_nan=True)


def test_layouts_are_divided_once() -> None:
    rowptr, col = (torch.tensor(t, dtype=torch.int32) for t in ([0, 2, 2, 5], [4, 0, 3, 1, 2, 0]))
    edge = torch.arange(6, dtype=torch.int32)
    found = divided((rowptr, col, edge), 3)
    assert found is not None
    own, halo = found.halves
    assert [t.tolist() for t in own] == [[0, 1, 1, 3], [0, 1, 2], [1, 3, 4]]  # the last edge is masked
    assert [t.tolist() for t in halo] == [[0, 1, 1, 2], [4, 3], [0, 2]]
    assert divided((rowptr, col, edge), 3) is found
    other = divided((rowptr, col, edge[:0]), 2)
    assert other is not None and other.halves[0].edge.numel() == 0 and other.halves[0].col.tolist() == [0, 1]
    rowptr.copy_(torch.tensor([0, 0, 1, 2]))  # another graph in the same memory
    other = divided((rowptr, col, edge), 3)
    assert other is not None and other.halves[0].rowptr.tolist() == [0, 0, 0, 1]


def test_values_in_the_order_of_a_layout_are_divided_once() -> None:
    rowptr, col = (torch.tensor(t, dtype=torch.int32) for t in ([0, 2, 3], [2, 0, 1]))
    whole, values = (rowptr, col, col), torch.arange(3.0).view(3, 1)
    layout = divided(whole, 2)
    assert layout is not None
    found = divided_values(values, whole, layout)
    assert found is not None and [t.flatten().tolist() for t in found] == [[1, 2], [0]]
    assert divided_values(values, whole, layout) is found
    values.neg_()
    changed = divided_values(values, whole, layout)
    assert changed is not None and [t.flatten().tolist() for t in changed] == [[-1, -2], [0]]
    layout = divided(whole, 1)  # of another part
    assert layout is not None
    changed = divided_values(values, whole, layout)
    assert changed is not None and [t.flatten().tolist() for t in changed] == [[-1], [0, -2]]


def test_nothing_is_divided_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    rowptr, values = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1)
    whole = rowptr, rowptr[:1], rowptr[:1]
    layout = divided(whole, 1)
    assert layout is not None
    monkeypatch.setattr(Device, "is_capturing", property(lambda device: True))
    assert divided(whole, 1) is layout
    assert divided_values(values, whole, layout) is None
    assert divided(whole, 0) is None
