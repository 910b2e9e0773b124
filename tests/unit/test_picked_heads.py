"""Heads of edge features that an index repeats: a region chooses among them, and writes none of the repeated rows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gnncompile
from tests.harness import light, same_gradients

HEADS, PICKED, CHANNELS = 3, 7, 4

SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda weights, order: weights[:, order],
    "index with a slice": lambda weights, order: weights[:, order, :],
    "index_select": lambda weights, order: weights.index_select(1, order),
    "negative": lambda weights, order: weights[:, order - HEADS],
    "without channels": lambda weights, order: weights[:, :, 0][:, order].unsqueeze(-1),
}


class Equivariant(nn.Module):
    """Messages of several orders per degree, with one weight per degree, as those of MACE."""

    def __init__(self, spelling: str, order: Tensor) -> None:
        super().__init__()
        self.pick, self.radial = SPELLINGS[spelling], nn.Linear(5, HEADS * CHANNELS)
        self.register_buffer("order", order)

    def forward(self, x: Tensor, edge_index: Tensor, basis: Tensor, harmonics: Tensor) -> Tensor:
        source, destination = edge_index
        weights = self.pick(self.radial(basis).unflatten(-1, (HEADS, CHANNELS)), self.order)
        message = x[source].unsqueeze(1) * weights * harmonics.unsqueeze(-1)
        return x.new_zeros(x.size(0), PICKED, CHANNELS).index_add(0, destination, message)


ORDER = torch.tensor([0, 1, 1, 1, 2, 2, 0])


def inputs(nodes: int, edges: int, device: str) -> tuple[Tensor, list[Tensor]]:
    shapes = (nodes, CHANNELS), (edges, 5), (edges, PICKED)
    floats = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    return torch.randint(nodes, (2, edges), device=device), floats


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_values_and_gradients(spelling: str, device: str) -> None:
    torch.manual_seed(0)
    eager = Equivariant(spelling, ORDER).double().to(device)
    ours = copy.deepcopy(eager)
    with light():
        compiled = gnncompile.compile(ours)
        for nodes, edges in ((6, 20), (4, 0), (1, 3), (9, 40)):
            edge_index, given = inputs(nodes, edges, device)
            x, *others = given
            same_gradients(eager, (ours, compiled), x, edge_index, *others)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_region_reads_repeated_rows(spelling: str) -> None:
    edge_index, (x, *others) = inputs(6, 20, "cpu")
    model = Equivariant(spelling, ORDER).double()
    (region,) = gnncompile.explain(model, x.requires_grad_(), edge_index, *others).regions
    of_edges = [line for line in region.program.splitlines() if "[edge" in line and "tensor" in line]
    wide = [line for line in of_edges if f"{PICKED}x" in line]
    assert len(of_edges) == HEADS + 1 and len(wide) == 1  # the harmonics have a number for each order


@pytest.mark.parametrize("spelling", ["index", "index_select"])
@pytest.mark.parametrize("wrong", [HEADS, -HEADS - 1])
def test_entries_out_of_range(spelling: str, wrong: int) -> None:
    order = ORDER.clone()
    order[2] = wrong
    edge_index, (x, *others) = inputs(6, 20, "cpu")
    model = Equivariant(spelling, order).double()
    with pytest.raises((IndexError, RuntimeError)):
        model(x, edge_index, *others)
    with pytest.raises((IndexError, RuntimeError)):
        gnncompile.compile(model)(x, edge_index, *others)


def test_another_order_needs_no_capture() -> None:
    edge_index, (x, *others) = inputs(6, 20, "cpu")
    model = Equivariant("index", ORDER.clone()).double()
    compiled = gnncompile.compile(model)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, edge_index, *others), model(x, edge_index, *others))
        model.order.copy_((model.order + 1) % HEADS)
    assert gnncompile.explain(compiled, x, edge_index, *others).captured_graphs == 1
