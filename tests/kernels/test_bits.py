"""Bools of edges as packed words: kernels against the reference, which comparisons a forward keeps, their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gnncompile import tuning
from gnncompile.exc import InvalidRegionError
from gnncompile.ir import bits, costs, residuals, rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import BITS, Output, Region, Space
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.ir.vjp import vjp
from gnncompile.runtime import launch
from tests.graphs import layout
from tests.harness import kernels, needs_interpreter

D, S, E, F = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.FEATURE
SHAPES = [(1, 1), (1, 5), (1, 32), (1, 33), (1, 100), (1, 257), (2, 32), (3, 64), (4, 32)]
DEVICES = [("cpp", "cpu"), ("triton", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("shape", [*SHAPES, (3, 5), (4, 8)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_packing_is_undone_by_unpacking(shape: tuple[int, int], rows: int):
    value = torch.rand(rows, *shape, generator=torch.Generator().manual_seed(0)) > 0.5
    packed = bits.pack(value)
    assert packed.dtype is torch.int32 and packed.shape == (rows, bits.words(shape))
    assert torch.equal(bits.unpack(packed, shape), value)


def test_the_order_of_bits():
    value = torch.zeros(1, 2, 20, dtype=torch.bool)
    value[0, 0, 0] = value[0, 1, 11] = value[0, 1, 12] = True  # elements 0, 31 and 32
    assert bits.pack(value).tolist() == [[1 - 2**31, 1]]


# -- kernels ------------------------------------------------------------------------------------------------------


def graphs() -> dict[str, tuple[Layout, int, int, int]]:
    """Layouts, and how many rows, columns and edges they have."""
    mixed = ([3, 0, 2, 0, 3, 3, 0, 2, 3, 0], [6, 1, 2, 1, 3, 0, 5, 4, 4, 0], [2, 5])
    hub = [0] * (2 * tuning.TILES.hub_edges + 1) + [2] * 129 + [3]
    lists = {"mixed, masked": mixed, "no edge": ([], [], []), "hub": (hub, [k % 7 for k in range(len(hub))], [])}
    found = {}
    for name, (row, col, dead) in lists.items():
        alive = torch.ones(len(row), dtype=torch.bool)
        alive[dead] = False
        made = layout(torch.tensor(row, dtype=torch.long), torch.tensor(col, dtype=torch.long), 5, alive)
        found[name] = made, 5, 7, len(row)
    return found


def stores(shape: tuple[int, int]) -> Region:
    """Which edges are above their row and which reach its maximum: in two passes."""
    b = Builder(D)
    x, y = b.input(0, S, shape, "float32"), b.input(1, D, shape, "float32")
    top = b.reduce("max", x)
    compared = [b.op("gt", x, y), b.op("eq", x, top), b.op("and", b.op("lt", x, y), b.op("gt", x, b.const(0)))]
    packed = [Output(c, BITS, (bits.words(shape),)) for c in compared]
    return b.finish([*packed, Output(top, "float32", shape)])


def reads(shape: tuple[int, int]) -> Region:
    """A choice by bits, a sum of them, and both with another value per edge."""
    b = Builder(D)
    x, chosen = b.input(0, S, shape, "float32"), b.input(1, E, shape, BITS)
    e = b.input(2, E, (1, 1), "float32")
    sums = [b.op("where", chosen, x, b.const(0)), b.op("float", chosen), b.op("mul", chosen, e)]
    other = b.op("or", chosen, b.op("gt", e, b.const(0)))
    outputs = [Output(b.reduce("sum", s), "float32", shape) for s in sums]
    return b.finish([*outputs, Output(b.op("not", other), BITS, (bits.words(shape),))])


def beside_wider(shape: tuple[int, int]) -> Region:
    """Bits beside a value that is four times as wide, so that the tile is."""
    b = Builder(D)
    heads, channels = shape
    x, y = b.input(0, S, shape, "float32"), b.input(1, S, (heads, 4 * channels), "float32")
    narrow = b.sum_axis(y, 1)
    wide = b.reduce("sum", y)
    compared = b.op("gt", x, narrow)
    return b.finish([Output(compared, BITS, (bits.words(shape),)), Output(wide, "float32", (heads, 4 * channels))])


def given(region: Region, rows: int, cols: int, edges: int) -> list[Tensor]:
    """Small integers, so that there are ties."""
    random = torch.Generator().manual_seed(1)
    counts = {D: rows, S: cols, E: edges}
    made = []
    for node in region.inputs:
        value = torch.randint(-2, 3, (counts[node.space], *node.shape), generator=random)
        made.append(bits.pack(value > 0) if node.dtype == BITS else value.float().flatten(1))
    return made


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of lanes that hold anything
@pytest.mark.parametrize("which, device", DEVICES)
@pytest.mark.parametrize("make", [stores, reads, beside_wider])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels(make: Callable[[tuple[int, int]], Region], shape: tuple[int, int], which: str, device: str):
    needs_interpreter(which, device)
    region = make(shape)
    verify(region)
    assert region.spec  # travels as a string
    with kernels(which):
        for name, (walk, rows, cols, edges) in graphs().items():
            if name == "hub" and (which, device) == ("triton", "cpu") and shape != (1, 33):
                continue  # the interpreter is slow
            tensors = given(region, rows, cols, edges)
            expected = run(region, tensors, walk)
            outputs = []
            for out in region.outputs:
                size = (region.rows(out, rows, edges), *out.trailing)
                outputs.append(torch.zeros(size, dtype=bits.tensor_type(out.dtype), device=device))
            kernel = launch.kernel(region.spec, device)
            assert launch.fallbacks == {}
            kernel([t.to(device) for t in tensors], Layout(*(t.to(device) for t in walk)), outputs)
            for found, wanted in zip(outputs, expected, strict=True):
                assert torch.equal(found.cpu(), wanted)


def test_what_is_packed_lives_on_edges_and_is_a_bool():
    b = Builder(D)
    x, y = b.input(0, S, (1, 40), "float32"), b.input(1, D, (1, 40), "float32")
    for node, trailing in ((b.op("add", x, y), (2,)), (b.op("gt", x, y), (1,)), (b.op("gt", y, b.const(0)), (2,))):
        with pytest.raises(InvalidRegionError, match="does not hold"):
            verify(b.finish([Output(node, BITS, trailing)]))
    rows = b.op("float", b.input(2, S, (1, 40), BITS))
    with pytest.raises(InvalidRegionError, match="packed bools live on edges"):
        verify(b.finish([Output(b.reduce("sum", rows), "float32", (40,))]))


# -- what a forward keeps -----------------------------------------------------------------------------------------


def maximum(b: Builder, width: int, dtype: str) -> list[int]:
    return [b.reduce("max", b.input(0, S, (1, width), dtype))]


def several(b: Builder, width: int, dtype: str) -> list[int]:
    x = b.op("add", b.input(0, S, (1, width), dtype), b.input(1, D, (1, width), dtype))
    return [b.reduce("max", x), b.reduce("min", x), b.reduce("sum", b.op("mul", x, x))]


def rectified(b: Builder, width: int, dtype: str) -> list[int]:
    x, y = b.input(0, S, (1, width), dtype), b.input(1, D, (1, width), dtype)
    return [b.reduce("sum", rules.relu(b, b.op("add", x, y)))]


def layer(b: Builder, width: int, dtype: str) -> list[int]:
    x, e, w = b.input(0, S, (1, width), dtype), b.input(1, E, (1, 6), dtype), b.input(2, F, (1, width), dtype)
    return [b.reduce("sum", rules.relu(b, b.op("add", x, b.linear(e, w))))]


def gatv2(b: Builder, width: int, dtype: str) -> list[int]:
    shape = (2, width // 2)
    x, y = b.input(0, S, shape, dtype), b.input(1, D, shape, dtype)
    z = rules.leaky_relu(b, b.op("add", x, y), 0.2)
    alpha = b.softmax(b.sum_axis(b.op("mul", z, b.input(2, Space.PARAMETER, shape, dtype)), 1))
    return [b.reduce("sum", b.op("mul", alpha, x))]


Make = Callable[[Builder, int, str], "list[int]"]
MADE: dict[Make, tuple[tuple[str, ...], int]] = {
    maximum: (("cols",), 1),
    several: (("cols", "rows"), 2),
    rectified: (("cols", "rows"), 1),
    layer: (("cols", "edges", "features"), 1),
    gatv2: (("cols", "rows", "one"), 1),
}
"""What each region's tensors have rows for, and how many comparisons it keeps if bits cost nothing."""


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch):
    """Bits cost nothing, so that all comparisons that save a row are kept."""
    monkeypatch.setattr(residuals, "WRITTEN", 0)
    monkeypatch.setattr(costs, "READ", 0)
    for function in (with_residuals, vjp):
        function.cache_clear()
    yield
    for function in (with_residuals, vjp):
        function.cache_clear()


