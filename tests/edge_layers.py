"""Compares layers over nodes and features of edges with eager in float64: results, all gradients, and their regions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import gnncompile
from gnncompile.ir.region import Region, parse
from tests.harness import launched


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
