"""PyG's own models with default options: outputs and all gradients equal eager's, with one graph for every size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE
from torch_geometric.utils import scatter

import gnncompile
from gnncompile import _compat
from gnncompile.capture.compile import callable_of
from gnncompile.runtime import launch
from tests.harness import kernels, light, needs_interpreter

SIZES = [(12, 40), (17, 61), (7, 0), (1, 1), (1, 0), (64, 64), (500, 4000)]
CHANNELS, CLASSES = 5, 3
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCN(CHANNELS, 8, 3, CLASSES),
    "GraphSAGE": lambda: GraphSAGE(CHANNELS, 8, 3, CLASSES),
    "GraphSAGE max": lambda: GraphSAGE(CHANNELS, 8, 3, CLASSES, aggr="max"),
    "GIN": lambda: GIN(CHANNELS, 8, 3, CLASSES),
    "GAT": lambda: GAT(CHANNELS, 8, 3, CLASSES, heads=2),
}


def graph(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    """Random features and edges, with self loops and duplicates where there is room."""
    generator = torch.Generator().manual_seed(nodes + edges)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    if edges >= 4:
        edge_index[:, 1] = edge_index[:, 0]
        edge_index[0, 2:4] = edge_index[1, 2:4]
    return torch.randn(nodes, CHANNELS, generator=generator), edge_index


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def compare(
    compiled: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **tol: float
) -> None:
    """Output and gradients of all parameters and float inputs against the eager model in float64."""
    kwargs = kwargs or {}
    exact = copy.deepcopy(model).double()
    model.zero_grad(), exact.zero_grad()
    exact_args, exact_kwargs = pytree.tree_map(doubled, (args, kwargs))
    found, expected = compiled(*args, **kwargs), exact(*exact_args, **exact_kwargs)
    limits = {"rtol": 2e-5, "atol": 2e-5, **tol}
    torch.testing.assert_close(found.double(), expected, **limits)
    if not found.requires_grad:
        return
    weight = torch.cos(torch.arange(expected.numel(), device=expected.device).double()).view_as(expected)
    (found * weight).sum().backward(), (expected * weight).sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
    ours, theirs = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves((exact_args, exact_kwargs))
    pairs += [(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True) if isinstance(a, Tensor) and a.requires_grad]
    for a, b in pairs:
        if b is None:
            assert a is None  # a parameter that the model does not use
            continue
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double() / scale, b / scale, rtol=0, atol=5 * limits["atol"])


def captured(compiled: Any) -> int:
    return len(callable_of(compiled).backend.captured)


# -- the four models, all sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", *(pytest.param(w, marks=pytest.mark.gpu) for w in ("cuda", "cuda float64"))])
@pytest.mark.parametrize("name", MODELS)
def test_training_at_all_sizes_in_one_graph(name: str, where: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    device, *double = where.split()
    kind = torch.float64 if double else torch.float32
    model = MODELS[name]().to(device, kind)

    def graph_there(nodes: int, edges: int) -> tuple[Tensor, Tensor]:
        x, edge_index = graph(nodes, edges)
        return x.to(device, kind), edge_index.to(device)

    compiled = gnncompile.compile(model, fullgraph=True)
    breaks = _compat.graph_breaks()
    frames = _compat.counters()["stats"]["unique_graphs"]
    compare(compiled, model, graph_there(*SIZES[0]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for size in SIZES[1:]:
            compare(compiled, model, graph_there(*size))
    assert captured(compiled) == 1 and _compat.counters()["stats"]["unique_graphs"] == frames + 1
    assert _compat.graph_breaks() == breaks
    (one,) = callable_of(compiled).backend.captured
    assert len(one.log.regions) >= 3 and one.log.skipped == [] and callable_of(compiled).backend.notes == []
    assert launch.fallbacks == {}


@pytest.mark.parametrize("name", MODELS)
def test_gradient_of_the_features(name: str):
    torch.manual_seed(0)
    model = MODELS[name]()
    with light("cpp"):
        compiled = gnncompile.compile(model, fullgraph=True)
        for size in SIZES:
            x, edge_index = graph(*size)
            compare(compiled, model, (x.requires_grad_(), edge_index))
        assert captured(compiled) == 1


@pytest.mark.parametrize("name", ["GCN", "GAT", "GraphSAGE max"])
def test_triton_kernels(name: str, device: str):
    needs_interpreter("triton", device)
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    with light("triton"):
        compiled = gnncompile.compile(model, fullgraph=True)
        for size in [(7, 20), (1, 0)]:
            x, edge_index = (t.to(device) for t in graph(*size))
            compare(compiled, model, (x.requires_grad_(), edge_index))
        assert captured(compiled) == 1 and launch.fallbacks == {}


# -- other inputs -------------------------------------------------------------------------------------------------


@pytest.fixture
def _light() -> Iterator[None]:
    with light():
        yield


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(CHANNELS, 4), GCNConv(4, CLASSES)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index, edge_weight).relu(), edge_index, edge_weight)


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("wanted", [False, True])
def test_gcn_with_edge_weights(wanted: bool):
    """Self loops with a weight of their own included: it moves to the loop that GCN adds."""
    model = Weighted()
    compiled = gnncompile.compile(model, fullgraph=True)
    for size in [(12, 40), (7, 0), (30, 9)]:
        x, edge_index = graph(*size)
        edge_weight = torch.rand(size[1]) + 0.1
        compare(compiled, model, (x, edge_index, edge_weight.requires_grad_(wanted)))
    assert captured(compiled) == 1


@pytest.mark.usefixtures("_light")
def test_gat_with_edge_features():
    model = GATConv(CHANNELS, 4, heads=2, edge_dim=3)
    compiled = gnncompile.compile(model, fullgraph=True)
    for size in [(12, 40), (7, 0), (30, 9)]:
        x, edge_index = graph(*size)
        compare(compiled, model, (x, edge_index, torch.randn(size[1], 3).requires_grad_()))
    assert captured(compiled) == 1


@pytest.mark.usefixtures("_light")
def test_layouts_and_types_of_the_edge_list():
    model = GCN(CHANNELS, 4, 2, CLASSES)
    compiled = gnncompile.compile(model, fullgraph=True)
    x, edge_index = graph(12, 40)
    for view in (
        edge_index,
        edge_index[:, ::2],
        edge_index.t().contiguous().t(),
        edge_index.flip(0),
        edge_index[:, 5:9],
    ):
        compare(compiled, model, (x, view))
    assert captured(compiled) == 1
    torch.testing.assert_close(compiled(x, edge_index.int()), model(x, edge_index), rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_bipartite(aggr: str):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv((CHANNELS, 2), CLASSES, aggr=aggr)

        def forward(self, x_src: Tensor, x_dst: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv((x_src, x_dst), edge_index)

    model = Two()
    compiled = gnncompile.compile(model, fullgraph=True)
    for sources, destinations, edges in [(9, 4, 30), (3, 8, 10), (1, 1, 0)]:
        edge_index = torch.stack([torch.randint(sources, (edges,)), torch.randint(destinations, (edges,))])
        x_src, x_dst = torch.randn(sources, CHANNELS), torch.randn(destinations, 2)
        compare(compiled, model, (x_src.requires_grad_(), x_dst.requires_grad_(), edge_index))
    assert captured(compiled) == 1


class Extrema(nn.Module):
    """The least and the greatest neighbour, and the greatest of each half of the nodes."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, destination = edge_index
        found = [scatter(x[source], destination, 0, x.size(0), kind) for kind in ("min", "max")]
        batch = torch.arange(x.size(0), device=x.device) * 2 // max(x.size(0), 1)
        return torch.cat([*found, global_max_pool(x, batch, 2)])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("numbers", [(-1.0, 0.0), (0.0, 1.0), (-1.0, 1.0)])
