"""Structure per edge in the order of a walk: the same numbers as from the edge list, forward and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import scatter, softmax

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
import gnncompile.ops.region
from gnncompile.capture.compile import callable_of
from gnncompile.codegen.cpp.kernel import CppKernel
from gnncompile.ir import rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.printer import summary
from gnncompile.ir.reference import Layout, run
from gnncompile.ir.region import BOOL, Output, Region, Space, parse
from gnncompile.ir.residuals import with_residuals
from gnncompile.ir.verify import verify
from gnncompile.passes.pre_grad.permute_edge_data import WIDEST
from tests.graphs import EDGE_LISTS, layout
from tests.harness import kernels, launched, light
from tests.tracing import Traced, check, data

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device

D, S, E = Space.DESTINATION, Space.SOURCE, Space.EDGE


# -- regions ------------------------------------------------------------------------------------------------------


def weighted(b: Builder, dtype: str) -> list[Output]:
    """Two sums, with a weight per edge and one per edge and head."""
    x, y = b.input(0, b.by.opposite, (2, 3), dtype), b.input(1, b.by, (2, 3), dtype)
    w, v = b.input(2, E, (1, 1), dtype), b.input(3, E, (2, 1), dtype)
    message = b.op("mul", b.op("add", x, y), b.op("mul", w, v))
    return [Output(b.reduce("sum", b.op("mul", message, message)), dtype, (2, 3))]


def gated(b: Builder, dtype: str) -> list[Output]:
    """Edges that are switched off, a sum of what is left, and its messages stored per edge."""
    x, on = b.input(0, b.by.opposite, (1, 4), dtype), b.input(2, E, (1, 1), BOOL)
    w = b.input(3, E, (1, 4), dtype)
    message = b.op("mul", b.op("where", on, x, b.const(0.5)), b.op("add", w, b.input(1, b.by, (1, 4), dtype)))
    return [Output(b.reduce("sum", message), dtype, (4,)), Output(message, dtype, (4,))]


def attended(b: Builder, dtype: str) -> list[Output]:
    """Attention whose logits and values have structure in them; one input is read in both ways."""
    x, y = b.input(0, b.by.opposite, (2, 3), dtype), b.input(1, b.by, (2, 1), dtype)
    w, v = b.input(2, E, (1, 1), dtype), b.input(3, E, (1, 3), dtype)
    logits = b.op("add", b.sum_axis(b.op("mul", x, v), 1), b.op("mul", y, w))
    alpha = b.softmax(rules.leaky_relu(b, logits, 0.2))
    return [Output(b.reduce("sum", b.op("mul", alpha, b.op("add", x, w))), dtype, (2, 3))]


def summed_alone(b: Builder, dtype: str) -> list[Output]:
    """Nothing but structure, its channels summed."""
    v = b.input(3, E, (2, 3), dtype)
    return [Output(b.reduce("sum", v), dtype, (2, 3)), Output(b.reduce("max", b.sum_axis(v, 1)), dtype, (2,))]


PROGRAMS = {"weighted": weighted, "gated": gated, "attended": attended, "summed alone": summed_alone}


def region_of(name: str, by: Space = D, dtype: str = "float32") -> Region:
    b = Builder(by)
    return with_residuals(b.finish(PROGRAMS[name](b, dtype)))


def in_order(region: Region, tensors: list[Tensor], walk: Layout, back: Layout) -> tuple[Region, list[Tensor]]:
    """The region that reads its edge tensors by position, and the tensors that it takes."""
    nodes, spaces = [], {n.positions[0]: n.space for n in region.inputs}
    place, given = {}, []
    for k, tensor in enumerate(tensors):
        place[k] = len(given)
        given += [tensor[walk.edge.long()], tensor[back.edge.long()]] if spaces.get(k) is E else [tensor]
    for node in region.nodes:
        if node.op == "input":
            space = Space.ORDERED if node.space is E else node.space
            node = replace(node, value=place[node.positions[0]], space=space)
        nodes.append(node)
    made = replace(region, nodes=tuple(nodes))
    verify(made)
    assert parse(made.spec) == made
    return made, given


def walks(g: triton_regions.Graph) -> tuple[Layout, Layout]:
    return layout(g.row, g.col, g.num_rows, g.alive), layout(g.col, g.row, g.num_cols, g.alive)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("by", [D, S])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_read_the_same_numbers(name: str, by: Space, dtype: str, device: str):
    region = region_of(name, by, dtype)
    for on, g in triton_regions.GRAPHS.items():
        tensors = triton_regions.random_tensors(region, g)
        walk, back = walks(g)
        made, given = in_order(region, tensors, walk, back)
        assert all(torch.equal(a, b) for a, b in zip(run(made, given, walk), run(region, tensors, walk), strict=True))
        found = triton_regions.launch(made, given, g, device), triton_regions.launch(region, tensors, g, device)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), on
        compiled = []
        for one, inputs in ((made, given), (region, tensors)):
            rows = [g.row.numel() if one.per_edge(o) else g.num_rows for o in one.outputs]
            outputs = zip(rows, one.outputs, strict=True)
            compiled.append([torch.zeros(n, *o.trailing, dtype=getattr(torch, o.dtype)) for n, o in outputs])
            CppKernel(one)(inputs, walk, compiled[-1])
        assert all(torch.equal(a, b) for a, b in zip(*compiled, strict=True)), on


def test_several_rows_per_program(device: str):
    region, g = region_of("weighted"), triton_regions.MIXED
    tensors = triton_regions.random_tensors(region, g)
    made, given = in_order(region, tensors, *walks(g))
    tile = triton_regions.rows_tile(made)
    torch.testing.assert_close(
        triton_regions.launch(made, given, g, device, tile), run(region, tensors, g.layout("cpu"))
    )


@pytest.mark.parametrize("on", ["mixed", "no_edge", "one_loop", "all_masked"])
@pytest.mark.parametrize("name", ["weighted", "gated", "attended"])
def test_gradients_and_their_gradients(name: str, on: str):
    """A walk by the other end reads the other order, and a gradient's gradient the first one again."""
    region, g = region_of(name, dtype="float64"), triton_regions.GRAPHS[on]
    walk, back = walks(g)
    tensors = triton_regions.random_tensors(region, g)
    made, given = in_order(region, tensors, walk, back)
    count = len(PROGRAMS[name](Builder(D), "float64"))

    def outputs(which: Region, rest: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return tuple(torch.ops.gnncompile.region([x, y, *rest], [*walk, *back], which.spec)[:count])

        return fn

    results = []
    with kernels("reference"):
        for which, inputs in ((made, given), (region, tensors)):
            leaves = [t.clone().requires_grad_() for t in tensors[:2]]
            out = outputs(which, inputs[2:])(*leaves)
            first = torch.autograd.grad(sum(o.sin().sum() for o in out), leaves, create_graph=True)
            second = torch.autograd.grad(sum(f.cos().sum() for f in first), leaves, allow_unused=True)
            results.append([*out, *first, *(s for s in second if s is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# -- the pass -----------------------------------------------------------------------------------------------------


def degree(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return scatter(torch.ones(row.numel()), col, 0, x.size(0), "sum").clamp(min=1)


def normalised(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    norm = degree(x, row, col).rsqrt()
    weight = (norm[row] * norm[col]).view(-1, 1)
    for _ in range(2):
        x = scatter(x[row] * weight, col, 0, x.size(0), "sum")
    return x


def two_walks_of_one(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """Reductions that are merged, and so are their gradients."""
    weight = degree(x, row, col)[row].view(-1, 1)
    return scatter(x[row] * weight, col, 0, x.size(0), "sum") + scatter(x[row] / weight, col, 0, x.size(0), "max")


def biased_attention(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    bias = degree(x, row, col).log()[row]
    alpha = softmax(F.leaky_relu(x[row].sum(-1) + x[col].sum(-1)) + bias, col, num_nodes=x.size(0))
    return scatter(x[row] * alpha.view(-1, 1), col, 0, x.size(0), "sum")


def given_weight(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """What is computed from features changes in every step."""
    return scatter(x[row] * x.sum().expand(row.numel(), 1).clone().cumsum(0), col, 0, x.size(0), "sum")


def wide_structure(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
    one_hot = F.one_hot(row % 4, 2 * WIDEST).to(x.dtype)
    return scatter(x[row].repeat(1, WIDEST // 2) * one_hot, col, 0, x.size(0), "sum")


CASES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = {
    "normalised": (normalised, 2),
    "two walks of one": (two_walks_of_one, 1),
    "biased attention": (biased_attention, 1),
    "computed in the step": (given_weight, 0),
    "wide": (wide_structure, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_which_inputs_are_put_in_order(name: str):
    fn, regions = CASES[name]
    with light():
        found = check(fn, *data())
        assert found is not None
        specs = [parse(r.spec) for r in found.ctx.log.regions]
        assert sum(any(n.space is Space.ORDERED for n in r.inputs) for r in specs) == regions
        assert found.count("hoist_structure", "index_select") == 0 or regions == 0
        off = Traced(fn, *data(), hoist=False)
        assert not any(n.space is Space.ORDERED for r in off.ctx.log.regions for n in parse(r.spec).inputs)


def test_layers_share_what_is_in_order():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([GCNConv(4, 5), GCNConv(5, 3)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    torch.manual_seed(0)
    model = Net()
    x, row, col = data()
    with light("cpp"), launched() as specs:
        compiled = gnncompile.compile(model)
        for nodes, edge_index in ((6, torch.stack([row, col])), (1, torch.zeros(2, 0, dtype=torch.long))):
            results = []
            for either in (compiled, model):
                leaf = x[:nodes].clone().requires_grad_()
                out = either(leaf, edge_index)
                results.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *model.parameters()])])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b)
        program = callable_of(compiled)
        assert program is not None
        (captured,) = program.backend.captured
        # the layouts of two walks, and the norms in the order of each
        assert len(captured.structure.program.results) == 8
    walks_of_rows = [parse(s) for s in specs if parse(s).grid == (1, 4)]
    assert {r.by for r in walks_of_rows} == {D, S}
    assert all("ordered edge" in summary(r) for r in walks_of_rows)


class Featured(nn.Module):
    """Sums neighbours and layers of the features of edges, in several steps."""

    def __init__(self, steps: int, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, 40) for _ in range(steps))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, other: Tensor | None = None) -> Tensor:
        """Every second step takes the other edges, if they are given."""
        for k, layer in enumerate(self.layers):
            source, destination = edge_index if other is None or k % 2 == 0 else other
            message = (x[source] + layer(e)).relu()
            x = x.new_zeros(x.shape).index_add(0, destination, message)
        return x


def orders(model: nn.Module, *given: Tensor) -> list[bool]:
    """Returns whether a region reads features of edges in the order of its walk, for each layer of the features."""
    found = []
    with launched() as specs:
        gnncompile.compile(model)(*given).sum().backward()
    for spec in dict.fromkeys(specs):
        region = parse(spec)
        layers = [node for node in region.nodes if node.op in ("linear", "outer")]
        read = [region.nodes[layer.args[0]] for layer in layers]
        found += [node.space is Space.ORDERED for node in read if node.op == "input"]
    return found


@pytest.mark.parametrize("edges", EDGE_LISTS)
@pytest.mark.parametrize("features", [6, 20])
def test_features_of_layers(edges: str, features: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    torch.manual_seed(0)
    edge_index = EDGE_LISTS[edges].to(device)
    e = torch.randn(edge_index.size(1), features, dtype=torch.float64, device=device)
    model = Featured(2, features).to(device, torch.float64)
    x = torch.randn(5, 40, dtype=torch.float64, device=device, requires_grad=True)
    other = copy.deepcopy(model)
    compiled = gnncompile.compile(other)
    found = []
    for called, parameters in ((model, model.parameters()), (compiled, other.parameters())):
        x.grad = None
        out = called(x, edge_index, e)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in parameters)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps, needs_grad, ordered", [(2, False, True), (1, False, False), (2, True, False)], ids=str)
def test_which_features_are_in_order(
    steps: int, needs_grad: bool, ordered: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader alone would not pay for the copies; features with a gradient are layers of their own."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    torch._dynamo.reset()
    edge_index = EDGE_LISTS["unsorted, duplicates, hub"].to(device)
    e = torch.randn(edge_index.size(1), 8, device=device, requires_grad=needs_grad)
    model, x = Featured(steps, 8).to(device), torch.randn(5, 40, device=device)
    with torch._inductor.config.patch(force_disable_caches=True):
        found = orders(model, x, edge_index, e)
    assert (True in found) == ordered and (False in found) == (steps == 1)


def test_features_of_two_graphs_are_left(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk would have copies of its own, with one reader."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    torch._dynamo.reset()
    edge_index = EDGE_LISTS["unsorted, duplicates, hub"].to(device)
    e, x = torch.randn(edge_index.size(1), 8, device=device), torch.randn(5, 40, device=device)
    with torch._inductor.config.patch(force_disable_caches=True):
        found = orders(Featured(2, 8).to(device), x, edge_index, e, edge_index.flip(1).roll(1, 1))
    assert found and True not in found
