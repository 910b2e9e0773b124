"""Self loops that a layer replaces: the attributes that they had, and the gradients of these."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

import gnncompile
from gnncompile.capture.compile import callable_of
from tests.harness import light

LAYERS: dict[str, Any] = {
    "GCNConv": lambda: pyg.GCNConv(4, 4),
    "improved": lambda: pyg.GCNConv(4, 4, improved=True),
    "SGConv": lambda: pyg.SGConv(4, 4, K=2),
    "GraphUNet": lambda: pyg.GraphUNet(4, 4, 4, depth=1),
    "ASAPooling": lambda: pyg.ASAPooling(4, ratio=3),
}
SIZES = ((6, 20, 4), (4, 0, 0), (1, 3, 3), (9, 12, 0), (5, 11, 8))
"""Nodes, edges, and how many of these are loops at the first node or the last."""


def graph(nodes: int, edges: int, loops: int, device: str) -> tuple[torch.Tensor, ...]:
    """A graph whose loops all weigh the same, as on a GPU eager may choose any of several loops at one node."""
    torch.manual_seed(edges)
    x = torch.randn(nodes, 4, dtype=torch.float64)
    edge_index, weight = torch.randint(nodes, (2, edges)), torch.rand(edges, dtype=torch.float64) + 0.5
    edge_index[:, :loops] = torch.tensor([0, nodes - 1]).repeat(edges)[:loops]
    weight[edge_index[0] == edge_index[1]] = 0.75
    return tuple(made.to(device) for made in (x, edge_index, weight))


def run(model: nn.Module, called: Any, name: str, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    x, edge_index, weight = inputs[0].clone().requires_grad_(), inputs[1], inputs[2].clone().requires_grad_()
    model.zero_grad()
    args = (None, weight) if name == "GraphUNet" else (weight,)
    made = called(x, edge_index, *args)
    made = made[0] if isinstance(made, tuple) else made
    (made * torch.arange(made.numel(), device=made.device).view_as(made).cos()).sum().backward()
    given = {"x": x, "weight": weight, **dict(model.named_parameters())}
    grads = {key: torch.zeros_like(v) if v.grad is None else v.grad for key, v in given.items()}
    return {"result": made.detach(), **grads}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_several_loops_at_a_node(name: str, device: str) -> None:
    """One loop's weight counts; the gradient goes to all of them, as eager's assignment gives it."""
    if name == "ASAPooling" and torch.__version__ < "2.12":
        pytest.skip("a selection by a data-dependent size breaks the graph")
    torch.manual_seed(0)
    eager = LAYERS[name]().double().to(device)
    ours = copy.deepcopy(eager)
    with light():
        compiled = gnncompile.compile(ours)
        for size in SIZES:
            inputs = graph(*size, device)
            expected, found = run(eager, eager, name, inputs), run(ours, compiled, name, inputs)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1
