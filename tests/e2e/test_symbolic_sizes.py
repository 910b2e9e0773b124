"""What sizes become in a captured graph: rows are symbols, widths are numbers until they change, slices are decided."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import metrics
from torch_geometric.utils import scatter, softmax

import gnncompile
from gnncompile.capture.compile import callable_of
from tests.harness import light

Shapes = Sequence[tuple[int, ...]]


@contextmanager
def nothing_told() -> Iterator[None]:
    """A block in which nothing is captured in another way than planned: gnncompile would warn."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    assert not [str(w.message) for w in told if "gnncompile" in str(w.message)]


def compare(fn: Callable[..., Tensor], shapes: Shapes, captures: int, device: str = "cpu") -> None:
    """Compares values and gradients with eager, call after call, and counts captured graphs."""
    compiled = gnncompile.compile(fn)
    with nothing_told():
        for seed, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(seed)
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
            index = torch.randint(max(shape[0], 1), (shape[0],), generator=generator).to(device)
            found = []
            for called in (fn, compiled):
                x = value.clone().requires_grad_()
                out = called(x, index)
                (out * torch.arange(out.numel(), device=device).view_as(out).cos()).sum().backward()
                found.append((out, x.grad))
            torch.testing.assert_close(found[1], found[0], msg=lambda m, shape=shape: f"{shape}: {m}")
    program = callable_of(compiled)
    assert program is not None and len(program.backend.captured) == captures


def _running_sums(x: Tensor, index: Tensor) -> Tensor:
    """The gradient of a running sum asks whether there is one row."""
    weight = torch.ones(6, 6, dtype=x.dtype, device=x.device).triu()
    return x + (x @ weight) + (x @ weight).cumsum(0)


def _beside_as_many_rows(x: Tensor, index: Tensor) -> Tensor:
    return _running_sums(x, index) + index.unsqueeze(-1)


# Two reductions along different axes, without weights: of a symbolic width Inductor could not fuse them for a GPU.
def _columns_and_rows(x: Tensor, index: Tensor) -> Tensor:
    unit = nn.functional.normalize(x, dim=-1)
    return (unit * unit).sum(-1, keepdim=True) + torch.exp(-unit.abs()) + x.sum(0)


ROWS = [(9, 6), (4, 6), (0, 6), (1, 6), (30, 6)]
WIDTHS: dict[str, tuple[Callable[..., Tensor], Shapes, int]] = {
    "rows": (_columns_and_rows, ROWS, 1),
    "first no rows": (_columns_and_rows, ROWS[2:], 1),
    "a gradient for one row": (_running_sums, [(9, 6), (1, 6), (0, 6), (4, 6)], 2),
    "first one row": (_running_sums, [(1, 6), (9, 6), (1, 6), (0, 6)], 2),
    "as many rows twice": (_beside_as_many_rows, [(9, 6), (1, 6), (0, 6), (4, 6)], 2),
    "another width": (_columns_and_rows, [(9, 6), (4, 5), (7, 3), (3, 8)], 2),
    "one feature": (_columns_and_rows, [(9, 1), (4, 6), (7, 3)], 2),
    "three axes": (lambda x, index: x.relu().sum(1), [(9, 3, 6), (4, 3, 6), (5, 2, 6)], 1),
    "dense matrices": (lambda x, index: x @ x, [(3, 6, 6), (2, 9, 9), (4, 5, 5)], 1),
}


@pytest.mark.parametrize("case", WIDTHS)
def test_widths_are_numbers_until_they_change(case: str, device: str):
    torch._dynamo.reset()
    compare(*WIDTHS[case], device)


FEW = [(9, 4), (0, 4), (1, 4), (5, 4)]
"""No rows have a graph of their own where a slice asks for one row."""
TALL = [(9, 4), (7, 4), (12, 4), (5, 4)]
SLICES: dict[str, tuple[Callable[..., Tensor], Shapes, int]] = {
    "features": (lambda x, index: x[:, :2], TALL, 1),
    "features of any width": (lambda x, index: x[..., :2].relu(), [(9, 4), (7, 5), (12, 6)], 2),
    "reduced": (lambda x, index: scatter(x[..., :2], index, 0, x.size(0), "mul"), TALL, 1),
    "softmax": (lambda x, index: softmax(x[..., 1:], index, num_nodes=x.size(0)), TALL, 1),
    "rows": (lambda x, index: x[:5] * 2, TALL, 1),
    "last rows": (lambda x, index: x[-3:] * 2, TALL, 1),
    "inner rows": (lambda x, index: x[1:-1] * 2, TALL, 1),
    "more than there are": (lambda x, index: x[:8] * 2, TALL, 2),
    "none": (lambda x, index: x[3:2] * 2, TALL, 1),
    "of another tensor": (lambda x, index: x[: index.size(0) - 2] * 2, TALL, 1),
    "every other": (lambda x, index: x[1::2] * 2, TALL, 1),
    "all but the first": (lambda x, index: x[1:].exp(), FEW, 2),
    "all but the last": (lambda x, index: x[:-1].exp(), FEW[1:], 2),
    "differences": (lambda x, index: torch.diff(x, dim=0).exp(), FEW, 2),
    "twice": (lambda x, index: torch.cat([x, x[1:]]).exp(), FEW, 2),
    "of two tensors": (lambda x, index: (x + index.unsqueeze(-1))[1:] * index[1:].unsqueeze(-1) + x[:-1], FEW, 2),
}


