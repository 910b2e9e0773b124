"""What torch or PyG would capture anew for a single node, for no edge or at some size of their own choosing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gnncompile
from gnncompile.support.case import CHANNELS, Case
from gnncompile.support.check import check
from tests.harness import light


@pytest.fixture
def _light() -> Iterator[None]:
    with light():
        yield


class Layer(nn.Module):
    """Applies a function to features, an edge list and a weight ``[3, CHANNELS, CHANNELS]``."""

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(3, CHANNELS, CHANNELS) / 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.fn(x, edge_index, self.weight)


def one_capture(fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """One graph for all sizes, without a break or a sync; outputs and gradients as in eager."""
    found = check(Case("a user's layer", lambda: Layer(fn)))
    assert found.passes, found


def one_product_per_weight(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh() @ weight


def rows_by_channel(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    return x[edge_index[0]].t().contiguous().sin() + (weight[0] @ x[edge_index[1]].t()).reshape(CHANNELS, -1)


def written_in_turns(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    out = x.new_empty(edge_index.size(1), CHANNELS)
    out[0::2] = x[edge_index[0, 0::2]] @ weight[0]
    out[1::2] = x[edge_index[1, 1::2]] @ weight[1]
    return out


def heads_packed(x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
    packed = (x @ weight[0]).unsqueeze(0).unflatten(-1, (2, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2)
    one, other = packed.contiguous()
    return one * other


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("fn", [one_product_per_weight, rows_by_channel, written_in_turns, heads_packed])
def test_layouts_are_not_guarded(fn: Callable[[Tensor, Tensor, Tensor], Tensor]):
    one_capture(fn)


def test_what_the_backward_reads_has_the_strides_of_each_call():
    """Of ``[3, num_nodes, CHANNELS]``, compiled by Inductor."""
    weight = torch.randn(3, CHANNELS, CHANNELS, dtype=torch.double, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return (x @ weight).relu().sum(0)

    compiled = gnncompile.compile(fn)
    for nodes in (12, 17, 9):
        x = torch.randn(nodes, CHANNELS, dtype=torch.double, requires_grad=True)
        expected, found = (torch.autograd.grad(f(x).square().sum(), [x, weight]) for f in (fn, compiled))
        torch.testing.assert_close(found, expected)
