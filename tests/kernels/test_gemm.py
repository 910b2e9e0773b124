"""Float32 products on tensor cores: the kernels, and where the passes put them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.codegen.gemm import launch
from gnncompile.codegen.gemm.launch import OverRows
from gnncompile.codegen.triton import ahead
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.device import device_of
from gnncompile.ops import gemm
from gnncompile.options import DEFAULTS
from gnncompile.passes.manager import run_post_grad
from tests.harness import tune
from tests.triton_regions import DEVICE, INF, NAN

pytestmark = triton_regions.INTERPRETED

BY_ROWS = re.compile(r"write_(?:product|sum_of_products)\((.*)\)")
OVER_ROWS, TWO_OVER_ROWS = (re.compile(rf"write_{name}_over_rows\((.*)\)") for name in ("product", "two_products"))
EXACT = 1.5e-7
"""Of the norm of a product: what one rounding to float32 may cost, and what the tensor cores' rounding adds."""


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 16, 16), (65, 32, 64), (130, 100, 47), (64, 260, 130)])
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
    assert _off(out, expected.relu() if relu else expected) < EXACT


@pytest.mark.parametrize("depths", [(16, 16), (132, 20), (36, 260)])
@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("added", ["nothing", "row", "out"])
@pytest.mark.parametrize("few", [True, False])
def test_sum_of_two(
    depths: tuple[int, int], transposed: tuple[bool, bool], added: str, few: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of matrices of different widths, with what is added to both once."""
    torch.manual_seed(0)
    rows, columns = 70, 36
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


def test_gate(any_tile: None):
    """Zeros where a matrix is not positive, as in the gradient of a ReLU: where it is no number, the gradient is."""
    left, right = torch.randn(70, 32, device=DEVICE), torch.randn(32, 40, device=DEVICE)
    gate = torch.randn(70, 40, device=DEVICE)
    gate[::7], gate[::11] = 0, NAN
    out = torch.full((70, 40), NAN, device=DEVICE)
    launch.by_rows((left, right), None, None, gate, False, out)
    assert _off(out, (left.double() @ right.double()).masked_fill(gate <= 0, 0)) < EXACT


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 16, 16), (31, 64, 64), (300, 100, 36), (100, 36, 132), (260, 132, 256)]
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
@pytest.mark.parametrize("widths", [(16, 64, 100, 36), (132, 36, 16, 128)])
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
    for left, right, found, total in both:
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


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "columns"), [(100, 256), (256, 256), (256, 47), (128, 512)])
def test_many_rows(depth: int, columns: int):
    """As many as a sampled mini-batch has: the programs' shares are long, and all of a launch is used."""
    rows = 316_499
    left, right = torch.randn(rows, depth, device=DEVICE), torch.randn(columns, depth, device=DEVICE).t()
    added, gate = torch.randn(rows, columns, device=DEVICE), torch.randn(rows, columns, device=DEVICE)
    out, expected = added.clone(), left.double() @ right.double() + added.double()
    launch.by_rows((left, right), None, out, gate, True, out)
    assert _off(out, expected.relu().masked_fill(gate <= 0, 0)) < EXACT
    if columns % 4 == 0:
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


@pytest.mark.parametrize("scale", [1e-20, 1e18])
def test_numbers_of_all_sizes(scale: float, any_tile: None):
    """Every element is as exact as in float32, whatever stands beside it in its row."""
    torch.manual_seed(0)
    left = torch.randn(64, 32, device=DEVICE)
    left[:, ::2] *= scale
    right = torch.randn(32, 32, device=DEVICE)
    right[::2, ::2] = 0  # every other column of the result is of the small or large numbers alone
    right[1::2, 1::2] = 0
    out = torch.empty(64, 32, device=DEVICE)
    launch.by_rows((left, right), None, None, None, False, out)
    expected = left.double() @ right.double()
    bound = left.double().abs() @ right.double().abs()
    assert float(((out - expected).abs() / bound).max()) < 2.0**-21


def test_infinities_and_no_numbers(any_tile: None):
    left, right = torch.ones(4, 16, device=DEVICE), torch.ones(16, 16, device=DEVICE) * 1.01
    left[0, 3], left[1, 3], left[2, 3] = INF, -INF, NAN
    left[3, 3], left[3, 4] = INF, -INF
    right[3, 5] = 0
    out = torch.empty(4, 16, device=DEVICE)
    launch.by_rows((left, right), None, None, None, False, out)
    torch.testing.assert_close(out, left @ right, equal_nan=True)
    right[2, 6], right[4, 7] = INF, NAN
    launch.by_rows((left, right), None, None, None, False, out)
    torch.testing.assert_close(out, left @ right, equal_nan=True)
    right[2, 6], right[4, 7] = 1, 1
    again = torch.empty(16, 16, device=DEVICE)
    launch.over_rows(OverRows(left.t().contiguous(), right, again[:4], None))
    torch.testing.assert_close(again[:4], left @ right, equal_nan=True)


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products go to the kernels too, on whatever device there is."""
    monkeypatch.setenv("GNNCOMPILE_KERNELS", "triton")
    tune(monkeypatch, least_over_rows=1, least_by_rows=1, least_product=1, least_weight=1)
    if DEVICE == "cuda":
        tune(monkeypatch, capability=torch.cuda.get_device_capability())
    torch._dynamo.reset()


class _Graph(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


class _Layers(nn.Sequential):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[no-any-return]


def _mlp(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:]))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[list[int]]]] = {
    "dense": (
        lambda: _Layers(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 17, bias=False)),
        [[2, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 1]],
    ),
    "gcn": (lambda: _Graph(GCNConv(16, 32), GCNConv(32, 16)), [[2, 0, 0, 1, 0, 0], [2, 0, 1, 0, 1, 1]]),
    "sage": (lambda: _Graph(SAGEConv(16, 32), SAGEConv(32, 16)), [[3, 0, 0, 1, 0, 0], [3, 0, 2, 0, 1, 2]]),
    "gin": (lambda: _Graph(GINConv(_mlp(16, 32, 16))), [[2, 0, 0, 2, 0, 0], [2, 0, 1, 0, 1, 2]]),
}
"""Models, and what :func:`_taken_in` says of their forward and backward."""


def _taken_in(code: str) -> list[int]:
    """How many products of rows there are, over rows, and pairs of these; how many ReLUs, their gradients, and sums
    they take in.
    """
    by_rows = [found.split(", ")[-3:] for found in BY_ROWS.findall(code)]
    over_rows = [found.split(", ") for found in OVER_ROWS.findall(code)]
    pairs = [found.split(", ") for found in TWO_OVER_ROWS.findall(code)]
    relus, gates = sum(call[1] == "True" for call in by_rows), sum(call[0] != "None" for call in by_rows)
    sums = sum(len(call) == 4 for call in over_rows) + sum((c[3] != "None") + (c[7] != "None") for c in pairs)
    return [len(by_rows), len(over_rows), len(pairs), relus, gates, sums]


def _steps(model: nn.Module, run: Any, x: Tensor, edge_index: Tensor, dtype: torch.dtype) -> list[Tensor]:
    inputs = x.to(dtype).requires_grad_()
    out = run(inputs, edge_index)
    return [out, *torch.autograd.grad(out.square().sum(), [inputs, *model.parameters()])]


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, on_tensor_cores: None):
    torch.manual_seed(0)
    make, expected = MODELS[name]
    model = make().to(DEVICE)
    exact = copy.deepcopy(model).double()
    compiled = gnncompile.compile(model)
    for nodes in (70, 1, 0, 3):
        x = torch.randn(nodes, 16, device=DEVICE)
        edge_index = torch.randint(nodes, (2, 3 * nodes), device=DEVICE) if nodes else x.new_empty(2, 0).long()
        found = _steps(model, compiled, x, edge_index, torch.float32)
        for a, b in zip(found, _steps(exact, exact, x, edge_index, torch.float64), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    x = torch.randn(9, 16, device=DEVICE, requires_grad=True)
    edges = torch.randint(9, (2, 20), device=DEVICE)
    torch._dynamo.reset()
    _, codes = run_and_get_code(lambda: gnncompile.compile(model)(x, edges).sum().backward())
    assert [_taken_in(code) for code in codes] == expected


@pytest.mark.parametrize("name", ["dense", "gcn", "gin"])
def test_kernels_of_the_first_graph_are_compiled_before_they_are_launched(
    name: str, on_tensor_cores: None, monkeypatch: pytest.MonkeyPatch
):
    tune(monkeypatch, least_summed=1)
    begun: list[Any] = []
    launched: list[Any] = []
    start = Kernel.__call__

    def begin(kernel: Any, pointers: Any, others: Any, options: Any) -> None:
        begun.append((kernel, tuple(pointers), len(others), options))

    def run(self: Kernel, programs: int, tensors: Any, numbers: Any, constants: Any) -> None:
        if not tensors[0].is_meta:
            key = self._kernel, tuple(t.dtype for t in tensors), len(numbers) + len(constants), self._options
            launched.append((key, constants, key in begun and constants in self._begun))
        start(self, programs, tensors, numbers, constants)

    monkeypatch.setattr(ahead, "begin", begin)
    monkeypatch.setattr(Kernel, "__call__", run)
    for kernel in (launch._split, launch._sums, launch._join):
        monkeypatch.setattr(kernel, "_begun", {})
    launch._by_rows.cache_clear()
    launch._over_rows.cache_clear()
    model = MODELS[name][0]().to(DEVICE)
    x, edges = torch.randn(70, 16, device=DEVICE), torch.randint(70, (2, 210), device=DEVICE)
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from the cache is not lowered
        _steps(model, gnncompile.compile(model), x, edges, torch.float32)
    assert launched and all(known for *_, known in launched), launched


def _code_of(options: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, width: int = 16) -> str:
    model, x = nn.Linear(width, 32).to(DEVICE, dtype), torch.randn(70, width, device=DEVICE, dtype=dtype)
    torch._dynamo.reset()
    compiled = gnncompile.compile(model, options=options)
    with torch._inductor.config.patch(force_disable_caches=True):  # what is patched here is no part of their keys
        found, codes = run_and_get_code(compiled, x)
    torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-3)
    return "".join(codes)


def test_where_the_library_computes(on_tensor_cores: None, monkeypatch: pytest.MonkeyPatch):
    assert BY_ROWS.search(_code_of())
    assert not BY_ROWS.search(_code_of({"products": False}))
    assert not BY_ROWS.search(_code_of(dtype=torch.float64))
    assert not BY_ROWS.search(_code_of(width=15)) and not BY_ROWS.search(_code_of(width=18))
    with monkeypatch.context() as narrow:
        tune(narrow, least_weight=1024)
        assert not BY_ROWS.search(_code_of()) and BY_ROWS.search(_code_of(width=32))
    with monkeypatch.context() as other:
        tune(other, capability=(1, 0))
        assert device_of(torch.device(DEVICE, 0 if DEVICE == "cuda" else None)).multiplies_in_parts == (DEVICE == "cpu")
    with monkeypatch.context() as small:
        tune(small, least_by_rows=2**30)
        assert BY_ROWS.search(_code_of())  # nobody knows how many rows there will be
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not BY_ROWS.search(_code_of())
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_a_sum_waits_for_the_walk_over_the_edges(on_tensor_cores: None, monkeypatch: pytest.MonkeyPatch):
    tune(monkeypatch, least_summed=1)
    model, x = GCNConv(16, 16).to(DEVICE), torch.randn(9, 16, device=DEVICE)
    edges = torch.randint(9, (2, 20), device=DEVICE)
    compiled = gnncompile.compile(model)
    found = _steps(model, compiled, x, edges, torch.float32)
    for a, b in zip(found, _steps(model, model, x, edges, torch.float32), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    _, codes = run_and_get_code(lambda: compiled(x.requires_grad_(), edges).sum().backward())
    body = codes[1].partition("def call(")[2]
    assert 0 < body.index("region_") < body.index("write_sums_over_rows(") < body.index("write_product_over_rows(")


def test_a_sum_waits_for_two_products_in_one(on_tensor_cores: None):
    def gradients(dy: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
        bias = dy.sum(0)
        total = own.product(dy, w, None, None, False, False)
        return [bias, own.product(y, w, total, None, False, True)]

    own = torch.ops.gnncompile
    given = [torch.randn(rows, 16, device=DEVICE) for rows in (20, 16, 20)]
    gm = make_fx(gradients, tracing_mode="fake")(*given)
    run_post_grad(gm.graph, DEFAULTS)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*given), gradients(*given))
    order = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert order.index(own.sum_of_products.default) < order.index(own.sums_over_rows.default)


def test_the_view_that_is_kept_may_be_the_transpose(on_tensor_cores: None):
    def gradients(kept: Tensor, dy: Tensor) -> Tensor:
        return torch.mm(kept, dy)

    own = torch.ops.gnncompile
    given = torch.randn(70, 16, device=DEVICE).t(), torch.randn(70, 32, device=DEVICE)
    gm = make_fx(gradients, tracing_mode="fake")(*given)
    run_post_grad(gm.graph, DEFAULTS)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*given), gradients(*given), rtol=1e-5, atol=1e-5)
    assert gm.graph.find_nodes(op="call_function", target=own.product_over_rows.default)


def test_few_rows_go_to_the_library(on_tensor_cores: None, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.utils.counters.clear()
    rows: list[int] = []
    ours = launch.by_rows

    def by_rows(one: launch.Factors, *rest: Any) -> None:
        rows.extend([] if one[0].is_meta else [one[0].size(0)])
        ours(one, *rest)

    monkeypatch.setattr(launch, "by_rows", by_rows)
    tune(monkeypatch, least_by_rows=16 * 32 * 40)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU()).to(DEVICE)
    compiled = gnncompile.compile(model)
    for count in (50, 39, 40, 1, 0):
        x = torch.randn(count, 16, device=DEVICE)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert rows == [50, 40]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
