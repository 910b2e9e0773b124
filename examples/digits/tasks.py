"""The three tasks of the demo: which model, which batches, which loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GAT, GCN, GIN, GraphSAGE

import gnncompile

from . import data

CHANNELS = 64
LAYERS = 3


@dataclass(frozen=True)
class Batch:
    """Arguments of the model, the rows of its output that count (None for all), and their labels."""

    inputs: tuple[Tensor, ...]
    rows: Tensor | None
    labels: Tensor

    def logits(self, model: Callable[..., Tensor]) -> Tensor:
        """Returns the model's output for the rows that count, `[num_labels, 10]`."""
        out = model(*self.inputs)
        return out if self.rows is None else out[self.rows]

    def loss(self, model: Callable[..., Tensor]) -> Tensor:
        """Returns the mean cross entropy."""
        return F.cross_entropy(self.logits(model), self.labels)


@dataclass(frozen=True)
class Task:
    """What is trained: the model, and batches of an epoch, in the same order every time they are asked for."""

    name: str
    model_name: str
    make_model: Callable[[], nn.Module]
    train_batches: Callable[[int], Iterator[Batch]]
    test_batches: Callable[[], Iterator[Batch]]
    epochs: int
    learning_rate: float


class DigitClassifier(nn.Module):
    """PyG's GIN with batch normalisation, a sum over the nodes of each graph, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = GIN(3, CHANNELS, num_layers=LAYERS, norm="batch_norm")
        self.lin = nn.Linear(CHANNELS, data.NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.gnn(x, edge_index)
        return self.lin(global_add_pool(x, batch))


NODE_MODELS = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GIN": GIN, "GAT": GAT}


def node_tasks(device: torch.device, epochs: int, seed: int) -> list[Task]:
    """Returns node classification on the graph of images with each of PyG's four models, default options."""
    graph = data.images_as_nodes(seed=seed).to(device)

    def batches(index: Tensor) -> Iterator[Batch]:
        yield Batch((graph.x, graph.edge_index), index, graph.y[index])

    def make(model: type[nn.Module]) -> nn.Module:
        return model(graph.num_features, CHANNELS, num_layers=LAYERS, out_channels=data.NUM_CLASSES)

    return [
        Task(
            "nodes",
            name,
            lambda model=model: make(model),
            lambda epoch: batches(graph.train_index),
            lambda: batches(graph.test_index),
            epochs,
            learning_rate=0.003 if name == "GIN" else 0.03,
        )
        for name, model in NODE_MODELS.items()
    ]


def sampled_task(device: torch.device, epochs: int, seed: int, batch_size: int = 128) -> Task:
    """Returns node classification with GraphSAGE on sampled neighbourhoods of the graph of images."""
    graph = data.images_as_nodes(seed=seed)
    plain = Data(x=graph.x, y=graph.y, edge_index=graph.edge_index)

    def batches(nodes: Tensor, draw: int) -> Iterator[Batch]:
        torch.manual_seed(draw)  # all ways to train get the same neighbours
        source = NeighborLoader(plain, num_neighbors=[5] * LAYERS, input_nodes=nodes, batch_size=batch_size)
        for batch in gnncompile.loader(source, device=device):
            seeds = torch.arange(batch.batch_size, device=device)
            yield Batch((batch.x, batch.edge_index), seeds, batch.y[seeds])

    def train_batches(epoch: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        order = torch.randperm(len(graph.train_index), generator=generator)
        return batches(graph.train_index[order], seed * 1000 + epoch)

    return Task(
        "sampled",
        "GraphSAGE",
        lambda: GraphSAGE(graph.num_features, CHANNELS, num_layers=LAYERS, out_channels=data.NUM_CLASSES),
        train_batches,
        lambda: batches(graph.test_index, seed),
        epochs,
        learning_rate=0.01,
    )


def graph_task(device: torch.device, epochs: int, seed: int, batch_size: int = 64) -> Task:
    """Returns graph classification of the images in shuffled mini-batches, each of another size."""
    train, test = data.images_as_graphs(seed=seed)

    def batches(loader: DataLoader) -> Iterator[Batch]:
        for batch in loader:
            batch = batch.to(device)
            yield Batch((batch.x, batch.edge_index, batch.batch), None, batch.y)

    def train_batches(epoch: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        return batches(DataLoader(train, batch_size, shuffle=True, generator=generator))

    return Task(
        "graphs",
        "GIN",
        DigitClassifier,
        train_batches,
        lambda: batches(DataLoader(test, 4 * batch_size)),
        epochs,
        learning_rate=0.002,
    )
