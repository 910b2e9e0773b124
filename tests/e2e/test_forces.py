"""Gradients that a model takes in its forward, as models of energy and forces do: captured, fused, equal to eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, SAGEConv
from torch_geometric.nn.models import SchNet
from torch_geometric.utils import scatter

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.passes.log import RegionRecord
from gnncompile.testing import awkward
from tests.harness import light

GRAPHS = {name: data.edge_index for name, data in awkward(channels=3).items() if name != "bipartite"}
SIZES = {name: data.x.size(0) for name, data in awkward(channels=3).items() if name != "bipartite"}


@pytest.fixture(autouse=True)
def _light() -> Iterator[None]:
    torch.manual_seed(0)
    with light():
        yield


def arguments(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, edges without self loops (their length has no gradient), and two graphs."""
    rows, ends = SIZES[name], GRAPHS[name]
    return torch.randn(rows, 3).double(), ends[:, ends[0] != ends[1]], torch.arange(rows) * 2 // max(rows, 1)


def step(model: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Results, and the gradients of a loss on them."""
    model.zero_grad()
    results = model(*args)
    if model.training:
        sum((k + 1) * result.sin().sum() for k, result in enumerate(results)).backward()
    found = {f"result {k}": result for k, result in enumerate(results)}
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], msg=lambda text, name=name: f"{what}, {name}: {text}")
        assert value.requires_grad == other[name].requires_grad, (what, name)


def records(compiled: nn.Module) -> list[Any]:
    """What the passes did, of each captured graph."""
    program = callable_of(compiled)
    assert program is not None and not program.backend.notes, program
    return [captured.log for captured in program.backend.captured]


def check(
    model: nn.Module,
    prepare: Callable[[str], tuple[Any, ...]] = arguments,
    modes: Sequence[bool] = (True, False),
    graphs: Iterable[str] = GRAPHS,
) -> list[RegionRecord]:
    """Compares with eager on graphs, by one capture for each mode; returns the last one's regions."""
    eager, compiled = model.double(), gnncompile.compile(copy.deepcopy(model), fullgraph=True)
    for training in modes:
        for name in graphs:
            args = prepare(name)
            found = [step(one.train(training), args) for one in (compiled, eager)]
            compare(*found, what=f"{name}, training {training}")
        torch.testing.assert_close(compiled.state_dict(), eager.state_dict())
    found = records(compiled)
    assert len(found) == len(modes)
    return found[-1].regions


def forces_among(regions: Sequence[RegionRecord]) -> list[RegionRecord]:
    return [region for region in regions if "autograd.grad" in region.line]


class SchNetWithForces(SchNet):
    """SchNet over given edges; energies ``[num_graphs, 1]`` and forces ``[num_nodes, 3]``."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        h = self.embedding(torch.arange(pos.size(0), device=pos.device) % 9)
        distance = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
        features = self.distance_expansion(distance)
        for block in self.interactions:
            h = h + block(h, edge_index, distance, features)
        energy = self.readout(self.lin2(self.act(self.lin1(h))), batch, dim=0)
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy, -gradient


def test_schnet() -> None:
    regions = check(SchNetWithForces(8, 8, num_interactions=1, num_gaussians=5))
    assert len(regions) > len(forces_among(regions)) >= 3


class Triplets(nn.Module):
    """Messages between edges, weighted by distances and angles, as DimeNet has them (arXiv:2003.03123)."""

    def __init__(self) -> None:
        super().__init__()
        self.distance, self.angle, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 1)
        self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pos: Tensor, edge_index: Tensor, pairs: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        (j, i), (kj, ji) = edge_index, pairs
        vectors = pos[j] - pos[i]
        length = (vectors.square().sum(-1) + 1e-6).sqrt()
        cross = torch.linalg.cross(vectors[ji], vectors[kj]).square().sum(-1) + 1e-6
        angle = torch.atan2(cross.sqrt(), (vectors[ji] * vectors[kj]).sum(-1))
        orders = torch.arange(1, 5, dtype=pos.dtype, device=pos.device)
        rows = self.distance((orders * length.unsqueeze(-1)).sin() / length.unsqueeze(-1))
        basis = self.angle((orders * angle.unsqueeze(-1)).cos() * length[kj].unsqueeze(-1))
        mixed = scatter(self.down(rows).tanh()[kj] * basis, ji, 0, rows.size(0), "sum")
        x = scatter(rows + self.up(mixed).tanh() * rows, i, 0, pos.size(0), "sum")
        energy = scatter(self.out(x.tanh()), batch, 0, 2, "sum")
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy, -gradient


def _with_triplets(name: str) -> tuple[Tensor, ...]:
    pos, edge_index, batch = arguments(name)
    pairs = (edge_index[1].view(-1, 1) == edge_index[0]).nonzero().t().contiguous()
    return pos, edge_index, pairs, batch


def test_triplets() -> None:
    regions = check(Triplets(), _with_triplets, modes=[True])
    assert len(regions) > len(forces_among(regions)) >= 3


class Forces(nn.Module):
    """An energy of pairs, and what is asked of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 4), nn.SiLU(), nn.Linear(4, 1))

    def energy(self, vectors: Tensor, edge_index: Tensor, rows: int) -> Tensor:
        return scatter(self.pair(vectors.square().sum(-1, keepdim=True)), edge_index[1], 0, rows, "sum")


