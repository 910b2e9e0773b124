"""Linear layers of edge features inside regions: kernels against float64, whole layers of PyG, what is left outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    CGConv,
    GATv2Conv,
    GINEConv,
    MaxAggregation,
    MessagePassing,
    ResGatedGraphConv,
    TransformerConv,
)

import gnncompile
from gnncompile import _compat, tuning
from gnncompile.codegen.triton import edge_linears
from gnncompile.exc import InvalidRegionError, UnsupportedRegion
from gnncompile.ir import rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import Output, Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.ir.vjp import vjp
from gnncompile.runtime import launch
from tests.graphs import EDGE_LISTS, layout
from tests.harness import kernels, launched, light, needs_interpreter, without_interpreter

D, S, E, F = Space.DESTINATION, Space.SOURCE, Space.EDGE, Space.FEATURE
NODES = 5
FULL = "unsorted, duplicates, hub"


# -- kernels ------------------------------------------------------------------------------------------------------


def message(dtype: str, heads: int, channels: int, features: int) -> Region:
    """Sum of relu(x + linear(e)) times the features' sum, so that these are read both one by one and as a whole."""
    b = Builder(D)
    x, e = b.input(0, S, (heads, channels), dtype), b.input(1, E, (1, features), dtype)
    z = rules.relu(b, b.op("add", x, b.linear(e, b.input(2, F, (heads, channels), dtype))))
    total = b.reduce("sum", b.op("mul", z, b.sum_axis(e, 1)))
    return b.finish([Output(total, dtype, (heads, channels))])


def back(dtype: str, heads: int, channels: int, features: int) -> Region:
    """What a gradient hands back to the features, per edge."""
    b = Builder(S)
    x, g = b.input(0, S, (heads, channels), dtype), b.input(1, D, (heads, channels), dtype)
    product = b.op("mul", x, g)
    out = b.transposed(product, b.input(2, F, (heads, channels), dtype), features)
    return b.finish([Output(out, dtype, (features,)), Output(b.reduce("sum", product), dtype, (heads, channels))])


def weights(dtype: str, heads: int, channels: int, features: int) -> Region:
    """The gradient of the weights, of a value per edge and of one per row."""
    b = Builder(D)
    x, g = b.input(0, S, (heads, channels), dtype), b.input(1, D, (heads, channels), dtype)
    e, shape = b.input(2, E, (1, features), dtype), (heads, channels)
    compute = "float64" if dtype == "float64" else "float32"
    sums = [b.outer(e, b.op("mul", x, g), shape), b.outer(e, b.sum_axis(g, 1), shape)]
    return b.finish([Output(s, compute, shape) for s in sums])


Make = Callable[[str, int, int, int], Region]
SHAPES = [(1, 1, 1), (1, 1, 2), (1, 3, 1), (3, 1, 2), (2, 5, 4), (1, 64, 16), (4, 16, 8), (1, 130, 3), (1, 257, 6)]


def graph(name: str) -> tuple[Layout, int, int, int]:
    """A layout, and how many rows, columns and edges it has."""
    if name == "long rows":  # three hubs, one of them several pieces long, and an edge that is masked out
        row = torch.tensor([0] * 300 + [2] * (2 * tuning.TILES.hub_edges + 1) + [3] * 129 + [1, 3, 0])
        col = torch.arange(row.numel()) % 7
        alive = torch.ones(row.numel(), dtype=torch.bool)
        alive[5] = False
        return layout(row, col, 5, alive), 5, 7, row.numel()
    edges = EDGE_LISTS[name]
    return layout(edges[1], edges[0], NODES, None), NODES, NODES, edges.size(1)


def tensors(region: Region, rows: int, columns: int, edges: int, features: int) -> list[Tensor]:
    torch.manual_seed(0)
    counts = {region.by: rows, region.by.opposite: columns, E: edges, F: features}
    made = []
    for node in region.inputs:
        size = (counts[node.space], node.shape[0] * node.shape[1])
        made.append(torch.randn(size, dtype=torch.float64).to(getattr(torch, node.dtype)))
    return made


