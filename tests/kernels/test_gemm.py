"""The kernels of float32 products on tensor cores, and where the library computes the products."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import triton
import triton.language as tl

from gnncompile.codegen.gemm import launch, weights
from gnncompile.codegen.gemm.launch import OverRows
from gnncompile.codegen.gemm.parts import sum_of_terms
from gnncompile.codegen.triton import tiled_products
from gnncompile.ops import gemm
from tests.harness import tune
from tests.triton_regions import DEVICE, INF, NAN

pytestmark = triton_regions.INTERPRETED

EXACT = 2.0**-22
"""Of the norm of a product: what two parts of a number may lack, what one rounding to float32 may cost, and what the
tensor cores' rounding adds."""


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (1, 16, 16),
        (65, 32, 64),
        (130, 100, 47),
        (64, 260, 130),
        (70, 17, 18),
        (1, 18, 20),
        (65, 50, 17),
        (0, 130, 50),
        (65, 8, 256),
        (70, 256, 9),
        (130, 42, 8),
        (65, 9, 11),
    ],
)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "out"])
@pytest.mark.parametrize("few", [True, False])
def test_by_rows(
    rows: int, depth: int, columns: int, transposed: bool, added: str, few: bool, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    tune(monkeypatch, few_rows=rows if few else 0)
    left = torch.randn(rows, depth, device=DEVICE)
    right = torch.randn(columns, depth, device=DEVICE).t() if transposed else torch.randn(depth, columns, device=DEVICE)
    out = torch.full((rows, columns), NAN, device=DEVICE)
    given = {
        "nothing": None,
        "row": torch.randn(columns, device=DEVICE),
        "matrix": torch.randn(rows, columns, device=DEVICE),
        "out": out,
    }[added]
    if given is out:
        out.normal_()
    expected = left.double() @ right.double() + (0 if given is None else given.double())
    relu = added != "nothing"
    launch.by_rows((left, right), None, given, None, relu, out)
    assert not rows or _off(out, expected.relu() if relu else expected) < EXACT


@pytest.mark.parametrize(
    "widths", [(16, 16, 36), (132, 20, 36), (36, 260, 36), (17, 50, 130), (18, 20, 17), (8, 42, 9)]
)
@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("added", ["nothing", "row", "out"])
@pytest.mark.parametrize("few", [True, False])
def test_sum_of_two(
    widths: tuple[int, int, int], transposed: tuple[bool, bool], added: str, few: bool, monkeypatch: pytest.MonkeyPatch
):
    """The depths of two products differ; a matrix or row is added to their sum once."""
    torch.manual_seed(0)
    rows, (*depths, columns) = 70, widths
    tune(monkeypatch, few_rows=rows if few else 0)
    lefts = [torch.randn(rows, depth, device=DEVICE) for depth in depths]
    weights = [torch.randn(columns, depth, device=DEVICE).t() for depth in depths]
    rights = [w if across else w.contiguous() for w, across in zip(weights, transposed, strict=True)]
    out, row = torch.randn(rows, columns, device=DEVICE), torch.randn(columns, device=DEVICE)
    given = {"nothing": None, "row": row, "out": out}[added]
    expected = sum(left.double() @ right.double() for left, right in zip(lefts, rights, strict=True))
    expected = expected + (0 if given is None else given.double())
    gate = torch.randn(rows, columns, device=DEVICE)
    one, other = zip(lefts, rights, strict=True)
    launch.by_rows(one, other, given, gate, True, out)
    assert _off(out, expected.relu().masked_fill(gate <= 0, 0)) < EXACT


@pytest.mark.parametrize(("least", "calls"), [(1, [2]), (70 * 36 * 100, [2]), (70 * 36 * 100 + 1, [])])
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "out"])
def test_sum_of_products_writes_the_same_by_the_library(
    least: int, calls: list[int], added: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, least_product=1, least_by_rows=least)
    found: list[int] = []
    ours = launch.by_rows
    count = lambda *given: (found.append(1 + (given[1] is not None)), ours(*given))[1]  # noqa: E731
    monkeypatch.setattr(launch, "by_rows", count)
    left, right, other_left, other_right, row, out, gate = (
        torch.randn(*size, device=DEVICE)
        for size in ((70, 64), (64, 36), (70, 36), (36, 36), (36,), (70, 36), (70, 36))
    )
    given = {"nothing": None, "row": row, "matrix": out.clone(), "out": out}[added]
    factors = left, right, other_left, other_right
    expected = torch.ops.gnncompile.sum_of_products(*factors, given, gate, True, False)
    gemm.write_sum_of_products(*factors, given, gate, True, out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert found == calls


@pytest.mark.parametrize("added", ["nothing", "row", "matrix"])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_product_writes_the_same_by_the_library(
    added: str, relu: bool, gated: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
):
    if ours:
        monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
        tune(monkeypatch, least_product=1, least_by_rows=1)
    left, right, gate = (torch.randn(n, 16, device=DEVICE) for n in (5, 16, 5))
    given = {"nothing": None, "row": torch.randn(16, device=DEVICE), "matrix": torch.randn(5, 16, device=DEVICE)}[added]
    gate[0, 0], gate[1, 1] = NAN, 0
    out = torch.full((5, 16), NAN, device=DEVICE)
    gemm.write_product(left, right, given, gate if gated else None, relu, out)
    expected = torch.ops.gnncompile.product(left, right, given, gate if gated else None, relu, False)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[True, False], ids=["few rows", "many rows"])
