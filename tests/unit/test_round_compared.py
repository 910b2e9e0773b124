"""The gradient of a maximum of low-precision values goes to the values that are the maximum after rounding."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gnncompile
from gnncompile.passes.post_grad import round_compared
from tests.cuda_code import cuda_code


def _centred(x: Tensor) -> Tensor:
    return x - 0.1 * x.mean(0, keepdim=True)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "maximum": lambda x: _centred(x).amax(0),
    "minimum of rows": lambda x: (x * 0.3).amin(1),
    "used twice": lambda x: _centred(x) - 0.1 * _centred(x).amax(0, keepdim=True),
    "compared with a number": lambda x: torch.where(x * 0.3 + 1 == 1.0, x, x * 2),
    "compared with itself": lambda x: torch.where((x * 0.3) * 3 != (x * 0.3) * 3, x, x * 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_ties_are_those_of_rounded_values(case: str, dtype: torch.dtype, device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = CASES[case]
    compiled = gnncompile.compile(run)
    for rows in (40, 1, 7):
        x = torch.randn(rows, 4).to(device, dtype).requires_grad_()
        exact = x.detach().double().requires_grad_()
        with torch.no_grad():
            x[0] = exact[0] = 0.0
        for leaf, model in ((x, compiled), (exact, run)):
            (model(leaf).double() ** 2).sum().backward()
        gradient = x.grad
        assert gradient is not None and bool(gradient.isfinite().all())
        # One of several almost equal values may be the maximum: the sum of the gradients is the same for all.
        slack = 0.15 if dtype is torch.bfloat16 else 0.02
        torch.testing.assert_close(gradient.double().sum(), exact.grad.sum(), rtol=slack, atol=slack)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests run on the GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_code_for_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel computes a maximum, writes the values, reads them again, and compares: the maximum is not rounded."""

    def ties(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.gnncompile.stored(_centred(x))
        maximum = y.amax(0)
        return maximum, y == maximum

    code = cuda_code(monkeypatch, ties, 4, dtype, round_compared.run)
    (one, other) = re.findall(r"= (tmp\d+) == (tmp\d+)$", code, re.MULTILINE)[0]
    rounded = ["bitcast=True).to(tl.float32)" in _line(code, name) for name in (one, other)]
    assert rounded == [dtype is torch.bfloat16] * 2


def _line(code: str, name: str) -> str:
    return next(line for line in code.splitlines() if line.strip().startswith(f"{name} = "))
