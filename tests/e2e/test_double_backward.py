"""Gradients of gradients, as training on forces needs them: ``options={"double_backward": True}`` equals eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, TransformerConv, global_mean_pool

import gnncompile
from gnncompile.testing import awkward

GRAPHS = {name: data for name, data in awkward(channels=4).items() if name != "bipartite"}


class Potential(nn.Module):
    """An energy per graph of features that depend smoothly on `pos`."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.out = conv, nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        near = (pos[edge_index[0]] - pos[edge_index[1]]).square().sum(-1, keepdim=True)
        own = torch.zeros_like(pos[:, :1]).index_add(0, edge_index[1], torch.exp(-near)) * pos
        x = self.conv(self.norm(own + pos), edge_index).tanh()
        return global_mean_pool(self.out(x), batch, 2).view(-1)


def derivatives(model: nn.Module, pos: Tensor, edge_index: Tensor) -> list[Tensor]:
    """Energy, forces, and the gradients of a loss on both; positions included."""
    pos = pos.clone().requires_grad_()
    batch = torch.arange(pos.size(0)) * 2 // max(pos.size(0), 1)
    energy = model(pos, edge_index, batch)
    (force,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    loss = energy.square().sum() + (force.sin() * torch.arange(4.0)).sum()
    wanted = [pos, *model.parameters()]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [energy, force, *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True))]


LAYERS: dict[str, Any] = {
    "gcn": lambda: GCNConv(4, 4),
    "max": lambda: SAGEConv(4, 4, aggr="max"),
    "gat": lambda: GATConv(4, 2, heads=2),
    "transformer": lambda: TransformerConv(4, 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_equals_eager(name: str) -> None:
    """One capture for all graphs; a graph of one node too, whose batch norm is that of evaluation."""
    torch.manual_seed(0)
    eager = Potential(LAYERS[name]()).double().eval()
    compiled = gnncompile.compile(copy.deepcopy(eager), options={"double_backward": True})
    for graph, data in GRAPHS.items():
        inputs = data.x.double(), data.edge_index
        for a, b in zip(derivatives(compiled, *inputs), derivatives(eager, *inputs), strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, graph=graph: f"{graph}: {text}")
    report = gnncompile.explain(compiled, *inputs, torch.zeros(len(inputs[0]), dtype=torch.long))
    assert report.regions and report.graph_breaks == 0 and report.recompiles == 0


def test_training_keeps_statistics() -> None:
    torch.manual_seed(0)
    eager = Potential(GCNConv(4, 4)).double()
    compiled = gnncompile.compile(copy.deepcopy(eager), options={"double_backward": True})
    data = GRAPHS["hub"]
    for _ in range(2):
        results = [derivatives(model, data.x.double(), data.edge_index) for model in (compiled, eager)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict())


class WithForces(nn.Module):
    """The gradient is taken in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = Potential(SAGEConv(4, 4))

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        energy = self.potential(pos, edge_index, batch)
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return energy, -gradient


def test_forces_in_the_forward() -> None:
    torch.manual_seed(0)
    eager = WithForces().double().eval()
    compiled = gnncompile.compile(copy.deepcopy(eager), options={"double_backward": True})
    for name in ("hub", "unsorted, duplicates, hub", "no edge"):
        data, results = GRAPHS[name], []
        for model in (compiled, eager):
            energy, force = model(data.x.double(), data.edge_index, torch.arange(len(data.x)) % 2)
            loss = energy.square().sum() + (force.sin() * torch.arange(4.0)).sum()
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            results.append([energy, force, *(g for g in found if g is not None)])
        assert len(results[0]) == len(results[1]) > 4
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{"double_backward": True}, {"inductor": False}])
def test_a_tensor_is_made_of_a_size(options: dict[str, bool]) -> None:
    """``torch.tensor`` of a size detaches a view in place, which code that runs op by op can't do."""

    def scaled(x: Tensor) -> Tensor:
        count = torch.tensor([x.size(0), 2])
        return x * count.prod()

    compiled = gnncompile.compile(scaled, options=options)
    for rows in (4, 6, 0, 1):
        x = torch.randn(rows, 3, requires_grad=True)
        torch.testing.assert_close(compiled(x), scaled(x))
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(scaled(x).sum(), x))


@pytest.mark.parametrize("settings", [{"mode": "reduce-overhead"}, {"options": {"record": True}}])
def test_refuses_recordings(settings: dict[str, Any]) -> None:
    options = {**settings.pop("options", {}), "double_backward": True}
    with pytest.raises(ValueError, match=r"double_backward.*recordings.*Leave out mode"):
        gnncompile.compile(Potential(GCNConv(4, 4)), options=options, **settings)
