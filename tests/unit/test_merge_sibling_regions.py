"""Several reductions share one walk over the edges: where they may, with the same numbers and gradients as eager."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import EGConv, PNAConv, SAGEConv, SimpleConv
from torch_geometric.nn.aggr import MultiAggregation, PowerMeanAggregation
from torch_geometric.utils import scatter, softmax

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import BITS, Output, Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.passes.pre_grad.merge_sibling_regions import MOST_REDUCTIONS
from tests.graphs import layout
from tests.harness import kernels, launched, light, look_at_graphs, needs_interpreter
from tests.tracing import Traced, check, data

WIDTH = 8
GRAPHS = {
    "unsorted, duplicates, hub, isolated": (
        7,
        [[3, 0, 2, 0, 1, 4, 4, 0, 2, 5, 3, 3], [0, 1, 0, 1, 0, 0, 2, 0, 3, 0, 3, 0]],
    ),
    "no edge": (3, [[], []]),
    "one node": (1, [[], []]),
    "one loop": (1, [[0], [0]]),
}


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    with light("cpp"):
        yield


def graph(name: str) -> tuple[Tensor, Tensor]:
    """x [nodes, WIDTH] of few different numbers, so that extrema have ties, and edge_index.

    No number is 0: where it is the extremum, torch hands a share of the gradient to the base of the reduction.
    """
    nodes, edges = GRAPHS[name]
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-2, 3, (nodes, WIDTH), generator=generator) / 2.0 + 0.25, torch.tensor(edges, dtype=torch.long)


def number_of_regions(compiled: nn.Module) -> int:
    """Regions of every captured graph."""
    program = callable_of(compiled)
    assert program is not None
    (count,) = {len(c.log.regions) for c in program.backend.captured}
    return count


# -- PyG's layers -------------------------------------------------------------------------------------------------

DEGREES = torch.tensor([2, 3, 1, 0, 1])
AGGREGATORS, SCALERS = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
STRUCTURE = 1
"""Degrees are a region of their own, which is run once per graph."""

LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "PNA": (lambda: PNAConv(WIDTH, WIDTH, AGGREGATORS, SCALERS, DEGREES), 1 + STRUCTURE),
    "PNA with towers": (
        lambda: PNAConv(WIDTH, WIDTH, AGGREGATORS, SCALERS, DEGREES, towers=2, divide_input=True),
        1 + STRUCTURE,
    ),
    "EGConv": (
        lambda: EGConv(WIDTH, WIDTH, aggregators=["sum", "mean", "max", "std", "symnorm"], num_heads=4, num_bases=2),
        1 + STRUCTURE,
    ),
    "SAGE": (lambda: SAGEConv(WIDTH, WIDTH, aggr=["mean", "max", "std"]), 1 + STRUCTURE),
    "SimpleConv": (lambda: SimpleConv(aggr=["sum", "mean", "max", "min", "std", "var"]), 1 + STRUCTURE),
    "softmax and mean": (lambda: SimpleConv(aggr=["softmax", "mean"]), 1 + STRUCTURE),
    "power mean": (
        lambda: SAGEConv(WIDTH, WIDTH, aggr=MultiAggregation(["sum", PowerMeanAggregation(2.0)])),
        1,
    ),
}


def compare(model: nn.Module, compiled: nn.Module, x: Tensor, edge_index: Tensor) -> tuple[list[str], list[str]]:
    """Output and gradients against eager in float64; the regions launched in the forward and in the backward."""
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    with launched() as forward:
        out = compiled(ours, edge_index)
    reference = copy.deepcopy(model).double()
    expected = reference(theirs, edge_index)
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
    with launched() as backward:
        found = torch.autograd.grad((out * weight.float()).sum(), [ours, *model.parameters()], allow_unused=True)
    wanted = torch.autograd.grad((expected * weight).sum(), [theirs, *reference.parameters()], allow_unused=True)
    for a, b in zip([out, *found], [expected, *wanted], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    return forward, backward


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str):
    torch.manual_seed(0)
    make, regions = LAYERS[name]
    model = make()
    compiled = gnncompile.compile(model, fullgraph=True)
    for on in GRAPHS:
        compare(model, compiled, *graph(on))
    assert number_of_regions(compiled) == regions


class Bonds(nn.Module):
    """Messages between directed bonds, as those of D-MPNN: a state is summed, and kept for the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.step = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, destination = edge_index
        reverse = torch.arange(source.size(0), device=x.device).flip(0)
        first = self.start(x[source]).sin()
        state = first.relu()
        for _ in range(3):
            received = scatter(state, destination, 0, x.size(0), "sum")
            state = (first + self.step(received[source] - state[reverse])).relu()
        return scatter(state, destination, 0, x.size(0), "sum")


