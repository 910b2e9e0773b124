"""Products that compute what follows them, and products over rows that compute their factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Space
from gnncompile.ops import gemm_arithmetic
from tests.harness import tune
from tests.triton_regions import DEVICE, INF, NAN

pytestmark = triton_regions.INTERPRETED

on_tensor_cores = triton_regions.on_tensor_cores

ROWS = Space.DESTINATION
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ROUNDED = {torch.float32: 2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The error of a product, in float32, or of one rounding, in relation to the largest result."""


@dataclass(frozen=True)
class Program:
    """Arithmetic on matrices: what it reads, and what it computes, in a region and in torch.

    Attributes:
        shapes: The shape of each tensor, as functions of the rows and columns.
        write: Adds the values to a region, and returns the results.
        run: Computes the results by torch.
    """

    shapes: list[Callable[[int, int], tuple[int, ...]]]
    write: Callable[..., list[int]]
    run: Callable[..., list[Tensor]]

    def spec(self, columns: int, dtype: torch.dtype, types: list[torch.dtype] | None = None) -> str:
        """Returns the region; `types` are the dtypes of its tensors, if they differ from that of the results."""
        b, places = Builder(ROWS), []
        for k, shape in enumerate(self.shapes):
            size = shape(-1, columns)
            space = ROWS if -1 in size else Space.PARAMETER
            wide = size[-1] == columns and len(size) > 0
            stored = TYPES[dtype if types is None else types[k]]
            places.append(b.input(k, space, (1, columns if wide else 1), stored))
        outs = self.write(b, *places)
        return b.finish([Output(out, TYPES[dtype], (columns,)) for out in outs]).spec

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns random tensors to read, after the first one."""
        return [torch.randn(shape(rows, columns), device=DEVICE).to(dtype) for shape in self.shapes[1:]]


def whole(rows: int, columns: int) -> tuple[int, ...]:
    """Returns the shape of a matrix."""
    return rows, columns


def _silu(b: Builder, p: int) -> list[int]:
    return [b.op("mul", p, b.op("sigmoid", p))]


def _gradient_of_silu(b: Builder, p: int, h: int) -> list[int]:
    s, one = b.op("sigmoid", h), b.const(1.0)
    return [b.op("mul", b.op("mul", p, s), b.op("add", b.op("mul", h, b.op("sub", one, s)), one))]


def _run_gradient_of_silu(p: Tensor, h: Tensor) -> list[Tensor]:
    s = h.sigmoid()
    return [p * s * (1 + h * (1 - s))]


def _many(b: Builder, p: int, row: int, column: int, number: int) -> list[int]:
    return [b.op("add", b.op("mul", p, row), b.op("mul", column, number)), b.op("tanh", p)]


def _gated(b: Builder, p: int, x: int, y: int, z: int) -> list[int]:
    kept = b.op("and", b.op("gt", x, b.const(0)), b.op("lt", y, b.const(1)))
    return [p, b.op("where", kept, b.op("add", p, z), b.const(0))]


PROGRAMS = {
    "silu": Program([whole], _silu, lambda p: [p * p.sigmoid()]),
    "gradient of silu": Program([whole, whole], _gradient_of_silu, _run_gradient_of_silu),
    "of a row, a column and a number": Program(
        [whole, lambda n, c: (c,), lambda n, c: (n, 1), lambda n, c: (1,)],
        _many,
        lambda p, row, column, number: [p * row + column * number, p.tanh()],
    ),
    "the product, and a gated sum": Program(
        [whole, whole, whole, whole],
        _gated,
        lambda p, x, y, z: [p, torch.where((x > 0) & (y < 1), p + z, 0.0)],
    ),
}


@pytest.fixture(autouse=True)
def in_triton(on_tensor_cores: None) -> None:
    """All products are computed by Triton's kernels."""


