"""The same bits from the same inputs, and sums that keep the precision of float32 whatever their rows are stored in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GINEConv, PNAConv, SAGEConv, SimpleConv, TransformerConv

import gnncompile
from tests.harness import light

NODES, WIDTH, FEATURES = 300, 32, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "SAGE max": lambda: SAGEConv(WIDTH, WIDTH, aggr="max"),
    "GAT": lambda: GATConv(WIDTH, 8, heads=4),
    "GATv2": lambda: GATv2Conv(WIDTH, 8, heads=4, edge_dim=FEATURES),
    "GINE": lambda: GINEConv(nn.Linear(WIDTH, WIDTH), edge_dim=FEATURES),
    "Transformer": lambda: TransformerConv(WIDTH, 8, heads=4, edge_dim=FEATURES),
    "PNA": lambda: PNAConv(WIDTH, WIDTH, ["mean", "min", "max", "std"], ["identity"], torch.tensor([0, 5, 3])),
}


def step(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = model(*inputs)
    leaves = [a for a in (*inputs, *model.parameters()) if a.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_twenty_times_the_same_bits(name: str, device: str):
    torch.manual_seed(0)
    edges = torch.randint(0, NODES, (2, 3000))
    edges[1, :1500] = 7  # a hub of many pieces
    x, e = torch.randn(NODES, WIDTH), torch.randn(edges.size(1), FEATURES)
    inputs = [x.to(device).requires_grad_(), edges.to(device)]
    model = LAYERS[name]().to(device)
    if name in ("GATv2", "GINE", "Transformer"):
        inputs.append(e.to(device))
    with light("cpp") if device == "cpu" else nullcontext():
        compiled = gnncompile.compile(model, fullgraph=True)
        first = step(compiled, *inputs)
        for _ in range(19):
            for a, b in zip(first, step(compiled, *inputs), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thousand_ones_on_a_hub(dtype: torch.dtype, device: str):
    """A sum that was rounded after every addition would stop at 256, or at 2048 for float16."""
    count = 1000 if dtype is torch.bfloat16 else 3000
    edges = torch.stack([torch.arange(1, count + 1), torch.zeros(count, dtype=torch.long)]).to(device)
    x = torch.ones(count + 1, 4, dtype=dtype, device=device, requires_grad=True)
    out = gnncompile.compile(SimpleConv(aggr="sum"), fullgraph=True)(x, edges)
    torch.testing.assert_close(out[0].float(), torch.full((4,), float(count), device=device), rtol=1e-3, atol=0)
    (gradient,) = torch.autograd.grad(out[0].sum(), x)
    assert torch.equal(gradient[1:], torch.ones_like(gradient[1:]))
