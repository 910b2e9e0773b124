"""Signed zeros, infinities and NaN are as torch has them: in regions, by every generator, and in Inductor's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import triton_regions  # isort: skip  (sets up Triton's interpreter before anything imports Triton)

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.ir import reference, rules
from gnncompile.ir.builder import Builder
from gnncompile.ir.region import Output, Region, Space, parse
from gnncompile.runtime import launch
from tests.graphs import layout
from tests.harness import kernels
from tests.triton_regions import GENERATORS, INF, NAN, home

pytestmark = triton_regions.INTERPRETED
D, S, E = Space.DESTINATION, Space.SOURCE, Space.EDGE

SMALLEST = 2e-38 if torch.cuda.is_available() else 1e-38
"""For Triton's ``floor`` and ``atan2`` on a GPU, in compiled code of torch as well, subnormal numbers are zeros."""
HALVES = [0.0, SMALLEST, 1e-20, 1e-8, 1e-3, 0.3, 0.5, 1.0, 2.0, 2.5, 3.0, 6.0, 19.9, 45.0, 88.0, 90.0, 1e9, 3e38, INF]
POINTS = torch.tensor([sign * x for x in HALVES for sign in (1, -1)] + [NAN])

One = tuple[Callable[[Builder, int], int], Callable[[Tensor], Tensor]]


def named(*names: str) -> dict[str, One]:
    """Operations that have one name here and in torch."""
    return {n: (lambda b, x, n=n: b.op(n, x), getattr(torch, n)) for n in names}


def with_number(name: str, symbol: str, number: float) -> dict[str, One]:
    """An operation with a number on either side."""
    fn = getattr(torch, name)
    return {
        f"x {symbol} {number!r}": (
            lambda b, x: b.op(name, x, b.const(number)),
            lambda x: fn(x, torch.tensor(number)),
        ),
        f"{number!r} {symbol} x": (
            lambda b, x: b.op(name, b.const(number), x),
            lambda x: fn(torch.tensor(number), x),
        ),
    }


def power(exponent: float) -> One:
    return lambda b, x: rules.power(b, x, exponent), lambda x: x**exponent


ONE: dict[str, One] = {
    **named("neg", "abs", "exp", "expm1", "exp2", "log", "log1p", "sqrt", "erf", "sigmoid", "tanh", "sign"),
    **named("floor", "ceil"),
    "leaky_relu": (rules.leaky_relu, F.leaky_relu),
    "leaky_relu, flat": (lambda b, x: rules.leaky_relu(b, x, 0.0), lambda x: F.leaky_relu(x, 0.0)),
    "silu": (rules.silu, F.silu),
    "softplus": (rules.softplus, F.softplus),
    "softplus, steep": (lambda b, x: rules.softplus(b, x, 3.0), lambda x: F.softplus(x, 3.0)),
    "softplus, low threshold": (lambda b, x: rules.softplus(b, x, 2.0, 3.0), lambda x: F.softplus(x, 2.0, 3.0)),
    "clamp": (lambda b, x: rules.clamp(b, x, -1, 2), lambda x: x.clamp(-1, 2)),
    "hardtanh": (rules.hardtanh, F.hardtanh),
    "elu": (rules.elu, F.elu),
    "selu": (rules.selu, F.selu),
    "celu": (rules.celu, F.celu),
    "hardsigmoid": (rules.hardsigmoid, F.hardsigmoid),
    "hardswish": (rules.hardswish, F.hardswish),
    "mish": (rules.mish, F.mish),
    "log_sigmoid": (rules.log_sigmoid, F.logsigmoid),
    "softshrink": (rules.softshrink, F.softshrink),
    "hardshrink": (rules.hardshrink, F.hardshrink),
    "threshold": (lambda b, x: rules.threshold(b, x, 0.25, -2.0), lambda x: F.threshold(x, 0.25, -2.0)),
    "trunc": (rules.trunc, torch.trunc),
    **{f"x ** {e!r}": power(e) for e in (0, 0.5, -0.5, 1, 2, 3, 4, 5, -1, -2, -3, 1.5, 1 / 3)},
    **{k: v for number in (0.0, -0.0, 1.0) for k, v in with_number("add", "+", number).items()},
    **{k: v for number in (0.0, -0.0, 1.0) for k, v in with_number("sub", "-", number).items()},
    **{k: v for number in (0.0, -0.0, 1.0, -1.0, INF) for k, v in with_number("mul", "*", number).items()},
    **{k: v for number in (0.0, -0.0, 1.0, -1.0, INF) for k, v in with_number("div", "/", number).items()},
    "x - x": (lambda b, x: b.op("sub", x, x), lambda x: x - x),
    "x / x": (lambda b, x: b.op("div", x, x), lambda x: x / x),
    "-(-x)": (lambda b, x: b.op("neg", b.op("neg", x)), torch.clone),
    "x * 0 + 0": (lambda b, x: b.op("add", b.op("mul", x, b.const(0)), b.const(0)), lambda x: x * 0.0 + 0.0),
}
"""Which zero torch's ``relu``, ``maximum``, ``clamp`` at 0 and ``gelu`` give depends on how many elements there are."""


