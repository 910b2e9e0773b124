"""Under autocast, parameters are converted by one launch, and their gradients are converted back by one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.passes.matrix_copies import LARGEST
from tests.triton_regions import DEVICE

pytestmark = triton_regions.INTERPRETED

CONVERSIONS = re.compile(r"^copies_\w+ = _gnncompile_matrix_copies\(\[(.*)\], ", re.MULTILINE)


class _Layers(nn.Module):
    """Layers of any width, a parameter that only arithmetic reads, and one that is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)
        self.scale = nn.Parameter(torch.rand(24) + 0.5)
        self.large = nn.Parameter(torch.randn(8, LARGEST // 8 + 1) / 512)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x) * self.scale.to(torch.bfloat16)).tanh()
        return (x @ self.large)[:, :5]


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    torch._dynamo.reset()


def _step(model: nn.Module, run: Any, *inputs: Tensor) -> list[Tensor]:
    out = run(*inputs)
    return [out, *torch.autograd.grad(out.float().square().sum(), [*model.parameters()])]


def _converted(code: str) -> list[int]:
    """How many tensors each launch converts."""
    return [found.count("_gnncompile_view(") for found in CONVERSIONS.findall(code)]


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_parameters_and_gradients(dtype: torch.dtype, kept: int):
    """The backward reads the parameter in bfloat16 that only arithmetic reads, so the graph returns its conversion."""
    torch.manual_seed(0)
    model = _Layers().to(DEVICE)
    compiled, x = gnncompile.compile(model), torch.randn(9, 8, device=DEVICE)
    with torch.autocast(DEVICE, dtype):
        found, codes = run_and_get_code(lambda: _step(model, compiled, x))
        expected = _step(model, model, x)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype and a.stride() == b.stride()
        assert float((a.double() - b.double()).norm()) < 2e-2 * float(b.double().norm())
    assert [_converted(code) for code in codes] == [[3 + kept], [3]]


def test_without_gradients_and_without_rows():
    model = _Layers().to(DEVICE)
    compiled = gnncompile.compile(model)
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        for rows in (9, 0, 1):
            x = torch.randn(rows, 8, device=DEVICE)
            torch.testing.assert_close(compiled(x), model(x), rtol=3e-2, atol=3e-2)


def test_one_conversion_stays():
    model = nn.Linear(8, 24, bias=False).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        _, codes = run_and_get_code(lambda: _step(model, gnncompile.compile(model), torch.randn(9, 8, device=DEVICE)))
    assert [_converted(code) for code in codes] == [[], []]


def test_many_conversions_take_several_launches():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)]).to(DEVICE)
    x = torch.randn(9, 8, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        found, codes = run_and_get_code(lambda: _step(model, gnncompile.compile(model), x))
        for a, b in zip(found, _step(model, model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().max()))
    assert [_converted(code) for code in codes] == [[16, 2], [16, 2]]


def test_autocast_within_a_model_with_a_graph():
    """A region reads the converted weights of a layer on edges; other layers share their conversions."""
    from tests.edge_layers import TwoLayers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.layer, self.after = nn.Linear(16, 16), TwoLayers(16), nn.Linear(16, 16)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                x = self.layer(self.before(x), edge_index)
                return self.after(x).float()

    torch.manual_seed(0)
    model = Model().to(DEVICE)
    x, edges = torch.randn(9, 16, device=DEVICE), torch.randint(9, (2, 30), device=DEVICE)
    found = _step(model, gnncompile.compile(model), x, edges)
    for a, b in zip(found, _step(model, model, x, edges), strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * float(b.abs().max()))
