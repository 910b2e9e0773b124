"""Rows of edges that regions store or read, since other operations need them as well."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gnncompile
from tests.harness import light, same_gradients

CUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "split": lambda rows: rows.split(4, dim=-1),  # type: ignore[dict-item,return-value]
    "split by sizes": lambda rows: rows.split([3, 5], dim=1),  # type: ignore[dict-item,return-value]
    "chunk": lambda rows: rows.chunk(2, dim=1),  # type: ignore[dict-item,return-value]
    "slices": lambda rows: (rows[:, :3], rows[:, 3:]),
}


class Messages(nn.Module):
    """Messages of two parts, as those of PaiNN: one is summed as it is, the other along a direction of each edge."""

    def __init__(self, cut: str, total: bool = False) -> None:
        super().__init__()
        self.cut, self.total, self.filter = CUTS[cut], total, nn.Linear(3, 8)

    def forward(self, x: Tensor, edge_index: Tensor, away: Tensor) -> Tensor:
        source, destination = edge_index
        one, other = self.cut(x[source] * self.filter(away))
        plain = x.new_zeros(x.size(0), one.size(1)).index_add(0, destination, one)
        if self.total:  # something else than a sum over the edges of each node reads the rows
            plain = plain + one.sum()
        along = other.unsqueeze(1) * away.unsqueeze(2)
        return torch.cat([plain, x.new_zeros(x.size(0), *along.shape[1:]).index_add(0, destination, along).sum(1)], 1)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_parts_of_messages(cut: str, total: bool, device: str) -> None:
    torch.manual_seed(0)
    eager = Messages(cut, total).double().to(device)
    ours = copy.deepcopy(eager)
    with light():
        compiled = gnncompile.compile(ours)
        for nodes, edges in ((6, 20), (4, 0), (1, 3), (9, 40)):
            edge_index = torch.randint(nodes, (2, edges), device=device)
            given = [torch.randn(n, m, dtype=torch.float64, device=device) for n, m in ((nodes, 8), (edges, 3))]
            x, away = given
            same_gradients(eager, (ours, compiled), x, edge_index, away)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_of_the_gathered_rows_are_sums_of_a_region(cut: str, total: bool) -> None:
    """The gather is part of a region, so its gradient is a walk by source, without atomics.

    Rows of which only messages read parts are not even stored.
    """
    edge_index = torch.randint(6, (2, 20))
    x, away = torch.randn(6, 8, requires_grad=True), torch.randn(20, 3, requires_grad=True)
    lines = str(gnncompile.explain(Messages(cut, total), x, edge_index, away)).splitlines()
    assert any("gather of 1x8" in line for line in lines) == total
    assert total or sum("sum of" in line and "from source" in line for line in lines) == 2


BY_ROWS = {"edge_layers": False}
"""The option without walks in tiles, which would take the layers in on a CPU."""


class Residual(nn.Module):
    """States of edges that layers add to, as in DimeNet++; the last one is summed by destination."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.weigh = nn.Linear(3, 16)

    def forward(self, x: Tensor, edge_index: Tensor, away: Tensor) -> Tensor:
        source, destination = edge_index
        state = (x[source] + x[destination]).sigmoid() + self.weigh(away)
        for layer in self.layers:
            state = state + layer(state).tanh()
        return x.new_zeros(x.size(0), 16).index_add(0, destination, state * self.weigh(away))


@pytest.mark.parametrize("layers", [2, 4])
def test_a_sum_of_states_reads_the_last_state_that_a_layer_reads(layers: int) -> None:
    """And not all the tensors that were added to it, for each of which it would write a gradient."""
    edge_index = torch.randint(6, (2, 20))
    x, away = torch.randn(6, 16, requires_grad=True), torch.randn(20, 3, requires_grad=True)
    model = gnncompile.compile(Residual(layers), options=BY_ROWS)
    regions = gnncompile.explain(model, x, edge_index, away).regions
    (region,) = (region for region in regions if "sum over edges" in region.program)
    inputs = [line for line in region.program.splitlines() if "[edge" in line and "tensor" in line]
    assert len(inputs) == 3, region.program  # the state, what the last layer adds to it, and the weights


@pytest.mark.parametrize("layers", [1, 4])
def test_sums_of_residual_states(layers: int, device: str) -> None:
    torch.manual_seed(0)
    eager = Residual(layers).double().to(device)
    ours = copy.deepcopy(eager)
    with light():
        compiled = gnncompile.compile(ours, options=BY_ROWS)
        for nodes, edges in ((6, 20), (4, 0), (1, 3), (9, 40)):
            edge_index = torch.randint(nodes, (2, edges), device=device)
            given = [torch.randn(n, m, dtype=torch.float64, device=device) for n, m in ((nodes, 16), (edges, 3))]
            x, away = given
            same_gradients(eager, (ours, compiled), x, edge_index, away)
