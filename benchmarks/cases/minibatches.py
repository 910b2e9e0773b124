"""Streams of mini-batches whose sizes change: the models, the graphs, and the loaders."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN, GraphSAGE

from benchmarks.cases.graphs import power_law

Arguments = Callable[[Data], tuple[Any, ...]]


@dataclass(frozen=True)
class MiniBatchCase:
    """One stream.

    Attributes:
        name: the name of the case.
        description: a description for the table.
        model: makes the model on the CPU.
        loader: makes the loader, given the numbers of mini-batches and of worker processes.
        arguments: returns the model's arguments from a mini-batch.
        target: returns the loss's target from a mini-batch.
        loss: computes the loss from the model's result and the target.
        kept: the number of mini-batches that are kept on the device, to time steps without loading.
        cut_in_loop: whether the loop, not the model, cuts results to the seeds.
    """

    name: str
    description: str
    model: Callable[[], nn.Module]
    loader: Callable[[int, int], Any]
    arguments: Arguments
    target: Callable[[Data], Any]
    loss: Callable[[Tensor, Any], Tensor] = F.cross_entropy
    kept: int = 32
    cut_in_loop: bool = False

    @property
    def label(self) -> str:
        """A label that is unique among the cases."""
        return self.name

    def __str__(self) -> str:
        return f"{self.name}: {self.description}"


class GraphClassifier(nn.Module):
    """PyG's GIN with batch normalisation, a sum over the nodes of each graph, and a linear layer."""

    def __init__(self, in_channels: int, channels: int, num_layers: int, classes: int) -> None:
        super().__init__()
        self.gnn = GIN(in_channels, channels, num_layers=num_layers, norm="batch_norm")
        self.lin = nn.Linear(channels, classes)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """Returns the scores of classes for each graph, `[num_graphs, classes]`."""
        out: Tensor = self.lin(global_add_pool(self.gnn(x, edge_index), batch))
        return out


class NodeClassifier(nn.Module):
    """PyG's GraphSAGE; the features are rows of a table that stays on the device."""

    def __init__(self, features: Tensor, channels: int, num_layers: int, classes: int) -> None:
        super().__init__()
        self.features: Tensor
        self.register_buffer("features", features, persistent=False)
        self.gnn = GraphSAGE(features.size(1), channels, num_layers=num_layers, out_channels=classes)

    def forward(self, nodes: Tensor, edge_index: Tensor, seeds: int | None = None) -> Tensor:
        """Returns the scores of classes for each node, `[num_nodes, classes]`, or for the first `seeds` nodes."""
        out: Tensor = self.gnn(self.features[nodes], edge_index)
        return out if seeds is None else out[:seeds]


