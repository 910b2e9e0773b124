"""PyG's hooks on message passing run and count, wherever the layer stands and whenever they come and go."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, GCNConv, MessagePassing, RGCNConv, SAGEConv, to_hetero_with_bases

import gnncompile
from gnncompile import testing
from gnncompile.capture.compile import callable_of
from tests.harness import light

STEPS = ("propagate", "message", "aggregate", "edge_update")
WHEN = ("forward", "forward_pre")


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(16, 8), GATConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SAGEConv(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.first(x, edge_index).relu()


class Around(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net(x, edge_index).sin()


def doubled(value: Any) -> Any:
    """All floating-point numbers that a hook is given, times two; the destinations of messages in reverse order."""
    if isinstance(value, Tensor):
        return value * 2 if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: one.flip(0) if name == "index" else doubled(one) for name, one in value.items()}
    return type(value)(doubled(one) for one in value) if type(value) in (tuple, list) else value


def register(layer: MessagePassing, step: str, when: str) -> Any:
    """Registers a hook that doubles what it is given."""
    hook = (lambda _, given: doubled(given)) if when == "forward_pre" else (lambda _, given, out: doubled(out))
    return getattr(layer, f"register_{step}_{when}_hook")(hook)


def is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point()


def assert_as_eager(model: Any, compiled: Callable[..., Any], *args: Any) -> Tensor:
    """Results and all gradients of what is compiled are the model's; returns the result."""
    found = []
    for run in (model, compiled):
        given = [a.clone().requires_grad_() if is_differentiable(a) else a for a in args]
        torch.manual_seed(0)
        out = run(*given)
        wanted = [a for a in given if is_differentiable(a)]
        wanted += list(model.parameters()) if isinstance(model, nn.Module) else []
        gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), wanted, allow_unused=True)
        found.append((out.detach(), *gradients))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    return found[0][0]


def captures(compiled: Any) -> int:
    program = callable_of(compiled)
    assert program is not None
    return len(program.backend.captured)


def test_hooks_come_and_go() -> None:
    """Of every kind, on one compiled model, which is captured once."""
    model = Net()
    compiled = gnncompile.compile(model)
    graph = testing.uniform(12, 40)
    plain = assert_as_eager(model, compiled, graph.x, graph.edge_index)
    for step, when in itertools.product(STEPS, WHEN):
        handle = register(model.second if step == "edge_update" else model.first, step, when)
        hooked = assert_as_eager(model, compiled, graph.x, graph.edge_index)
        assert not torch.allclose(hooked, plain), (step, when)
        handle.remove()
        torch.testing.assert_close(assert_as_eager(model, compiled, graph.x, graph.edge_index), plain)
    assert captures(compiled) == 1


def test_hooks_of_message_and_aggregate() -> None:
    model = SAGEConv(16, 8)
    compiled = gnncompile.compile(model)
    x, edge_index = torch.randn(12, 16), torch.randint(12, (2, 40))
    adj = torch.sparse_coo_tensor(edge_index, torch.ones(40), (12, 12)).coalesce().to_sparse_csr()
    plain = assert_as_eager(model, compiled, x, adj)
    for when in WHEN:
        handle = register(model, "message_and_aggregate", when)
        assert not torch.allclose(assert_as_eager(model, compiled, x, adj), plain), when
        handle.remove()


@pytest.mark.parametrize("name", testing.awkward())
def test_awkward_graphs(name: str) -> None:
    graph: Any = testing.awkward()[name]
    if isinstance(graph, HeteroData):
        (edges,) = graph.edge_types
        sides, edge_index = (graph[edges[0]].x, graph[edges[2]].x), graph[edges].edge_index
        layer = GATConv((16, 16), 8, add_self_loops=False)
        register(layer, "message", "forward")

        def run(*sides: Tensor) -> Any:
            return layer(sides, edge_index)

        assert_as_eager(run, gnncompile.compile(run), *sides)
        return
    model = Net()
    register(model.first, "message", "forward")
    register(model.second, "aggregate", "forward_pre")
    assert_as_eager(model, gnncompile.compile(model), graph.x, graph.edge_index)


