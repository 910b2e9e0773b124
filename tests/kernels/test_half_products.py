"""Products of 16-bit matrices on tensor cores: the kernels, where they compute, and what compiled models give."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile import tuning
from gnncompile.codegen.gemm import launch
from gnncompile.codegen.gemm.launch import OverRows
from gnncompile.codegen.triton.tiled_products import EdgeProduct, write_products
from gnncompile.ops import gemm
from tests.harness import tune, tune_halves
from tests.triton_regions import DEVICE, INF, NAN

pytestmark = triton_regions.INTERPRETED
on_tensor_cores = triton_regions.on_tensor_cores

HALVES = [torch.bfloat16, torch.float16]
ROUNDED = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of one rounding to 16 bits."""

halves = pytest.mark.parametrize("dtype", HALVES)


def _check(found: Tensor, expected: Tensor, sizes: Tensor) -> None:
    """One rounding, and sums in float32: `sizes` is the sum of the sizes of all terms, in float64."""
    bound = ROUNDED[found.dtype] * expected.abs() + 1e-5 * sizes + 1e-7
    assert not ((found.double() - expected).abs() > bound).any()


def _matrix(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE).to(dtype)


def _empty(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.full(size, NAN, device=DEVICE, dtype=dtype)


@halves
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 16, 16), (65, 20, 64), (130, 104, 17), (260, 128, 128), (300, 42, 8)]
)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "out"])
def test_by_rows(rows: int, depth: int, columns: int, transposed: bool, added: str, dtype: torch.dtype):
    torch.manual_seed(0)
    left = _matrix(dtype, rows, depth)
    right = _matrix(dtype, columns, depth).t() if transposed else _matrix(dtype, depth, columns)
    gate, out = _matrix(dtype, rows, columns), _matrix(dtype, rows, columns)
    row, matrix = _matrix(dtype, columns), _matrix(dtype, rows, columns)
    given = {"nothing": None, "row": row, "matrix": matrix, "out": out}[added]
    more = 0 if given is None else given.double().clone()
    launch.by_rows((left, right), None, given, gate, True, out)
    expected = (left.double() @ right.double() + more).relu().masked_fill(gate <= 0, 0)
    _check(out, expected, left.double().abs() @ right.double().abs() + abs(more))


@halves
@pytest.mark.parametrize("widths", [(16, 16, 40), (128, 25, 66), (64, 128, 128)])
@pytest.mark.parametrize("transposed", [(True, False), (False, True)])
def test_sum_of_two(widths: tuple[int, int, int], transposed: tuple[bool, bool], dtype: torch.dtype):
    """Their sum is rounded once."""
    torch.manual_seed(0)
    (*depths, columns), rows = widths, 150
    lefts = [_matrix(dtype, rows, depth) for depth in depths]
    weights = [_matrix(dtype, columns, depth).t() for depth in depths]
    rights = [w if across else w.contiguous() for w, across in zip(weights, transposed, strict=True)]
    out = _empty(dtype, rows, columns)
    one, other = zip(lefts, rights, strict=True)
    launch.by_rows(one, other, None, None, False, out)
    pairs = [(left.double(), right.double()) for left, right in (one, other)]
    _check(out, sum(a @ b for a, b in pairs), sum(a.abs() @ b.abs() for a, b in pairs))


@halves
@pytest.mark.parametrize(
    ("many", "biased", "transposed"),
    [(1, 1, True), (2, 0b11, False), (2, 0b01, True), (3, 0b010, False), (4, 0b1111, True), (4, 0, False)],
)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 16, 24), (130, 20, 64), (260, 41, 125)])
def test_side_by_side(
    many: int, biased: int, transposed: bool, rows: int, depth: int, columns: int, dtype: torch.dtype
):
    """Bit `k` of `biased` tells whether product `k` has a row to add."""
    torch.manual_seed(0)
    left = _matrix(dtype, rows, depth)
    weights = [_matrix(dtype, columns, depth) for _ in range(many)]
    rights = [w.t() if transposed else w.t().contiguous() for w in weights]
    added = [_matrix(dtype, columns) if biased >> k & 1 else None for k in range(many)]
    outs = [_empty(dtype, rows, columns) for _ in range(many)]
    launch.side_by_side(left, rights, added, outs)
    for right, row, out in zip(rights, added, outs, strict=True):
        more = 0 if row is None else row.double()
        _check(out, left.double() @ right.double() + more, left.double().abs() @ right.double().abs() + abs(more))


