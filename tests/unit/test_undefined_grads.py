"""Results that nobody differentiates: gradients that eager leaves None are None, which optimizers tell from zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv

import gnncompile
from gnncompile.capture.compile import callable_of

RESULTS = ("left", "right", "both", "right", "none of the heads")


class Heads(nn.Module):
    """Normalisation with statistics, and two heads; what is before them is a result too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = GCNConv(6, 8), nn.BatchNorm1d(8)
        self.left, self.right = nn.Linear(8, 3), GATConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        h = self.norm(self.first(x, edge_index)).relu()
        return self.left(h), self.right(h, edge_index), h, x.size(0)


def graph(device: str, nodes: int = 12, edges: int = 40) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, 6, generator=made, dtype=torch.float64)
    return x.to(device), torch.randint(nodes, (2, edges), generator=made).to(device)


def pair(device: str, **settings: Any) -> tuple[Heads, Any]:
    torch.manual_seed(0)
    eager = Heads().double().to(device)
    options = {"inductor": device != "cpu"}
    return eager, gnncompile.compile(copy.deepcopy(eager), options=options, **settings)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Moves what has a gradient of zero on."""
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=0.1)


def loss(results: Any, which: str) -> Tensor:
    left, right, h, _ = results
    wanted = {"left": [left], "right": [right], "both": [left, right]}.get(which, [h])
    return sum((one * one).sum() for one in wanted)  # type: ignore[return-value]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("of_features", [False, True])
def test_heads_in_turn(device: str, recording: None, mode: str | None, of_features: bool) -> None:
    eager, model = pair(device, mode=mode)
    optimizers = [sgd(eager), sgd(model)]
    x, edge_index = graph(device)
    x.requires_grad_(of_features)
    for k in range(10):
        left_out = []
        for m, optimizer in zip((eager, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss(m(x, edge_index), RESULTS[k % 5]).backward()
            left_out.append([name for name, p in m.named_parameters() if p.grad is None])
            optimizer.step()
        assert left_out[1] == left_out[0] and bool(left_out[0]) == (RESULTS[k % 5] != "both")
        same(model.state_dict(), eager.state_dict())
    assert len(callable_of(model).backend.captured) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [(1, 0), (5, 0), (1, 3)])
def test_small_graphs(device: str, size: tuple[int, int]) -> None:
    eager, model = pair(device)
    for m in (eager.eval(), model.eval()):
        loss(m(*graph(device, *size)), "left").backward()
    found, expected = ([p.grad for p in m.parameters()] for m in (model, eager))
    assert [g is None for g in found] == [g is None for g in expected]
    same([g for g in found if g is not None], [g for g in expected if g is not None])


def test_hooks_are_not_called_with_none(device: str) -> None:
    _, model = pair(device)
    seen: list[Tensor] = []
    model.left.weight.register_hook(lambda gradient: seen.append(gradient.abs().sum()))
    loss(model(*graph(device)), "right").backward()
    assert model.left.bias.grad is None and all(float(s) == 0 for s in seen)


def test_a_step_with_a_further_loss(device: str, recording: None) -> None:
    eager, model = pair(device)
    x, edge_index = graph(device)

    def both(results: Any, _: Any) -> tuple[Tensor, Tensor]:
        return loss(results, "right"), loss(results, "left")

    optimizer = sgd(eager)
    step = gnncompile.TrainStep(model, both, sgd(model), options={"inductor": device != "cpu"})
    before = eager.left.weight.detach().clone()
    for _ in range(6):
        optimizer.zero_grad()
        expected = both(eager(x, edge_index), None)
        expected[0].backward()
        optimizer.step()
        same(step(x, edge_index), tuple(e.detach() for e in expected))
        same(model.state_dict(), eager.state_dict())
    assert torch.equal(model.left.weight, before) and model.left.weight.grad is None


class Keeps(nn.Module):
    """A running mean that carries its history, as those of PyG's InstanceNorm do; and what comes from it."""

    mean: Tensor

    def __init__(self, beside: str = "nothing") -> None:
        super().__init__()
        self.beside = beside
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.largest = nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
        if self.beside == "a write without a gradient":
            self.largest.mul_(0.5).add_(h.detach().abs().sum(0), alpha=0.1)
        summed = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        beside = {"a view of an input": x[:, :2], "an input": x, "a view of a result": summed.view(-1, 2, 3)}
        return (summed, beside[self.beside]) if self.beside in beside else (summed,)


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize(
    "beside", ["nothing", "an input", "a view of an input", "a view of a result", "a write without a gradient"]
)
def test_a_model_keeps_a_result_with_its_history(device: str, through: bool, beside: str) -> None:
    """Each call's backward is its own; where the kept result is differentiated, the calls before are gone through."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Keeps(beside).double().to(device)
    ours = copy.deepcopy(eager)
    compiled = gnncompile.compile(ours, options={"inductor": device != "cpu"})
    for sizes in ((12, 40), (7, 0), (1, 0), (5, 9)):
        x, edge_index = graph(device, *sizes)
        for model, run in ((eager, eager), (ours, compiled)):
            model.zero_grad()
            given = x.clone().requires_grad_() * 1  # has a history of its own, as what a layer makes
            total = torch.stack([result.square().sum() for result in run(given, edge_index)]).sum()
            if through:
                total.backward(retain_graph=True)
                model.mean.square().sum().backward(retain_graph=True)
            else:
                total.backward()
        same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
        same(ours.mean, eager.mean)


class Twice(nn.Module):
    """Two states with one history, which the next call reads; with a graph break, within a call too."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.linear = nn.Linear(6, 6)
        self.first, self.second = nn.Buffer(torch.zeros(6)), nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) + self.first * self.second
        self.first, self.second = h.mean(0).sin(), h.sum(0).cos()
        if self.breaks:
            torch._dynamo.graph_break()
        return h * self.first + self.second