@pytest.mark.parametrize("on", GRAPHS)
def test_rows_and_their_sum_share_a_walk(on: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model = Bonds()
    nodes = look_at_graphs(monkeypatch, lambda graph: [n for n in graph.nodes if n.op == "call_function"])
    compare(model, gnncompile.compile(model, fullgraph=True), *graph(on))
    regions = [parse(n.args[2]) for n in nodes if n.target is torch.ops.gnncompile.region.default]  # type: ignore[arg-type]
    stores = [any(map(r.per_edge, (o for o in r.outputs if o.dtype != BITS))) for r in regions if r.reductions]
    assert sorted(stores) == [False, True, True, True]  # no step reads the last state
    # The rows of the other direction are gathered by regions: their gradients need no atomics.
    assert not any(n.target in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor) for n in nodes)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["PNA", "EGConv", "SAGE"])
def test_layers_in_triton(name: str):
    pytest.importorskip("triton")
    needs_interpreter("triton")
    torch.manual_seed(0)
    model = LAYERS[name][0]()
    with light("triton"):
        compare(model, gnncompile.compile(model, fullgraph=True), *graph(next(iter(GRAPHS))))


def test_bipartite():
    torch.manual_seed(0)
    model = SAGEConv((WIDTH, WIDTH), WIDTH, aggr=["mean", "max", "std"])
    compiled = gnncompile.compile(model, fullgraph=True)
    x, edge_index = graph(next(iter(GRAPHS)))
    results = []
    for run, kind in ((compiled, torch.float32), (copy.deepcopy(model).double(), torch.float64)):
        pair = [t.to(kind).requires_grad_() for t in (x, x[:4])]
        out = run(tuple(pair), edge_index)
        results.append([out, *torch.autograd.grad(out.cos().sum(), pair)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    assert number_of_regions(compiled) == 1 + STRUCTURE


def test_walks_of_the_gradient_are_shared():
    """One walk by source does it all; the forward has counted the ties of minimum and maximum."""
    model = SimpleConv(aggr=["sum", "mean", "max", "min", "std", "var"])
    x, edge_index = graph(next(iter(GRAPHS)))
    forward, backward = compare(model, gnncompile.compile(model, fullgraph=True), x, edge_index)
    assert [parse(spec).by for spec in backward] == [Space.SOURCE]
    (counts,) = {sum(n.op == "ties" for n in r.nodes) for r in map(parse, forward) if r.grid == (1, WIDTH)}
    assert counts == 2


def test_switch():
    model = SAGEConv(WIDTH, WIDTH, aggr=["mean", "max", "std"])
    compiled = gnncompile.compile(model, fullgraph=True, options={"siblings": False})
    compare(model, compiled, *graph(next(iter(GRAPHS))))
    assert number_of_regions(compiled) == 3 + STRUCTURE


def test_explain_says_what_a_walk_does():
    model = SAGEConv(WIDTH, WIDTH, aggr=["mean", "max", "std"])
    report = gnncompile.explain(model, *graph(next(iter(GRAPHS))))
    (region,) = [r for r in report.regions if "max" in r.what]
    assert region.what == f"2 sums, max of 1x{WIDTH} from source" and region.result.startswith("3 x (")
    assert region.program.count("over edges of") == 3


# -- what may be merged -------------------------------------------------------------------------------------------


def total(value: Tensor, col: Tensor, like: Tensor) -> Tensor:
    return scatter(value, col, 0, like.size(0), "sum")


def deviation(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """Two walks: the second reads what the first one gives."""
    mean = scatter(x[row], col, 0, x.size(0), "mean")
    return mean + scatter((x[row] - mean[col]) ** 2, col, 0, x.size(0), "mean")


def crossed(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """Two pairs that share rows; only one of them may be merged, or both would wait for each other."""
    y = x.sin()
    a, b = total(x[row], col, x), total(y[row], col, x)
    return total(x[row] * b[col], col, x) + total(y[row] * a[col], col, x)


def twice(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    mean = scatter(x[row], col, 0, x.size(0), "mean")
    square = scatter(x[row] * x[row], col, 0, x.size(0), "mean")
    return mean + (square - scatter(x[row].clone(), col, 0, x.size(0), "mean") ** 2)


def detached(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    with torch.no_grad():
        high = scatter(x[row], col, 0, x.size(0), "max")
    return total(x[row] * 2, col, x) * high


def written_to(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    a, b = total(x[row], col, x), total(x[row] * 1.0, col, x)
    a[0].mul_(3)
    return a + 2 * b


def attention_twice(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    alpha = softmax((x[row] * x[col]).sum(-1), col, num_nodes=x.size(0)).view(-1, 1)
    return total(alpha * x[row], col, x) + total(alpha * x[row].sin(), col, x) ** 2


def other_rows(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return total(x[row], col, x) * total(x.sin()[row], col, x)


def other_edges(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return total(x[row], col, x) * total(x[col], row, x)


def other_mode_of_rows(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return total(x[row], col, x) * total(F.dropout(x, 0.0)[row] * x[row], col, x)


PAIRS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "deviation": (deviation, 2),
    "crossed": (crossed, 3),
    "twice": (twice, 1),
    "another gradient mode": (detached, 2),
    "written to": (written_to, 2),
    "attention twice": (attention_twice, 1),
    "other rows": (other_rows, 2),
    "other edges": (other_edges, 2),
    "computed in between": (other_mode_of_rows, 1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_merged(name: str):
    fn, regions = PAIRS[name]
    found = check(fn, *data())
    assert found is not None and found.count("merge_sibling_regions", "gnncompile.region") == regions
    assert len(found.ctx.log.regions) == regions


class Branches(nn.Module):
    """Of two sums of the same rows only one has a gradient, and a walk is formed to read the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(2, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        row, col = edge_index.unbind(0)
        learned, fixed = total(x[row] * self.weigh(edge_attr), col, x), total(x[row], col, x)
        return learned + total(fixed[row], col, x)


@pytest.mark.parametrize("name", GRAPHS)
def test_what_has_no_gradient_beside_what_has_one(name: str):
    x, edge_index = graph(name)
    model = Branches()
    compiled = gnncompile.compile(copy.deepcopy(model))
    edge_attr = torch.randn(edge_index.size(1), 2)
    results, gradients = [], []
    for one in (compiled, model):
        results.append(one(x, edge_index, edge_attr))
        gradients.append(torch.autograd.grad(results[-1].square().sum(), list(one.parameters())))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)
    assert number_of_regions(compiled) == 2


def test_only_results_beside_a_gradient_are_parted_from_it(monkeypatch: pytest.MonkeyPatch):
    parted = look_at_graphs(
        monkeypatch, lambda g: g.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    )
    x, edge_index = graph("unsorted, duplicates, hub, isolated")
    layer = gnncompile.compile(SAGEConv(WIDTH, WIDTH, aggr=["mean", "max", "std"]))
    with torch.no_grad():
        layer(x.requires_grad_(), edge_index)
    layer(x.detach(), edge_index)
    layer(x, edge_index)
    assert not parted
    gnncompile.compile(Branches())(x.detach(), edge_index, torch.randn(edge_index.size(1), 2))
    assert len(parted) == 1


def test_equal_reductions_are_one_output():
    found = Traced(twice, *data())
    (record,) = found.ctx.log.regions
    region = parse(record.spec)
    assert [region.nodes[i].op for i in region.reductions] == ["reduce_sum", "reduce_sum"]


def test_random_numbers_are_not_drawn_earlier():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        first = total(x[row], col, x)
        return first * total(F.dropout(x, 0.5)[row] * x[row], col, x)

    assert Traced(fn, *data()).count("merge_sibling_regions", "gnncompile.region") == 2


def test_a_region_holds_so_many_reductions():
    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return torch.cat([total(x[row] + k, col, x) for k in range(MOST_REDUCTIONS + 2)], 1)

    found = check(fn, *data())
    assert found is not None and found.count("merge_sibling_regions", "gnncompile.region") == 2
    assert any("reductions" in skip.reason for skip in found.ctx.log.skipped)


# -- the gradient of a region with several results ----------------------------------------------------------------


def several() -> Region:
    """Sums, two of them of attention, maximum and minimum, over source rows, weights of edges and destination rows."""
    b = Builder(Space.DESTINATION)
    x = b.input(0, Space.SOURCE, (1, 3), "float64")
    w = b.input(1, Space.EDGE, (1, 1), "float64")
    y = b.input(2, Space.DESTINATION, (1, 3), "float64")
    message = b.op("add", x, y)
    alpha = b.softmax(b.sum_axis(b.op("mul", x, y), 1))
    summed = [(message, w), (message, message), (alpha, x), (alpha, message)]
    found = [b.reduce("sum", b.op("mul", *pair)) for pair in summed]
    found += [b.reduce("max", message), b.reduce("min", b.op("mul", x, w))]
    return with_residuals(b.finish([Output(v, "float64", (3,)) for v in found]))


ROW, COL = torch.tensor([0, 1, 2, 0, 3, 3, 1, 1]), torch.tensor([0, 0, 1, 0, 1, 3, 3, 3])


def in_torch(x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
    x_j, y_i, rows = x[ROW], y[COL], y.size(0)
    message, alpha = x_j + y_i, softmax((x_j * y_i).sum(-1), COL, num_nodes=rows).view(-1, 1)
    found = [scatter(v, COL, 0, rows, "sum") for v in (message * w, message * message, alpha * x_j, alpha * message)]
    return [*found, scatter(message, COL, 0, rows, "max"), scatter(x_j * w, COL, 0, rows, "min")]


def gradients(found: list[Tensor], given: tuple[bool, ...], leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.cos(torch.arange(15.0, dtype=torch.float64)).view(5, 3)
    sums = [(out * weight).sum() for out, g in zip(found, given, strict=True) if g and out.requires_grad]
    if not sums:
        return [torch.zeros_like(leaf) for leaf in leaves]
    made = torch.autograd.grad(sums, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, made, strict=True)]


def test_any_results_may_have_a_cotangent_and_any_inputs_a_gradient():
    generator = torch.Generator().manual_seed(0)
    shapes, shift = [(4, 3), (8, 1), (5, 3)], [0.25, 0.5, 0.0]
    tensors = [torch.randint(-2, 3, s, generator=generator).double() + k for s, k in zip(shapes, shift, strict=True)]
    edges = [*layout(COL, ROW, 5), *layout(ROW, COL, 4)]
    spec, count = several().spec, 6
    wanted = [w for w in itertools.product((True, False), repeat=3) if any(w)]
    for k, given in enumerate(g for g in itertools.product((True, False), repeat=count) if any(g)):
        leaves = [t.clone().requires_grad_(a) for t, a in zip(tensors, wanted[k % len(wanted)], strict=True)]
        found, expected = torch.ops.gnncompile.region(leaves, edges, spec)[:count], in_torch(*leaves)
        leaves = [t for t in leaves if t.requires_grad]
        torch.testing.assert_close(found, expected)
        with kernels("reference"):  # hundreds of backwards
            torch.testing.assert_close(gradients(found, given, leaves), gradients(expected, given, leaves))


class _MovedByAMerge(nn.Module):
    """The maximum and the softmax by source share a walk with a sum that reads a mean, so the mean moves before them.

    The mean may no longer share a walk with the weighted sum, which reads the softmax.
    """

    def forward(self, e: Tensor, edge_index: Tensor, n: int) -> tuple[Tensor, ...]:
        source, target = edge_index
        weighted = scatter(softmax(e, source, num_nodes=n) * softmax(e, target, num_nodes=n), target, 0, n, "sum")
        apart = e - scatter(e, target, 0, n, "mean")[target]
        variance = scatter(apart.square(), target, 0, n, "mean")
        return weighted, variance, scatter(apart, source, 0, n, "sum"), scatter(e, source, 0, n, "max")


@pytest.mark.parametrize("name", GRAPHS)
def test_calls_that_an_earlier_merge_has_moved(name: str):
    x, edge_index = graph(name)
    given = torch.randn(edge_index.size(1), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model, results = _MovedByAMerge(), []
    for run in (model, gnncompile.compile(model, fullgraph=True)):
        e = given.clone().requires_grad_()
        made = run(e, edge_index, x.size(0))
        results.append([*made, *torch.autograd.grad(sum((m * m).sum() for m in made), e)])
    torch.testing.assert_close(results[1], results[0])
