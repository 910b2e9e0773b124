"""Regions that read rows of tensors through an index per edge, against the same regions with these rows stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gnncompile.ops.region  # noqa: F401  (registers the ops)
from gnncompile.exc import InvalidRegionError
from gnncompile.ir import reference
from gnncompile.ir.builder import Builder
from gnncompile.ir.printer import summary, to_text
from gnncompile.ir.region import BITS, BOOL, INDEX, SEED, Node, Output, Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.runtime import launch
from tests import triton_regions
from tests.harness import forget_kernels, kernels, tune
from tests.tiled_regions import REGIONS, Maker
from tests.triton_regions import DEVICE, GPU, INTERPRETED, Graph, graph

D, S, E, P = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.PARAMETER
TABLE_ROWS = 7
TOLERANCE = {"float64": 1e-11, "float32": 3e-5, "bfloat16": 3e-2, "float16": 4e-3}
GRAPHS = {
    "no edge": graph([], [], 3, 2),
    "no row": graph([], [], 0, 2),
    "one node": graph([0, 0], [0, 0], 1, 1),
    "hub": graph([1] * 300 + [0, 2], [i % 5 for i in range(302)], 4, 5),
    "unsorted": graph([3, 0, 2, 0, 3, 3, 0, 2, 3, 0], [6, 1, 2, 1, 3, 0, 5, 4, 4, 0], 4, 7),
    "masked": triton_regions.MIXED,
    "dense": triton_regions.GRAPHS["dense"],
}


@pytest.fixture(params=["reference", "cpp", pytest.param("triton", marks=GPU)])
def which(request: pytest.FixtureRequest) -> Iterator[str]:
    """The generator of kernels."""
    with kernels(request.param):
        yield request.param
        assert not launch.fallbacks


def through_index(region: Region) -> tuple[Region, dict[int, int]]:
    """Returns a region whose inputs on edges are gathered through one index, and the positions of these inputs.

    Features that layers read one by one stay on edges, unless the walk is in tiles.
    """
    b, copies, moved = Builder(region.by, region.unmasked, region.tiled), dict[int, int](), dict[int, int]()
    stays = set() if region.tiled else {n.args[0] for n in region.nodes if n.op in ("linear", "outer")}
    for i, node in enumerate(region.nodes):
        if node.op == "input" and node.space is E and node.dtype not in (BITS, SEED) and i not in stays:
            position = int(node.value or 0)
            copies[i] = b.through_index(position, region.count, node.shape, node.dtype)
            moved[position] = i
        else:
            args = tuple(copies[a] for a in node.args)
            copies[i] = b.emit(Node(node.op, args, node.space, node.shape, node.dtype, node.value))
    found = b.finish([Output(copies[o.node], o.dtype, o.trailing) for o in region.outputs])
    verify(found)
    return found, moved


def double(region: Region) -> Region:
    """Returns the region in float64."""
    floats = ("float32", "bfloat16", "float16")
    nodes = [
        Node(n.op, n.args, n.space, n.shape, "float64" if n.dtype in floats else n.dtype, n.value) for n in region.nodes
    ]
    outputs = [Output(o.node, "float64" if o.dtype in floats else o.dtype, o.trailing) for o in region.outputs]
    return Region(region.by, tuple(nodes), tuple(outputs), region.unmasked, region.tiled)


def check(region: Region, tensors: list[Tensor], walk: Graph, which: str) -> None:
    """Compares a region with the same region that reads stored rows, by the reference in float64."""
    torch.manual_seed(0)
    edges = walk.row.numel()
    indexed, moved = through_index(region)
    index = torch.randint(-1, TABLE_ROWS, (edges,), dtype=torch.int32)
    stored, given = list(tensors), list(tensors)
    for position in moved:
        given[position] = torch.randn(TABLE_ROWS, *tensors[position].shape[1:], dtype=torch.float64).to(
            tensors[position].dtype
        )
        rows = torch.cat([given[position], torch.zeros_like(given[position][:1])])
        stored[position] = rows[index.long()]
    device = DEVICE if which == "triton" else "cpu"
    layout = list(walk.layout(device))
    found = launch.runner(indexed.spec, device)([*(t.to(device) for t in given), index.to(device)], layout)
    wide = [t.double() if t.dtype.is_floating_point else t for t in stored]
    right = reference.run(double(region), wide, walk.layout("cpu"))
    for out, one, other in zip(region.outputs, found, right, strict=True):
        limit = TOLERANCE.get(out.dtype, 0)
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=limit, atol=limit * 10, equal_nan=True)


def mixed(dtype: str, heads: int, channels: int) -> Region:
    """Sums, a maximum and values per edge of rows of two tensors, of a bool and of rows of both ends."""
    b = Builder(D, unmasked=True)
    x, own = b.input(0, S, (heads, channels), dtype), b.input(1, D, (heads, channels), dtype)
    first, weight = b.input(2, E, (heads, channels), dtype), b.input(3, E, (heads, 1), dtype)
    chosen = b.input(4, E, (1, 1), BOOL)
    message = b.op("mul", b.op("add", x, b.op("where", chosen, first, own)), weight)
    total, most = b.reduce("sum", message), b.reduce("max", first)
    trailing = (heads * channels,)
    outputs = [(total, dtype), (most, dtype), (b.on_edges(b.op("sub", first, x)), dtype)]
    return b.finish([Output(at, kind, trailing) for at, kind in outputs])


def attention(dtype: str, heads: int, channels: int) -> Region:
    """A softmax and the sum that it weights, of rows that come from a tensor of any number of rows."""
    b = Builder(D, unmasked=True)
    rows, logits = b.input(0, E, (heads, channels), dtype), b.input(1, E, (heads, 1), dtype)
    alpha = b.softmax(b.op("add", logits, b.input(2, S, (heads, 1), dtype)))
    return b.finish([Output(b.reduce("sum", b.op("mul", rows, alpha)), dtype, (heads * channels,))])


def random_tensors(region: Region, walk: Graph) -> list[Tensor]:
    """Returns random tensors for a region."""
    rows = {region.by: walk.num_rows, region.by.opposite: walk.num_cols, E: walk.row.numel(), P: 1}
    made = [torch.empty(0)] * region.count
    for node in region.inputs:
        value = torch.randn(rows[node.space], node.shape[0] * node.shape[1], dtype=torch.float64)
        made[int(node.value or 0)] = value > 0 if node.dtype == BOOL else value.to(getattr(torch, node.dtype))
    return made


@INTERPRETED
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("make, heads, channels", [(mixed, 1, 16), (mixed, 1, 5), (mixed, 3, 8), (attention, 2, 32)])
def test_rows_of_an_index(
    make: Callable[[str, int, int], Region], heads: int, channels: int, name: str, which: str
) -> None:
    torch.manual_seed(1)
    region = replace(make("float32", heads, channels), unmasked=GRAPHS[name].alive is None)
    check(region, random_tensors(region, GRAPHS[name]), GRAPHS[name], which)


@INTERPRETED
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["unsorted", "hub"])
def test_every_type(name: str, dtype: str, which: str) -> None:
    torch.manual_seed(1)
    region = mixed(dtype, 2, 16)
    check(region, random_tensors(region, GRAPHS[name]), GRAPHS[name], which)


@INTERPRETED
@pytest.mark.parametrize("name", ["no edge", "hub", "unsorted"])
@pytest.mark.parametrize("kind", REGIONS)
def test_walks_in_tiles(monkeypatch: pytest.MonkeyPatch, kind: str, name: str, which: str) -> None:
    torch.manual_seed(1)
    tune(monkeypatch, processors=1)
    forget_kernels()
    make, walk = Maker(), GRAPHS[name]
    region = REGIONS[kind](make)
    tensors = make.tensors(walk.num_rows, walk.num_cols, walk.row.numel(), torch.float32)
    check(region, tensors, walk, which)


def test_a_product_of_two_values_reads_no_tensor_of_other_rows(which: str) -> None:
    """The gradient of weights multiplies rows of edges. It can't take the rows of a tensor that an index chooses."""
    torch.manual_seed(1)
    make, walk = Maker(), GRAPHS["hub"]
    x, y = make.input(E, 16), make.input(E, 16)
    region = make.finish(make.b.outer(x, y, (1, 16)), make.layer(x, 16))
    check(region, make.tensors(walk.num_rows, walk.num_cols, walk.row.numel(), torch.float32), walk, which)