def any_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both ways to split a weight."""
    tune(monkeypatch, few_rows=2**14 if request.param else 0)


@pytest.mark.parametrize(("depth", "columns"), [(32, 40), (18, 17), (17, 50), (50, 18), (20, 130)])
@pytest.mark.parametrize("added", [True, False])
def test_gate(depth: int, columns: int, added: bool, any_tile: None):
    """Zeros where a matrix is not positive, as in the gradient of a ReLU: where it is no number, the gradient is."""
    left, right = torch.randn(70, depth, device=DEVICE), torch.randn(depth, columns, device=DEVICE)
    gate = torch.randn(70, columns, device=DEVICE)
    gate[::7], gate[::11] = 0, NAN
    out = torch.full((70, columns), NAN, device=DEVICE)
    if added:
        matrix = torch.randn(70, columns, device=DEVICE)
        launch.by_rows((left, right), None, matrix, gate, False, out)
        assert _off(out, (left.double() @ right.double() + matrix).masked_fill(gate <= 0, 0)) < EXACT
        return
    launch.by_rows((left, right), None, None, gate, False, out)
    assert _off(out, (left.double() @ right.double()).masked_fill(gate <= 0, 0)) < EXACT


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        *[(1, 16, 16), (31, 64, 64), (300, 100, 36), (100, 36, 132), (260, 132, 256)],
        *[(1, 17, 18), (70, 18, 17), (300, 128, 50), (100, 50, 20), (65, 130, 17), (65, 20, 130)],
        *[(70, 42, 8), (300, 8, 64), (31, 9, 8), (1, 8, 8)],
    ],
)
def test_over_rows(rows: int, depth: int, columns: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    # Several shares, of which the last one is short, are put together in several steps.
    tune(monkeypatch, processors=4, joined=(2, 64))
    left, right = torch.randn(rows, depth, device=DEVICE), torch.randn(rows, columns, device=DEVICE)
    results = [torch.full((depth, columns), NAN, device=DEVICE) for _ in range(2)]
    sums = torch.full((depth,), NAN, device=DEVICE)
    launch.over_rows(OverRows(left, right, results[0], None))
    launch.over_rows(OverRows(left, right, results[1], sums))
    assert _off(results[0], left.double().t() @ right.double()) < EXACT
    assert torch.equal(*results)
    torch.testing.assert_close(sums.double(), left.double().sum(0), rtol=1e-6, atol=1e-5)


def test_shares_of_rows():
    """Of at least so many steps each, unless too few would be left to fill the device."""
    shares = partial(launch._shares, block=32)
    assert shares(1, 396) == (32, 1) and shares(2708, 396, least=3) == shares(2708, 396) == (32, 85)
    assert shares(10_000, 396) == (32, 313)
    assert shares(10_000, 396, least=3) == (96, 105) and shares(10_000, 198, least=5) == (160, 63)
    assert shares(169_343, 396, least=3) == shares(169_343, 396) == (448, 378)
    assert shares(100, 0, least=3) == (128, 1)


@pytest.mark.parametrize("rows", [1, 31, 300])
@pytest.mark.parametrize(
    "widths",
    [(16, 64, 100, 36), (132, 36, 16, 128), (17, 18, 50, 20), (128, 50, 17, 17), (18, 130, 20, 16), (8, 42, 9, 8)],
)
@pytest.mark.parametrize("summed", [(True, False), (False, True), (True, True), (False, False)])
def test_two_products_over_rows(
    rows: int, widths: tuple[int, ...], summed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
):
    """Of different matrices; what one of them writes is not in the way of the other."""
    torch.manual_seed(0)
    tune(monkeypatch, processors=4, joined=(2, 64))
    given = [torch.randn(rows, width, device=DEVICE) for width in widths]
    both = []
    for left, right, sums in zip(given[::2], given[1::2], summed, strict=True):
        out = torch.full((left.size(1), right.size(1)), NAN, device=DEVICE)
        both.append(OverRows(left, right, out, torch.full_like(left[0], NAN) if sums else None))
    launch.over_rows(*both)
    for left, right, found, total, *_ in both:
        assert _off(found, left.double().t() @ right.double()) < EXACT
        if total is not None:
            torch.testing.assert_close(total.double(), left.double().sum(0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("rows", "together"), [(0, False), (1, True), (40, True), (41, False)])
def test_two_products_meet_where_rows_are_few(rows: int, together: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, most_together=40)
    calls: list[int] = []
    ours = launch.over_rows
    monkeypatch.setattr(launch, "over_rows", lambda *given: (calls.append(len(given)), ours(*given))[1])
    x, y, z = (torch.randn(rows, width, device=DEVICE) for width in (16, 32, 64))
    outs = [torch.full(size, NAN, device=DEVICE) for size in ((16, 32), (32, 64))]
    sums = torch.full((32,), NAN, device=DEVICE)
    gemm.write_two_products_over_rows(x, y, outs[0], None, y, z, outs[1], sums)
    assert calls == ([2] if together else [1] if rows else [])  # by themselves, one is left to the library
    expected = torch.ops.gnncompile.two_products_over_rows(x, y, False, y, z, True)
    torch.testing.assert_close([*outs, sums], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (31, 64), (700, 36), (300, 260)])
def test_sums(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch):
    tune(monkeypatch, processors=1)
    matrix, out = torch.randn(rows, columns, device=DEVICE), torch.full((columns,), NAN, device=DEVICE)
    launch.sums(matrix, out)
    torch.testing.assert_close(out.double(), matrix.double().sum(0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_products_over_few_rows_write_sums(rows: int, monkeypatch: pytest.MonkeyPatch):
    """The library sums nothing to zeros, and products of few rows without sums."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    calls: list[int] = []
    ours = launch.over_rows
    monkeypatch.setattr(launch, "over_rows", lambda one: (calls.append(one.left.size(0)), ours(one))[1])
    left, right = torch.randn(rows, 16, device=DEVICE), torch.randn(rows, 32, device=DEVICE)
    out, sums = torch.full((16, 32), NAN, device=DEVICE), torch.full((16,), NAN, device=DEVICE)
    gemm.write_product_over_rows(left, right, out, sums)
    assert calls == ([rows] if rows else [])
    torch.testing.assert_close(out, left.t() @ right)
    torch.testing.assert_close(sums, left.sum(0))
    gemm.write_product_over_rows(left, right, out.fill_(NAN))
    assert len(calls) == (1 if rows else 0)
    torch.testing.assert_close(out, left.t() @ right)


