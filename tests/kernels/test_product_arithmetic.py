"""What follows a product, and what its factors are made of: where products compute that, and the results."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.passes.post_grad import fuse_product_epilogue, fuse_product_factor
from tests.triton_regions import DEVICE

pytestmark = triton_regions.INTERPRETED
on_tensor_cores = triton_regions.on_tensor_cores

own, aten = torch.ops.gnncompile, torch.ops.aten
KERNEL_OF_INDUCTOR = re.compile(r"triton_(?:poi|red|per)_fused|cpp_fused")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu by tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
    "elu": nn.functional.elu,
    "leaky relu": lambda x: nn.functional.leaky_relu(x, 0.1),
    "relu": torch.relu,
    "hardswish": nn.functional.hardswish,
}


class _Residual(nn.Module):
    """Two layers, whose result is added to what they read."""

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.second(self.activation(self.first(x))))


class _Gated(nn.Module):
    """Rows that are gated by other rows, as in the blocks of DimeNet++."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows, self.gate, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.silu(self.rows(x)) * self.gate(x))


def _blocks(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), _Residual(32, activation), _Residual(32, activation), nn.Linear(32, 16))


def _step(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    inputs = x.to(next(model.parameters()).dtype).requires_grad_()
    out = run(inputs)
    return [out, *torch.autograd.grad(out.square().sum(), [inputs, *model.parameters()])]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layers_with_an_activation(name: str, on_tensor_cores: None):
    torch.manual_seed(0)
    model = _blocks(ACTIVATIONS[name]).to(DEVICE)
    exact, compiled = copy.deepcopy(model).double(), gnncompile.compile(model)
    for rows in (70, 1, 0, 3):
        x = torch.randn(rows, 16, device=DEVICE)
        for a, b in zip(_step(model, compiled, x), _step(exact, exact, x), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).double(), exact(x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: _blocks(nn.functional.silu), lambda: _Gated(16)], ids=["residual", "gated"])
