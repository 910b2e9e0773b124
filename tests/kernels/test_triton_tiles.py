"""Triton kernels of tiled regions: what the regions of ``tests.tiled_regions`` do not show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gnncompile.exc import ArgumentError, UnsupportedRegion
from gnncompile.ir import reference
from gnncompile.ir.reference import Layout
from gnncompile.ir.region import BITS, BOOL, SEED, Output, Region, Space
from gnncompile.ir.verify import verify
from gnncompile.tile_sizes import WalkTile
from tests.graphs import layout
from tests.harness import tune, without_interpreter
from tests.tiled_regions import REGIONS, D, E, Maker, P, S, W
from tests.triton_regions import DEVICE, GPU, INTERPRETED, TOLERANCE

pytest.importorskip("triton")
from gnncompile.codegen.triton.kernel import triton_kernel
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.codegen.triton.tiled_kernel import TiledKernel
from gnncompile.codegen.triton.tiled_plan import TiledPlan

pytestmark = [*GPU, INTERPRETED]


def edges(hub: bool = False) -> tuple[Layout, int, int]:
    """The layout of 150 edges with 20 rows and 9 columns, the last row empty."""
    generator = torch.Generator().manual_seed(3)
    row, column = torch.randint(19, (150,), generator=generator), torch.randint(9, (150,), generator=generator)
    if hub:
        row[10:140] = 4
    return layout(row, column, 20), 20, 9


def run(region: Region, tensors: list[Tensor], walk: Layout, device: str = DEVICE) -> list[Tensor]:
    """Outputs of the kernel, written over NaN."""
    verify(region)
    outputs = []
    for out in region.outputs:
        rows = region.rows(out, walk.num_rows, walk.col.numel())
        dtype = getattr(torch, out.dtype)
        outputs.append(torch.full((rows, *out.trailing), 1 if dtype is torch.bool else torch.nan, dtype=dtype))
    outputs = [o.to(device) for o in outputs]
    triton_kernel(region)([t.to(device) for t in tensors], Layout(*(t.to(device) for t in walk)), outputs)
    return [o.cpu() for o in outputs]


def compare(region: Region, tensors: list[Tensor], walk: Layout) -> None:
    """Compares the kernel with the reference."""
    for out, found, right in zip(
        region.outputs, run(region, tensors, walk), reference.run(region, tensors, walk), strict=True
    ):
        limit = TOLERANCE.get(out.dtype, 0)
        torch.testing.assert_close(found, right.view_as(found), rtol=limit, atol=limit * 10, equal_nan=True)


def minimum(make: Maker) -> Region:
    """A minimum, a maximum, their ties, and a mean of squares computed from row results."""
    b = make.b
    x = b.op("floor", b.op("mul", make.input(S, 5), make.input(D, 1)))
    low, high = b.reduce("min", x), b.reduce("max", x)
    degree = b.op("add", b.reduce("sum", b.const(1)), b.const(1e-3))
    mean = b.op("div", b.reduce("sum", b.op("mul", x, x)), degree)
    return make.finish(low, high, b.ties(low), b.ties(high), b.op("add", mean, make.input(D, 5)), degree)


def narrow_layers(make: Maker) -> Region:
    """Layers from and to one channel, and sums of products that are vectors."""
    b = make.b
    x = make.input(E, 1)
    wide = make.layer(x, 6)
    one = make.layer(wide, 1)
    again = make.layer(one, 1)
    sums = [b.outer(x, wide, (1, 6)), b.outer(wide, one, (1, 1)), b.outer(x, again, (1, 1)), b.outer(wide, one, (1, 4))]
    return make.finish(wide, again, *sums)


def transposes(make: Maker) -> Region:
    """Products with transposed weights, of values that are narrower than the weights too."""
    b, found = make.b, []
    for value, rows, channels in ((make.input(E, 6), 3, 6), (make.input(S, 1), 5, 6), (make.input(D, 1), 4, 1)):
        make.rows.append((W, rows, (1, channels)))
        weights = b.input(len(make.rows) - 1, W, (1, channels), make.dtype)
        found.append(b.transposed(b.on_edges(value), weights, rows))
    return make.finish(*found)


def wide(make: Maker) -> Region:
    """Values of very different widths, up to the widest."""
    b = make.b
    x = make.layer(make.input(E, 2), 200)
    y = make.layer(b.op("tanh", x), 3)
    return make.finish(y, b.reduce("sum", x), b.outer(y, x, (1, 200)), b.sum_axis(x, 1))


def shared_sums(make: Maker) -> Region:
    """Sums that several outputs read, in an order in which one output joins two others."""
    b = make.b
    x = make.layer(make.input(E, 6), 7)
    one, two = b.reduce("sum", x), b.reduce("sum", b.op("mul", x, x))
    return make.finish(one, two, b.op("add", one, two))


EXTRA: dict[str, Callable[[Maker], Region]] = {
    "minimum": minimum,
    "narrow_layers": narrow_layers,
    "transposes": transposes,
    "wide": wide,
    "shared_sums": shared_sums,
}


@pytest.mark.parametrize("programs, kept", [(1, 0), (2, 2**16), (100, 2**10)])
@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("name", EXTRA)
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, name: str, hub: bool, programs: int, kept: int) -> None:
    """With few and many programs, and with weights that are kept or loaded for each tile."""
    tile = WalkTile(16, 4, 1)
    tune(monkeypatch, processors=programs, tiled_floats=((0, tile),), tiled_weights=kept)
    torch.manual_seed(0)
    make = Maker()
    region = EXTRA[name](make)
    walk, rows, columns = edges(hub)
    compare(region, make.tensors(rows, columns, 150, torch.float32), walk)


def test_bools_dropout_and_ordered_rows() -> None:
    torch.manual_seed(0)
    make, (walk, _, _) = Maker(), edges()
    b = make.b
    packed, kept, seed = b.input(0, E, (1, 40), BITS), b.input(1, E, (1, 1), BOOL), b.input(2, P, (1, 1), SEED)
    x = b.input(3, E, (1, 40), "float32")
    order = b.input(4, Space.ORDERED, (1, 1), "float32")
    x = b.op("mul", b.op("where", packed, x, order), b.dropout(seed, 0.3, (1, 40)))
    both = b.op("or", b.op("and", kept, packed), b.op("gt", x, b.const(0)))
    outputs = [Output(b.reduce("sum", x), "float32", (40,)), Output(both, BOOL, (40,)), Output(x, "float32", (40,))]
    words = torch.randint(-(2**31), 2**31, (150, 2)).int()
    tensors = [words, torch.rand(150) < 0.5, torch.tensor([12345678901]), torch.randn(150, 40)]
    compare(b.finish(outputs), [*tensors, torch.randn(150), torch.randn(150)], walk)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bool_chooses_what_a_layer_reads(dtype: str) -> None:
    """As Triton can't compile this for bools from memory in float64, walks take them as numbers there."""
    torch.manual_seed(0)
    make, (walk, _, _) = Maker(dtype), edges()
    b, of = make.b, getattr(torch, dtype)
    x = b.op("where", b.input(0, E, (1, 8), BOOL), b.input(1, E, (1, 8), dtype), b.const(2.0))
    y = b.linear(x, b.input(2, W, (1, 8), dtype))
    both = b.op("and", b.input(0, E, (1, 8), BOOL), b.op("gt", y, b.const(0)))
    region = b.finish([Output(b.reduce("sum", y), dtype, (8,)), Output(both, BOOL, (8,))])
    compare(region, [torch.rand(150, 8) < 0.5, torch.randn(150, 8, dtype=of), torch.randn(8, 8, dtype=of)], walk)


