"""Where the passes after differentiation put float32 products on tensor cores, and what the compiled models compute."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.codegen.gemm import launch, weights
from gnncompile.codegen.triton import ahead
from gnncompile.codegen.triton.launcher import Kernel
from gnncompile.device import device_of
from gnncompile.options import DEFAULTS
from gnncompile.passes.manager import run_post_grad
from tests.harness import tune
from tests.triton_regions import DEVICE

pytestmark = triton_regions.INTERPRETED
on_tensor_cores = triton_regions.on_tensor_cores

BY_ROWS = re.compile(r"write_(?:product|sum_of_products)\((.*)\)")
OVER_ROWS, TWO_OVER_ROWS = (re.compile(rf"write_{name}_over_rows\((.*)\)") for name in ("product", "two_products"))


class _Graph(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


class _Slices(nn.Module):
    """Products with slices of one weight, as a layer of rows that stand side by side is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(18, 49) / 7)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        one = nn.functional.linear(x, self.weight[:, :16]).relu()
        return one + nn.functional.linear(x * 2, self.weight[:, 33:])


class _Layers(nn.Sequential):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[no-any-return]


def _mlp(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:]))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[list[int]]]] = {
    "dense": (
        lambda: _Layers(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 17, bias=False)),
        [[2, 0, 0, 1, 0, 0], [2, 0, 1, 0, 1, 1]],
    ),
    "gcn": (lambda: _Graph(GCNConv(16, 32), GCNConv(32, 16)), [[2, 0, 0, 1, 0, 0], [2, 0, 1, 0, 1, 1]]),
    "sage": (lambda: _Graph(SAGEConv(16, 32), SAGEConv(32, 16)), [[3, 0, 0, 1, 0, 0], [3, 0, 2, 0, 1, 2]]),
    "odd": (
        lambda: _Layers(nn.Linear(16, 50), nn.ReLU(), nn.Linear(50, 17), nn.ReLU(), nn.Linear(17, 18)),
        [[3, 0, 0, 2, 0, 0], [3, 1, 1, 0, 2, 3]],
    ),
    "slices": (_Slices, [[1, 0, 0, 1, 0, 0], [0, 2, 0, 0, 0, 0]]),  # three products have other epilogues
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
        if not tensors[0].is_meta and "codegen.gemm" in self._kernel.fn.__module__:
            types = tuple(t.dtype for t in tensors)
            key = self._kernel, types, len(numbers) + len(constants), self._options
            launched.append((key, constants, key in begun and (types, constants) in self._begun))
        start(self, programs, tensors, numbers, constants)

    monkeypatch.setattr(ahead, "begin", begin)
    monkeypatch.setattr(Kernel, "__call__", run)
    for kernel in (weights._split, launch._sums):
        monkeypatch.setattr(kernel, "_begun", {})
    for made in (launch._by_rows, launch._over_rows, launch._join):
        made.cache_clear()
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
    assert not BY_ROWS.search(_code_of(width=7)) and BY_ROWS.search(_code_of(width=9))
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


class AddsToRows(nn.Module):
    """A product that is added to rows which a region makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = SAGEConv(16, 40), nn.Linear(40, 40, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.conv(x, edge_index)
        return hidden.relu() + self.last(hidden)


def test_as_many_rows_as_columns_are_no_other_program(on_tensor_cores: None):
    torch._dynamo.utils.counters.clear()
    model = AddsToRows().to(DEVICE)
    compiled = gnncompile.compile(model)
    for count in (40, 57, 1):
        x, edge_index = (one.to(DEVICE) for one in (torch.randn(count, 16), torch.randint(count, (2, 160))))
        found, expected = compiled(x, edge_index), model(x, edge_index)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        found.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
