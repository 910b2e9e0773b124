"""Models as research code writes them, with edge states, line graphs, attention and corruption: equal to eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import DeepGCNLayer, DeepGraphInfomax, GCNConv, GENConv, global_mean_pool
from torch_geometric.utils import scatter, to_dense_batch

import gnncompile
from gnncompile.capture.compile import callable_of
from gnncompile.testing import awkward
from tests.harness import light

WIDTH = 8
GRAPHS = {name: data for name, data in awkward(channels=WIDTH).items() if name != "bipartite"}
ROWS = ("no edge", "self loops", "unsorted, duplicates, hub", "hub")
"""Graphs of several nodes, as batch norm needs them in training."""


class GatedGCN(nn.Module):
    """A layer with a state for each edge, gates, batch norm and residuals (Bresson and Laurent, arXiv:1711.07553)."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm_x, self.norm_e = norm(WIDTH), norm(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        j, i = edge_index
        state = self.c(e) + self.d(x)[i] + self.e(x)[j]
        gate = state.sigmoid()
        rows = x.size(0)
        total, weight = scatter(gate * self.b(x)[j], i, 0, rows), scatter(gate, i, 0, rows)
        x = x + self.norm_x(self.a(x) + total / (weight + 1e-6)).relu()
        return x, e + self.norm_e(state).relu()


class GatedGCNs(nn.Module):
    """Two layers and a layer of both states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GatedGCN(), GatedGCN()])
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, e = layer(x, edge_index, e)
        return self.out(x), e


class ALIGNN(nn.Module):
    """Bonds are nodes of a second graph, whose edges are angles (Choudhary and DeCost, arXiv:2106.01829)."""

    def __init__(self) -> None:
        super().__init__()
        self.bonds, self.atoms, self.angle = GatedGCN(nn.LayerNorm), GatedGCN(nn.LayerNorm), nn.Linear(1, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, pairs: Tensor, batch: Tensor) -> Tensor:
        cosine = F.cosine_similarity(e[pairs[0]], e[pairs[1]], dim=-1).unsqueeze(-1)
        angles = self.angle(cosine).tanh()
        e, angles = self.bonds(e, pairs, angles)
        x, e = self.atoms(x, edge_index, e)
        return self.out(global_mean_pool(x, batch, 2))


class GraphGPS(nn.Module):
    """One layer: gates beside attention among all nodes of a graph (Rampasek et al., arXiv:2205.12454)."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.norm = GatedGCN(), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        local, e = self.local(x, edge_index, e)
        dense, mask = to_dense_batch(x, batch)
        rows = self.attention(dense, dense, dense, key_padding_mask=~mask, need_weights=False)[0][mask]
        x = self.norm(local + rows + x)
        return x + self.ffn(x), e


class DeeperGCN(nn.Module):
    """Residual layers with a softmax aggregation of learned temperature (Li et al., arXiv:2006.07739)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(2):
            conv = GENConv(WIDTH, WIDTH, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer")
            self.layers.append(DeepGCNLayer(conv, nn.LayerNorm(WIDTH), nn.ReLU(), block="res+"))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        e = self.encoder(e)
        x = self.layers[0].conv(x, edge_index, e)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, e)
        return self.layers[0].act(self.layers[0].norm(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = GCNConv(WIDTH, WIDTH), nn.PReLU(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.act(self.conv(x, edge_index))


def infomax() -> DeepGraphInfomax:
    """Nodes are told from those of a graph with shuffled features (Velickovic et al., arXiv:1809.10341)."""
    return DeepGraphInfomax(
        WIDTH,
        Encoder(),
        summary=lambda z, *_: z.mean(0).sigmoid(),
        corruption=lambda x, edge_index: (x[torch.randperm(x.size(0), device=x.device)], edge_index),
    )


def _edges(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = GRAPHS[name]
    states = torch.randn(data.edge_index.size(1), WIDTH, generator=torch.Generator().manual_seed(1))
    return data.x, data.edge_index, states, torch.arange(data.x.size(0)) * 2 // max(data.x.size(0), 1)


def _with_angles(name: str) -> tuple[Tensor, ...]:
    """Edges that end where others begin are joined."""
    x, edge_index, states, batch = _edges(name)
    pairs = (edge_index[1].view(-1, 1) == edge_index[0]).nonzero().t().contiguous()
    return x, edge_index, states, pairs, batch


Case = tuple[Callable[[], nn.Module], Callable[[str], tuple[Tensor, ...]], Iterable[str]]
CASES: dict[str, Case] = {
    "GatedGCN": (GatedGCNs, lambda name: _edges(name)[:3], ROWS),
    "ALIGNN": (ALIGNN, _with_angles, ("no edge", "one node", "one node, self loop", "duplicates", "self loops")),
    "GraphGPS": (GraphGPS, _edges, ROWS),
    "DeeperGCN": (DeeperGCN, lambda name: _edges(name)[:3], GRAPHS),
    "DeepGraphInfomax": (infomax, lambda name: _edges(name)[:2], GRAPHS),
}


def results(model: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """What a model returns; in training also the gradients of a loss on it, features first."""
    given = [a.to(dtype).requires_grad_() if a.is_floating_point() else a for a in args]
    torch.manual_seed(3)
    with torch.set_grad_enabled(model.training):
        found = model(*given)
    out = list(found) if isinstance(found, tuple) else [found]
    if not model.training:
        return out
    wanted = [*(a for a in given if a.is_floating_point()), *model.parameters()]
    gradients = torch.autograd.grad(sum(o.sin().sum() for o in out), wanted, allow_unused=True)
    return out + [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True)]


def compare(name: str, dtype: torch.dtype, modes: tuple[bool, ...], graphs: Iterable[str]) -> None:
    """Compares a compiled model with eager in float64, statistics of norms included."""
    make, prepare, _ = CASES[name]
    torch.manual_seed(0)
    eager: Any = make().double()
    compiled: Any = gnncompile.compile(copy.deepcopy(eager).to(dtype), fullgraph=True)
    for training in modes:
        for graph in graphs:
            args = prepare(graph)
            found = results(compiled.train(training), args, dtype)
            for k, (a, b) in enumerate(zip(found, results(eager.train(training), args, torch.float64), strict=True)):
                what = f"{graph}, training {training}, {k}"
                close = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
                torch.testing.assert_close(a.double(), b, **close, msg=lambda text, what=what: f"{what}: {text}")
    for key, value in compiled.state_dict().items():
        torch.testing.assert_close(value.double(), eager.state_dict()[key].double(), rtol=1e-4, atol=1e-5)
    program: Any = callable_of(compiled)
    assert len(program.backend.captured) == len(modes), "one capture for all graphs"
    assert all(captured.log.regions for captured in program.backend.captured)


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    with light():
        compare(name, torch.float64, (True, False), CASES[name][2])


def test_equals_float64_with_inductor() -> None:
    torch._dynamo.reset()
    compare("ALIGNN", torch.float32, (True,), ("no edge", "one node, self loop", "duplicates"))
