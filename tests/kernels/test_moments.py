"""Means and variances of columns by a kernel, and what column sums read: numbers, and where models use them."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile import tuning
from gnncompile.codegen.triton.moments import write_moments
from tests.triton_regions import DEVICE, INF, NAN

pytestmark = triton_regions.INTERPRETED
on_tensor_cores = triton_regions.on_tensor_cores

SIZES = [(1, 1), (2, 7), (31, 64), (700, 20), (1300, 130)]


def _moments(x: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    var, mean = (torch.full((x.size(1),), 7.0, device=x.device) for _ in range(2))
    write_moments(x, correction, var, mean)
    return var, mean


@pytest.fixture
def many_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shares are joined in several steps, the last share is short, and small matrices go to the kernel."""
    monkeypatch.setattr(tuning, "MOMENTS", tuning.MOMENTS._replace(rows=16, programs=1, joined=(2, 16)))
    monkeypatch.setattr(tuning, "LEAST_MOMENTS", 1)
    triton_regions.tune(monkeypatch, processors=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("correction", [0, 1])
def test_moments(size: tuple[int, int], correction: int, dtype: torch.dtype, many_shares: None):
    torch.manual_seed(0)
    x = (torch.randn(size, device=DEVICE) + 3).to(dtype)
    var, mean = _moments(x, correction)
    expected = torch.var_mean(x.double(), 0, correction=correction)
    torch.testing.assert_close((var.double(), mean.double()), expected, rtol=2e-6, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("correction", [0, 1])
def test_no_rows(correction: int, many_shares: None):
    for found in _moments(torch.empty(0, 5, device=DEVICE), correction):
        assert found.isnan().all()


@pytest.mark.parametrize("row", [0, 40, 699])
def test_far_values_do_not_cancel(row: int, many_shares: None):
    """Numbers of one size far from zero, and one row far from all others, as that of a node that all nodes reach."""
    torch.manual_seed(0)
    x = 1e4 + torch.randn(700, 16, device=DEVICE)
    x[row] *= 100
    var, mean = _moments(x, 0)
    torch.testing.assert_close(
        (var.double(), mean.double()), torch.var_mean(x.double(), 0, correction=0), rtol=1e-5, atol=0
    )
    equal = torch.full((700, 16), 1e4 / 3, device=DEVICE)
    var, mean = _moments(equal, 0)
    assert float(var.max()) <= 1e-12 * float(equal[0, 0]) ** 2
    torch.testing.assert_close(mean, equal[0])


@pytest.mark.parametrize("shares", [1, 5])
def test_the_first_rows_differ_from_all_others(shares: int, many_shares: None, monkeypatch: pytest.MonkeyPatch):
    triton_regions.tune(monkeypatch, processors=shares)
    torch.manual_seed(0)
    x = torch.randn(3000, 8, device=DEVICE)
    x[:64] = 1e4 / 3
    found = tuple(one.double() for one in _moments(x, 0))
    torch.testing.assert_close(found, torch.var_mean(x.double(), 0, correction=0), rtol=3e-6, atol=0)


def test_large_numbers_do_not_overflow(many_shares: None):
    x = torch.full((200, 4), 6e37, device=DEVICE)
    var, mean = _moments(x, 0)
    torch.testing.assert_close(mean, x[0])
    assert not var.isnan().any()


@pytest.mark.parametrize("row", [0, 40, 50, 99])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_no_number_stays_in_its_column(bad: float, row: int, many_shares: None):
    """As in torch's statistics, an infinity gives no number, or an infinity."""
    x = torch.randn(100, 8, device=DEVICE)
    x[row, 3] = bad
    var, mean = _moments(x, 0)
    assert not mean[3].isfinite()
    assert var[3].isnan()
    others = [0, 1, 2, 4, 5, 6, 7]
    torch.testing.assert_close(mean[others].double(), x.double().mean(0)[others], rtol=1e-5, atol=1e-6)
    assert var[others].isfinite().all()


def test_same_bits(many_shares: None):
    x = torch.randn(900, 33, device=DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(_moments(x, 0), _moments(x.clone(), 0), strict=True))


# -- compiled models ---------------------------------------------------------------------------------------------------


class _Normed(nn.Module):
    """A layer, batch norm, ReLU, a residual, and batch norm of arithmetic that nothing else stores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(width, width), nn.Linear(width, 3)
        self.norm, self.other = nn.BatchNorm1d(width), nn.BatchNorm1d(width, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.norm(self.linear(x)).relu()
        out: Tensor = self.last(self.other(hidden.tanh() * x).relu())
        return out


def _step(model: nn.Module, run: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = run(x)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])]


def _compare(width: int, sizes: list[int], dtype: torch.dtype) -> None:
    """Compares a model with float64. Errors are about those of eager, which rounds as much in 16 bits."""
    torch.manual_seed(0)
    model = _Normed(width).to(DEVICE, dtype)
    own, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = gnncompile.compile(own)
    for rows in sizes:
        x = torch.randn(rows, width, device=DEVICE).to(dtype)
        found, right = _step(own, compiled, x), _step(exact, exact, x.double())
        for a, b, c in zip(found, right, _step(model, model, x), strict=True):
            off, eager = (float((one.double() - b).norm()) for one in (a, c))
            assert off <= 2 * eager + (2e-4 if dtype is torch.float32 else 5e-2) * float(1 + b.norm())
    for (name, a), b in zip(own.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norms_of_many_rows(dtype: torch.dtype, many_shares: None, on_tensor_cores: None):
    # In 16 bits gradients of two rows are mostly rounding.
    _compare(32, [130, 70, 2 if dtype is torch.float32 else 20], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_many_rows_that_inductor_sums_them_in_parts(dtype: torch.dtype):
    _compare(64, [200_001, 150_000], dtype)


def test_what_is_stored_is_read_by_our_kernel(many_shares: None, on_tensor_cores: None):
    """Inductor sums what it computes on the way. It stores no gradient that both sums and later arithmetic read."""
    model, x = _Normed(32).to(DEVICE, torch.bfloat16), torch.randn(70, 32, device=DEVICE).bfloat16()
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: _step(model, gnncompile.compile(model), x))
    calls = [len(re.findall(r"_gnncompile_write_moments\(", code)) for code in codes]
    assert calls == [1, 0]


def test_eval_reads_the_running_statistics(many_shares: None, on_tensor_cores: None):
    model, x = _Normed(32).to(DEVICE).eval(), torch.randn(70, 32, device=DEVICE)
    torch.testing.assert_close(gnncompile.compile(model)(x), model(x), rtol=1e-4, atol=1e-4)
