"""Products of matrices in vectors of our own on CPUs: the kernels, tiled regions, and compiled models."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import gnncompile
from gnncompile import device, tuning
from gnncompile.codegen.cpp import matrix
from gnncompile.codegen.cpp.compiler import load
from gnncompile.codegen.cpp.prelude import prelude
from gnncompile.codegen.cpp.products import LIBRARY, PAIRS, VECTORS
from gnncompile.codegen.cpp.tiled_source import tiled_source
from gnncompile.device import Device, device_of
from tests.harness import kernels
from tests.kernels.test_tiles import by_op, check, region_of

SIZES = [(1, 1, 1), (1, 70, 5), (7, 16, 16), (130, 50, 33), (131, 33, 50), (300, 17, 130), (257, 96, 64), (5000, 3, 4)]


@pytest.fixture(params=[True, False], ids=["own", "library"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Products by our own vectors, then by the library, on whatever CPU there is; small products count too."""
    monkeypatch.setattr(Device, "multiplies_in_own_vectors", property(lambda device: request.param))
    few = replace(
        tuning.LOOPS, least_product=1, least_product_in_halves=1, least_rows=1, least_weight=1, narrowest_product=1
    )
    monkeypatch.setattr(tuning, "LOOPS", few)
    torch._dynamo.reset()
    with kernels("cpp"), torch._inductor.config.patch(force_disable_caches=True):
        yield request.param


def near(found: Tensor, right: Tensor) -> None:
    """Asserts that a result has the accuracy of float32 sums."""
    assert (found.double() - right).norm() <= 1e-6 * right.norm()


@pytest.mark.parametrize("rows, depth, columns", [*SIZES, (0, 5, 20), (4, 0, 5)])
@pytest.mark.parametrize("added", ["nothing", "row", "matrix", "out"])
def test_by_rows(rows: int, depth: int, columns: int, added: str) -> None:
    torch.manual_seed(rows)
    left, right = torch.randn(rows, depth), torch.randn(columns, depth).t()
    out = torch.full((rows, columns), float("nan"))
    if added == "out":
        out.normal_()
    more = {"nothing": None, "row": torch.randn(columns), "matrix": torch.randn(rows, columns), "out": out}[added]
    wanted = left.double() @ right.double() + (0 if more is None else more.double())
    matrix.by_rows(left, right, more, None, False, out)
    near(out, wanted)