@pytest.mark.parametrize(
    ("widths", "ours"), [((16, 50), True), ((17, 4), True), ((8, 12), True), ((15, 16), False), ((32, 3), False)]
)
def test_products_over_edges(widths: tuple[int, int], ours: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, least_over_rows=1)
    if DEVICE == "cuda":
        tune(monkeypatch, capability=torch.cuda.get_device_capability())
    calls: list[tuple[int, int]] = []
    over_rows = launch.over_rows
    monkeypatch.setattr(launch, "over_rows", lambda one: (calls.append(tuple(one.out.shape)), over_rows(one))[1])
    left, right = (torch.randn(70, width, device=DEVICE) for width in widths)
    out = torch.full(widths, NAN, device=DEVICE)
    tiled_products.write_products([tiled_products.EdgeProduct(left, right, out)])
    assert calls == ([widths] if ours else [])
    torch.testing.assert_close(out.double(), left.double().t() @ right.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("depth", "columns"), [(100, 256), (256, 256), (256, 47), (128, 512), (50, 128), (17, 18), (42, 8), (9, 11)]
)
def test_many_rows(depth: int, columns: int):
    """As many as a sampled mini-batch has: the programs' shares are long, and all of a launch is used."""
    rows = 316_499
    left, right = torch.randn(rows, depth, device=DEVICE), torch.randn(columns, depth, device=DEVICE).t()
    added, gate = torch.randn(rows, columns, device=DEVICE), torch.randn(rows, columns, device=DEVICE)
    out, expected = added.clone(), left.double() @ right.double() + added.double()
    launch.by_rows((left, right), None, out, gate, True, out)
    assert _off(out, expected.relu().masked_fill(gate <= 0, 0)) < EXACT
    product, sums = torch.empty(columns, depth, device=DEVICE), torch.empty(columns, device=DEVICE)
    launch.over_rows(OverRows(gate, left, product, sums))
    assert _off(product, gate.double().t() @ left.double()) < 4 * EXACT
    assert _off(sums, gate.double().sum(0)) < 4 * EXACT