class EdgeVectors(Forces):
    """By vectors along the edges, as equivariant potentials take them."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        vectors = (pos[edge_index[0]] - pos[edge_index[1]]).requires_grad_(True)
        energy = self.energy(vectors, edge_index, pos.size(0))
        (gradient,) = torch.autograd.grad([energy.sum()], [vectors], retain_graph=True, create_graph=True)
        return energy, scatter(gradient, edge_index[1], 0, pos.size(0)) - scatter(
            gradient, edge_index[0], 0, pos.size(0)
        )


class Stress(Forces):
    """By positions and by a strain that is made in the forward; both on the way to what the energy reads."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, ...]:
        strain = pos.new_zeros(3, 3).requires_grad_()
        pos = pos.detach().requires_grad_()
        moved = pos + pos @ (strain + strain.t())
        energy = self.energy(moved[edge_index[0]] - moved[edge_index[1]], edge_index, pos.size(0))
        found = torch.autograd.grad(energy, [pos, strain, moved], torch.ones_like(energy), create_graph=True)
        return (energy, *found)


class Unused(Forces):
    """What the energy does not depend on has no gradient, or zeros."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, ...]:
        pos, other = pos.detach().requires_grad_(), pos.detach().requires_grad_()
        energy = self.energy(pos[edge_index[0]] - pos[edge_index[1]], edge_index, pos.size(0))
        options = {"retain_graph": True, "create_graph": True}
        one, none = torch.autograd.grad(energy.sum(), (pos, other), allow_unused=True, **options)
        assert none is None
        return energy, one, torch.autograd.grad(energy.sum(), (other,), materialize_grads=True, **options)[0].detach()


class Laplacian(Forces):
    """The gradient of a gradient, trained on."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        energy = self.energy(pos[edge_index[0]] - pos[edge_index[1]], edge_index, pos.size(0))
        (first,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), pos, create_graph=True)
        return first, second


class UsedBefore(Forces):
    """What read the positions before they were a leaf has no part in the gradient."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach()
        fixed = pos.sin()
        pos.requires_grad_()
        moved = pos * fixed
        energy = self.energy(moved[edge_index[0]] - moved[edge_index[1]], edge_index, pos.size(0))
        return energy, *torch.autograd.grad(energy.sum(), pos, create_graph=True)


class WithoutGradients(Forces):
    """Gradients are switched on for the forces alone."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            energy = self.energy(pos[edge_index[0]] - pos[edge_index[1]], edge_index, pos.size(0))
            (gradient,) = torch.autograd.grad(energy.sum(), pos)
        return energy.detach(), gradient


KINDS = {kind.__name__: kind for kind in (EdgeVectors, Stress, Unused, Laplacian, UsedBefore, WithoutGradients)}
FEW = ("no edge", "one node", "self loops", "unsorted, duplicates, hub")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked(kind: str) -> None:
    training = kind != "WithoutGradients"
    with torch.set_grad_enabled(training):
        regions = check(KINDS[kind](), modes=[training], graphs=FEW)
    assert regions and (forces_among(regions) or kind == "EdgeVectors")