def region_of(make: Make, width: int, dtype: str = "float32") -> Region:
    b = Builder(D)
    outputs = make(b, width, dtype)
    shape = b.nodes[outputs[0]].shape
    return b.finish([Output(o, dtype, shape if shape[0] > 1 else shape[1:]) for o in outputs])


def packed(region: Region) -> list[int]:
    return [o.node for o in region.outputs if o.dtype == BITS]


@pytest.mark.parametrize("make", MADE)
def test_comparisons_are_kept_where_a_gradient_gathers_less_for_it(make: Make, cheap: None):
    plain = region_of(make, 64)
    region = with_residuals(plain)
    verify(region)
    assert len(packed(region)) == MADE[make][1]
    others = Region(region.by, region.nodes, tuple(o for o in region.outputs if o.dtype != BITS), region.unmasked)
    assert _gathered(region, plain) < _gathered(others, plain)
    for stage in vjp(region, (True,) * region.count, _given(region, plain)).stages:
        verify(stage.region)


def _given(region: Region, plain: Region) -> tuple[bool, ...]:
    return tuple(k < len(plain.outputs) for k in range(len(region.outputs)))


def _gathered(region: Region, plain: Region) -> float:
    """Elements gathered by the walks of a backward, and multiplied by layers."""
    total = 0.0
    for stage in vjp(region, (True,) * region.count, _given(region, plain)).stages:
        found = [n for n in stage.region.inputs if n.space is stage.region.by.opposite]
        found += [n for n in stage.region.nodes if n.op == "linear"]
        total += sum(n.shape[0] * n.shape[1] for n in found)
    return total


