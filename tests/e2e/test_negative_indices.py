"""Negative indices: they count from the end where eager lets them, and are an error where they are one in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch_geometric.nn import GCNConv
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.layout import csr
from tests.harness import light

NODES, EDGES = 6, 20

pytestmark = pytest.mark.filterwarnings("error:gnncompile")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fused(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    return scatter(x[j], i, 0, NODES, "sum")


def fused_twice(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    """One of the two gathers is no indexing of Python's."""
    return scatter((x[j] - x.index_select(0, i)).relu(), i, 0, NODES, "sum")


def moved(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    """A linear layer behind the gather moves in front of it."""
    return torch.nn.functional.linear(x[j], torch.ones(3, 4)).relu()


def plain(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    return (x[j] * x[i]).sin()


def of_pairs(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    """Rows of both ends at once, of tables of different sizes."""
    pairs, more = torch.stack([j, i]), torch.cat([x, x])
    return scatter(x[pairs][0] * more[j], i, 0, NODES, "mean")


def put(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    return x.new_zeros(NODES, 4).index_put_((j,), x.index_select(0, i).sin(), accumulate=True)


def columns(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    """The gather and the reduction are along the second dimension."""
    return torch.zeros(4, NODES).index_add(1, i, x.t()[:, j])


def in_parts(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    """The second part begins after a graph break."""
    x = x.sin()
    torch._dynamo.graph_break()
    return scatter(x[j], i, 0, NODES, "sum")


def both(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    """Eager refuses negative entries of an index that another operation selects rows by."""
    return scatter(x[j] * x.index_select(0, j), i, 0, NODES, "sum")


def selected(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    return x.index_select(0, j).sin()


def selected_columns(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    return x.t().index_select(1, j).sin()


def added(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
    return (x * 2).index_add(0, j, x.index_select(0, i))


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    indices = torch.randint(NODES, (2, EDGES), generator=made)
    return torch.randn(NODES, 4, generator=made, requires_grad=True), *indices.unbind()


def run(model: Callable[..., Tensor], x: Tensor, *indices: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x, *indices)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("model", "inductor"),
    [
        (fused, True),
        (plain, True),
        *((f, False) for f in (fused, fused_twice, moved, of_pairs, put, columns, in_parts)),
    ],
)
def test_indexing_counts_from_the_end(model: Callable[..., Tensor], inductor: bool, before: bool) -> None:
    with nullcontext() if inductor else light():
        compiled = gnncompile.compile(model)
        for seed in range(3):
            x, j, i = inputs(seed)
            if not before or seed > 0:
                j[3], j[7] = -1, -NODES
            torch.testing.assert_close(run(compiled, x, j, i), run(model, x, j, i))
        program = callable_of(compiled)
        assert program is not None and len(program.backend.captured) == 1 + (model is in_parts)
        assert model in (plain, moved) or any(captured.log.regions for captured in program.backend.captured)
        x, j, i = inputs(3)
        j[2] = -NODES - 1
        with pytest.raises(IndexError):
            compiled(x, j, i)


def test_layouts_replace_negative_entries() -> None:
    """By what is asked for either end of the edges."""
    row = torch.tensor([0, -1, 2, 0])
    made = csr.csr(row, row, 3, 3, None, True, True)
    torch.testing.assert_close(made, csr.csr(row % 3, row % 3, 3, 3, None))
    torch.testing.assert_close(csr.csr(row % 3, row, 3, 5, None, False, True)[1], torch.tensor([0, 0, 4, 2]).int())
    for wrapped in ((False, True), (True, False), (False, False)):
        with pytest.raises(IndexError, match=r"entry 1 is -1|joins nodes -1"):
            csr.csr(row, row, 3, 3, None, *wrapped)


@pytest.mark.parametrize(
    ("model", "inductor"),
    [(selected, True), (selected_columns, True), (added, True), (selected, False), (added, False), (both, False)],
)
def test_other_ops_refuse_them(model: Callable[..., Tensor], inductor: bool) -> None:
    with nullcontext() if inductor else light():
        compiled = gnncompile.compile(model)
        x, j, i = inputs(0)
        torch.testing.assert_close(run(compiled, x, j, i), run(model, x, j, i))
        for bad in (-1, NODES):
            j[3] = bad
            with pytest.raises((IndexError, RuntimeError)):
                model(x, j, i)
            with pytest.raises(IndexError, match=r"out of range|outside the graph") as error:
                compiled(x, j, i)
            assert len(str(error.value).splitlines()) <= 2


class Net(nn.Module):
    """Rows of its own choice, some of them from the end; dropout, whose random numbers are drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = GCNConv(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, edge_index: Tensor, near: Tensor) -> Tensor:
        x = self.norm(self.conv(x, edge_index))
        return x + scatter(x[near], torch.arange(NODES).repeat(2), 0, NODES, "mean")


def test_statistics_are_counted_once() -> None:
    models: list[Any] = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    x, j, i = inputs(0)
    near = torch.tensor([-1, 2, -3, 0, 1, 5, 4, -6, 3, 2, 1, 0])
    with light():
        compiled = gnncompile.compile(models[1])
        for _ in range(2):
            expected, found = (model(x, torch.stack([j, i]), near) for model in (models[0], compiled))
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


def test_an_edge_list_refuses_them() -> None:
    conv = GCNConv(4, 3)
    x, j, i = inputs(0)
    with light():
        compiled = gnncompile.compile(conv)
        j[3] = -1
        for model in (conv, compiled):
            with pytest.raises(IndexError):
                model(x, torch.stack([j, i]))
        program = callable_of(compiled)
        assert program is not None and len(program.backend.captured) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_in_16_bits_on_a_cpu_are_torchs(dtype: torch.dtype):
    """Inductor's C++ would add numbers of 16 bits one by one, with a lock for each."""

    def pairs(x: Tensor, j: Tensor, i: Tensor) -> Tensor:
        return (x.index_select(0, j) * x.index_select(0, i)).sin()

    torch.manual_seed(0)
    x, j, i = torch.randn(NODES, 4).to(dtype), torch.randint(NODES, (EDGES,)), torch.randint(NODES, (EDGES,))
    found, codes = [], []
    for call in (pairs, gnncompile.compile(pairs)):
        given = x.clone().requires_grad_()

        def step(call: Callable[..., Tensor] = call, given: Tensor = given) -> None:
            call(given, j, i).float().sum().backward()

        with torch._inductor.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(step)
        found.append(given.grad)
    exact = x.double().requires_grad_()
    pairs(exact, j, i).sum().backward()
    eager, ours = ((one.double() - exact.grad).norm() for one in found)
    assert ours <= 1.1 * eager
    assert any("index_add" in code and "atomic_add" not in code for code in codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_negative_place_of_a_sum_is_an_error(dtype: torch.dtype):
    def total(x: Tensor, i: Tensor) -> Tensor:
        return x.new_zeros(NODES, 4).index_add(0, i, x.sin())

    x, i = torch.randn(EDGES, 4).to(dtype), torch.randint(NODES, (EDGES,))
    compiled = gnncompile.compile(total, options={"regions": False})
    torch.testing.assert_close(compiled(x, i), total(x, i), rtol=2e-2, atol=2e-2)
    i[3] = -1
    for call in (total, compiled):
        with pytest.raises((IndexError, RuntimeError)):
            call(x, i)