def test_views_that_begin_anywhere(any_tile: None):
    """Memory that does not begin at a multiple of 16 bytes, and a weight with gaps."""
    left = torch.randn(70 * 32 + 1, device=DEVICE)[1:].view(70, 32)
    right = torch.randn(32, 64, device=DEVICE)[:, ::2]
    out = torch.empty(70, 32, device=DEVICE)
    launch.by_rows((left, right), None, None, None, False, out)
    assert _off(out, left.double() @ right.double()) < EXACT
    out = torch.empty(32, 32, device=DEVICE)
    launch.over_rows(OverRows(left, left, out, None))
    assert _off(out, left.double().t() @ left.double()) < EXACT


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(70, 1), (70, 7), (1, 70), (130, 64), (300, 130)])
@pytest.mark.parametrize("scale", [1.0, 1e-37, 1e-43, 1e30])
def test_weights_in_two_parts(depth: int, columns: int, scale: float, transposed: bool):
    """The parts are the nearest numbers, and the power brings the largest finite number to between 2^14 and 2^15."""
    torch.manual_seed(0)
    x = torch.randn(depth, columns, device=DEVICE) * scale
    x.view(-1)[:4] = torch.tensor([0.0, INF, -INF, NAN])
    x.view(-1)[-1] = 8 * scale  # in the last stripe
    given = x.t().contiguous() if transposed else x
    high, low, power = in_parts(given, depth, columns, (depth + 3, columns + 2), transposed)
    for part in (high, low):
        assert not part[depth:].any() and not part[:, columns:].any()
    exponent = math.log2(power)
    assert exponent == int(exponent)
    finite = x[x.isfinite()]
    largest = float(finite.abs().max()) / power
    assert 2**14 <= largest < 2**15 or scale < 2**-112
    scaled, high, low = x.double() / power, high[:depth, :columns], low[:depth, :columns]
    number = ~scaled.isnan()
    torch.testing.assert_close(high[number], scaled[number].clamp(-65504, 65504).half(), rtol=0, atol=0)
    rest = (scaled - high.double()) * 2**11  # an infinity stays one
    torch.testing.assert_close(low, rest.half(), rtol=0, atol=0, equal_nan=True)


