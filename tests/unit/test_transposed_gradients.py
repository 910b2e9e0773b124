"""Gradients of weights that are transposed, and of which views are taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gnncompile
from tests.fuzz.engines import engine
from tests.triton_regions import HAS_GPU


class Layers(nn.Module):
    """Layers whose weights are used as they are, transposed, or transposed and then in part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            if self.kind == "layer":
                return nn.functional.linear(nn.functional.linear(x, self.first).relu(), self.second)
            if self.kind == "transposed":
                return (x @ self.second).relu() @ self.first
            weight = self.first.t().contiguous().t() if self.kind == "transposed twice" else self.first.t()[:, :3].t()
            return nn.functional.linear(x, weight).relu() @ self.second.t()


@pytest.mark.skipif(HAS_GPU, reason="the engine without Inductor runs Triton's interpreter")
@pytest.mark.parametrize("kind", ["layer", "transposed", "transposed twice", "in part"])
def test_gradients_of_weights_lie_as_views_say(kind: str) -> None:
    """Under autocast, the conversions of all gradients are one launch, which reads them by their strides."""
    torch.manual_seed(0)
    model, x = Layers(kind), torch.randn(9, 4)
    found = []
    for compiled in (False, True):
        model.zero_grad()
        with engine("passes", "triton", False):
            run = gnncompile.compile(model, fullgraph=True) if compiled else model
            run(x).float().sin().sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)