class Potential(nn.Module):
    """Layers between positions and energy."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(layers), nn.Linear(4, 1)

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        x = pos = pos.detach().requires_grad_()
        for layer in self.layers:
            x = layer(x) if isinstance(layer, PER_NODE) else layer(x, edge_index)
        energy = self.out(x).tanh()
        (gradient,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy, -gradient


PER_NODE = (nn.BatchNorm1d, nn.LayerNorm, nn.Tanh, nn.GELU)

LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "attention": lambda: [GATConv(3, 2, heads=2), nn.Tanh(), SAGEConv(4, 4, aggr="min")],
    "norms": lambda: [SAGEConv(3, 4), nn.BatchNorm1d(4), nn.GELU(), SAGEConv(4, 4, aggr="max"), nn.LayerNorm(4)],
}


@pytest.mark.parametrize("layers", LAYERS)
def test_layers(layers: str) -> None:
    graphs = FEW if layers != "norms" else ("no edge", "self loops", "hub")  # a batch of one has no statistics
    regions = check(Potential(*LAYERS[layers]()), modes=[True], graphs=graphs)
    assert forces_among(regions)


class WithHistory(Forces):
    """The energy depends on features whose history, outside of the model, leads to the positions as well."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        vectors = (pos * features)[edge_index[0]] - pos[edge_index[1]]
        energy = self.energy(vectors, edge_index, pos.size(0))
        return energy, *torch.autograd.grad(energy.sum(), pos, create_graph=True)


class Broken(Forces):
    """The graph breaks between energy and gradient."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        energy = self.energy(pos[edge_index[0]] - pos[edge_index[1]], edge_index, pos.size(0))
        torch._dynamo.graph_break()
        return energy, *torch.autograd.grad(energy.sum(), pos, create_graph=True)


class Products(Forces):
    """A product over neighbours has a gradient that asks the data for sizes."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        found = scatter(self.pair(pos[edge_index[0]].sum(-1, keepdim=True)), edge_index[1], 0, pos.size(0), "mul")
        return found, *torch.autograd.grad(found.sum(), pos, create_graph=True)


class OfArgument(Forces):
    """The positions that were passed are made to require a gradient."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pos.requires_grad_()
        energy = self.energy(pos[edge_index[0]] - pos[edge_index[1]], edge_index, pos.size(0))
        return energy, *torch.autograd.grad(energy.sum(), pos, create_graph=True)


@pytest.mark.parametrize("kind", [WithHistory, Broken, Products, OfArgument])
def test_where_the_graph_breaks(kind: type[Forces]) -> None:
    """Right, in parts; the reason is noted."""
    eager = kind().double()
    compiled = gnncompile.compile(copy.deepcopy(eager))
    for name in ("no edge", "self loops", "unsorted, duplicates, hub"):
        args, found = arguments(name), []
        for model in (compiled, eager):
            given = [args[0].clone(), *args[1:]]
            if kind is WithHistory:
                given[0].requires_grad_()
                given.append(given[0].sin())
            found.append(step(model, tuple(given)))
            if kind is OfArgument:
                assert given[0].requires_grad and given[0].grad is not None
                found[-1]["of the argument"] = given[0].grad
        compare(*found, what=name)
    program = callable_of(compiled)
    assert program is not None
    notes = [note for note in program.backend.notes if note.what == "torch.autograd.grad in the model"]
    assert len(notes) == (kind is not OfArgument), program.backend.notes


class Dropped(Forces):
    """The gradient of an energy with dropout is that of the same mask."""

    def forward(self, pos: Tensor, edge_index: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pos = pos.detach().requires_grad_()
        kept = nn.functional.dropout(pos[edge_index[0]].square(), 0.5)
        total = scatter(kept, edge_index[1], 0, pos.size(0), "sum")
        return total.detach(), kept.detach(), *torch.autograd.grad(total.sum(), pos)


def test_dropout_has_one_mask() -> None:
    model = gnncompile.compile(Dropped().double(), fullgraph=True)
    _, edge_index, batch = arguments("hub")
    pos = torch.rand(SIZES["hub"], 3).double() + 1
    _, kept, gradient = model(pos, edge_index, batch)
    # The energy is a form of degree two: the gradient at a point leads back to it.
    torch.testing.assert_close((gradient * pos).sum(), 2 * kept.sum())
    assert 0 < (kept == 0).sum() < kept.numel()
    assert records(model)[0].regions
