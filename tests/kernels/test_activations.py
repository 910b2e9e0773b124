"""Activations in messages are part of their regions: values and gradients equal eager's on awkward numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.runtime import launch
from tests.harness import light, needs_interpreter

INF, NAN = float("inf"), float("nan")
SMALL = [0.0, -0.0, 1e-8, -1e-8, 1e-3, -1e-3, 0.3, -0.3, 0.5, -0.5, 1.0, -1.0, 2.5, -2.5]
LARGE = [3.0, -3.0, 6.0, -6.0, 19.9, 21.0, -30.0, -45.0, 70.0, -90.0, 1e9, -1e9, INF, -INF, NAN]
POINTS = SMALL + LARGE

PLAIN = [
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.hardtanh, F.hardsigmoid, F.hardswish,
    F.mish, F.softsign, F.logsigmoid, F.tanhshrink, F.softshrink, F.hardshrink, F.silu, F.softplus,
    torch.square, torch.reciprocal, torch.rsqrt, torch.abs, torch.sign, torch.sgn, torch.floor, torch.ceil,
    torch.trunc, torch.expm1, torch.exp2, torch.log2, torch.log10, torch.log1p, torch.tan, torch.tanh,
    torch.sigmoid,
]  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{fn.__name__: fn for fn in PLAIN},
    "elu in place": lambda x: F.elu(x * 1, 0.7, inplace=True),
    "celu of another alpha": lambda x: F.celu(x, 2.0),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.25, -2.0),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, dtype=x.dtype)),
    "power 1.7": lambda x: x**1.7,
    "power 5": lambda x: x**5,
    "power 0": lambda x: x**0,
    "power of a tensor": lambda x: x.abs() ** torch.full((1,), 1.5, dtype=x.dtype),
    "power of two": lambda x: 2**x,
    "masked_fill": lambda x: x.masked_fill((x > 0) & ~(x > 2) | torch.isnan(x), 0.25),
}
LOOSE = {"hardsigmoid"}
"""Functions whose gradient torch computes with a constant in float32."""
NO_NAN = {"hardsigmoid", "hardswish"}
"""Functions of which torch has a gradient at NaN other than that of their formula."""


@pytest.mark.parametrize("which", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation(name: str, which: str):
    needs_interpreter(which)

    def fn(x: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return x.new_zeros(x.size(0)).index_add_(0, col, FUNCTIONS[name](x[row]))

    points = [p for p in POINTS if p == p or name not in NO_NAN]
    at = torch.arange(len(points))
    with light(which):
        for dtype, limit in ((torch.float32, 2e-5), (torch.float64, 1e-12 if name not in LOOSE else 1e-7)):
            compiled = gnncompile.compile(fn)
            results = []
            for run, kind in ((compiled, dtype), (fn, torch.float64)):
                x = torch.tensor(points, dtype=dtype).to(kind).requires_grad_()
                out = run(x, at, at)
                results.append((out, torch.autograd.grad(out.sum(), x)[0]))
            for found, expected in zip(*results, strict=True):
                fits = ~(expected.isfinite() & (expected.abs() > torch.finfo(dtype).max))
                torch.testing.assert_close(found.double()[fits], expected[fits], rtol=limit, atol=limit, equal_nan=True)
            (one,) = callable_of(compiled).backend.captured
            assert len(one.log.regions) == 1 and one.log.skipped == []
        assert launch.fallbacks == {}
