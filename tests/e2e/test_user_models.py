"""Models as users write them, with PyG's base class and without: one captured graph, eager's numbers on all sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import BatchNorm, GCNConv, GENConv, LayerNorm, MessagePassing
from torch_geometric.utils import degree, softmax, to_dense_batch

import gnncompile
from gnncompile.support.case import CHANNELS, EDGE_CHANNELS, Graph
from tests.harness import light
from tests.ladder import climb


@pytest.fixture(autouse=True, scope="module")
def _light() -> Iterator[None]:
    with light():
        yield


# -- MessagePassing -----------------------------------------------------------------------------------------------


class Gated(MessagePassing):
    """message, aggregate and update of its own."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.gate, self.value = nn.Linear(2 * CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        norm = degree(edge_index[1], x.size(0), x.dtype).clamp(min=1).pow(-0.5).view(-1, 1)
        return self.propagate(edge_index, x=x, norm=norm)

    def message(self, x_i: Tensor, x_j: Tensor, norm_i: Tensor, norm_j: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(torch.cat([x_i, x_j], -1)))
        return gate * self.value(x_j) * norm_i * norm_j

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: Any = None) -> Tensor:
        out = inputs.new_zeros(dim_size, inputs.size(1))
        return out.index_add(0, index, inputs)

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs.relu() + x


class Attention(MessagePassing):
    """edge_update, and two propagates."""

    def __init__(self) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.edge = nn.Linear(CHANNELS, 2 * 3, bias=False), nn.Linear(EDGE_CHANNELS, 2)
        self.att = nn.Parameter(torch.randn(1, 2, 3))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        rows = self.lin(x).view(-1, 2, 3)
        alpha = self.edge_updater(edge_index, score=(rows * self.att).sum(-1), edge_attr=edge_attr)
        out = self.propagate(edge_index, rows=rows, alpha=alpha)
        return self.propagate(edge_index, rows=out.tanh(), alpha=alpha).flatten(1)

    def edge_update(
        self, score_i: Tensor, score_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int | None
    ) -> Tensor:
        return softmax(nn.functional.leaky_relu(score_i + score_j + self.edge(edge_attr)), index, num_nodes=size_i)

    def message(self, rows_j: Tensor, alpha: Tensor) -> Tensor:
        return rows_j * alpha.unsqueeze(-1)


class Branching(MessagePassing):
    """Python control flow on shapes, and several aggregations."""

    def __init__(self) -> None:
        super().__init__(aggr=["mean", "max", "std"])
        self.lin = nn.Linear(3 * CHANNELS, CHANNELS)

    def forward(self, x: Any, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        pair = (x, x) if isinstance(x, Tensor) else x
        if pair[0].dim() == 1:
            pair = tuple(t.view(-1, 1) for t in pair)
        out = self.lin(self.propagate(edge_index, x=pair, edge_weight=edge_weight))
        return out + pair[1] if out.size(-1) == pair[1].size(-1) else out

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j if edge_weight is None else x_j * edge_weight.view(-1, 1)


class FromTargetToSource(MessagePassing):
    def __init__(self) -> None:
        super().__init__(aggr="max", flow="target_to_source")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, size=None) - x

    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return (x_j - x_i).relu()


# -- plain torch --------------------------------------------------------------------------------------------------