def test_the_epilogue_keeps_nan_and_closed_gates() -> None:
    left, right = torch.randn(40, 20), torch.randn(20, 30)
    left[3, 0], out = float("nan"), torch.empty(40, 30)
    gate = torch.randn(40, 30)
    matrix.by_rows(left, right, None, gate, True, out)
    wanted = torch.where(gate <= 0, 0.0, (left @ right).relu())
    torch.testing.assert_close(out, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows, depth, columns", [*SIZES, (0, 5, 20)])
def test_over_rows(rows: int, depth: int, columns: int) -> None:
    torch.manual_seed(rows)
    left, right = torch.randn(rows, depth), torch.randn(rows, columns)
    out, sums = torch.full((depth, columns), float("nan")), torch.full((depth,), float("nan"))
    matrix.over_rows(left, right, out, sums)
    near(out, left.double().t() @ right.double())
    near(sums, left.double().sum(0))


def test_results_do_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    left, right, rows = torch.randn(9001, 33), torch.randn(33, 70), torch.randn(9001, 70)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, over, sums = torch.empty(9001, 70), torch.empty(33, 70), torch.empty(33)
            matrix.by_rows(left, right, None, None, False, out)
            matrix.over_rows(left, rows, over, sums)
            found.append((out, over, sums))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_rows_do_not_depend_on_their_place() -> None:
    """A backward computes rows of its forward again, in other tiles."""
    torch.manual_seed(0)
    left, right, whole = torch.randn(50, 40), torch.randn(40, 90), torch.empty(50, 90)
    matrix.by_rows(left, right, None, None, False, whole)
    for count in (1, 2, 3, 7, 13):
        part = torch.empty(count, 90)
        matrix.by_rows(left[9 : 9 + count].clone(), right, None, None, False, part)
        assert torch.equal(part, whole[9 : 9 + count])


@pytest.mark.parametrize("graph", ["no edge", "hub"])
@pytest.mark.parametrize(
    "name, dtype, tolerance",
    [("equivariant", "float32", 2e-5), ("filters", "float32", 2e-5), ("equivariant", "float64", 1e-11)],
)
def test_tiled_regions(name: str, dtype: str, tolerance: float, graph: str, own: bool) -> None:
    check(name, graph, dtype, True, by_op, tolerance)


def test_other_products_are_the_librarys(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LOOPS", tuning.XEON)
    assert matrix.pays(torch.empty(40_000, 8), 8) is own
    assert not matrix.pays(torch.empty(40_000, 8, dtype=torch.float64), 8)
    assert not matrix.pays(torch.empty(40_000, 8, device="meta"), 8)
    assert not matrix.pays(torch.empty(90, 8), 8)
    assert not matrix.pays(torch.empty(tuning.XEON.least_rows - 1, 800), 800)
    assert not matrix.pays(torch.empty(40_000, 8), tuning.XEON.widest_product + 1)


@pytest.mark.parametrize(("family", "rows"), [(25, 2**13), (26, 2**12)])
def test_processors_that_halve_vectors_need_larger_products(
    family: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LOOPS", tuning.XEON)
    monkeypatch.setattr(Device, "multiplies_in_own_vectors", property(lambda device: True))
    monkeypatch.setattr(device, "_library_halves_vectors", lambda: True)
    monkeypatch.setattr(device, "_cpuinfo", lambda: ["processor\t: 0\n", f"cpu family\t: {family}\n"])
    device._halves_vectors.cache_clear()
    try:
        assert matrix.pays(torch.empty(rows, 8), 8) and not matrix.pays(torch.empty(rows - 1, 8), 8)
        assert device_of("cpu").has_enough_rows(rows, 8, 8) and not device_of("cpu").has_enough_rows(rows - 1, 8, 8)
    finally:
        device._halves_vectors.cache_clear()


def test_a_gpu_has_none_of_these_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "cpp")
    assert not device_of(torch.device("cuda")).multiplies_in_own_vectors


def test_the_writer_of_products_is_chosen(own: bool) -> None:
    region, _ = region_of("mesh_graph_net")
    found, other = (VECTORS, LIBRARY) if own else (LIBRARY, VECTORS)
    text = tiled_source(region)
    assert found in text and other not in text
    assert LIBRARY in tiled_source(region, own_products=False)


BY_PAIRS = pytest.mark.skipif(not device_of("cpu").multiplies_pairs, reason="needs a processor of AMD with AVX512-BF16")


def test_pairs_are_for_weights_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "multiplies_in_own_vectors", property(lambda device: True))
    for pairs in (True, False):
        monkeypatch.setattr(Device, "multiplies_pairs", property(lambda device, pairs=pairs: pairs))
        for dtype in ("float32", "float16", "bfloat16"):
            text = tiled_source(region_of("mesh_graph_net", dtype)[0])
            assert (PAIRS in text) is (pairs and dtype == "bfloat16")
            assert (VECTORS in text) is not (PAIRS in text)


TWO_PRODUCTS = """
// Arguments: rows, left, right, weights, left @ weights, left.T @ right.
extern "C" void run(int64_t rows, const T* left, const T* right, const T* weights, T* by_rows, T* over_rows) {
  constexpr int64_t DEPTH = {depth}, COLUMNS = {columns}, HALF = (DEPTH + 1) / 2;
  T* const space = static_cast<T*>(__builtin_calloc(in_strips(HALF, COLUMNS) + rows * (DEPTH + COLUMNS) + 64, 4));
  T *strips = space, *first = space + in_strips(HALF, COLUMNS), *other = first + (rows + 1) / 2 * DEPTH + 32;
  for (int64_t j = 0; j < COLUMNS; ++j)
    for (int64_t k = 0; k < HALF; ++k)
      strips[(j / STRIP * HALF + k) * STRIP + j % STRIP] =
          pair(weights[2 * k * COLUMNS + j], 2 * k + 1 < DEPTH ? weights[(2 * k + 1) * COLUMNS + j] : 0);
  T* const pairs = static_cast<T*>(__builtin_calloc(rows * HALF + 32, 4));
  pair_columns(pairs, left, rows, DEPTH);
  multiply<COLUMNS, false>(by_rows, pairs, HALF, 1, strips, STRIP, STRIP * HALF, rows, HALF);
  pair_rows(first, left, rows, DEPTH);
  pair_rows(other, right, rows, COLUMNS);
  multiply<COLUMNS, true>(over_rows, first, 1, DEPTH, other, COLUMNS, STRIP, DEPTH, (rows + 1) / 2);
  __builtin_free(pairs);
  __builtin_free(space);
}
"""


@BY_PAIRS
@pytest.mark.parametrize("rows, depth, columns", [size for size in SIZES if size[0] < 1000])
def test_pairs_are_rounded_once_and_added_in_float32(rows: int, depth: int, columns: int) -> None:
    torch.manual_seed(rows)
    left, right, weights = torch.randn(rows, depth), torch.randn(rows, columns), torch.randn(depth, columns)
    left[0, 0] = float("inf")
    body = PAIRS + TWO_PRODUCTS.replace("{depth}", str(depth)).replace("{columns}", str(columns))
    kernel = load(prelude(body, False) + body, contract=True).run
    by_rows, over_rows = torch.full((rows, columns), float("nan")), torch.zeros(depth, columns)
    given = [tensor.data_ptr() for tensor in (left, right, weights, by_rows, over_rows)]
    kernel(ctypes.c_int64(rows), *map(ctypes.c_void_p, given))
    a, b, w = (tensor.bfloat16().double() for tensor in (left, right, weights))
    for found, wanted in ((by_rows, a @ w), (over_rows, a.t() @ b)):
        assert torch.equal(found.isfinite(), wanted.isfinite())
        near(found.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0))


