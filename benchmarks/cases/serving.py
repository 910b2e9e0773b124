"""Requests to servers: models of two layers, on the guide's graph, on single small graphs, and on batches of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch_geometric.nn import MLP, GATConv, GCNConv, GINEConv, SAGEConv

from gnncompile import testing

Request = tuple[Tensor, ...]

CHANNELS, EDGE_CHANNELS = 64, 8


class TwoLayers(nn.Module):
    """Two layers of message passing, with a ReLU between them."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor, *rest: Tensor) -> Tensor:
        """Returns features of nodes, `[num_nodes, channels]`; `rest` may be `edge_attr [num_edges, channels]`."""
        hidden = self.first(x, edge_index, *rest).relu()
        return self.second(hidden, edge_index, *rest)  # type: ignore[no-any-return]


def _gine() -> nn.Module:
    layer: nn.Module = GINEConv(MLP([CHANNELS, CHANNELS]), edge_dim=EDGE_CHANNELS)
    return layer


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "GCN": (partial(GCNConv, CHANNELS, CHANNELS), False),
    "GraphSAGE": (partial(SAGEConv, CHANNELS, CHANNELS), False),
    "GAT": (partial(GATConv, CHANNELS, CHANNELS // 8, heads=8), False),
    "GINE": (_gine, True),
}
"""For each model: makes a layer, and whether the layer takes features of edges."""


@dataclass(frozen=True)
class Workload:
    """The graphs of requests.

    Attributes:
        graphs: graphs in each request, joined to one.
        num_nodes: nodes of each graph.
        num_edges: edges of each graph.
    """

    name: str
    graphs: int
    num_nodes: int
    num_edges: int

    @property
    def text(self) -> str:
        """The size of a request, for people."""
        graphs = f"{self.graphs} graphs of " if self.graphs > 1 else ""
        return f"{graphs}{self.num_nodes:,} nodes, {self.num_edges:,} edges"


WORKLOADS = (
    Workload("guide", 1, 10_000, 200_000),
    Workload("single", 1, 30, 64),
    Workload("batch", 128, 30, 64),
)


@dataclass(frozen=True)
class ServingCase:
    """A model and the requests that it is asked."""

    model_name: str
    workload: Workload

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"{self.model_name}-{self.workload.name}"

    label = name

    def __str__(self) -> str:
        return f"{self.name}: 2 layers, {CHANNELS} channels, {self.workload.text}"

    def model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Returns the model in evaluation mode on a device; always with the same parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            make, _ = MODELS[self.model_name]
            return TwoLayers(make(), make()).eval().to(device)

    def requests(self, count: int, seed: int, device: torch.device | str = "cpu") -> list[Request]:
        """Returns requests with different graphs, whose sizes differ by up to a tenth, on a device."""
        made = [self._request(seed + k, 1 - k / count / 10) for k in range(count)]
        return [tuple(one.to(device) for one in request) for request in made]

    def _request(self, seed: int, part: float) -> Request:
        load, (_, with_edges) = self.workload, MODELS[self.model_name]
        nodes, edges = int(load.num_nodes * part), int(load.num_edges * part)
        graphs = [testing.uniform(nodes, edges, channels=CHANNELS, seed=seed + k) for k in range(load.graphs)]
        x = torch.cat([graph.x for graph in graphs])
        edge_index = torch.cat([graph.edge_index + k * nodes for k, graph in enumerate(graphs)], 1)
        extra = torch.randn(edge_index.size(1), EDGE_CHANNELS, generator=torch.Generator().manual_seed(seed))
        return (x, edge_index, extra) if with_edges else (x, edge_index)


def dynamic_shapes(request: Request) -> ShapesCollection:
    """Returns which sizes differ between requests, for ``torch.export``."""
    shapes = ShapesCollection()
    for tensor in request:
        shapes[tensor] = {int(tensor.dtype is torch.int64): Dim.DYNAMIC}
    return shapes


CASES: Sequence[ServingCase] = [ServingCase(name, load) for load, name in product(WORKLOADS, MODELS)]