@pytest.mark.parametrize("breaks", [False, True])
def test_states_with_a_history_in_common(device: str, breaks: bool) -> None:
    """The backward of several calls at once runs through what both states come from, and once only."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Twice(breaks).double().to(device)
    ours = copy.deepcopy(eager)
    compiled = gnncompile.compile(ours, options={"inductor": device != "cpu"})
    for sizes in ((12, 40), (1, 0), (5, 9)):
        rows = [graph(device, *sizes)[0], graph(device, *sizes)[0].flip(0)]
        for model, run in ((eager, eager), (ours, compiled)):
            model.zero_grad()
            model.first, model.second = model.first.detach(), model.second.detach()
            sum(run(x).square().sum() for x in rows).backward()  # type: ignore[union-attr]
        same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
        same([ours.first, ours.second], [eager.first, eager.second])


class Detached(nn.Module):
    """A layer whose result another result, and what the model writes, read without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), GCNConv(6, 6)
        self.seen, self.count = nn.Buffer(torch.zeros(6)), nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, ...]:
        h = self.left(x)
        with torch.no_grad():
            self.seen.mul_(0.5).add_(h.sum(0), alpha=0.1)
            gate = h.sigmoid()
        self.count.add_((h > 0).sum(0))
        return h, self.right(x, edge_index) * gate + h.detach(), gate


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_read_without_a_gradient(device: str, which: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Detached().double().to(device)
    ours = copy.deepcopy(eager)
    compiled = gnncompile.compile(ours, options={"inductor": device != "cpu"})
    for sizes in ((12, 40), (7, 0), (1, 0)):
        for model, run in ((eager, eager), (ours, compiled)):
            model.zero_grad()
            run(*graph(device, *sizes))[which].square().sum().backward()
        found, expected = ([p.grad for p in model.parameters()] for model in (ours, eager))
        assert [g is None for g in found] == [g is None for g in expected] and None in expected
        same([g for g in found if g is not None], [g for g in expected if g is not None])
        same(dict(ours.named_buffers()), dict(eager.named_buffers()))
