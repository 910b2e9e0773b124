"""Several backwards through one forward (``retain_graph=True``): all gradients are eager's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, GINConv, SAGEConv

import gnncompile
from tests.harness import kernels

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "memory freed": {"keep_memory": False},
    "no inductor": {"inductor": False},
}


class TwoTasks(nn.Module):
    """A class and a number for each node. What one layer saves is written over in the backward of the next."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                GATv2Conv(8, 4, heads=2, dropout=dropout),
                GINConv(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ELU(), nn.Linear(16, 8))),
                SAGEConv(8, 8, aggr="max"),
            ]
        )
        self.norm, self.drop, self.dense = nn.LayerNorm(8), nn.Dropout(dropout), nn.Linear(8, 8)
        self.classes, self.number = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        for conv in self.convs:
            x = x + self.drop(self.norm(conv(x, edge_index)).sigmoid())
            x = x + self.dense(x).tanh()  # the residual's gradient stays, so that of the layer is written over the tanh
        return self.classes(x).log_softmax(-1), self.number(x)


@pytest.fixture(autouse=True)
def _reset(device: str) -> Iterator[None]:
    torch._dynamo.reset()
    with kernels("cpp" if device == "cpu" else "triton"):
        yield


def graph(device: str, nodes: int, edges: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(edges)
    x = torch.randn(nodes, 8, generator=made, dtype=torch.float64)
    return x.to(device), torch.randint(nodes, (2, edges), generator=made).to(device)


def made(device: str, options: dict[str, Any], dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = TwoTasks(dropout).double().to(device)
    return eager, gnncompile.compile(copy.deepcopy(eager), options=options)


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_of_each_loss(device: str, name: str) -> None:
    """As in multi-task learning, which compares or projects the gradients of losses."""
    eager, ours = made(device, SETTINGS[name])
    for sizes in ((40, 300), (1, 3), (7, 0), (40, 300)):
        found = []
        for model in (eager, ours):
            x, edge_index = graph(device, *sizes)
            x.requires_grad_()
            leaves, (classes, number) = [x, *model.parameters()], model(x, edge_index)
            losses = [classes.square().sum(), number.sum(), classes.sum() * number.square().sum()]
            each = [torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) for loss in losses]
            again = torch.autograd.grad(losses[0], leaves, allow_unused=True)
            found.append([gradient for gradients in (*each, again) for gradient in gradients])
        same(found[1], found[0])


def test_a_backward_that_keeps_its_graph_comes_after_others(device: str) -> None:
    eager, ours = made(device, {})
    for keeps in (False, True, False, True):
        for model in (eager, ours):
            model.zero_grad()
            losses = [result.square().sum() for result in model(*graph(device, 40, 300))]
            for loss in losses if keeps else [losses[0] + losses[1]]:
                loss.backward(retain_graph=keeps)
        same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
    losses[0].backward()  # frees the graph
    with pytest.raises(RuntimeError, match="second time"):
        losses[0].backward()


def test_the_same_elements_are_dropped(device: str) -> None:
    _, ours = made(device, {}, dropout=0.5)
    loss = ours(*graph(device, 40, 300))[0].square().sum()
    once = torch.autograd.grad(loss, list(ours.parameters())[:4], retain_graph=True)
    again = torch.autograd.grad(loss, list(ours.parameters())[:4], retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in once)