def check(region: Region, where: str, features: int, device: str, tolerance: float) -> None:
    verify(region)
    walk, rows, columns, edges = graph(where)
    given = tensors(region, rows, columns, edges, features)
    expected = run(exactly(region), [t.double() for t in given], walk)
    outputs = []
    for out in region.outputs:
        size = (region.rows(out, rows, edges), *out.trailing)
        start = 0.0 if region.cleared(out) else float("nan")
        outputs.append(torch.full(size, start, dtype=getattr(torch, out.dtype), device=device))
    kernel = launch.kernel(region.spec, device)
    assert launch.fallbacks == {}
    kernel([t.to(device) for t in given], _moved(walk, device), outputs)
    for found, wanted in zip(outputs, expected, strict=True):
        scale = max(float(wanted.abs().max()), 1.0) if wanted.numel() else 1.0
        torch.testing.assert_close(found.cpu().double() / scale, wanted / scale, rtol=0, atol=tolerance)


def _moved(walk: Layout, device: str) -> Layout:
    return Layout(*(t.to(device) for t in walk))


def exactly(region: Region) -> Region:
    """The same region in float64."""
    return parse(
        region.spec.replace('"float32"', '"float64"').replace("bfloat16", "float64").replace("float16", "float64")
    )


DEVICES = [("cpp", "cpu"), ("triton", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.gpu)]
OF_TRITON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of lanes that hold anything
@pytest.mark.parametrize("which, device", DEVICES)
@pytest.mark.parametrize("make", [message, back, weights])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels(make: Make, shape: tuple[int, int, int], which: str, device: str):
    needs_interpreter(which, device)
    with kernels(which):
        for where in (FULL, "no edge"):
            check(make("float32", *shape), where, shape[2], device, 2e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which, device", DEVICES)
@pytest.mark.parametrize("make", [message, weights])
@pytest.mark.parametrize(
    "dtype, tolerance", [("float64", 1e-13), ("float32", 2e-6), ("float16", 2e-3), ("bfloat16", 1e-2)]
)
def test_kernels_on_long_rows(make: Make, dtype: str, tolerance: float, which: str, device: str):
    needs_interpreter(which, device)
    with kernels(which):
        check(make(dtype, 1, 24, 8), "long rows", 8, device, tolerance)


def weights_behind_layer(dtype: str, heads: int, channels: int, features: int) -> Region:
    """The gradient of weights whose features a layer of the same region reads too, and of a bias."""
    b = Builder(D)
    e, g = b.input(0, E, (1, features), dtype), b.input(1, D, (heads, channels), dtype)
    shape = (heads, channels)
    masked = rules.relu(b, b.op("mul", b.linear(e, b.input(2, F, shape, dtype)), g))
    one = b.on_edges(b.const(1.0))
    return b.finish(
        [Output(b.outer(e, masked, shape), "float32", shape), Output(b.outer(one, g, shape), "float32", shape)]
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which, device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape", [(1, 16, 8), (1, 100, 9), (1, 130, 9), (1, 64, 16), (1, 24, 40), (2, 16, 16)], ids=str
)
@pytest.mark.parametrize("where", [FULL, "no edge", "long rows"])
def test_gradients_of_weights_are_products(
    where: str, shape: tuple[int, int, int], dtype: str, which: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    """Small integers have 16 bits, and so have their products here: nothing is rounded."""
    needs_interpreter(which, device)
    monkeypatch.setattr(torch, "randn", lambda size, dtype: torch.randint(-2, 3, size).to(dtype))
    region = weights(dtype, *shape)
    with kernels(which):
        check(region, where, shape[2], device, 0.0)
        text = launch.kernel(region.spec, device).listing
    heads, channels, features = shape
    fits = features >= 16 and 4 * features >= channels if dtype == "float32" else channels <= 128
    assert (" plus_product(" in text) == (which == "triton" and heads == 1 and fits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which, device", DEVICES)
def test_gradients_of_weights_keep_float32(which: str, device: str):
    """Products of parts are as exact as float32."""
    needs_interpreter(which, device)
    with kernels(which):
        for where in (FULL, "no edge", "long rows"):
            check(weights("float32", 1, 64, 20), where, 20, device, 2e-6)


COMPILE = """
from tests.kernels.test_edge_linears import weights
from gnncompile.codegen.triton.kernel import TritonEdgeSums

for channels, features, dtype in (
    *((c, f, "bfloat16") for c, f in ((128, 16), (128, 128), (64, 32), (256, 8), (512, 16), (100, 200))),
    *((c, f, "float32") for c, f in ((64, 20), (128, 32), (128, 16))),
):
    kernel = TritonEdgeSums(weights(dtype, 1, channels, features))
    print(kernel.variant.entry.compile((8, 9)).shared if " plus_product(" in kernel.text else 0)
"""


def test_products_fit_in_the_shared_memory_of_small_gpus():
    """A program has up to 99 KiB on GPUs of compute capability 8.6 and 8.9. Wider sums are no products."""
    shared = [int(line) for line in without_interpreter("-c", COMPILE).splitlines()]
    halves, floats = [True, False, True, False, False, False], [True, True, False]
    assert [number > 0 for number in shared] == halves + floats and max(shared) <= 99 * 1024


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which, device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "shape, is_product",
    [
        ((1, 64, 16), True),
        ((1, 100, 9), True),
        ((1, 128, 32), True),
        ((1, 24, 8), True),  # in pieces of hubs
        ((1, 8, 16), False),
        ((1, 64, 4), False),
        ((1, 130, 9), True),
        ((1, 300, 9), False),
        ((1, 128, 40), False),
        ((2, 64, 16), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", [FULL, "no edge", "one edge", "long rows"])
def test_layers_of_halves_are_products(
    where: str,
    shape: tuple[int, int, int],
    is_product: bool,
    dtype: str,
    which: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Small integers have 16 bits, and their sums 24: nothing is rounded."""
    needs_interpreter(which, device)
    monkeypatch.setattr(torch, "randn", lambda size, dtype: torch.randint(-2, 3, size).to(dtype))
    region = message(dtype, *shape)
    region = replace(region, outputs=tuple(replace(out, dtype="float32") for out in region.outputs))
    with kernels(which):
        check(region, where, shape[2], device, 0.0)
        text = launch.kernel(region.spec, device).listing
    assert ("(dot(" in text) == (which == "triton" and is_product)


@pytest.mark.parametrize("which, device", DEVICES)
def test_layers_of_halves_in_float64(which: str, device: str):
    """Matrix units sum 16-bit factors in float32, which is too little beside a float64 input."""
    needs_interpreter(which, device)
    region = message("bfloat16", 1, 64, 16)
    nodes = (replace(region.nodes[0], dtype="float64"), *region.nodes[1:])
    region = replace(region, nodes=nodes, outputs=tuple(replace(out, dtype="float64") for out in region.outputs))
    with kernels(which):
        check(region, FULL, 16, device, 1e-13)
        check(region, "long rows", 16, device, 1e-13)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which, device", DEVICES)
def test_features_reach_their_own_rows_only(which: str, device: str):
    """A product of several edges at once does not spread what is no number, nor read edges that are masked out."""
    needs_interpreter(which, device)
    region = message("bfloat16", 1, 64, 16)
    walk, rows, columns, edges = graph("long rows")
    x, features, weights = tensors(region, rows, columns, edges, 16)
    features[5] = features[-3] = float("nan")  # edge 5 is masked out; the last but two is the only one of row 1
    out = torch.empty(rows, 64, dtype=torch.bfloat16, device=device)
    with kernels(which):
        given = [t.to(device) for t in (x, features, weights)]
        launch.kernel(region.spec, device)(given, _moved(walk, device), [out])
    assert out.isnan().any(1).tolist() == [False, True, False, False, False]


COMPILE_LAYERS = """
from tests.kernels.test_edge_linears import message
from gnncompile.codegen.triton.kernel import TritonKernel

for channels, features in ((64, 16), (128, 16), (128, 32), (24, 9)):
    kernel = TritonKernel(message("bfloat16", 1, channels, features))
    for variant in (kernel.ordinary, *kernel.pieces, *kernel.hubs):
        for capability in ((8, 0), (9, 0)):
            print("dot(" in variant.text, variant.entry.compile(capability).shared)
"""


def test_products_of_few_edges_are_compiled():
    """Triton refuses blocks of too few columns, but not here: without a GPU its interpreter would not tell."""
    lines = [line.split() for line in without_interpreter("-c", COMPILE_LAYERS).splitlines()]
    assert sum(product == "True" for product, _ in lines) >= 8
    assert max(int(shared) for _, shared in lines) <= 48 * 1024


@pytest.mark.parametrize("device", OF_TRITON)
def test_float16_overflows_as_in_eager(device: str):
    """A product rounds its values first. In float32 the value would be 90,000."""
    needs_interpreter("triton", device)
    b = Builder(D)
    e, g = b.input(0, E, (1, 8), "float16"), b.input(1, D, (1, 16), "float16")
    region = b.finish([Output(b.outer(e, b.op("mul", g, g), (1, 16)), "float32", (1, 16))])
    walk, rows, _, edges = graph(FULL)
    out = torch.zeros(8, 1, 16, device=device)
    given = [torch.ones(edges, 8), torch.full((rows, 16), 300)]
    with kernels("triton"):
        launch.kernel(region.spec, device)([t.half().to(device) for t in given], _moved(walk, device), [out])
    assert out.isinf().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which, device", DEVICES)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 4e-6), ("float16", 2e-3), ("bfloat16", 1e-2)])
def test_features_of_a_layer_and_of_a_sum(dtype: str, tolerance: float, which: str, device: str):
    needs_interpreter(which, device)
    region = weights_behind_layer(dtype, 1, 48, 16)
    with kernels(which):
        for where in (FULL, "no edge", "long rows"):
            check(region, where, 16, device, tolerance)
        text = launch.kernel(region.spec, device).listing
    assert "product(" not in text, "values behind a layer would not fit in registers"


@pytest.mark.parametrize("which, device", DEVICES)
def test_as_many_features_as_channels(which: str, device: str):
    """What is read once per channel, for all heads, is not mistaken for features of edges."""
    needs_interpreter(which, device)
    b = Builder(D)
    x, e = b.input(0, S, (2, 3), "float32"), b.input(1, E, (1, 3), "float32")
    z = b.op("mul", b.op("add", x, b.linear(e, b.input(2, F, (2, 3), "float32"))), b.input(3, D, (1, 3), "float32"))
    region = b.finish([Output(b.reduce("sum", z), "float32", (2, 3))])
    with kernels(which):
        check(region, FULL, 3, device, 2e-6)


@pytest.mark.parametrize("device", OF_TRITON)
def test_features_that_do_not_stand_at_multiples_of_eight_bytes(device: str):
    """A GPU can't load a word from an odd place, so such a tensor is copied first."""
    needs_interpreter("triton", device)
    region = message("float32", 1, 4, 2)
    assert edge_linears.read_as_words(region) == {1}
    assert edge_linears.read_as_words(message("float32", 1, 4, 3)) == frozenset()
    walk, rows, columns, edges = graph(FULL)
    x, e, w = tensors(region, rows, columns, edges, 2)
    odd = torch.cat([torch.zeros(1), e.flatten()]).to(device)[1:].view_as(e)
    assert odd.data_ptr() % 8
    with kernels("triton"):
        found = torch.empty(rows, 4, device=device)
        launch.kernel(region.spec, device)([x.to(device), odd, w.to(device)], _moved(walk, device), [found])
    (expected,) = run(region, [x, e, w], walk)
    torch.testing.assert_close(found.cpu(), expected.view(rows, 4))


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_over_all_edges_do_not_depend_on_threads(threads: int):
    region, before = weights("float32", 1, 24, 8), torch.get_num_threads()
    walk, rows, columns, edges = graph("long rows")
    given = tensors(region, rows, columns, edges, 8)
    results = []
    with kernels("cpp"):
        for count in (threads, 1):
            torch.set_num_threads(count)
            results.append([torch.empty(8, 24), torch.empty(8, 24)])
            launch.kernel(region.spec, "cpu")(given, walk, results[-1])
    torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_malformed_layers_are_refused():
    def region(build: Callable[[Builder], int]) -> Region:
        b = Builder(D)
        return Region(D, (), ()) if b is None else b.finish([Output(b.reduce("sum", build(b)), "float32", (4,))])

    weights_of_rows = region(lambda b: b.linear(b.input(0, S, (1, 3), "float32"), b.input(1, F, (1, 4), "float32")))
    with pytest.raises(InvalidRegionError, match="takes the features of edges"):
        verify(weights_of_rows)
    of_rows = region(lambda b: b.linear(b.input(0, E, (1, 3), "float32"), b.input(1, S, (1, 4), "float32")))
    with pytest.raises(InvalidRegionError, match="takes weights"):
        verify(of_rows)
    plain = region(lambda b: b.op("add", b.input(0, S, (1, 4), "float32"), b.input(1, F, (1, 4), "float32")))
    with pytest.raises(InvalidRegionError, match="reads weights"):
        verify(plain)


# -- layers of PyG ------------------------------------------------------------------------------------------------


class EdgeGate(MessagePassing):
    """A layer of edge features that is used twice, in messages that are reduced in two ways."""

    def __init__(self) -> None:
        super().__init__(aggr=["mean", "max"])
        self.lin = nn.Linear(4, 6)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        gate = self.lin(edge_attr)
        return torch.tanh(gate) * x_j + gate


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GINE": lambda: GINEConv(nn.Linear(6, 5), edge_dim=4),
    "Transformer": lambda: TransformerConv(6, 3, heads=2, edge_dim=4, beta=True),
    "GATv2": lambda: GATv2Conv(6, 3, heads=2, edge_dim=4, add_self_loops=False),
    "GATv2 with self loops": lambda: GATv2Conv(6, 3, heads=2, edge_dim=4),
    "CG": lambda: CGConv(6, dim=4, aggr="mean"),
    "ResGated": lambda: ResGatedGraphConv(6, 5, edge_dim=4),
    "written by hand": EdgeGate,
}


def results(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = model(*inputs)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    leaves = [a for a in (*inputs, *model.parameters()) if a.requires_grad]
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)]


def compare(model: nn.Module, edges: Tensor, grad: bool = False, width: int = 4) -> list[Region]:
    """Compares with eager in float64; the regions that ran."""
    torch.manual_seed(0)
    x, e = torch.randn(NODES, 6, requires_grad=True), torch.randn(edges.size(1), width, requires_grad=grad)
    with launched() as specs:
        found = results(gnncompile.compile(model, fullgraph=True), x, edges, e)
    wide = [a.detach().double().requires_grad_(a.requires_grad) for a in (x, e)]
    expected = results(copy.deepcopy(model).double(), wide[0], edges, wide[1])
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    return [parse(spec) for spec in specs]


def widest_per_edge(regions: list[Region]) -> int:
    """How many elements an edge has at most, in what regions read and write per edge."""
    read = [n.shape for r in regions for n in r.inputs if n.space is E]
    written = [r.nodes[o.node].shape for r in regions for o in r.outputs if r.per_edge(o)]
    return max((heads * channels for heads, channels in read + written), default=0)


@pytest.mark.parametrize("edges", EDGE_LISTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, edges: str):
    torch.manual_seed(1)
    with light():
        regions = compare(LAYERS[name](), EDGE_LISTS[edges])
    if name != "GATv2 with self loops":  # its features are appended to: those of the loops are means
        assert widest_per_edge(regions) <= 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("which", ["cpp", "triton"])
@pytest.mark.parametrize("name", ["GINE", "GATv2", "CG"])
def test_layers_by_kernels(name: str, which: str):
    needs_interpreter(which)
    torch.manual_seed(1)
    with light(which):
        compare(LAYERS[name](), EDGE_LISTS[FULL])
        assert launch.fallbacks == {}


@pytest.mark.parametrize("name", ["GINE", "CG"])
def test_one_graph_for_all_sizes(name: str):
    torch.manual_seed(1)
    model = LAYERS[name]()
    before = _compat.counters()["stats"]["unique_graphs"]
    with light():
        compiled = gnncompile.compile(model, fullgraph=True)
        for nodes, count in ((12, 40), (17, 61), (7, 0), (1, 1), (30, 4)):
            edges = torch.randint(0, nodes, (2, count))
            x, e = torch.randn(nodes, 6, requires_grad=True), torch.randn(count, 4)
            for a, b in zip(results(compiled, x, edges, e), results(model, x, edges, e), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert _compat.counters()["stats"]["unique_graphs"] == before + 1


def test_features_with_a_gradient_are_left_outside():
    with light():
        regions = compare(LAYERS["GINE"](), EDGE_LISTS[FULL], grad=True)
    assert not any(n.op == "linear" for r in regions for n in r.nodes)


def test_many_features_are_left_outside():
    with light():
        regions = compare(GINEConv(nn.Linear(6, 5), edge_dim=40), EDGE_LISTS[FULL], width=40)
    assert not any(n.op == "linear" for r in regions for n in r.nodes)


class Vectors(nn.Module):
    """Vectors of nodes, whose components are scaled by the same rows of a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.vectors = nn.Linear(width, 8), nn.Linear(6, 24)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, destination = edge_index
        messages = self.vectors(x).view(-1, 3, 8)[source] * self.lin(edge_attr).unsqueeze(1)
        return x.new_zeros(x.size(0), 3, 8).index_add(0, destination, messages).flatten(1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("which", "width", "inside"), [("triton", 4, True), ("triton", 6, False), ("cpp", 6, True)])
@pytest.mark.parametrize("edges", ["no edge", FULL])
def test_layers_that_vectors_read(edges: str, which: str, width: int, inside: bool):
    """A walk on a GPU would compute a layer for each component."""
    needs_interpreter(which)
    with light(which):
        regions = compare(Vectors(width), EDGE_LISTS[edges], width=width)
    assert any(n.op == "linear" for r in regions for n in r.nodes) == inside


def test_layers_in_16_bits_that_vectors_read():
    """The library multiplies 16-bit values; a walk on a CPU would convert them for each component."""
    edges, model = EDGE_LISTS[FULL], Vectors(6).bfloat16()
    x, e = torch.randn(NODES, 6).bfloat16(), torch.randn(edges.size(1), 6).bfloat16()
    with light("cpp"), launched() as specs:
        found = gnncompile.compile(model)(x, edges, e)
    assert specs and not any(n.op == "linear" for spec in specs for n in parse(spec).nodes)
    exact = copy.deepcopy(model).double()(x.double(), edges, e.double())
    torch.testing.assert_close(found.double(), exact, rtol=5e-2, atol=5e-2)


class Returned(MessagePassing):
    """A layer of edge features whose rows leave the model."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        rows = self.lin(edge_attr)
        out = self.propagate(edge_index, x=x, rows=rows)
        return torch.cat([out, rows])

    def message(self, x_j: Tensor, rows: Tensor) -> Tensor:
        return torch.relu(x_j + rows)


def test_rows_that_are_used_elsewhere_are_stored_once():
    with light():
        regions = compare(Returned(), EDGE_LISTS[FULL])
    assert not any(n.op == "linear" for r in regions for n in r.nodes)


def test_gradient_of_the_weights_is_one_sum_over_all_edges():
    region = with_residuals(message("float32", 1, 8, 4), (True, False, True))
    stages = vjp(region, (True, False, True), tuple(k == 0 for k in range(len(region.outputs)))).stages
    assert [s.region.sums_all for s in stages].count(True) == 1
    assert all(s.region.rows(o, 100, 1000) != 1000 for s in stages for o in s.region.outputs)


def test_why_a_layer_is_stored():
    x, e = torch.randn(NODES, 6), torch.randn(EDGE_LISTS[FULL].size(1), 4)
    with light():
        report = gnncompile.explain(gnncompile.compile(LAYERS["GINE"]()), x, EDGE_LISTS[FULL], e.requires_grad_())
    assert [(s.what, s.reason[:29]) for s in report.skipped] == [
        ("linear layer stored per edge", "its features need a gradient,")
    ]


# -- the maximum of what a layer makes ------------------------------------------------------------------------------


class _LargestShare(nn.Module):
    """The maximum over a segment of a softmax over features, which reads a layer's result twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.largest = nn.Linear(3, 4, dtype=dtype), MaxAggregation()

    def forward(self, x: Tensor, segment: Tensor) -> Tensor:
        return self.largest(self.layer(x).softmax(-1), segment)


def largest_shares(dtype: torch.dtype) -> None:
    """Compares the results and gradients of a compiled model with eager's."""
    torch.manual_seed(0)
    segment = torch.tensor([0, 0, 0, 2, 2, 2, 2, 3])
    model, x = _LargestShare(dtype), torch.randn(8, 3, dtype=dtype)
    compiled = gnncompile.compile(copy.deepcopy(model))
    cotangent = torch.randn(4, 4, dtype=dtype)
    found = [[m(x, segment), *torch.autograd.grad(m(x, segment), m.parameters(), cotangent)] for m in (compiled, model)]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("which", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_share(which: str, dtype: torch.dtype):
    needs_interpreter(which)
    with light(which):
        largest_shares(dtype)
        assert launch.fallbacks == {}


@pytest.mark.parametrize("missing", ["reduce_max", "eq"])
def test_the_largest_share_where_a_kernel_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch):
    """The forward or the backward runs by the reference interpreter, which rounds otherwise than the other's kernel."""
    generate = launch._generate

    def broken(region: Region, device: str) -> launch.Kernel:
        if any(node.op == missing for node in region.nodes):
            raise UnsupportedRegion("it is missing")
        return generate(region, device)

    with light("cpp"):
        monkeypatch.setattr(launch, "_generate", broken)
        for dtype in (torch.float32, torch.float64):
            largest_shares(dtype)
        assert launch.fallbacks