def run(region: Region, tensors: Sequence[Tensor], rows: int, edges: Tensor, which: str) -> list[Tensor]:
    """What a region gives, by a generator, on the CPU."""
    where = layout(edges[0], edges[1], rows)
    if which == "reference":
        return list(reference.run(region, tensors, where))
    device = home(which)
    with kernels(which):
        given = [t.to(device) for t in tensors]
        found = launch.runner(region.spec, device)(given, [part.to(device) for part in where])
        assert launch.fallbacks == {}
    return [value.cpu() for value in found]


def by_rows(build: Callable[..., Sequence[int]], tensors: Sequence[Tensor], which: str) -> list[Tensor]:
    """Operations on rows without edges."""
    b = Builder(D)
    given = [b.input(k, D, (1, 1), "float32") for k in range(len(tensors))]
    region = b.finish([Output(value, "float32", (1,)) for value in build(b, *given)])
    columns = [tensor.view(-1, 1).contiguous() for tensor in tensors]
    none = torch.empty(2, 0, dtype=torch.long)
    return [value.view(-1) for value in run(region, columns, tensors[0].numel(), none, which)]


def same(found: Tensor, expected: Tensor, what: str) -> None:
    """Numbers to rounding, NaN for NaN, a zero's sign."""
    rounding = 1.6e-2 if expected.dtype == torch.bfloat16 else 2e-5
    # On a GPU a sigmoid or softplus below 2**-126 is 0, which these functions multiply by -88.
    tiny = 1e-36 if torch.cuda.is_available() and what in ("silu", "mish") else 1e-37
    torch.testing.assert_close(found, expected, rtol=rounding, atol=tiny, equal_nan=True, msg=lambda m: f"{what}: {m}")
    zero = (expected == 0) & (found == 0)
    wrong = (found.signbit() != expected.signbit()) & zero
    assert not bool(wrong.any()), f"{what}: zeros of another sign at {wrong.nonzero().view(-1).tolist()}"


ALL = ["reference", *GENERATORS]


@pytest.mark.parametrize("name", ["sigmoid", "softplus", "tanh", "expm1"])
@pytest.mark.parametrize("which", GENERATORS)
def test_elementary_functions_are_accurate(which: str, name: str):
    """Within a few units in the last place, and the rounding of x * log2(e), from 1e-30 to where results vanish."""
    sizes = torch.cat([torch.linspace(0, 80, 8001), torch.logspace(-30, 0, 2001)])
    x = torch.cat([sizes, -sizes]).float()
    x = x if name != "expm1" else x[x < 60]
    (found,) = by_rows(lambda b, x: [b.op(name, x)], [x], which)
    exact = F.softplus if name == "softplus" else getattr(torch, name)
    right = exact(x.double(), 1, 1000) if name == "softplus" else exact(x.double())
    error = (found.double() - right).abs() / right.abs().clamp(min=1e-30)
    assert bool((error <= 5e-7 + 2.5e-7 * x.double().abs()).all()), error.max()


@pytest.mark.parametrize("which", ALL)
def test_operations_of_one_number(which: str):
    found = by_rows(lambda b, x: [build(b, x) for build, _ in ONE.values()], [POINTS], which)
    for (name, (_, fn)), value in zip(ONE.items(), found, strict=True):
        same(value, fn(POINTS), name)


@pytest.mark.parametrize("which", ALL)
def test_operations_of_two_numbers(which: str):
    names = ("add", "sub", "mul", "div", "pow")
    x, y = torch.cartesian_prod(POINTS, POINTS).t().contiguous()
    found = by_rows(lambda b, x, y: [b.op(name, x, y) for name in names], [x, y], which)
    for name, value in zip(names, found, strict=True):
        same(value, getattr(torch, name)(x, y), name)


@pytest.mark.parametrize("which", ALL)
@pytest.mark.parametrize("shape", [(1, 3), (1, 4), (4, 4), (1, 20)])
@pytest.mark.parametrize("edges", [0, 1, 2, 5, 150])
def test_sums_of_negative_zeros(edges: int, shape: tuple[int, int], which: str):
    """They begin with a positive zero, over edges and over features alike."""
    heads = shape[0]
    b = Builder(D)
    x, y, e = b.input(0, S, shape, "float32"), b.input(1, D, shape, "float32"), b.input(2, E, shape, "float32")
    made = [
        (b.reduce("sum", x), shape),
        (b.reduce("sum", b.op("mul", x, e)), shape),
        (b.sum_axis(y, 1), (heads, 1)),
        (b.on_edges(b.sum_axis(b.op("mul", x, e), 1)), (heads, 1)),
    ]
    region = b.finish([Output(value, "float32", trailing) for value, trailing in made])
    zeros = [torch.full((2, *shape), -0.0), torch.full((2, *shape), -0.0), torch.ones(edges, *shape)]
    where = torch.stack([torch.zeros(edges, dtype=torch.long), torch.arange(edges) % 2])
    for value in run(region, zeros, 2, where, which):
        assert not bool(value.signbit().any()) and not bool(value.any())


