"""One launch adds up the sums of a kernel's programs and writes them to the outputs of a region."""

from __future__ import annotations

import pytest
import torch

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.codegen.triton.program_sums import ProgramSums
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output
from gnncompile.ir.vjp import vjp
from tests.triton_regions import D, S

pytestmark = triton_regions.INTERPRETED
device = triton_regions.device

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("programs", [0, 1, 31, 70])
@pytest.mark.parametrize("sizes", [[1], [3, 64, 1, 100], [33] * 11], ids=["one", "four", "eleven"])
def test_each_output_gets_the_sums_of_its_columns(
    sizes: list[int], programs: int, dtype: torch.dtype, device: str
) -> None:
    partial = torch.randn(programs, sum(sizes) + 5, dtype=torch.float64, device=device).to(dtype)
    firsts = [sum(sizes[:k]) + 5 for k in range(len(sizes))]
    outputs = [torch.full((n,), torch.nan, dtype=TYPES[k % 4], device=device) for k, n in enumerate(sizes)]
    ProgramSums(list(zip(firsts, sizes, strict=True)))(partial, outputs)
    for out, first, size in zip(outputs, firsts, sizes, strict=True):
        expected = partial[:, first : first + size].double().sum(0)
        at_most = {torch.float64: 1e-12, torch.float32: 1e-5}.get(out.dtype, 1e-2)
        close = at_most if dtype is torch.float64 else max(at_most, 1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=close, atol=close * 10)


def test_a_launch_adds_up_all_sums(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    run = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda *given: (launched.append(len(given[2])), run(*given))[1])
    outputs = [torch.empty(40, device=device) for _ in range(5)]
    ProgramSums([(40 * k, 40) for k in range(5)])(torch.randn(9, 200, device=device), outputs)
    assert launched == [6]


@pytest.mark.parametrize("tiled", [False, True])
def test_a_single_sum_over_edges_is_the_gradient_in_its_dtype(tiled: bool) -> None:
    b = Builder(D, tiled=tiled)
    weights = b.input(1, triton_regions.Space.FEATURE, (1, 4), "bfloat16")
    states = b.input(0, triton_regions.E, (1, 8), "bfloat16")
    layer = b.linear(states, weights)
    total = b.reduce("sum", b.op("mul", layer, b.input(2, S, (1, 4), "bfloat16")))
    region = b.finish([Output(total, "bfloat16", (4,))])
    plan = vjp(region, (False, True, False), (True,))
    gradient = plan.gradients[1]
    assert gradient is not None
    (temporary,) = gradient.temporaries
    outputs = [out for stage in plan.stages for out in stage.region.outputs]
    assert outputs[temporary].dtype == "bfloat16"


@pytest.mark.parametrize("tiled", [False, True])
def test_several_sums_of_one_gradient_are_added_in_float32(tiled: bool) -> None:
    b = Builder(D, tiled=tiled)
    weights = b.input(1, triton_regions.Space.FEATURE, (1, 8), "bfloat16")
    states = b.input(0, triton_regions.E, (1, 8), "bfloat16")
    twice = b.linear(b.op("tanh", b.linear(states, weights)), weights)
    region = b.finish([Output(b.reduce("sum", twice), "bfloat16", (8,))])
    plan = vjp(region, (False, True), (True,))
    gradient = plan.gradients[1]
    assert gradient is not None
    outputs = [out for stage in plan.stages for out in stage.region.outputs]
    assert [outputs[t].dtype for t in gradient.temporaries] == ["float32", "float32"]