def test_layers_in_16_bits(make: Callable[[], nn.Module], on_tensor_cores: None):
    """As accurate as torch's own kernels."""
    torch.manual_seed(0)
    model = make().to(DEVICE)
    exact, compiled = copy.deepcopy(model).double(), gnncompile.compile(model)
    x = torch.randn(70, 16, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, torchs = _step(model, compiled, x), _step(model, model, x)
    for a, b, c in zip(ours, torchs, _step(exact, exact, x), strict=True):
        assert (a.double() - c).norm() <= 1.5 * (b.double() - c).norm() + 1e-3 * c.norm()


def test_nothing_but_products_is_left(on_tensor_cores: None):
    """Of residual blocks, the kernels of Inductor compute only the loss and the gradient of the last result."""
    torch.manual_seed(0)
    model = _blocks(nn.functional.silu).to(DEVICE)
    compiled = gnncompile.compile(model)
    x = torch.randn(70, 16, device=DEVICE, requires_grad=True)
    _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    bodies = [code.partition("def call(")[2] for code in codes]
    assert [len(KERNEL_OF_INDUCTOR.findall(body)) for body in bodies] == [0, 0]
    assert [body.count("write_product_with_epilogue(") for body in bodies] == [4, 5]
    assert sum(body.count("write_products_over_rows(") for body in bodies) > 0


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda h: torch.floor(h * 2),
    "hardshrink": nn.functional.hardshrink,
    "threshold": lambda h: torch.where(h > 0.5, h, h * 0.1),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_fall_where_the_backward_finds_them(name: str, on_tensor_cores: None):
    """The backward reads the product from memory, rounded to 16 bits. So the forward has to round it too."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).to(DEVICE, torch.bfloat16)

    def run(x: Tensor) -> Tensor:
        return nn.functional.linear(STEPS[name](layer(x)) * x, torch.eye(16, dtype=x.dtype, device=x.device))

    found = []
    for one in (gnncompile.compile(run), run):
        torch.manual_seed(1)
        x = torch.randn(2000, 16, device=DEVICE).bfloat16().requires_grad_()
        out = one(x)
        found.append((out, *torch.autograd.grad(out.float().sum(), x)))
    for ours, torchs in zip(*found, strict=True):
        assert not ((ours - torchs).abs() > 0.02 * torchs.abs() + 1e-2).any()


# -- one graph at a time ----------------------------------------------------------------------------------------------


def _product(x: Tensor, w: Tensor) -> Tensor:
    return own.product(x, w, None, None, False, False)  # type: ignore[no-any-return]


def silu_and_a_sum(x: Tensor, w: Tensor) -> list[Tensor]:
    """The result is summed by Inductor, and the product is not read: the sum reads one matrix as before."""
    return [(_product(x, w) * 2).sum(0)]


def read_by_a_sum_and_kept(x: Tensor, w: Tensor) -> list[Tensor]:
    """Inductor reads the product once, for the sum; to write the doubled rows would cost more."""
    p = _product(x, w)
    return [p, (p * 2).sum(0)]


def kept_and_read_by_a_product(x: Tensor, w: Tensor) -> list[Tensor]:
    p = _product(x, w)
    return [p, _product(p.tanh(), w)]


def a_tensor_that_comes_later(x: Tensor, w: Tensor) -> list[Tensor]:
    """The other operand depends on the product."""
    p = _product(x, w)
    return [_product(p * p.sum(0), w)]


def a_comparison(x: Tensor, w: Tensor) -> list[Tensor]:
    """A mask is no result of a product."""
    p = _product(x, w)
    return [p > 0, _product(torch.where(p > 0, p, p * 0.1), w)]


def equality(x: Tensor, w: Tensor) -> list[Tensor]:
    """Inductor must round the compared values as well."""
    p = _product(x, w)
    return [_product(torch.where(p == x, p, p * 0.1), w)]


def five_results(x: Tensor, w: Tensor) -> list[Tensor]:
    p = _product(x, w)
    return [p, p.tanh(), p * 2, p.exp(), p.sigmoid()]


def a_long_sum(x: Tensor, w: Tensor) -> list[Tensor]:
    """Of more tensors than a kernel reads."""
    others = [_product(x, w * k) for k in range(6)]
    return [_product(x, w) + others[0] + others[1] + others[2] + others[3] + others[4] + others[5]]


def a_long_chain(x: Tensor, w: Tensor) -> list[Tensor]:
    p = _product(x, w)
    for _ in range(500):
        p = p * 1.001
    return [p]


def times_a_long_chain(x: Tensor, w: Tensor) -> list[Tensor]:
    """As unrolled loops write them: more operations than Python's stack holds calls."""
    h = x
    for _ in range(1500):
        h = h * 1.001
    return [_product(_product(x, w) * h, w)]


def in_place_of_a_sum(x: Tensor, w: Tensor) -> list[Tensor]:
    total = own.product(x, w, None, None, False, False)
    p = own.product(x, w * 2, total, None, False, True)
    return [p.tanh(), _product(p, w)]


def of_what_it_adds(x: Tensor, w: Tensor) -> list[Tensor]:
    """The sum that is added is an operand of the arithmetic as well, so nothing is written in its place."""
    total = own.product(x, w, None, None, False, False)
    p = own.product(x, w * 2, total, None, False, True)
    return [_product(p * (total * 2), w)]


def ordered(x: Tensor, w: Tensor) -> list[Tensor]:
    """Sums that only run after the product do not read it."""
    p = _product(x, w)
    total = own.sums_over_rows(x, p)
    return [total, _product(p.tanh(), w)]


def gated(x: Tensor, w: Tensor) -> list[Tensor]:
    """A product with a gate keeps the epilogue that it has."""
    return [own.product(x, w, None, x, False, False).tanh()]


def transposed(x: Tensor, w: Tensor) -> list[Tensor]:
    """A matrix that would have to be copied."""
    return [_product(x, w) * x[:8].t().repeat(1, 2)[:, :16].repeat(5, 1)]


EPILOGUES = {
    silu_and_a_sum: 1,
    read_by_a_sum_and_kept: 0,
    kept_and_read_by_a_product: 1,
    a_tensor_that_comes_later: 0,
    a_comparison: 0,
    equality: 0,
    five_results: 1,
    a_long_sum: 1,
    a_long_chain: 1,
    times_a_long_chain: 0,
    in_place_of_a_sum: 1,
    of_what_it_adds: 1,
    ordered: 1,
    gated: 0,
    transposed: 0,
}
"""Functions of rows and weights, and how many products with an epilogue they get."""


@pytest.mark.parametrize("function", EPILOGUES)
def test_epilogues(function: Callable[..., list[Tensor]], on_tensor_cores: None):
    torch.manual_seed(0)
    x, w = torch.randn(80, 16, device=DEVICE), torch.randn(16, 16, device=DEVICE) / 4
    gm = _same_after(fuse_product_epilogue.run, function, x, w)
    assert len(_nodes(gm, own.product_with_epilogue.default)) == EPILOGUES[function]


def test_a_result_lies_where_the_sum_was(on_tensor_cores: None):
    x, w = torch.randn(80, 16, device=DEVICE), torch.randn(16, 16, device=DEVICE) / 4
    gm = _same_after(fuse_product_epilogue.run, in_place_of_a_sum, x, w)
    (node,) = _nodes(gm, own.product_with_epilogue.default)
    assert node.args[6] is True


def test_what_is_read_is_not_overwritten(on_tensor_cores: None):
    x, w = torch.randn(80, 16, device=DEVICE), torch.randn(16, 16, device=DEVICE) / 4
    gm = _same_after(fuse_product_epilogue.run, of_what_it_adds, x, w)
    (node,) = _nodes(gm, own.product_with_epilogue.default)
    assert node.args[4] in node.args[7]
    assert node.args[6] is False


def test_who_only_waits_gets_no_matrix(on_tensor_cores: None):
    x, w = torch.randn(80, 16, device=DEVICE), torch.randn(16, 16, device=DEVICE) / 4
    gm = _same_after(fuse_product_epilogue.run, ordered, x, w)
    (node,) = _nodes(gm, own.product_with_epilogue.default)
    assert len(node.meta["val"]) == 1


def test_many_products(on_tensor_cores: None):
    """The time grows with the number of products, not with its square."""

    def many(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(600):
            x = _product(x, w).tanh()
        return x

    gm = make_fx(many, tracing_mode="fake")(torch.randn(80, 16, device=DEVICE), torch.eye(16, device=DEVICE))
    begin = time.perf_counter()
    fuse_product_epilogue.run(gm.graph)
    assert time.perf_counter() - begin < 5.0  # 0.5 s; 5 s if each looks at the whole graph
    assert len(_nodes(gm, own.product_with_epilogue.default)) == 600


def silu_of_rows(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    return [own.product_over_rows(dy, h * h.sigmoid())]


def silu_of_rows_and_sums(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    return list(own.product_and_sums_over_rows(dy, (h * h.sigmoid()) * g))


def read_twice_in_one_branch(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    t = h * 2 + 1
    return [own.product_over_rows(dy, t.sigmoid() * t)]


def two_of_them(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    return list(own.two_products_over_rows(dy, h.tanh(), True, g, h, False))


def read_twice(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    a = h.tanh()
    return [own.product_over_rows(dy, a), own.product_over_rows(g, a)]


def of_two_read_twice(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    """Twice two matrices are more than one written, and read twice."""
    a = h.tanh() * g
    return [own.product_over_rows(dy, a), own.product_over_rows(g, a)]


def stored_for_others(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    a = h.tanh()
    return [own.product_over_rows(dy, a), a]


def on_the_left(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    a = h.tanh()
    return [own.product_over_rows(a, a)]


def of_three(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    return [own.product_over_rows(dy, (h * g).tanh() * dy)]


def of_a_long_chain(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    a = h
    for _ in range(1500):
        a = a * 1.001
    return [own.product_over_rows(dy, a)]


def of_values_that_lie_in_memory(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    """Each is computed from the one before, which it reads twice, and from another matrix."""
    a, found = h, []
    for k in range(30):
        a = (a * (a + g) * dy).tanh()
        found.append(own.product_over_rows(g * k, a))
    return [*found, a * 2]


def of_rows_alone(dy: Tensor, h: Tensor, g: Tensor) -> list[Tensor]:
    """Of a value that Inductor would have to store for it."""
    return [own.product_over_rows(dy, h / h.square().sum(1, True).sqrt())]


FACTORS = {
    silu_of_rows: 1,
    silu_of_rows_and_sums: 1,
    read_twice_in_one_branch: 1,
    two_of_them: 1,
    read_twice: 2,
    of_two_read_twice: 0,
    stored_for_others: 0,
    on_the_left: 0,
    of_three: 0,
    of_rows_alone: 0,
    of_a_long_chain: 0,
    of_values_that_lie_in_memory: 0,
}


@pytest.mark.parametrize("function", FACTORS)
def test_factors(function: Callable[..., list[Tensor]], on_tensor_cores: None):
    torch.manual_seed(0)
    given = [torch.randn(80, 16, device=DEVICE) for _ in range(3)]
    gm = _same_after(fuse_product_factor.run, function, *given)
    assert len(_nodes(gm, own.products_over_rows.default)) == FACTORS[function]


def _same_after(
    rewrite: Callable[[fx.Graph], None], function: Callable[..., list[Tensor]], *given: Tensor
) -> fx.GraphModule:
    """Returns the rewritten graph of a function, which gives the same results as before."""
    gm = make_fx(function, tracing_mode="fake")(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of nodes that are erased twice
        rewrite(gm.graph)
    gm.graph.lint()
    gm.recompile()
    for one, other in zip(gm(*given), function(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return gm


def _nodes(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))