def _check(found: Tensor, expected: Tensor) -> None:
    assert not found.isnan().any()
    bound = ROUNDED[found.dtype] * expected.abs().max() if expected.numel() else 0.0
    assert not ((found.double() - expected).abs() > 4 * bound).any()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 16, 16), (65, 32, 64), (130, 100, 47), (70, 260, 130), (65, 42, 8), (0, 16, 32)]
)
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "out"])
@pytest.mark.parametrize("dtype", TYPES)
def test_epilogues(name: str, rows: int, depth: int, columns: int, added: str, dtype: torch.dtype):
    torch.manual_seed(0)
    program = PROGRAMS[name]
    left = (torch.randn(rows, depth, device=DEVICE) / depth**0.5).to(dtype)
    right = torch.randn(columns, depth, device=DEVICE).to(dtype)
    read = program.tensors(rows, columns, dtype)
    sizes = {"nothing": None, "row": (columns,), "matrix": (rows, columns), "out": (rows, columns)}
    size = sizes[added]
    given = None if size is None else torch.randn(size, device=DEVICE).to(dtype)
    product = left.double() @ right.double().t() + (0 if given is None else given.double())
    expected = program.run(product, *(one.double() for one in read))
    outs = [torch.full((rows, columns), NAN, device=DEVICE, dtype=dtype) for _ in expected]
    if added == "out" and given is not None:
        outs[0] = given
    spec = program.spec(columns, dtype)
    gemm_arithmetic.write_product_with_epilogue(left, right.t(), None, None, given, False, read, spec, outs)
    for one, other in zip(outs, expected, strict=True):
        _check(one, other)


@pytest.mark.parametrize("relu", [True, False])
def test_an_epilogue_of_a_sum_of_products(relu: bool):
    torch.manual_seed(0)
    program = PROGRAMS["gradient of silu"]
    factors = [torch.randn(size, device=DEVICE) for size in ((70, 20), (20, 36), (70, 50), (50, 36))]
    read, out = program.tensors(70, 36, torch.float32), torch.full((70, 36), NAN, device=DEVICE)
    product = factors[0].double() @ factors[1].double() + factors[2].double() @ factors[3].double()
    (expected,) = program.run(product.relu() if relu else product, read[0].double())
    spec = program.spec(36, torch.float32)
    gemm_arithmetic.write_product_with_epilogue(*factors, None, relu, read, spec, [out])
    _check(out, expected)


def test_results_of_another_dtype():
    """As under autocast: a product in 16 bits, and results in float32."""
    torch.manual_seed(0)
    program = PROGRAMS["gradient of silu"]
    left, right = (torch.randn(size, device=DEVICE).bfloat16() for size in ((70, 32), (32, 48)))
    h, out = torch.randn(70, 48, device=DEVICE), torch.full((70, 48), NAN, device=DEVICE)
    spec = program.spec(48, torch.float32, [torch.bfloat16, torch.float32])
    gemm_arithmetic.write_product_with_epilogue(left, right, None, None, None, False, [h], spec, [out])
    (expected,) = program.run((left.double() @ right.double()).bfloat16().double(), h.double())
    assert (out.double() - expected).norm() <= 1e-3 * expected.norm()  # a few sums in float32 are rounded the other way


def _quotient(b: Builder, x: int, y: int) -> list[int]:
    return [b.op("div", x, b.op("exp", y))]


def _inverse(b: Builder, x: int) -> list[int]:
    return [b.op("div", b.const(1.0), b.op("add", x, b.const(4.0)))]