def test_ties_of_features_that_are_zero(numbers: tuple[float, float], device: str):
    """Of ones that are not set, say: in eager the zero that the result began with takes a share of the gradient."""
    model = Extrema()
    compiled = gnncompile.compile(model, fullgraph=True)
    for nodes, edges in SIZES:
        x, edge_index = graph(nodes, edges)
        x = torch.where(x > 0, *numbers).to(device).requires_grad_()
        compare(compiled, model, (x, edge_index.to(device)))


@pytest.mark.usefixtures("_light")
def test_tuple_input():
    model = SAGEConv((CHANNELS, 2), CLASSES)
    compiled = gnncompile.compile(model, fullgraph=True)
    args = (
        (torch.randn(9, CHANNELS), torch.randn(4, 2)),
        torch.stack([torch.randint(9, (20,)), torch.randint(4, (20,))]),
    )
    torch.testing.assert_close(compiled(*args), model(*args), rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("_light")
def test_eval_and_no_grad():
    model = GAT(CHANNELS, 4, 2, CLASSES, dropout=0.5)
    compiled = gnncompile.compile(model, fullgraph=True).eval()
    with torch.no_grad():
        for size in SIZES[:4]:
            compare(compiled, model, graph(*size))
    with torch.inference_mode():
        compare(compiled, model, graph(*SIZES[1]))
    compare(compiled, model, graph(*SIZES[0]))


@pytest.mark.usefixtures("_light")
def test_dropout_in_training_is_random():
    model = GCN(CHANNELS, 8, 2, CLASSES, dropout=0.5)
    compiled = gnncompile.compile(model, fullgraph=True)
    x, edge_index = graph(12, 40)
    assert not torch.equal(compiled(x, edge_index), compiled(x, edge_index))


@pytest.mark.usefixtures("_light")
def test_attention_weights_are_returned():
    """The edges with self loops removed are wanted themselves: one graph returns them for all sizes."""
    model = GATConv(CHANNELS, 4, heads=2)
    compiled = gnncompile.compile(model)
    for size in [(12, 40), (7, 0), (9, 20)]:
        x, edge_index = graph(*size)
        out, (edges, alpha) = compiled(x, edge_index, return_attention_weights=True)
        expected, (expected_edges, expected_alpha) = model(x, edge_index, return_attention_weights=True)
        assert torch.equal(edges, expected_edges)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(alpha, expected_alpha, rtol=2e-5, atol=2e-5)
    assert len(callable_of(compiled).backend.captured) == 1 and not callable_of(compiled).backend.notes


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(CHANNELS, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.conv, self.lin = GINConv(mlp), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.conv(x, edge_index).relu()
        return self.lin(
            torch.cat([pool(x, batch) for pool in (global_add_pool, global_mean_pool, global_max_pool)], -1)
        )


def mini_batch(graphs: int) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.randint(2, 9, (graphs,))
    nodes = int(counts.sum())
    batch = torch.repeat_interleave(torch.arange(graphs), counts)
    return torch.randn(nodes, CHANNELS), torch.randint(nodes, (2, 3 * nodes)), batch


def test_pooling_without_a_size():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Pooling()
    compiled = gnncompile.compile(model, fullgraph=True)
    with kernels("reference"):
        for graphs in (5, 3, 8, 1):
            before = copy.deepcopy(model.state_dict())
            args = mini_batch(graphs)
            exact = copy.deepcopy(model)
            out, expected = compiled(*args), exact(*args)
            torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-5)
            # Running statistics are updated as well, once.
            for key, value in exact.state_dict().items():
                torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-5)
            assert int(model.conv.nn[1].num_batches_tracked) == int(before["conv.nn.1.num_batches_tracked"]) + 1
            model.zero_grad()
            out.square().sum().backward(), expected.square().sum().backward()
            for p, q in zip(model.parameters(), exact.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3)
    assert captured(compiled) == 1
    assert callable_of(compiled).derived.wanted == {"args[2]"} and callable_of(compiled).derived.looks == 4


