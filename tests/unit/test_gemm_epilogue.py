"""What follows a matrix product, left to the product: activations, and sums with other matrices."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import gnncompile
from gnncompile.passes.post_grad import gemm_epilogue

CHANNELS = 6
IN_PLACE = re.compile(r"extern_kernels\.addmm\((\w+), .* out=\1\)")


def _product(device: str, used_twice: bool = False) -> torch.fx.Graph:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    shapes = {"bias": (4,), "x": (5, 3), "weight": (3, 4)}
    nodes = []
    for name, shape in shapes.items():
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = torch.empty(shape, device="meta" if device == "cuda" else device)
    product = graph.call_function(aten.addmm.default, tuple(nodes))
    relu = graph.call_function(aten.relu.default, (product,))
    graph.output((relu, product) if used_twice else relu)
    return graph


def test_a_product_on_a_cpu_is_left_alone():
    graph = _product("cpu")
    before = str(graph)
    gemm_epilogue.run(graph)
    assert str(graph) == before


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_dense_layers_with_an_activation(rows: int, bias: bool):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(7, 8, bias=bias), nn.ReLU(), nn.Linear(8, 3)).cuda()
    compiled = gnncompile.compile(model)
    x = torch.randn(rows, 7, device="cuda")
    results = []
    for run in (compiled, copy.deepcopy(model).double()):
        inputs = x.to(next(run.parameters()).dtype).requires_grad_()
        out = run(inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), [inputs, *run.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


class _Sums(nn.Module):
    """A sum of three products in the forward, and one in the gradient of x."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS) for _ in range(3)])
        self.outer = nn.ModuleList([nn.Linear(CHANNELS, CHANNELS, bias=k == 0) for k in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (outer(inner(x).sin()) for inner, outer in zip(self.inner, self.outer, strict=True))
        return (first + second + third).sin()


def _adds_to_what_is_given(x: Tensor, weight: Tensor) -> Tensor:
    return x + x @ weight + x @ weight.sin() + x @ weight.cos()


def _keeps_a_term(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ weight
    return product, product + x @ weight.sin()


def _adds_to_a_view(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).t() + x @ weight.sin()


def _adds_a_row(x: Tensor, weight: Tensor) -> Tensor:
    return x[:1] @ weight + x @ weight.sin()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_added_in_place(device: str, dtype: torch.dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Sums().to(device, dtype)
    compiled = gnncompile.compile(model)
    for rows in (5, 1, 0, 40):
        x = torch.randn(rows, CHANNELS, device=device, dtype=dtype)
        results = []
        for run in (compiled, copy.deepcopy(model).double()):
            inputs = x.detach().to(next(run.parameters()).dtype).requires_grad_()
            out = run(inputs)
            results.append([out, *torch.autograd.grad(out.square().sum(), [inputs, *run.parameters()])])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    _, codes = run_and_get_code(lambda: compiled(x.requires_grad_()).sum().backward())
    assert [len(IN_PLACE.findall(code)) for code in codes] == [2, 2]


def test_what_is_given_is_copied_once():
    torch._dynamo.reset()
    x, weight = torch.randn(5, CHANNELS), torch.randn(CHANNELS, CHANNELS)
    before = x.clone()
    found, codes = run_and_get_code(gnncompile.compile(_adds_to_what_is_given), x, weight)
    torch.testing.assert_close(found, _adds_to_what_is_given(x, weight))
    assert torch.equal(x, before)
    assert codes[0].count("extern_kernels.addmm(") == 3 and len(IN_PLACE.findall(codes[0])) == 2


@pytest.mark.parametrize("readers", [1, 2])
def test_products_are_added_to_returned_gradients_that_nobody_else_reads(readers: int):
    own, aten, graph = torch.ops.gnncompile, torch.ops.aten, torch.fx.Graph()
    shapes = {"rows": (7, 4), "send": (2,), "halo": (2, 0), "dy": (5, 3), "weight": (3, 4)}
    rows, send, halo, dy, weight = (graph.placeholder(name) for name in shapes)
    for node, shape in zip((rows, send, halo, dy, weight), shapes.values(), strict=True):
        node.meta["val"] = torch.zeros(shape)
    back = graph.call_function(own.halo_return.default, (rows, send, halo, "0", []))
    product = graph.call_function(aten.mm.default, (dy, weight))
    total = graph.call_function(aten.add.Tensor, (back, product))
    for node in (back, product, total):
        node.meta["val"] = torch.zeros(5, 4)
    graph.output((total, back) if readers == 2 else total)
    gemm_epilogue.run(graph)
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    expected = [own.add_product.default] if readers == 1 else [aten.mm.default, aten.add.Tensor]
    assert targets == [own.halo_return.default, *expected]


@pytest.mark.parametrize("fn", [_keeps_a_term, _adds_to_a_view, _adds_a_row])
def test_matrices_that_someone_else_reads_are_not_added_to(fn: Callable[..., Any]):
    torch._dynamo.reset()
    x, weight = torch.randn(CHANNELS, CHANNELS), torch.randn(CHANNELS, CHANNELS)
    found, codes = run_and_get_code(gnncompile.compile(fn), x, weight)
    for a, b in zip(found, fn(x, weight), strict=True):
        torch.testing.assert_close(a, b)
    assert len(codes) == 1 and not IN_PLACE.search(codes[0])
