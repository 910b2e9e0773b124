"""``autograd.Function``, hooks of tensors, checkpoints and control flow: captured, with regions around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.testing import awkward
from tests.harness import light

GRAPHS = {name: data for name, data in awkward(channels=4).items() if name != "bipartite"}
FEW = ("no edge", "one node", "self loops", "unsorted, duplicates, hub")


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    torch.manual_seed(0)
    with light():
        yield


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is another one than that of its operations. One of two results has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.step = step
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return (x / step).round() * step, signs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return cotangent * ctx.step * x.cos(), None


class Summed(torch.autograd.Function):
    """Message passing with a gradient of its own: half of the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        ctx.save_for_backward(edge_index)
        return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        (edge_index,) = ctx.saved_tensors
        found = torch.zeros_like(cotangent).index_add(0, edge_index[0], cotangent[edge_index[1]])
        return found / 2, None


class Layers(nn.Module):
    """Two layers, and what stands between them."""

    def __init__(self, between: Callable[..., Tensor], layer: type[nn.Module] = SAGEConv) -> None:
        super().__init__()
        self.first, self.second, self.scale = layer(4, 4), layer(4, 4), nn.Parameter(torch.tensor(1.5))
        self.between = between

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.between(self, self.first(x, edge_index).tanh(), edge_index)


def _function(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    rounded, signs = StraightThrough.apply(x, 0.25)
    return self.second(rounded * self.scale, edge_index) + signs


def _function_of_edges(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    return self.second(Summed.apply(x * self.scale, edge_index), edge_index)


def _hook(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    before = x.square()  # the hook sees this gradient as well
    x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) * self.scale)
    return self.second(x, edge_index) + before


def _checkpoint(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    x = checkpoint(lambda h: self.second(h, edge_index).relu() * self.scale, x, use_reentrant=False)
    return checkpoint(self.second, x, edge_index, use_reentrant=False)


def _within(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    def inner(h: Tensor) -> Tensor:
        return checkpoint(_function, self, h, edge_index, use_reentrant=False)

    return checkpoint(inner, x * self.scale, use_reentrant=False)


def _condition(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    chosen = torch.cond(x.sum() > 0, lambda h: h.relu() * 2, lambda h: h - 1, (x,))
    return self.second(chosen * self.scale, edge_index)


KINDS = {one.__name__: one for one in (_function, _function_of_edges, _hook, _checkpoint, _within, _condition)}


def results(model: nn.Module, x: Tensor, edge_index: Tensor) -> list[Tensor]:
    x = x.double().requires_grad_()
    out = model(x, edge_index)
    wanted = [x, *model.parameters()]
    found = torch.autograd.grad(out.sin().sum(), wanted, allow_unused=True)
    return [out, *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True))]


def check(eager: nn.Module, graphs: Any = FEW) -> gnncompile.capture.backend.Captured:
    """Equal to eager on all graphs, captured once."""
    compiled = gnncompile.compile(copy.deepcopy(eager), fullgraph=True)
    for name in graphs:
        data = GRAPHS[name]
        for a, b in zip(*(results(m, data.x, data.edge_index) for m in (compiled, eager)), strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    program = callable_of(compiled)
    assert program is not None and not program.backend.notes, program.backend.notes
    (captured,) = program.backend.captured
    return captured


@pytest.mark.parametrize("kind", KINDS)
def test_equals_eager(kind: str) -> None:
    captured = check(Layers(KINDS[kind]).double())
    assert len(captured.log.regions) == (3 if kind == "_checkpoint" else 2)


def _list(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    x.register_hook(self.seen.append)
    return self.second(x * self.scale, edge_index)


def _retained(self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    x.retain_grad()
    self.seen.append(x)
    return self.second(x * self.scale, edge_index)


@pytest.mark.parametrize("between", [_list, _retained])
def test_gradients_that_are_looked_at(between: Callable[..., Tensor]) -> None:
    """The graph breaks there; what stands on both sides has its regions."""
    eager = Layers(between).double()
    eager.seen = []  # type: ignore[assignment]
    compiled = gnncompile.compile(copy.deepcopy(eager))
    for name in ("no edge", "unsorted, duplicates, hub", "hub"):
        data, found = GRAPHS[name], []
        for model in (compiled, eager):
            out = model(data.x.double(), data.edge_index)
            out.sin().sum().backward()
            last: Any = model.seen[-1]  # type: ignore[index]
            found.append([out, last.grad if between is _retained else last])
        torch.testing.assert_close(*found)
    program = callable_of(compiled)
    assert program is not None
    assert sum(len(captured.log.regions) for captured in program.backend.captured) >= 2