class EGNN(nn.Module):
    """E(n)-equivariant layers (https://arxiv.org/abs/2102.09844)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.ModuleDict(
            {
                "edge": nn.Sequential(nn.Linear(2 * CHANNELS + 1, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU()),
                "move": nn.Sequential(nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 1)),
                "node": nn.Sequential(nn.Linear(CHANNELS + 16, 16), nn.SiLU(), nn.Linear(16, CHANNELS)),
            }
        )
        self.layers = nn.ModuleList([layer])

    def forward(self, h: Tensor, pos: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        row, col = edge_index
        for layer in self.layers:
            apart = pos[row] - pos[col]
            distance = apart.pow(2).sum(-1, keepdim=True)
            message = layer["edge"](torch.cat([h[row], h[col], distance], -1))
            step = torch.zeros_like(pos).index_add_(0, row, apart * layer["move"](message))
            count = pos.new_zeros(pos.size(0)).index_add_(0, row, pos.new_ones(row.size(0)))
            pos = pos + step / count.clamp(min=1).unsqueeze(-1)
            summed = torch.zeros(h.size(0), 16, dtype=h.dtype).index_add_(0, row, message)
            h = h + layer["node"](torch.cat([h, summed], -1))
        return h, pos


class SchNet(nn.Module):
    """Continuous filters (https://arxiv.org/abs/1706.08566)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, CHANNELS)
        self.filter = nn.Sequential(nn.Linear(6, CHANNELS), nn.Softplus(), nn.Linear(CHANNELS, CHANNELS))
        self.lin, self.out = nn.Linear(CHANNELS, CHANNELS, bias=False), nn.Linear(CHANNELS, 1)
        self.register_buffer("centres", torch.linspace(0, 3, 6))

    def forward(self, z: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor, count: int) -> Tensor:
        source, target = edge_index[0], edge_index[1]
        distance = ((pos[source] - pos[target]).pow(2).sum(-1) + 1e-6).sqrt()
        smeared = torch.exp(-2.0 * (distance.view(-1, 1) - self.centres.view(1, -1)).pow(2))
        weight = self.filter(smeared) * (0.5 * (torch.cos(distance) + 1)).view(-1, 1)
        h = self.embedding(z)
        message = self.lin(h).index_select(0, source) * weight
        h = h + h.new_zeros(h.shape).scatter_add_(0, target.view(-1, 1).expand_as(message), message)
        return h.new_zeros(count, 1).index_add_(0, batch, self.out(h))


class GPS(nn.Module):
    """A local layer and attention within each graph (https://arxiv.org/abs/2205.12454)."""

    def __init__(self) -> None:
        super().__init__()
        self.local = Gated()
        self.qkv, self.norm = nn.Linear(CHANNELS, 3 * CHANNELS), LayerNorm(CHANNELS, mode="node")

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        dense, mask = to_dense_batch(x, batch)
        query, key, value = self.qkv(dense).chunk(3, -1)
        score = query @ key.transpose(1, 2) / CHANNELS**0.5
        alpha = score.masked_fill(~mask.unsqueeze(1), -1e9).softmax(-1)
        place = torch.arange(x.size(0)) - torch.searchsorted(batch, batch)
        return self.norm(self.local(x, edge_index) + (alpha @ value)[batch, place])


class DeepGCN(nn.Module):
    """Residual layers before their norm (https://arxiv.org/abs/2006.07739)."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GENConv(CHANNELS, CHANNELS, learn_t=True, norm="layer") for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(CHANNELS) for _ in range(3)])
        self.encode = nn.Linear(EDGE_CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        edge_attr = self.encode(edge_attr)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x).relu(), edge_index, edge_attr)
        return x


class MaxPooling(nn.Module):
    """scatter_reduce and masks, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index.unbind(0)
        rows = self.lin(x)[row].relu()
        index = col.unsqueeze(-1).expand(-1, rows.size(-1))
        highest = x.new_zeros(x.shape).scatter_reduce(0, index, rows, "amax", include_self=False)
        mean = x.new_zeros(x.shape).scatter_reduce_(0, index, rows, reduce="mean", include_self=False)
        return torch.where(highest > 0.1, highest, mean)


def _three(g: Graph) -> Any:
    return g.x, g.edge_index, g.edge_attr


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Graph], Any]]] = {
    "message, aggregate, update": (Gated, lambda g: (g.x, g.edge_index)),
    "edge_update, two propagates": (Attention, _three),
    "branches, several aggregations": (Branching, lambda g: (g.x, g.edge_index, g.edge_weight)),
    "branches, two kinds of nodes": (Branching, lambda g: ((g.x, g.x0), g.edge_index)),
    "from target to source": (FromTargetToSource, lambda g: (g.x, g.edge_index)),
    "EGNN": (EGNN, lambda g: (g.x, g.pos, g.edge_index)),
    "SchNet": (SchNet, lambda g: (g.z, g.pos, g.edge_index, g.batch, 3)),
    "GraphGPS": (GPS, lambda g: (g.x, g.batch_edge_index, g.batch)),
    "DeepGCN": (DeepGCN, _three),
    "scatter_reduce": (MaxPooling, lambda g: (g.x, g.edge_index)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str):
    make, arguments = MODELS[name]
    climb(make, arguments)


class Unread(nn.Module):
    """Normalisations of which nothing reads more than the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(CHANNELS, CHANNELS)
        self.norm, self.other = nn.BatchNorm1d(CHANNELS), BatchNorm(CHANNELS)
        self.instance = nn.InstanceNorm1d(CHANNELS, track_running_stats=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Tensor = self.conv(x, edge_index)
        self.norm(h), self.other(h), self.instance(h.t().unsqueeze(0))
        return h.relu()


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_that_nothing_reads(training: bool):
    torch.manual_seed(0)
    model = Unread().train(training)
    compiled = gnncompile.compile(copy.deepcopy(model))
    for number in (3, 5):
        x, edge_index = torch.randn(number, CHANNELS), torch.randint(number, (2, 9))
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index))
    torch.testing.assert_close(dict(compiled.state_dict()), dict(model.state_dict()))
    counted = {name: buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")}
    assert len(counted) == 3 and all(bool(mean.any()) == training for mean in counted.values())
