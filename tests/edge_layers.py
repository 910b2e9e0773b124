"""Compares layers over nodes and features of edges with eager in float64: results, all gradients, and their regions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import gnncompile
from gnncompile.ir.region import Region, parse
from tests.harness import launched


class TwoLayers(nn.Module):
    """Two layers on each edge. The first reads the rows of both ends and their distance, so its weight is cut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2 * channels + 1, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, destination = edge_index
        squared = (x[source] - x[destination]).square().sum(-1, keepdim=True)
        messages = self.last(self.first(torch.cat([x[destination], x[source], squared], -1)).sigmoid()).tanh()
        return x + messages.new_zeros(x.size(0), messages.size(1)).index_add(0, destination, messages)


def run(model: nn.Module, x: Tensor | tuple[Tensor, ...], edge_index: Tensor, edge_attr: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = model(x, edge_index, edge_attr)
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype, device=out.device)).view_as(out)
    leaves = [a for a in (*(x if isinstance(x, tuple) else [x]), edge_attr, *model.parameters()) if a.requires_grad]
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True)]


def double(value: Any) -> Any:
    """A leaf in float64, or a tuple of such leaves."""
    if isinstance(value, tuple):
        return tuple(map(double, value))
    return value.detach().double().requires_grad_(value.requires_grad)


def compare(model: nn.Module, x: Any, edge_index: Tensor, edge_attr: Tensor, compiled: Any = None) -> list[Region]:
    """Compares with eager in float64; the regions that ran."""
    compiled = compiled or gnncompile.compile(model, fullgraph=True)
    with launched() as specs:
        found = run(compiled, x, edge_index, edge_attr)
    expected = run(copy.deepcopy(model).double(), double(x), edge_index, double(edge_attr))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    return [parse(spec) for spec in specs]