def test_results_are_repeatable_to_the_bit():
    torch.manual_seed(0)
    model = GAT(CHANNELS, 8, 2, CLASSES)
    x, edge_index = graph(500, 4000)
    with light("cpp"):
        compiled = gnncompile.compile(model, fullgraph=True)
        runs = []
        for _ in range(3):
            model.zero_grad()
            out = compiled(x, edge_index)
            out.sum().backward()
            runs.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_assignment_to_a_slice():
    """Inductor itself takes part, under gnncompile's settings for symbolic sizes."""
    torch._dynamo.reset()

    def fn(x: Tensor) -> Tensor:
        x = x * 1
        x[:3] = 0.0
        return x

    torch.testing.assert_close(gnncompile.compile(fn)(torch.ones(6, 2)), fn(torch.ones(6, 2)))


@pytest.mark.parametrize("name, calls", [("GCN", 5), ("GraphSAGE", 5), ("GIN", 5), ("GAT", 6)])
def test_walks_of_a_training_step(name: str, calls: int, monkeypatch: pytest.MonkeyPatch):
    """A walk for every layer and one for its gradient; features without a gradient save one where they are gathered."""
    torch.manual_seed(0)
    compiled = gnncompile.compile(MODELS[name]())
    x, edge_index = torch.randn(40, CHANNELS), torch.randint(40, (2, 200))
    compiled(x, edge_index).sum().backward()
    walked: list[str] = []
    inner = launch.kernel
    monkeypatch.setattr(launch, "kernel", lambda spec, device: walked.append(spec) or inner(spec, device))
    compiled(x, edge_index).sum().backward()
    assert len(walked) == calls