def test_it_is_said_and_explained() -> None:
    model = Net()
    compiled = gnncompile.compile(model)
    graph = testing.uniform(12, 40)
    calls = []
    model.second.register_message_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning) as said:
        compiled(graph.x, graph.edge_index)
    assert len(said) == 1 and said[0].filename == __file__
    text = str(said[0].message)
    assert "second (GATConv) has a hook of register_message_forward_hook" in text and "run uncompiled" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(graph.x, graph.edge_index)
    assert len(calls) == 2 and captures(compiled) == 0
    with pytest.warns(UserWarning):
        report = gnncompile.explain(compiled, graph.x, graph.edge_index)
    assert any("register_message_forward_hook" in skip.reason for skip in report.skipped)


def test_a_compiled_model_in_a_compiled_model() -> None:
    inner = gnncompile.compile(Small())
    outer = Around(inner)
    compiled = gnncompile.compile(outer)
    graph = testing.uniform(12, 40)
    plain = assert_as_eager(outer, compiled, graph.x, graph.edge_index)
    handle = register(inner.first, "message", "forward")
    with pytest.warns(UserWarning, match=r"net\.first \(SAGEConv\)"):
        assert not torch.allclose(assert_as_eager(outer, compiled, graph.x, graph.edge_index), plain)
    handle.remove()
    assert_as_eager(outer, compiled, graph.x, graph.edge_index)
    assert captures(compiled) == 1


def test_a_layer_that_was_put_in_later() -> None:
    model = Small()
    compiled = gnncompile.compile(model)
    graph = testing.uniform(12, 40)
    assert_as_eager(model, compiled, graph.x, graph.edge_index)
    model.first = SAGEConv(16, 4)
    plain = assert_as_eager(model, compiled, graph.x, graph.edge_index)
    register(model.first, "message", "forward")
    assert not torch.allclose(assert_as_eager(model, compiled, graph.x, graph.edge_index), plain)


@pytest.mark.parametrize("kind", [GCNConv, RGCNConv])
def test_layers_of_no_module(kind: type[MessagePassing]) -> None:
    """A layer is an argument, or stands in a list: only a trace finds it."""
    layers = [kind(16, 8, *[2] * (kind is RGCNConv)) for _ in range(2)]
    graph = testing.uniform(12, 40)
    types = (torch.arange(40) % 2,) if kind is RGCNConv else ()

    def run(layer: Any, x: Tensor, edge_index: Tensor, *types: Tensor) -> Tensor:
        return layer(x, edge_index, *types).relu()

    compiled = gnncompile.compile(run)
    for layer in layers:
        plain = run(layer, graph.x, graph.edge_index, *types)
        for _ in range(2):
            torch.testing.assert_close(compiled(layer, graph.x, graph.edge_index, *types), plain)
            handle = register(layer, "message", "forward")
            hooked = run(layer, graph.x, graph.edge_index, *types)
            assert not torch.allclose(hooked, plain)
            torch.testing.assert_close(compiled(layer, graph.x, graph.edge_index, *types), hooked)
            handle.remove()
    before = captures(compiled)
    for layer in layers:
        compiled(layer, graph.x, graph.edge_index, *types)
    assert captures(compiled) == before


def test_train_step() -> None:
    graph = testing.uniform(12, 40)
    target = torch.randn(12, 4)
    plain = Small()
    ours = copy.deepcopy(plain)
    step = gnncompile.TrainStep(ours, nn.functional.mse_loss, torch.optim.SGD(ours.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    handles: list[Any] = []
    for at in range(9):
        if at % 4 == 2:
            handles = [register(model.first, "message", "forward") for model in (plain, ours)]
        elif at % 4 == 0:
            for handle in handles:
                handle.remove()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(graph.x, graph.edge_index), target)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(graph.x, graph.edge_index, target=target), loss.detach())
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_to_hetero_with_bases() -> None:
    """It weights the messages of each type of edges by hooks."""
    torch.manual_seed(0)
    types = [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")]
    edges = {kind: torch.randint(10, (2, 20)) for kind in types}
    x = {"a": torch.randn(10, 16), "b": torch.randn(10, 16)}

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SAGEConv((16, 16), 8), SAGEConv((8, 8), 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    model = to_hetero_with_bases(Layers(), (["a", "b"], types), num_bases=3, in_channels={"x": 16})
    model(x, edges)  # gives parameters their shapes

    def total(run: Any) -> Callable[[], Tensor]:
        return lambda: torch.cat(list(run(x, edges).values())).sin()

    compiled = gnncompile.compile(model)
    found = []
    for run in (model, compiled):
        loss = total(run)().sum()
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
