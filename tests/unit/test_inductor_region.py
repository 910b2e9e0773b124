"""Regions in the code that Inductor writes: called directly, into its own buffers, in every situation of a buffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import gnncompile
from gnncompile.capture.compile import callable_of


def add(x: Tensor, edge_index: Tensor) -> Tensor:
    return x.new_zeros(x.size(0), x.size(1)).index_add(0, edge_index[1], x[edge_index[0]])


def graph(nodes: int = 9, edges: int = 30, channels: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    edge_index = torch.randint(max(nodes, 1), (2, edges if nodes else 0), generator=generator)
    return torch.randn(nodes, channels, generator=generator), edge_index


def _transposed(x: Tensor, edge_index: Tensor) -> Tensor:
    return add(x.t().contiguous().t(), edge_index)


def _slice(x: Tensor, edge_index: Tensor) -> Tensor:
    return add(x[:, 1:3], edge_index)


def _used_and_returned(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    y = add(x, edge_index)
    return y, add(y.exp(), edge_index)


def _written(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    y = add(x, edge_index)
    z = y * 2
    y.add_(1)
    return y, z


def _chain(x: Tensor, edge_index: Tensor) -> Tensor:
    for _ in range(4):
        x = add(x, edge_index).tanh()
    return x


def _per_edge(x: Tensor, edge_index: Tensor) -> Tensor:
    """A softmax whose values leave their region, one per edge."""
    from torch_geometric.utils import softmax

    return softmax(x[edge_index[0]] * x[edge_index[1]], edge_index[1], num_nodes=x.size(0)).square()


CASES: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "plain": add,
    "transposed": _transposed,
    "slice": _slice,
    "used and returned": _used_and_returned,
    "written to": _written,
    "chain": _chain,
    "per edge": _per_edge,
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_gradients(name: str):
    if name == "slice" and torch.__version__ < "2.12":
        pytest.xfail("Inductor in torch 2.11 can't scatter a slice of symbolic width")
    torch._dynamo.reset()
    model = CASES[name]
    compiled = gnncompile.compile(model)
    for nodes in (9, 5, 0, 1, 9):
        x, edge_index = graph(nodes)
        results = []
        for run in (compiled, model):
            leaf = x.clone().requires_grad_()
            out = run(leaf, edge_index)
            outs = out if isinstance(out, tuple) else (out,)
            total = sum((o * torch.cos(o.detach())).sum() for o in outs)
            results.append([*outs, *torch.autograd.grad(total, leaf)])  # type: ignore[arg-type]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    program = callable_of(compiled)
    # Whether a view of no row or a single one is contiguous is a question of its size.
    assert program is not None and (name in ("transposed", "slice") or len(program.backend.captured) == 1)


def test_kernels_are_called_directly():
    torch._dynamo.reset()
    x, edge_index = graph()
    _, codes = run_and_get_code(lambda: gnncompile.compile(add)(x.requires_grad_(), edge_index).sum().backward())
    assert len(codes) == 2
    for code in codes:
        assert "gnncompile.region" not in code.replace("'gnncompile::region", "") and "_gnncompile_call(" in code
        assert code.count("empty_strided_cpu((") >= 1