def test_zeros_of_both_signs_are_two_constants():
    b = Builder(D)
    x = b.input(0, D, (1, 1), "float32")
    regions = [b.finish([Output(b.op("mul", x, b.const(zero)), "float32", (1,))]) for zero in (0.0, -0.0)]
    assert regions[0] != regions[1] and [parse(region.spec) for region in regions] == regions


@pytest.mark.parametrize("which", ALL)
def test_equal_products_differ_by_zero(which: str):
    """A cross product of a vector with itself, whose norm has a gradient that depends on it."""
    x, y = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    difference = lambda b, x, y: [b.op("sub", b.op("mul", x, y), b.op("mul", y, x))]  # noqa: E731
    again = lambda b, x, y, z, w: [b.op("sub", b.op("mul", x, y), b.op("mul", z, w))]  # noqa: E731
    assert not bool(by_rows(difference, [x, y], which)[0].any())
    assert not bool(by_rows(again, [x, y, y.clone(), x.clone()], which)[0].any())


# -- in Inductor's code -------------------------------------------------------------------------------------------


def asked(x: Tensor) -> list[Tensor]:
    """Numbers that Inductor alone does not have as torch has them, of ``[20 k]`` numbers."""
    few, many = x.view(-1, 4), x.view(-1, 20)
    return [
        *(x.view(-1, 1).sum(1), few.sum(1), few.sum(0), many.sum(1), few.mean(1), few.bfloat16().sum(1)),
        *(x + torch.zeros_like(x), x * 0, (x * 0.0) * 0, 0.0 - x, x + 0.0, x - 0.0),
        *(torch.expm1(x), torch.remainder(x, 2.0), torch.remainder(x * 128, 0.1), F.elu(x)),
        *(
            torch.atan2(x.abs(), few.sum(1).repeat_interleave(4)),
            torch.copysign(torch.ones_like(few[:, 0]), few.sum(1).nan_to_num()),
        ),
        *(1 / x, x.reciprocal(), x**3, x**-1, torch.sqrt(x), torch.sign(x), torch.floor(x), torch.trunc(x)),
    ]


def test_inductor(device: str):
    torch._dynamo.reset()
    compiled = gnncompile.compile(asked)
    special = torch.cat([POINTS, POINTS.new_zeros(-POINTS.numel() % 40)])
    for x in (torch.full((40,), -0.0), special, torch.linspace(-1e-4, 2e-4, 60)):
        x = x.to(device)
        for k, (found, expected) in enumerate(zip(compiled(x), asked(x), strict=True)):
            same(found, expected, f"result {k}")
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == 1


def with_keywords(x: Tensor, w: Tensor, state: Tensor) -> list[Tensor]:
    """Operations with keyword arguments that patterns of Inductor leave out."""
    product, row = x @ w, w[0]
    state.mul_(0.5).add_(x @ w, alpha=0.1)
    return [
        *(torch.add(x, product, alpha=0.5), torch.add(product, x, alpha=0.5), torch.add(product, x @ w.t(), alpha=2)),
        *(torch.add(row, product, alpha=-3), torch.add(product, row, alpha=0.25), torch.sub(x, product, alpha=0.5)),
        *(torch.add((x > 0).int(), product, alpha=0.5), torch.add((x > 0).int(), (x > 1).long(), alpha=3)),
        *(torch.ones(4, 5, dtype=torch.int64, device=x.device).cumsum(0, dtype=torch.float32), x.cumsum(1)),
        *(F.gelu(product, approximate="tanh"), product.cumsum(0, dtype=torch.float64), torch.rsub(x, product, alpha=2)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keyword_arguments_in_inductor(device: str, dtype: torch.dtype):
    torch._dynamo.reset()
    compiled = gnncompile.compile(with_keywords)
    generator = torch.Generator().manual_seed(0)
    for rows in (7, 1, 0):
        x, w = (torch.randn(n, 6, generator=generator, dtype=dtype).to(device).requires_grad_() for n in (rows, 6))
        states = [torch.ones_like(x).detach() for _ in range(2)]
        results = [run(x, w, state) for run, state in zip((compiled, with_keywords), states, strict=True)]
        gradients = [torch.autograd.grad(sum(r.sum() for r in made if r.requires_grad), (x, w)) for made in results]
        torch.testing.assert_close([*results[0], *gradients[0], states[0]], [*results[1], *gradients[1], states[1]])