def test_comparisons_are_kept_if_they_save_more_than_bits_cost():
    """Those of a layer of edge features, which three walks would compute; not of one wide row that is gathered."""
    assert len(packed(with_residuals(region_of(layer, 128)))) == 1
    assert not packed(with_residuals(region_of(layer, 8)))
    assert not packed(with_residuals(region_of(maximum, 128)))
    assert not packed(with_residuals(region_of(layer, 128), (False, False, False)))


def test_no_comparison_is_kept_that_a_kernel_would_split(cheap: None):
    assert packed(with_residuals(region_of(maximum, 1024))) and not packed(with_residuals(region_of(maximum, 1025)))


def test_comparisons_of_rows_alone_are_not_packed(cheap: None):
    """The sum of where the relu is open is kept per row."""
    assert not packed(with_residuals(region_of(rectified, 64), (False, True)))


# -- and its gradient ---------------------------------------------------------------------------------------------


def inputs(make: Make, width: int, dtype: torch.dtype) -> list[Tensor]:
    """For a graph of 5 rows, 7 columns and 10 edges."""
    random = torch.Generator().manual_seed(2)
    counts = {"cols": 7, "rows": 5, "edges": 10, "features": 6, "one": 1}
    made = []
    for which in MADE[make][0]:
        columns = 6 if which == "edges" else width
        made.append(torch.randn(counts[which], columns, generator=random, dtype=torch.float64).to(dtype))
        if make is gatv2:
            made[-1] = made[-1].view(-1, 2, width // 2)
    return [t.requires_grad_() for t in made]


def both_walks() -> list[Tensor]:
    row = torch.tensor([3, 0, 2, 0, 3, 3, 0, 2, 3, 0])
    col = torch.tensor([6, 1, 2, 1, 3, 0, 5, 4, 4, 0])
    alive = torch.tensor([k not in (2, 5) for k in range(10)])
    return [*layout(row, col, 5, alive), *layout(col, row, 7, alive)]


@pytest.mark.parametrize("make", MADE)
def test_gradients(make: Make, cheap: None):
    region = with_residuals(region_of(make, 64, "float64"))
    assert packed(region)
    visible, walk = len(make(Builder(D), 64, "float64")), both_walks()

    def run_op(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ops.gnncompile.region(list(tensors), walk, region.spec)[:visible])

    with kernels("reference"):
        assert torch.autograd.gradcheck(run_op, inputs(make, 64, torch.float64), fast_mode=True)
        assert torch.autograd.gradgradcheck(run_op, inputs(make, 64, torch.float64), fast_mode=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which, device", DEVICES)
@pytest.mark.parametrize("make", MADE)
def test_gradients_of_kernels(make: Make, which: str, device: str, cheap: None):
    needs_interpreter(which, device)
    region = with_residuals(region_of(make, 128))
    assert packed(region)
    visible, walk = len(make(Builder(D), 128, "float32")), [t.to(device) for t in both_walks()]

    def gradients(region: Region, tensors: list[Tensor], walk: list[Tensor]) -> tuple[Tensor, ...]:
        made = torch.ops.gnncompile.region(tensors, walk, region.spec)[:visible]
        return torch.autograd.grad([(m * torch.cos(m.detach() + 1)).sum() for m in made], tensors)

    with kernels("reference"):
        exact = with_residuals(region_of(make, 128, "float64"))
        expected = gradients(exact, inputs(make, 128, torch.float64), both_walks())
    with kernels(which):
        given = [t.detach().to(device).requires_grad_() for t in inputs(make, 128, torch.float32)]
        found = gradients(region, given, walk)
        assert launch.fallbacks == {}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=2e-5, atol=2e-5)