@pytest.mark.parametrize("case", SLICES)
def test_slices_are_decided(case: str, device: str):
    """Where one ends is a guard; its size is that of the rows, or a number, never a secret of the data."""
    with light():
        compare(*SLICES[case], device)


@pytest.mark.parametrize(
    "case", ["features", "inner rows", "more than there are", "all but the first", "differences", "of two tensors"]
)
def test_slices_by_inductor(case: str, device: str):
    torch._dynamo.reset()
    compare(*SLICES[case], device)


ASKED: dict[str, Callable[[Tensor], bool]] = {
    "x.size(0) <= 1": lambda x: x.size(0) <= 1,
    "x.size(0) < 2": lambda x: x.size(0) < 2,
    "not x.size(0) > 1": lambda x: not x.size(0) > 1,
    "x.numel() <= 6": lambda x: x.numel() <= 6,
}
"""What a model may ask before it normalises rows."""


def _asking(asked: str) -> Callable[..., Tensor]:
    return lambda x, index: _running_sums(x, index) if ASKED[asked](x) else x - x.mean(0)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("rows", "captures"), [((9, 1, 2, 0), 3), ((1, 2), 2)], ids=["many first", "one first"])
def test_questions_whether_there_are_several_rows(asked: str, rows: tuple[int, ...], captures: int, device: str):
    torch._dynamo.reset()
    compare(_asking(asked), [(n, 6) for n in rows], captures, device)


RESHAPES: dict[str, Callable[..., Tensor]] = {
    "elements": lambda x, index: x * torch.arange(x.numel(), device=x.device).cos().view_as(x),
    "transposed": lambda x, index: (x.t().relu().reshape(-1) * 2).view(x.size(0), 4),
    "repeated": lambda x, index: x.repeat(1, 2).view(-1, 2).relu(),
    "heads": lambda x, index: x.view(-1, 2, 2).transpose(1, 2).relu().reshape(x.size(0), 4) + x,
    "a product of columns": lambda x, index: x.unsqueeze(-1) @ x.new_ones(1, 3) + x.cumsum(-1).unsqueeze(-1) * 2,
}


@pytest.mark.parametrize("case", RESHAPES)
@pytest.mark.parametrize("rows", [(0, 5, 1, 9), (1, 5, 0, 9)], ids=["none first", "one first"])
def test_reshapes_of_few_rows(case: str, rows: tuple[int, ...], device: str):
    """Inductor compares sizes of the first call while it works out a reshape: those of no rows it can't match.

    Two sizes may both be 1 in the first call, and differ in the next.
    """
    torch._dynamo.reset()
    compare(RESHAPES[case], [(n, 4) for n in rows], 1, device)


INDICES: dict[str, Callable[..., Tensor]] = {
    "one graph": lambda x, index: scatter(x, index.new_zeros(x.size(0)), 0, None, "max").exp(),
    "three rows each": lambda x, index: scatter(x, torch.arange(x.size(0), device=x.device) // 3, 0, None, "min") * 2,
    "every other row": lambda x, index: x[torch.arange(x.size(0), device=x.device) % 2 == 0].relu(),
}


@pytest.mark.parametrize("case", INDICES)
def test_sizes_found_in_an_index_made_from_sizes(case: str, device: str):
    """They are found once for each number of rows, so no step waits for them."""
    torch._dynamo.reset()
    compare(INDICES[case], [(9, 4), (4, 4), (1, 4), (9, 4)], 1, device)
    report = gnncompile.explain(INDICES[case], torch.randn(9, 4, device=device), torch.arange(9, device=device))
    assert report.host_syncs == 0, report
    assert all((r.kernel == "cpp") == (device == "cpu") for r in report.regions)


def test_no_rows_of_a_kernel_along_two_axes(device: str):
    """Its launcher shares out blocks among axes of the grid: there may be none."""
    torch._dynamo.reset()
    compare(lambda x, index: (x - x)[index] + x.t().contiguous().t(), [(40, 4), (0, 4), (7, 4)], 1, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [10_000, 200_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_and_columns_are_summed_at_once_where_there_are_many(rows: int, dtype: torch.dtype):
    """A matrix that stays in the cache is read twice; so is one of float64, which the common kernel can't sum."""
    torch._dynamo.reset()
    compiled = gnncompile.compile(lambda x: ((x * x).sum(0), (x * 2).sum(1)))
    x = torch.randn(rows, 64, device="cuda", dtype=dtype)
    before = metrics.codegen_mix_order_reduction
    with torch._inductor.config.patch(force_disable_caches=True):  # code for few rows serves many as well
        found = compiled(x)
    at_once = metrics.codegen_mix_order_reduction - before
    assert at_once == (rows == 200_000 and dtype is torch.float32)
    torch.testing.assert_close(found, ((x * x).sum(0), (x * 2).sum(1)), rtol=1e-4, atol=1e-4)