def test_text_and_string() -> None:
    region, _ = through_index(mixed("float32", 1, 4))
    assert parse(region.spec) == region
    assert "x2: float32[edge, 1x4] = tensor 2, row x5" in to_text(region)
    assert summary(region) == "sum, max of 1x4 from source, destination, rows of an index"


@pytest.mark.parametrize(
    "node, message",
    [
        (Node("input", (0,), E, (1, 4), BITS, 0), "gathered through one index"),
        (Node("input", (0,), D, (1, 4), "float32", 0), "gathered through one index"),
        (Node("neg", (0,), E, (1, 1)), "reads an index, which only an input does"),
        (Node("input", (), D, (1, 1), INDEX, 0), "one number per edge"),
    ],
)
def test_what_is_no_region(node: Node, message: str) -> None:
    nodes = (Node("input", (), E, (1, 1), INDEX, 1), node)
    with pytest.raises(InvalidRegionError, match=message):
        verify(Region(D, nodes, ()))


def test_layers_of_features_one_by_one_read_rows_of_edges() -> None:
    b = Builder(D)
    layer = b.linear(b.through_index(0, 1, (1, 4), "float32"), b.input(2, Space.FEATURE, (1, 8), "float32"))
    with pytest.raises(InvalidRegionError, match="stored per edge"):
        verify(b.finish([Output(b.reduce("sum", layer), "float32", (8,))]))


