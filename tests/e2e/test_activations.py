"""ReLU and leaky ReLU: gradients are eager's, and the forward writes no mask for them on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import gnncompile

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky relu": F.leaky_relu,
    "threshold": lambda x: F.threshold(x, 0.5, -1.0),
    "in place": lambda x: F.leaky_relu_((x * 1.0), 0.3),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_eager(name: str, dtype: torch.dtype, device: str):
    torch._dynamo.reset()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return ACTIVATIONS[name](x @ weight) * 0.5

    compiled = gnncompile.compile(run, fullgraph=True)
    special = torch.tensor([0.0, -0.0, 0.5, float("inf"), float("nan")])
    for rows in (40, 0, 1, 7):
        x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))
        if rows == 7:
            x[:, 0] = torch.cat([special, x[:2, 0]])
        x, weight = x.to(device, dtype).requires_grad_(), torch.eye(5, device=device, dtype=dtype).requires_grad_()
        out = [model(x, weight) for model in (run, compiled)]
        torch.testing.assert_close(out[1], out[0], equal_nan=True)
        found = [torch.autograd.grad(one, [x, weight], torch.ones_like(one)) for one in out]
        torch.testing.assert_close(found[1], found[0], equal_nan=True)


@pytest.mark.parametrize("name", ["relu", "leaky relu"])
def test_no_mask_is_written_on_a_cpu(name: str):
    torch._dynamo.reset()
    compiled = gnncompile.compile(lambda x: ACTIVATIONS[name](x.cos()) * 0.5, fullgraph=True)
    x = torch.randn(50, 8, requires_grad=True)
    _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    assert len(codes) == 2 and not any("bool" in code for code in codes)