FACTORS = {
    "silu": PROGRAMS["silu"],
    "a quotient of two": Program([whole, whole], _quotient, lambda x, y: [x / y.exp()]),
    "a scaled matrix": Program([whole, lambda n, c: (n, 1)], lambda b, x, s: [b.op("mul", x, s)], lambda x, s: [x * s]),
    "what is 1/4 of nothing": Program([whole], _inverse, lambda x: [1 / (x + 4)]),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 16, 16), (31, 64, 100), (300, 132, 36), (65, 17, 18), (70, 42, 8)]
)
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_factors(
    name: str, rows: int, depth: int, columns: int, summed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    tune(monkeypatch, processors=3, joined=(2, 64))
    program = FACTORS[name]
    left, first = (torch.randn(rows, width, device=DEVICE).to(dtype) for width in (depth, columns))
    read = [first, *program.tensors(rows, columns, dtype)]
    right = program.run(*(one.double() for one in read))[0]
    outs = [torch.full(size, NAN, device=DEVICE, dtype=dtype) for size in ((depth, columns), (depth,))][: 1 + summed]
    gemm_arithmetic.write_products_over_rows([left], read, [program.spec(columns, dtype)], [summed], outs)
    # The factor is rounded to the dtype of the left matrix.
    expected = [left.double().t() @ right, left.double().sum(0)]
    for out, other, terms in zip(
        outs, expected, (left.double().t().abs() @ right.abs(), left.double().abs().sum(0)), strict=False
    ):
        assert not ((out.double() - other).abs() > 2 * ROUNDED[dtype] * terms + 1e-6).any()


@pytest.mark.parametrize("plain", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_two_products_one_of_them_with_a_factor(plain: int, rows: int):
    torch.manual_seed(0)
    lefts = [torch.randn(rows, width, device=DEVICE) for width in (20, 36)]
    rights = [torch.randn(rows, width, device=DEVICE) for width in (17, 64)]
    specs = [FACTORS["silu"].spec(right.size(1), torch.float32) for right in rights]
    specs[plain] = ""
    sizes = (20, 17), (20,), (36, 64)
    outs = [torch.full(size, NAN, device=DEVICE) for size in sizes]
    gemm_arithmetic.write_products_over_rows(lefts, rights, specs, [True, False], outs)
    factors = [(right * right.sigmoid() if spec else right).double() for right, spec in zip(rights, specs, strict=True)]
    expected = lefts[0].double().t() @ factors[0], lefts[0].double().sum(0), lefts[1].double().t() @ factors[1]
    for out, other in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.double(), other, rtol=1e-5, atol=1e-5)


def test_infinities_reach_what_follows():
    program = PROGRAMS["silu"]
    left, right = torch.ones(70, 32, device=DEVICE), torch.ones(32, 16, device=DEVICE)
    left[3, 5], left[4, 5], left[5, 5] = INF, -INF, NAN
    out = torch.zeros(70, 16, device=DEVICE)
    spec = program.spec(16, torch.float32)
    gemm_arithmetic.write_product_with_epilogue(left, right, None, None, None, False, [], spec, [out])
    assert (out[3] == INF).all()
    assert out[4:6].isnan().all()
    assert (out[6:] > 31).all()


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_other_kernels_write_the_same(rows: int, monkeypatch: pytest.MonkeyPatch):
    """Where Triton does not run, torch computes the products and the arithmetic."""
    torch.manual_seed(0)
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "reference")
    program, factor = PROGRAMS["the product, and a gated sum"], FACTORS["a quotient of two"]
    left, right = torch.randn(rows, 20, device=DEVICE), torch.randn(20, 36, device=DEVICE)
    read = program.tensors(rows, 36, torch.float32)
    outs = [torch.full((rows, 36), NAN, device=DEVICE) for _ in range(2)]
    spec = program.spec(36, torch.float32)
    gemm_arithmetic.write_product_with_epilogue(left, right, None, None, None, False, read, spec, outs)
    for one, other in zip(outs, program.run(left.double() @ right.double(), *(t.double() for t in read)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    both = [torch.randn(rows, 36, device=DEVICE) for _ in range(2)]
    out = torch.full((20, 36), NAN, device=DEVICE)
    gemm_arithmetic.write_products_over_rows([left], both, [factor.spec(36, torch.float32)], [False], [out])
    torch.testing.assert_close(out, left.t() @ (both[0] / both[1].exp()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_few_rows_are_multiplied_by_the_library(other: bool, added: bool, monkeypatch: pytest.MonkeyPatch):
    """An epilogue follows in our kernel."""
    torch.manual_seed(0)
    tune(monkeypatch, least_product=10**6)
    program = PROGRAMS["the product, and a gated sum"]
    factors: list[Tensor | None] = [torch.randn(size, device=DEVICE) for size in ((40, 20), (20, 36))]
    factors += [torch.randn(size, device=DEVICE) if other else None for size in ((40, 50), (50, 36))]
    given = torch.randn(36, device=DEVICE) if added else None
    read = program.tensors(40, 36, torch.float32)
    outs = [torch.full((40, 36), NAN, device=DEVICE) for _ in range(2)]
    left, right, *others = (None if one is None else one.double() for one in factors)
    product = left @ right + (others[0] @ others[1] if other else 0) + (0 if given is None else given.double())
    spec = program.spec(36, torch.float32)
    gemm_arithmetic.write_product_with_epilogue(*factors, given, True, read, spec, outs)  # type: ignore[arg-type]
    for one, expected in zip(outs, program.run(product.relu(), *(t.double() for t in read)), strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)