def gradients(region: Region, tensors: list[Tensor], fixed: set[int], layout: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of a region's tensors but those at the positions `fixed`."""
    leaves = [t.clone().requires_grad_(at not in fixed and t.is_floating_point()) for at, t in enumerate(tensors)]
    outputs = torch.ops.gnncompile.region(leaves, layout, region.spec)
    visible = [o for o in outputs if o.is_floating_point()]
    torch.manual_seed(2)
    loss = sum((o * torch.randn_like(o)).sum() for o in visible)
    return list(torch.autograd.grad(loss, [t for t in leaves if t.requires_grad], allow_unused=True))


@pytest.mark.parametrize("kind", [*REGIONS, "mixed", "attention"])
@pytest.mark.parametrize("name", ["no edge", "hub", "unsorted"])
def test_gradients_of_the_other_tensors(kind: str, name: str) -> None:
    torch.manual_seed(1)
    walk = GRAPHS[name]
    if kind in REGIONS:
        make = Maker("float64")
        region = REGIONS[kind](make)
        stored = make.tensors(walk.num_rows, walk.num_cols, walk.row.numel(), torch.float64)
    else:
        region = {"mixed": mixed, "attention": attention}[kind]("float64", 2, 16)
        stored = random_tensors(region, walk)
    indexed, moved = through_index(region)
    index, given = torch.randint(-1, TABLE_ROWS, (walk.row.numel(),), dtype=torch.int32), list(stored)
    for position in moved:
        given[position] = torch.randn(TABLE_ROWS, *stored[position].shape[1:]).to(stored[position].dtype)
        stored[position] = torch.cat([given[position], torch.zeros_like(given[position][:1])])[index.long()]
    back = Graph(walk.col, walk.row, walk.num_cols, walk.num_rows)
    layout = [*walk.layout("cpu"), *back.layout("cpu")]
    found = gradients(with_residuals(indexed), [*given, index], {*moved}, layout)
    right = gradients(with_residuals(region), stored, {*moved}, layout)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
