"""Layers of wide rows over graphs of many edges per row, whose sums have Triton kernels of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GINEConv, PNAConv, SAGEConv

import gnncompile
from gnncompile.runtime import launch
from tests.harness import launched, light, needs_interpreter

NODES, WIDE = 6, 256

LAYERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "GCN": (16, lambda: GCNConv(16, WIDE)),
    "SAGE": (WIDE, lambda: SAGEConv(WIDE, 16)),
    "SAGE max": (WIDE, lambda: SAGEConv(WIDE, 16, aggr="max")),
    "GINE": (WIDE, lambda: GINEConv(nn.Linear(WIDE, 16), edge_dim=4)),
    "GAT": (16, lambda: GATConv(16, WIDE, edge_dim=4)),
    "PNA": (64, lambda: PNAConv(64, 16, ["mean", "std", "max"], ["identity"], torch.tensor([0, 2, 3]))),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("degree", [10, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_output_and_every_gradient(name: str, degree: int, device: str) -> None:
    """One node has half of the edges, one has none. All of the kernels' code can be shown."""
    pytest.importorskip("triton")
    needs_interpreter("triton", device)
    torch.manual_seed(0)
    width, make = LAYERS[name]
    layer, number = make().to(device), degree * NODES
    edges = torch.randint(NODES - 1, (2, number), device=device)
    edges[1, : number // 2] = 2
    inputs = [torch.randn(NODES, width, device=device)]
    if name in ("GINE", "GAT"):
        inputs.append(torch.randn(number, 4, device=device))
    results = []
    with light("triton"), launched() as specs:
        for model in (layer, gnncompile.compile(copy.deepcopy(layer), fullgraph=True)):
            given = [x.clone().requires_grad_() for x in inputs]
            out = model(given[0], edges, *given[1:])
            (out * torch.arange(out.numel(), device=device).view_as(out).cos()).sum().backward()
            results.append([out, *(x.grad for x in given), *(p.grad for p in model.parameters())])
        assert launch.fallbacks == {} and all(launch.kernel(spec, device).listing for spec in set(specs))
    assert len(specs) >= 2
    torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=2e-4)