@BY_PAIRS
@pytest.mark.parametrize("graph", ["no edge", "one edge", "hub", "many rows"])
@pytest.mark.parametrize("name", ["equivariant", "filters", "mesh_graph_net"])
def test_tiled_regions_by_pairs(name: str, graph: str) -> None:
    with kernels("cpp"):
        assert "vdpbf16ps" in tiled_source(region_of(name, "bfloat16")[0])
        check(name, graph, "bfloat16", True, by_op, 3e-2)


class Layers(nn.Module):
    """Layers with and without bias, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 48), nn.Linear(48, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :9] + self.last(self.first(x).relu())


@pytest.mark.parametrize("rows", [1, 90])
def test_models(rows: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls: set[str] = set()
    for kernel in (matrix.by_rows, matrix.over_rows):

        def run(*given: Any, kernel: Any = kernel) -> None:
            calls.add(kernel.__name__)
            kernel(*given)

        monkeypatch.setattr(matrix, kernel.__name__, run)
    eager = Layers()
    compiled = gnncompile.compile(copy.deepcopy(eager))
    x = torch.randn(rows, 20)
    results = []
    for model in (copy.deepcopy(eager).double(), compiled):
        given = x.to(next(model.parameters()).dtype).requires_grad_()
        out, code = run_and_get_code(model, given)
        out.cos().sum().backward()
        results.append([out.detach(), given.grad, *(p.grad for p in model.parameters())])
    assert calls == ({"by_rows", "over_rows"} if own else set())
    assert any("write_product(" in text for text in code) is own
    assert any("write_two_products_over_rows(" in text for text in code) is own
    for found, right in zip(results[1], results[0], strict=True):
        near(found, right)