def in_parts(given: Tensor, depth: int, columns: int, padded: tuple[int, int], transposed: bool):
    """The high and the low part of a weight, and the power of two that divided it."""
    parts = weights.in_parts(given, (depth, columns), padded, given.size(1), transposed)
    size = padded[0] * padded[1]
    return (
        parts[:size].view(padded),
        parts[size : 2 * size].view(padded),
        float(parts[2 * size :].view(torch.float32)[0]),
    )


VIEWS: dict[str, Callable[[int, int], Tensor]] = {
    "rows of a slice": lambda depth, columns: torch.randn(depth, 3 * columns, device=DEVICE)[:, columns : 2 * columns],
    "columns of a slice": lambda depth, columns: torch.randn(columns, 2 * depth + 1, device=DEVICE)[:, -depth:].t(),
    "with gaps": lambda depth, columns: torch.randn(depth, 2 * columns, device=DEVICE)[:, ::2],
    "one row for all": lambda depth, columns: torch.randn(1, columns, device=DEVICE).expand(depth, -1),
    "one number for all": lambda depth, columns: torch.randn(1, 1, device=DEVICE).expand(depth, columns),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("depth", "columns"), [(16, 64), (64, 16), (17, 50), (50, 18), (1, 20)])
def test_weights_may_be_views(view: str, depth: int, columns: int, any_tile: None):
    torch.manual_seed(0)
    weight, other = VIEWS[view](depth, columns), torch.randn(32, columns, device=DEVICE)
    left, other_left = torch.randn(70, depth, device=DEVICE), torch.randn(70, 32, device=DEVICE)
    out, both = (torch.full((70, columns), NAN, device=DEVICE) for _ in range(2))
    launch.by_rows((left, weight), None, None, None, False, out)
    assert _off(out, left.double() @ weight.double()) < EXACT
    launch.by_rows((other_left, other), (left, weight), None, None, False, both)
    assert _off(both, other_left.double() @ other.double() + left.double() @ weight.double()) < EXACT


@pytest.mark.parametrize("scale", [2.0**-27, 2.0**24])
def test_each_number_is_as_exact_as_in_float32(scale: float, any_tile: None):
    """Also beside numbers of its row that are 2^27 times as large."""
    _left, _right, off, bound = _product_of_sizes(scale)
    assert float((off / bound).max()) < 2.0**-21


@pytest.mark.parametrize(
    ("row", "weight", "expected"),
    [
        ([2.0**79, 2.0**60, 0.0], [0.0, 2.0**60, 2.0**79], 2.0**120),  # both powers together are no float32 number
        ([3e38, 1e30, 0.0], [0.0, 1e30, 3e38], INF),
        ([3e38, 0.0, 0.0], [0.0, 0.0, 3e38], 0.0),
        ([1e-34, 0.0, 0.0], [1e-4, 0.0, 0.0], 1e-38),
        ([1e-25, 0.0, 0.0], [1e-12, 0.0, 0.0], 1e-37),
        ([1e30, 0.0, 0.0], [1e-30, 0.0, 0.0], 1.0),
        ([0.0, 0.0, 0.0], [3e38, 1.0, 1e-38], 0.0),
    ],
)
def test_products_of_large_and_small_powers(row: list[float], weight: list[float], expected: float, any_tile: None):
    left, right = torch.tensor([row], device=DEVICE), torch.tensor([weight], device=DEVICE).t()
    out = torch.empty(1, 1, device=DEVICE)
    launch.by_rows((left, right), None, None, None, False, out)
    torch.testing.assert_close(out.double(), torch.full_like(out, expected).double(), rtol=1e-5, atol=1e-44)