@lru_cache(maxsize=1)
def molecules(number: int = 16_384, seed: int = 0) -> list[Data]:
    """Returns random molecules.

    A molecule is a tree with a few rings. It has 10 to 38 atoms, normally distributed around 24, about two edges per
    atom (both directions counted), node features ``[num_nodes, 32]``, and a class.
    """
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        size = int(np.clip(rng.normal(24, 6), 10, 38))
        parent = np.array([rng.integers(max(0, k - 3), k) for k in range(1, size)])
        pairs = np.stack([np.arange(1, size), parent])
        rings = rng.integers(0, size, (2, max(1, size // 12)))
        pairs = np.concatenate([pairs, rings[:, rings[0] != rings[1]]], 1)
        edges = torch.from_numpy(np.concatenate([pairs, pairs[::-1]], 1)).long()
        x = torch.from_numpy(rng.standard_normal((size, 32), dtype=np.float32))
        made.append(Data(x=x, edge_index=edges, y=torch.tensor([int(rng.integers(8))])))
    return made


def _graphs(load: Callable[[], list[Data]], batch_size: int, batches: int, workers: int) -> DataLoader:
    graphs = load()
    generator = torch.Generator().manual_seed(0)
    # The last mini-batch is smaller, as usual in an epoch.
    number = batches * batch_size - batch_size // 3
    sampler = RandomSampler(graphs, replacement=True, num_samples=number, generator=generator)
    return DataLoader(graphs, batch_size=batch_size, sampler=sampler, num_workers=workers, pin_memory=True)


def digits() -> list[Data]:
    """Returns the demo's training graphs of handwritten digits."""
    from examples.digits.data import images_as_graphs

    return images_as_graphs()[0]


class NeighbourSampler:
    """Samples the neighbourhoods of seeds, hop by hop, as PyG's ``NeighborLoader`` does.

    ``NeighborLoader`` needs pyg-lib or torch-sparse, which not every machine has.

    Args:
        edge_index: the edges, ``[2, num_edges]``.
        num_nodes: the number of nodes.
        fan_out: for each hop, the most neighbours to sample per node.
        labels: the class of each node, ``[num_nodes]``.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, fan_out: tuple[int, ...], labels: Tensor) -> None:
        row, col = edge_index.numpy()
        order = np.argsort(col, kind="stable")
        self.neighbours = row[order].astype(np.int32)
        self.rowptr = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(np.bincount(col, minlength=num_nodes), out=self.rowptr[1:])
        self.fan_out, self.labels, self.num_nodes = fan_out, labels, num_nodes

    def __call__(self, seeds: list[int]) -> Data:
        """Samples the subgraph around the seeds, which are its first nodes."""
        rng = np.random.default_rng(seeds[0])
        frontier = np.unique(np.array(seeds))
        number = len(frontier)
        local = np.full(self.num_nodes, -1, np.int32)
        local[frontier] = np.arange(number)
        nodes, edges = [frontier], []
        for fan_out in self.fan_out:
            source, target = self._hop(frontier, fan_out, rng)
            new = self._distinct(source[local[source] < 0])
            local[new] = np.arange(number, number + len(new))
            number += len(new)
            edges.append(np.stack([local[source], local[target]]))
            nodes.append(new)
            frontier = new
        n_id = torch.from_numpy(np.concatenate(nodes)).long()
        edge_index = torch.from_numpy(np.concatenate(edges, 1)).long()
        data = Data(edge_index=edge_index, y=self.labels[n_id], n_id=n_id, num_nodes=number)
        data.batch_size = len(nodes[0])
        return data

    def _distinct(self, nodes: Any) -> Any:
        """Returns the sorted nodes without duplicates. It marks nodes instead of sorting them, as `np.unique` does,
        because sorting would take most of the sampler's time.
        """
        marks = np.zeros(self.num_nodes, np.bool_)
        marks[nodes] = True
        return np.flatnonzero(marks)

    def _hop(self, frontier: Any, fan_out: int, rng: np.random.Generator) -> tuple[Any, Any]:
        """Samples `fan_out` edges to each node, or takes all edges if there are no more; returns sources and
        destinations.
        """
        start, degree = self.rowptr[frontier], np.diff(self.rowptr)[frontier]
        few = degree <= fan_out
        times = np.where(few, degree, fan_out)
        target = np.repeat(frontier, times)
        first = np.repeat(np.cumsum(times) - times, times)
        nth = np.arange(len(target)) - first
        drawn = (rng.random(len(target)) * np.repeat(degree, times)).astype(np.int64)
        source = self.neighbours[np.repeat(start, times) + np.where(np.repeat(few, times), nth, drawn)]
        return source, target


SAMPLED_NODES, SAMPLED_FEATURES, SAMPLED_CLASSES = 1_000_000, 100, 47


@lru_cache(maxsize=1)
def _sampler() -> NeighbourSampler:
    edges = power_law(SAMPLED_NODES, 20_000_000, max_degree=10_000)
    labels = torch.randint(SAMPLED_CLASSES, (SAMPLED_NODES,), generator=torch.Generator().manual_seed(1))
    return NeighbourSampler(edges, SAMPLED_NODES, (15, 10, 5), labels)


def _sampled(batch_size: int, batches: int, workers: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    # Each epoch leaves out its last, smaller mini-batch, so that no mini-batch holds a seed twice.
    whole = SAMPLED_NODES // batch_size * batch_size
    epochs = -(-batches * batch_size // whole)
    seeds: Any = torch.cat([torch.randperm(SAMPLED_NODES, generator=generator)[:whole] for _ in range(epochs)])
    seeds = seeds[: batches * batch_size].tolist()
    return torch.utils.data.DataLoader(
        seeds, batch_size=batch_size, collate_fn=_sampler(), num_workers=workers, pin_memory=True
    )


def _node_classifier() -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(SAMPLED_NODES, SAMPLED_FEATURES, generator=generator)
    return NodeClassifier(features, 256, 3, SAMPLED_CLASSES)


def _loss_of_seeds(out: Tensor, target: tuple[Tensor, int]) -> Tensor:
    labels, seeds = target
    return F.cross_entropy(out[:seeds], labels[:seeds])


def _of_graph(data: Data) -> tuple[Any, ...]:
    return data.x, data.edge_index, data.batch


def _molecule_case(batch_size: int) -> MiniBatchCase:
    return MiniBatchCase(
        f"molecules-{batch_size}",
        f"{batch_size} molecule-like graphs of about 24 nodes and 52 edges, GIN of 5 layers and 64 channels",
        lambda: GraphClassifier(32, 64, 5, 8),
        partial(_graphs, molecules, batch_size),
        _of_graph,
        lambda data: data.y,
    )


def _sampled_case(name: str, note: str, arguments: Arguments, cut_in_loop: bool = False) -> MiniBatchCase:
    graph = f"1,024 nodes of {SAMPLED_NODES:,} (power law, 20M edges), 15, 10, 5 neighbours"
    return MiniBatchCase(
        name,
        f"{graph}, GraphSAGE, 3 layers, 256 wide{note}",
        _node_classifier,
        partial(_sampled, 1024),
        arguments,
        lambda data: (data.y, data.batch_size),
        _loss_of_seeds,
        kept=8,
        cut_in_loop=cut_in_loop,
    )


CASES = (
    _molecule_case(128),
    _molecule_case(1024),
    _sampled_case("sampled", "", lambda data: (data.n_id, data.edge_index), cut_in_loop=True),
    _sampled_case(
        "sampled-seeds",
        "; the model cuts its result to the seeds, not the loss",
        lambda data: (data.n_id, data.edge_index, data.batch_size),
    ),
    MiniBatchCase(
        "digits",
        "64 graphs of handwritten digits of the demo, GIN of 3 layers and 64 channels",
        lambda: GraphClassifier(3, 64, 3, 10),
        partial(_graphs, digits, 64),
        _of_graph,
        lambda data: data.y,
    ),
)


def take(loader: Any, number: int) -> Iterator[Data]:
    """Yields the first `number` mini-batches of a loader."""
    for _, data in zip(range(number), loader, strict=False):
        yield data
