"""Products of many small matrices, written out as multiplications and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gnncompile
from gnncompile import tuning
from gnncompile.passes.post_grad import expand_small_products
from tests.harness import tune

SQUARE, WIDE = (3, 3), (3, 8)
PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, int], tuple[int, int]]] = {
    "matmul": (torch.matmul, SQUARE, WIDE),
    "bmm between functions": (lambda a, b: torch.bmm(a.tanh(), b).sin(), SQUARE, WIDE),
    "a vector and a matrix": (lambda a, b: torch.matmul(a[:, :1], b).squeeze(1), SQUARE, WIDE),
    "einsum": (lambda a, b: torch.einsum("eij,ekj->eik", a, b), WIDE, SQUARE[:1] + WIDE[1:]),
    "transposed": (lambda a, b: a.transpose(1, 2) @ b, SQUARE, WIDE),
    "two products of one factor": (lambda a, b: (a @ b) * (a.transpose(1, 2) @ b), SQUARE, WIDE),
    "outer product": (lambda a, b: a[:, :, :1] @ b[:, :1], SQUARE, WIDE),
    "with itself": (lambda a, b: (a @ a - a @ a.transpose(1, 2)) @ b, SQUARE, WIDE),
    "two axes of matrices": (lambda a, b: a.unsqueeze(1) @ b.view(-1, 2, 3, 4), SQUARE, WIDE),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


class Shaped(nn.Module):
    """A product of matrices that it makes from rows of numbers. Attributes of a model are known sizes."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.product, self.shapes = product, shapes

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.shapes
        return self.product(a.view(-1, *left), b.view(-1, *right))


def run(product: Callable[[Tensor, Tensor], Tensor], given: tuple[Tensor, Tensor], dtype: torch.dtype) -> list[Tensor]:
    a, b = (t.to(dtype).requires_grad_() for t in given)
    out = product(a, b)
    (out * torch.arange(out.numel(), device=out.device).view_as(out).cos().to(dtype)).sum().backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (a, b)]
    return [found.double() for found in (out.detach(), *grads)]


CASES = [(name, torch.float64) for name in PRODUCTS] + [("matmul", torch.float32), ("einsum", torch.bfloat16)]


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    """What these tests patch is no part of the keys of Inductor's caches."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_products(name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and gradients are those of float64, for any number of matrices."""
    torch._dynamo.reset()
    monkeypatch.setattr(tuning, "LOOPS", replace(tuning.LOOPS, small_product=4096))
    product, left, right = PRODUCTS[name]
    shaped = Shaped(product, left, right)
    compiled = gnncompile.compile(shaped)
    with mock.patch.object(expand_small_products, "_expand", wraps=expand_small_products._expand) as expanded:
        for number in (7, 0, 1, 130):
            torch.manual_seed(number)
            flat = [torch.randn(number, m * n).bfloat16().to(device) for m, n in (left, right)]
            expected = run(shaped, (flat[0], flat[1]), torch.float64)
            found = run(compiled, (flat[0], flat[1]), dtype)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])
    assert expanded.call_count


@pytest.mark.parametrize(("sizes", "expands"), [((4, 4, 4), True), ((4, 4, 5), False), ((64, 64, 64), False)])
def test_large_products_are_left_to_the_library(
    sizes: tuple[int, int, int], expands: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    tune(monkeypatch, small_product=64)
    rows, inner, columns = sizes
    compiled = gnncompile.compile(Shaped(torch.matmul, (rows, inner), (inner, columns)))
    with mock.patch.object(expand_small_products, "_expand", wraps=expand_small_products._expand) as expanded:
        compiled(torch.randn(5, rows * inner, device=device), torch.randn(5, inner * columns, device=device))
    assert bool(expanded.call_count) == expands