@pytest.mark.parametrize("gaps", [False, True])
def test_weights_of_any_strides_side_by_side(gaps: bool):
    """Those that lie in different ways, or with gaps, are multiplied one by one."""
    torch.manual_seed(0)
    left, dtype = _matrix(torch.bfloat16, 70, 32), torch.bfloat16
    rights = [_matrix(dtype, 32, 64)[:, ::2] if gaps else _matrix(dtype, 32, 32).t(), _matrix(dtype, 32, 32)]
    outs = [_empty(dtype, 70, 32) for _ in rights]
    launch.side_by_side(left, rights, [None, None], outs)
    for right, out in zip(rights, outs, strict=True):
        _check(out, left.double() @ right.double(), left.double().abs() @ right.double().abs())


@halves
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 16, 16), (31, 64, 64), (700, 104, 20), (300, 41, 130), (260, 136, 256), (300, 42, 8), (70, 9, 11)],
)
@pytest.mark.parametrize("together", [True, False])
def test_over_rows(
    rows: int, depth: int, columns: int, together: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    # Several shares, of which the last one is short, are put together in several steps.
    tune(monkeypatch, processors=4, joined=(2, 64))
    left, right, other = (_matrix(dtype, rows, width) for width in (depth, columns, depth))
    outs = [_empty(dtype, depth, columns) for _ in range(2)]
    sums = _empty(dtype, depth)
    one, two = OverRows(left, right, outs[0], None), OverRows(other, right, outs[1], sums)
    if together:
        launch.over_rows(one, two)
    else:
        launch.over_rows(two)
        launch.over_rows(one)
    for x, out in ((left, outs[0]), (other, outs[1])):
        _check(out, x.double().t() @ right.double(), x.double().abs().t() @ right.double().abs())
    _check(sums, other.double().sum(0), other.double().abs().sum(0))


@halves
def test_float32_results_are_not_taken_for_16_bits(dtype: torch.dtype):
    """Kernels of the same sizes are compiled for each dtype, and for each number of results."""
    for kind in (torch.float32, dtype, torch.float32):
        left, right = _matrix(kind, 70, 32), _matrix(kind, 70, 32)
        guard = [_empty(kind, 3, 32, 32) for _ in range(2)]
        for outs in (guard[:1], guard):
            launch.over_rows(*(OverRows(left, right, out[1], None) for out in outs))
            for out in outs:
                torch.testing.assert_close(out[1].float(), left.float().t() @ right.float(), rtol=1e-2, atol=1e-2)
                assert out[::2].isnan().all()


@halves
def test_infinities_and_no_numbers(dtype: torch.dtype):
    left, right = (torch.ones(*size, device=DEVICE, dtype=dtype) for size in ((4, 16), (16, 16)))
    left[0, 3], left[1, 3], left[2, 3] = INF, -INF, NAN
    left[3, 3], left[3, 4] = INF, -INF
    right[3, 5] = 0
    out, beside = _empty(dtype, 4, 16), _empty(dtype, 4, 16)
    launch.by_rows((left, right), None, None, None, False, out)
    launch.side_by_side(left, [right], [None], [beside])
    expected = (left.float() @ right.float()).to(dtype)
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(beside, expected, equal_nan=True)


def test_a_weight_with_gaps_is_copied():
    left, right = _matrix(torch.bfloat16, 70, 32), _matrix(torch.bfloat16, 32, 64)[:, ::2]
    out = _empty(torch.bfloat16, 70, 32)
    launch.by_rows((left, right), None, None, None, False, out)
    _check(out, left.double() @ right.double(), left.double().abs() @ right.double().abs())


@pytest.mark.gpu
@halves
@pytest.mark.parametrize(("depth", "columns"), [(64, 64), (128, 128), (128, 64), (64, 256), (256, 256), (42, 8)])
def test_many_rows(depth: int, columns: int, dtype: torch.dtype):
    rows = 316_499
    left, gate = _matrix(dtype, rows, depth), _matrix(dtype, rows, columns)
    weights = [_matrix(dtype, columns, depth).t() for _ in range(4)]
    outs = [_empty(dtype, rows, columns) for _ in range(4)]
    if max(depth, columns) <= tuning.HALF_PRODUCTS.widest:
        launch.side_by_side(left, weights, [None] * 4, outs)
        for right, out in zip(weights, outs, strict=True):
            _check(out, left.double() @ right.double(), left.double().abs() @ right.double().abs())
        launch.by_rows((left, weights[0]), (left, weights[1]), gate, gate, True, outs[0])
        expected = left.double() @ (weights[0].double() + weights[1].double()) + gate.double()
        sizes = left.double().abs() @ (weights[0].double().abs() + weights[1].double().abs())
        _check(outs[0], expected.relu().masked_fill(gate <= 0, 0), sizes)
    other = _matrix(dtype, rows, columns)
    both = [OverRows(x, left, _empty(dtype, columns, depth), _empty(dtype, columns)) for x in (gate, other)]
    launch.over_rows(*both)
    for x, right, out, sums, *_ in both:
        _check(out, x.double().t() @ right.double(), x.double().abs().t() @ right.double().abs())
        _check(sums, x.double().sum(0), x.double().abs().sum(0))


@halves
@pytest.mark.parametrize(("least", "ours"), [(1, True), (2**40, False)])
def test_same_rows_by_the_library(least: int, ours: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, least_product=1, least_by_rows=least)
    calls: list[int] = []
    beside = launch.side_by_side
    monkeypatch.setattr(launch, "side_by_side", lambda *given: (calls.append(len(given[1])), beside(*given))[1])
    left, rights = _matrix(dtype, 5, 16), [_matrix(dtype, 16, 32) for _ in range(3)]
    added = [_matrix(dtype, 32) for _ in range(3)]
    outs = [_empty(dtype, 5, 32) for _ in range(3)]
    gemm.write_products_of_same_rows(left, rights, added, outs)
    assert calls == ([3] if ours else [])
    expected = torch.ops.gnncompile.products_of_same_rows(left, rights, added)
    torch.testing.assert_close(outs, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("width", "sums", "ours"), [(64, False, True), (72, False, False), (72, True, True), (73, False, True)]
)
def test_wide_products_over_rows_are_left_to_the_library(
    width: int, sums: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, least_over_rows=1)
    calls: list[int] = []
    over_rows = launch.over_rows
    monkeypatch.setattr(launch, "over_rows", lambda one: (calls.append(one.left.size(1)), over_rows(one))[1])
    left, right = (_matrix(torch.bfloat16, 70, width) for _ in range(2))
    out, summed = _empty(torch.bfloat16, width, width), _empty(torch.bfloat16, width)
    gemm.write_product_over_rows(left, right, out, summed if sums else None)
    assert calls == ([width] if ours else [])
    _check(out, left.double().t() @ right.double(), left.double().abs().t() @ right.double().abs())


@halves
@pytest.mark.parametrize("edges", [0, 1, 70])
@pytest.mark.parametrize(
    ("widths", "calls"),
    [
        ([(16, 32)], [1]),
        ([(16, 32), (32, 64)], [2]),
        ([(16, 32), (128, 64), (24, 16)], [2, 1]),
        ([(16, 32), (18, 33), (32, 136)], [2]),
        ([(72, 64)], []),
        ([(72, 50)], [1]),
        ([(72, 15)], []),
    ],
)
@pytest.mark.parametrize("to", [None, torch.float32])
def test_products_over_edges(
    edges: int,
    widths: list[tuple[int, int]],
    calls: list[int],
    to: torch.dtype | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two that are narrow share a launch; one that is alone and wide is left to the library."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, least_over_rows=1, capability=torch.cuda.get_device_capability() if DEVICE == "cuda" else (9, 0))
    found: list[int] = []
    over_rows = launch.over_rows
    monkeypatch.setattr(launch, "over_rows", lambda *given: (found.append(len(given)), over_rows(*given))[1])
    products = [
        EdgeProduct(_matrix(dtype, edges, rows), _matrix(dtype, edges, columns), _empty(to or dtype, rows, columns))
        for rows, columns in widths
    ]
    write_products(products)
    assert found == (calls if edges else [])
    for left, right, out in products:
        expected, sizes = left.double().t() @ right.double(), left.double().abs().t() @ right.double().abs()
        _check(out.to(dtype), expected, sizes)


# -- compiled models ---------------------------------------------------------------------------------------------------


class _Heads(nn.Module):
    """Layers of the same rows, one of them without a bias, and a layer of what they give."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(width, width) for _ in range(3))
        self.two.register_parameter("bias", None)
        self.last = nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last((self.one(x).sigmoid() * self.two(x) + self.three(x)).tanh())
        return out


def _step(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    out = (model if run is None else run)(x)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])]


def _written(codes: list[str]) -> list[list[int]]:
    """How many calls of each kind the forward and the backward have."""
    names = ("products_of_same_rows", "product", "sum_of_products", "two_products_over_rows", "product_with_epilogue")
    return [[len(re.findall(rf"_gnncompile_gemm\w*\.write_{name}\(", code)) for name in names] for code in codes]


@halves
def test_layers_of_the_same_rows(dtype: torch.dtype, on_tensor_cores: None):
    torch.manual_seed(0)
    model = _Heads(32).to(DEVICE, dtype)
    exact = copy.deepcopy(model).double()
    compiled = gnncompile.compile(model)
    for rows in (70, 1, 0, 3):
        x = _matrix(dtype, rows, 32).requires_grad_()
        wide = x.detach().double().requires_grad_()
        for a, b in zip(_step(model, compiled, x), _step(exact, exact, wide), strict=True):
            assert float((a.double() - b).norm()) <= 2e-2 * float(b.norm())
    torch._dynamo.reset()
    x = _matrix(dtype, 9, 32).requires_grad_()
    _, codes = run_and_get_code(lambda: gnncompile.compile(model)(x).sum().backward())
    assert _written(codes) == [[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]]


def test_autocast(on_tensor_cores: None):
    """Weights are converted before the products that read them. Errors are no larger than those of eager."""
    torch.manual_seed(0)
    model = _Heads(32).to(DEVICE)
    compiled, x = gnncompile.compile(model), torch.randn(70, 32, device=DEVICE, requires_grad=True)
    exact = _step(copy.deepcopy(model).double(), None, x.detach().double().requires_grad_())
    with torch.autocast(DEVICE, torch.bfloat16):
        found, codes = run_and_get_code(lambda: _step(model, compiled, x))
        expected = _step(model, model, x)
    for a, b, right in zip(found, expected, exact, strict=True):
        assert a.dtype is b.dtype
        off, usual = (float((one.double() - right).norm() / right.norm()) for one in (a, b))
        assert off < 1.2 * usual + 2e-3
    assert _written(codes)[0] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(("change", "ours"), [({}, True), ({"widest": 31}, False), ({"widest": 32}, True)])
def test_where_the_library_computes(
    change: dict[str, int], ours: bool, on_tensor_cores: None, monkeypatch: pytest.MonkeyPatch
):
    tune_halves(monkeypatch, **change)
    model = _Heads(32).to(DEVICE, torch.bfloat16)
    with torch._inductor.config.patch(force_disable_caches=True):  # what is patched here is no part of their keys
        _, codes = run_and_get_code(gnncompile.compile(model), _matrix(torch.bfloat16, 9, 32))
    assert ("write_products_of_same_rows" in "".join(codes)) == ours


@pytest.mark.parametrize("kind", ["stored transposed", "read transposed", "alike"])
def test_weights_that_lie_in_different_ways(kind: str, on_tensor_cores: None):
    """Under autocast, the strides of a converted weight are known for certain only when it is there."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = torch.randn(32, 32) / 6
            self.first = nn.Parameter(first.t() if kind == "stored transposed" else first)
            self.second = nn.Parameter(torch.randn(32, 32) / 6)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.first.t() if kind == "read transposed" else self.first
            return nn.functional.linear(x, weight).tanh() * (x @ self.second)

    torch.manual_seed(0)
    model, x = Model().to(DEVICE), torch.randn(70, 32, device=DEVICE, requires_grad=True)
    exact = _step(copy.deepcopy(model).double(), None, x.detach().double().requires_grad_())
    with torch.autocast(DEVICE, torch.bfloat16):
        found = _step(model, gnncompile.compile(model), x)
    for a, b in zip(found, exact, strict=True):
        assert float((a.double() - b).norm()) <= 2e-2 * float(b.norm())


def test_slices_of_a_weight_share_a_launch(on_tensor_cores: None):
    """As the filters of PaiNN, of which each message reads a part."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Linear(20, 96)

        def forward(self, x: Tensor) -> Tensor:
            weights, biases = self.filters.weight.split(32), self.filters.bias.split(32)
            one, two, three = (nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
            return one.tanh() * two + three

    torch.manual_seed(0)
    model, x = Model().to(DEVICE, torch.bfloat16), _matrix(torch.bfloat16, 70, 20)
    found, codes = run_and_get_code(gnncompile.compile(model), x)
    assert _written(codes)[0] == [1, 0, 0, 0, 0]
    torch.testing.assert_close(found.double(), copy.deepcopy(model).double()(x.double()), rtol=2e-2, atol=2e-2)


def test_weights_with_gaps_are_not_joined(on_tensor_cores: None):
    """The kernel takes weights whose rows or columns lie together. One that is a view of a large parameter has gaps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Parameter(torch.randn(1024, 1024) / 32)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.large[:32, :32], self.large[32:64, 64:96]
            return nn.functional.linear(x, one).tanh() * nn.functional.linear(x, two)

    model, x = Model().to(DEVICE, torch.bfloat16), _matrix(torch.bfloat16, 9, 32)
    with torch.no_grad():
        found, codes = run_and_get_code(gnncompile.compile(model), x)
        torch.testing.assert_close(found, model(x), rtol=3e-2, atol=3e-2)
    assert "write_products_of_same_rows" not in "".join(codes)


@pytest.mark.parametrize("regions", [0, 1, 2, 3])
def test_a_result_is_not_made_long_before_it_is_read(regions: int, on_tensor_cores: None):
    """A product waits for its turn if more than one region lies in between. The last region reads the product."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out = self.one(x)
            for _ in range(regions):
                out = torch.zeros_like(out).index_add_(0, edge_index[1], out[edge_index[0]]).tanh()
            return out.cos() + self.two(x)

    model = Model().to(DEVICE, torch.bfloat16)
    x, edges = _matrix(torch.bfloat16, 9, 32), torch.randint(9, (2, 20), device=DEVICE)
    with torch.no_grad():
        found, codes = run_and_get_code(gnncompile.compile(model), x, edges)
        torch.testing.assert_close(found, model(x, edges), rtol=3e-2, atol=3e-2)
    assert ("write_products_of_same_rows" in "".join(codes)) == (regions < 3)