@triton.jit
def _sum_of_terms(total_ptr, small_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, sum_of_terms(tl.load(total_ptr + at), tl.load(small_ptr + at)))


def test_small_terms_that_are_not_finite_do_not_count():
    """The large terms of a sum that is no float32 number are infinite. Small ones may be, with the other sign."""
    total = torch.tensor([INF, -INF, INF, NAN, 1.0, INF, 2.0, 3.0], device=DEVICE)
    small = torch.tensor([-INF, INF, NAN, 1.0, 0.5, INF, -1.0, 0.0], device=DEVICE)
    out = torch.empty_like(total)
    _sum_of_terms[(1,)](total, small, out, 8)
    expected = torch.tensor([INF, -INF, INF, NAN, 1.5, INF, 1.0, 3.0], device=DEVICE)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1e-20, 1e18])
def test_numbers_of_all_sizes(scale: float, any_tile: None):
    """What a row loses of its small numbers is nothing beside its largest one."""
    left, right, off, bound = _product_of_sizes(scale)
    lost = left.abs().amax(1, keepdim=True) * right.abs().amax() * len(right) * 2.0**-49
    assert bool((off <= bound * 2.0**-21 + lost).all())


def _product_of_sizes(scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two float64 factors, how far our product is off, and the product of their absolute values."""
    torch.manual_seed(0)
    left = torch.randn(64, 32, device=DEVICE)
    left[:, ::2] *= scale
    right = torch.randn(32, 32, device=DEVICE)
    right[::2, ::2] = 0  # every other column of the result is of the small or large numbers alone
    right[1::2, 1::2] = 0
    out = torch.empty(64, 32, device=DEVICE)
    launch.by_rows((left, right), None, None, None, False, out)
    left, right = left.double(), right.double()
    return left, right, (out - left @ right).abs(), left.abs() @ right.abs()


WEIGHTS: dict[str, Callable[[int, int], Tensor]] = {
    "with low parts": lambda depth, columns: torch.ones(depth, columns, device=DEVICE) * 1.01,
    "without low parts": lambda depth, columns: torch.ones(depth, columns, device=DEVICE),
    "with negative low parts": lambda depth, columns: torch.ones(depth, columns, device=DEVICE) * 0.99,
    "of both signs": lambda depth, columns: torch.randn(depth, columns, device=DEVICE),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("depth", "columns"), [(16, 16), (17, 18), (50, 17)])
def test_infinities_and_no_numbers(depth: int, columns: int, kind: str, any_tile: None):
    torch.manual_seed(0)
    left, right = torch.ones(4, depth, device=DEVICE), WEIGHTS[kind](depth, columns)
    left[0, 3], left[1, 3], left[2, 3] = INF, -INF, NAN
    left[3, 3], left[3, 4] = INF, -INF
    right[3, 5] = 0
    out = torch.empty(4, columns, device=DEVICE)
    launch.by_rows((left, right), None, None, None, False, out)
    torch.testing.assert_close(out, left @ right, equal_nan=True)
    right[2, 6], right[4, 7] = INF, NAN
    launch.by_rows((left, right), None, None, None, False, out)
    expected = left @ right
    assert not out[:, 6].isfinite().any()  # beside an infinity of their row, other numbers may become zeros
    out[:, 6] = expected[:, 6] = 0
    torch.testing.assert_close(out, expected, equal_nan=True)
    right[2, 6], right[4, 7] = 1, 1
    again = torch.empty(4, columns, device=DEVICE)
    launch.over_rows(OverRows(left.t().contiguous(), right, again, None))
    torch.testing.assert_close(again, left @ right, equal_nan=True)