@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
def test_rows_are_as_exact_as_their_type(kept: str) -> None:
    """A region with weights of 16 bits whose other values are float32 rounds the inputs of layers only."""
    torch.manual_seed(0)
    make, (walk, _, _) = Maker("bfloat16"), edges()
    b = make.b
    y = b.op("add", make.layer(make.input(E, 8), 8, bias=False), b.input(2, E, (1, 8), "float32"))
    region = b.finish([Output(b.reduce("sum", y), kept, (8,)), Output(b.on_edges(y), "float32", (8,))])
    tensors = [torch.randn(150, 8).bfloat16(), torch.randn(8, 8).bfloat16(), 1000 * torch.randn(150, 8)]
    found, right = run(region, tensors, walk)[0], reference.run(region, tensors, walk)[0]
    limit = 1e-5 if kept == "float32" else 1e-2
    torch.testing.assert_close(found.double(), right.double().view_as(found), rtol=limit, atol=limit * 1000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_that_read_the_same_edges_share_a_walk(dtype: str) -> None:
    """One walk by rows takes two sums of a stored state. A softmax, whose state is not rounded, has its own."""
    torch.manual_seed(0)
    make, (walk, rows, columns) = Maker(dtype), edges(hub=True)
    b = make.b
    state = make.layer(make.input(E, 12), 12)
    gate, other = b.op("sigmoid", state), make.input(S, 12)
    sums = [b.reduce("sum", b.op("mul", gate, other)), b.reduce("sum", gate)]
    region = make.finish(state, *sums, b.reduce("sum", b.op("mul", b.softmax(state), other)))
    assert [part.outputs for part in TiledPlan(region).parts] == [[1, 2], [3]]
    compare(region, make.tensors(rows, columns, 150, getattr(torch, dtype)), walk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("operands", "is_read"), [(1, False), (2, True), (3, True)])
def test_a_sum_reads_a_result_per_edge_where_its_operands_are_more(operands: int, is_read: bool, dtype: str) -> None:
    """A gradient of a state is stored for a layer's gradient. Its sum over edges reads it, or its only operand."""
    torch.manual_seed(0)
    make, (walk, rows, columns) = Maker(dtype), edges(hub=True)
    b = make.b
    total = make.input(E, 12)
    for _ in range(operands - 1):
        total = b.op("add", total, b.op("mul", make.input(E, 12), make.input(D, 12)))
    gradient = b.op("mul", total, make.input(D, 12))
    region = make.finish(gradient, b.reduce("sum", gradient), make.layer(gradient, 12, bias=False))
    plan = TiledPlan(region)
    assert [bool(part.leaves) for part in plan.parts] == [is_read]
    assert not is_read or plan.places[plan.parts[0].leaves.pop()] == "out0", "stored twice"
    compare(region, make.tensors(rows, columns, 150, getattr(torch, dtype)), walk)


@pytest.mark.parametrize("compares", [False, True])
def test_a_result_that_is_rounded_otherwise_is_computed_again(compares: bool) -> None:
    """Neither a sum in float32 nor a sum that compares values reads a result that is stored in 16 bits."""
    torch.manual_seed(0)
    make, (walk, rows, columns) = Maker("bfloat16"), edges()
    b = make.b
    gradient = b.op("add", b.op("mul", make.input(E, 8), make.input(D, 8)), make.input(E, 8))
    layer, summed = make.layer(gradient, 8, bias=False), b.reduce("sum", gradient)
    positive = b.reduce("sum", b.op("where", b.op("gt", gradient, b.const(0.0)), gradient, b.const(0.0)))
    other = (positive, "bfloat16") if compares else (b.op("mul", summed, b.const(2.0)), "float32")
    outputs = [(gradient, "bfloat16"), (summed, "bfloat16"), other, (layer, "bfloat16")]
    region = b.finish([Output(node, dtype, (8,)) for node, dtype in outputs])
    assert not any(part.leaves for part in TiledPlan(region).parts)
    compare(region, make.tensors(rows, columns, 150, torch.bfloat16), walk)


def test_a_long_chain_is_planned_quickly() -> None:
    make = Maker()
    x = make.layer(make.input(E, 4), 4)
    for _ in range(40):
        x = make.b.op("mul", make.b.op("tanh", x), x)
    assert len(TiledPlan(make.finish(make.layer(x, 4))).phases) == 2


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinities_reach_their_own_rows_only(value: float) -> None:
    make, (walk, rows, _) = Maker(), edges()
    b = make.b
    region = make.finish(b.reduce("sum", make.input(E, 20)), b.reduce("max", make.input(E, 20)))
    x = torch.randn(150, 20)
    x[17, 3] = x[40, 5] = x[40, 6] = value
    x[41, 6] = -value
    compare(region, [x, x], walk)
    assert rows == walk.num_rows


@pytest.mark.parametrize("channels", [20, 200])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinities_come_through_a_layer(value: float, channels: int) -> None:
    torch.manual_seed(0)
    make, (walk, _, _) = Maker(), edges()
    x = make.layer(make.input(E, channels), 24)
    region = make.finish(x, make.b.reduce("sum", x))
    tensors = make.tensors(20, 9, 150, torch.float32)
    tensors[0][17, 3] = tensors[0][40, 5] = value
    compare(region, tensors, walk)


def test_weights_of_two_types_are_split_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that split weights are compiled ahead for the type of each weight, not for that of the products."""
    torch.manual_seed(0)
    make, (walk, _, _) = Maker(), edges()
    x = make.layer(make.input(E, 20), 24, bias=False)
    make.dtype = "bfloat16"
    region = make.finish(make.layer(x, 24, bias=False))
    tensors = make.tensors(20, 9, 150, torch.float32)
    tensors[2] = tensors[2].bfloat16()
    compare(region, tensors, walk)
    begun: list[list[torch.dtype]] = []
    monkeypatch.setattr(Kernel, "compile_ahead", lambda _, types, *given: begun.append(list(types)))
    triton_kernel(region).compile_ahead(7)
    split = [types[0] for types in begun if len(types) == 2 and types[1] == torch.float16]
    assert split == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", REGIONS)
def test_the_same_bits_every_time(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    make = Maker(dtype)
    region = REGIONS[name](make)
    walk, rows, columns = edges(hub=True)
    tensors = make.tensors(rows, columns, 150, getattr(torch, dtype))
    for one, other in zip(run(region, tensors, walk), run(region, tensors, walk), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype, products", [("float32", 0), ("float16", 0), ("bfloat16", 2)])
def test_sums_of_operands_are_products(dtype: str, products: int) -> None:
    """Of a loaded and of a computed operand. A weighted sum, and a sum of what no product reads, are none."""
    make = Maker(dtype)
    b, x = make.b, make.input(E, 32)
    y = b.op("tanh", make.layer(x, 32))
    z = make.layer(y, 32)
    one = b.on_edges(b.const(1))
    sums = [b.outer(w, v, (1, 32)) for w, v in ((one, x), (one, y), (one, z), (make.input(E, 1), x))]
    region = make.finish(*sums, b.op("mul", z, x))  # the loaded operand is read again
    walk, rows, columns = edges()
    kernel = triton_kernel(region)
    assert isinstance(kernel, TiledKernel)
    assert kernel.listing.count("= add_rows(") == products
    tensors = make.tensors(rows, columns, 150, getattr(torch, dtype))
    for found, right in zip(run(region, tensors, walk), reference.run(region, tensors, walk), strict=True):
        limit = TOLERANCE.get(dtype, 0) * float(right.abs().max())
        torch.testing.assert_close(found, right.view_as(found), rtol=0, atol=limit)


@pytest.mark.parametrize("others, taken", [(0, [1, 0]), (1, [1, 1])])
def test_a_sum_moves_to_the_walk_whose_product_reads_the_value(
    monkeypatch: pytest.MonkeyPatch, others: int, taken: list[int]
) -> None:
    """If the walk that makes the value takes two sums more."""
    tune(monkeypatch, tiled_layers_of_halves=((0, 1),))
    make = Maker("bfloat16")
    b, x, one = make.b, make.input(E, 32), make.b.on_edges(make.b.const(1))
    z = make.layer(x, 32)
    y = b.op("tanh", z)
    sums = [b.outer(one, value, (1, 32)) for value in (y, z)[: 1 + others]]
    region = make.finish(*sums, make.layer(y, 32))
    plan = TiledPlan(region)
    assert [len(phase.sums) for phase in plan.phases] == taken
    assert {region.nodes[i].args[1] for i in plan.sums_by_product(plan.phases[1])} == ({y} if others else set())
    walk, rows, columns = edges()
    tensors = make.tensors(rows, columns, 150, torch.bfloat16)
    for found, right in zip(run(region, tensors, walk), reference.run(region, tensors, walk), strict=True):
        torch.testing.assert_close(found, right.view_as(found), rtol=0, atol=0.01 * float(right.abs().max()))


@pytest.mark.parametrize("dtype, divisor, short", [
    ("float32", "sqrt", True), ("float32", "exp", False), ("float64", "sqrt", False)
])  # fmt: skip
def test_many_numbers_are_divided_by_one_square_root(dtype: str, divisor: str, short: bool) -> None:
    make = Maker(dtype)
    b, x = make.b, make.layer(make.input(E, 32), 32)
    one = b.op(divisor, b.op("mul", make.input(E, 1), b.const(1.5)))
    region = make.finish(make.layer(b.op("div", x, one), 32))
    walk, rows, columns = edges()
    tensors = [
        t.abs() + 0.5 if t.shape[1:] == (1,) else t for t in make.tensors(rows, columns, 150, getattr(torch, dtype))
    ]
    assert ("* (1.0 / e" in triton_kernel(region).listing) == short
    compare(region, tensors, walk)


def test_layouts_keep_the_numbers_of_edges_for_values_that_a_walk_stores() -> None:
    make = Maker()
    region = make.finish(make.b.reduce("sum", make.layer(make.input(S, 8), 8)))
    kernel = triton_kernel(region)
    assert isinstance(kernel, TiledKernel) and "edge_at" in kernel.listing
    assert region.numbers_edges and not any(node.numbers_edges for node in region.nodes)


def test_regions_without_kernel_say_why() -> None:
    make = Maker()
    with pytest.raises(UnsupportedRegion, match="300 channels, expected at most 256"):
        triton_kernel(make.finish(make.layer(make.input(E, 8), 300)))
    make = Maker()
    with pytest.raises(UnsupportedRegion, match="2 heads"):
        triton_kernel(make.finish(make.b.reduce("sum", make.input(S, 4, heads=2))))
    make = Maker()
    with pytest.raises(UnsupportedRegion, match="reads a reduction"):
        triton_kernel(make.finish(make.layer(make.b.softmax(make.input(S, 8)), 8)))


def test_another_dtype_is_refused() -> None:
    make, (walk, rows, columns) = Maker(), edges()
    region = REGIONS["states"](make)
    tensors = make.tensors(rows, columns, 150, torch.float64)
    with pytest.raises(ArgumentError, match=r"expected torch\.float32"):
        run(region, tensors, walk)


def test_the_walk_is_printed_and_counted() -> None:
    region = REGIONS["mesh_graph_net"](Maker())
    kernel = triton_kernel(region)
    assert isinstance(kernel, TiledKernel)
    assert len(kernel.walks) == kernel.listing.count("def walk_tiles") == len(kernel.gathered) == 2
    assert "def region_kernel" in kernel.listing
    read = [{region.nodes[i].space for i in gathered} for gathered in kernel.gathered]
    assert read == [{E, S}, {E}] and kernel.generator == "triton"


@pytest.mark.parametrize("name, dtypes", [("states", ("float32", "float64")), ("maximum", ("bfloat16",))])
def test_kernels_compile_for_a_gpu(name: str, dtypes: tuple[str, ...]) -> None:
    """Triton's interpreter checks no types, so the kernels are compiled as well: in a process without it."""
    told = without_interpreter("-m", "tests.compiled_tiles", name, "20", *dtypes)
    assert told.count(" registers, ") >= 2 * len(dtypes)
