"""Graphs like those of node classification at scale, from which mini-batches are sampled for whole epochs."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE

from benchmarks.cases.graphs import power_law
from benchmarks.cases.minibatches import NeighbourSampler


@dataclass(frozen=True)
class SampledCase:
    """One graph and the model that is trained on it.

    Attributes:
        name: the name of the case.
        source: what the graph is like.
        num_nodes: the number of nodes.
        num_edges: the number of edges.
        max_degree: the most edges to a node.
        train: the number of nodes with labels, the seeds of an epoch.
        channels: the features per node.
        hidden: the width of the model.
        classes: the number of classes.
        fan_outs: for each hop, the most neighbours to sample per node; the model has as many layers.
        batch_size: the seeds of a mini-batch.
    """

    name: str
    source: str
    num_nodes: int
    num_edges: int
    max_degree: int
    train: int
    channels: int = 100
    hidden: int = 256
    classes: int = 47
    fan_outs: tuple[int, ...] = (15, 10, 5)
    batch_size: int = 1024

    @property
    def label(self) -> str:
        """A label that is unique among the cases."""
        return self.name

    def __str__(self) -> str:
        fan_outs = ", ".join(map(str, self.fan_outs))
        return (
            f"{self.name}: {self.source}, {self.num_nodes:,} nodes, {self.num_edges:,} edges, {self.train:,} seeds in "
            f"mini-batches of {self.batch_size:,}, {fan_outs} neighbours, GraphSAGE, {self.hidden} wide"
        )

    def model(self) -> nn.Module:
        """Returns the model on the CPU."""
        made: nn.Module = GraphSAGE(
            self.channels, self.hidden, num_layers=len(self.fan_outs), out_channels=self.classes
        )
        return made


@lru_cache(maxsize=1)
def graph(case: SampledCase) -> Data:
    """Returns the graph with features, labels and ``train_index``, all random, from fixed seeds."""
    generator = torch.Generator().manual_seed(1)
    data = Data(
        edge_index=power_law(case.num_nodes, case.num_edges, max_degree=case.max_degree),
        x=torch.randn(case.num_nodes, case.channels, generator=generator),
        y=torch.randint(case.classes, (case.num_nodes,), generator=generator),
    )
    data.train_index = torch.randperm(case.num_nodes, generator=generator)[: case.train]
    return data


@lru_cache(maxsize=1)
def numpy_sampler(case: SampledCase) -> NeighbourSampler:
    """Returns the sampler in NumPy."""
    data = graph(case)
    return NeighbourSampler(data.edge_index, case.num_nodes, case.fan_outs, data.y)


class _Gather:
    """Samples with NumPy and gathers the features, as PyG's loaders do.

    Args:
        case: the graph.
    """

    def __init__(self, case: SampledCase) -> None:
        self._sampler, self._x = numpy_sampler(case), graph(case).x

    def __call__(self, seeds: list[int]) -> Data:
        """Returns the mini-batch around the seeds."""
        data = self._sampler(seeds)
        data.x = self._x[data.n_id]
        return data


def sampled_by_numpy(case: SampledCase, workers: int) -> Iterable[Data]:
    """Returns a plain loader around the sampler in NumPy."""
    seeds: Any = graph(case).train_index.tolist()
    return torch.utils.data.DataLoader(seeds, case.batch_size, collate_fn=_Gather(case), num_workers=workers)


def neighbour_loader(case: SampledCase, workers: int) -> NeighborLoader:
    """Returns PyG's loader."""
    data = graph(case)
    plain = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    seeds: Tensor = data.train_index
    return NeighborLoader(
        plain, list(case.fan_outs), input_nodes=seeds, batch_size=case.batch_size, num_workers=workers
    )


CASES = (
    SampledCase("products-10th", "a tenth of ogbn-products in size", 244_903, 12_371_828, 1_748, 19_662, hidden=64),
    SampledCase(
        "small",
        "a power law",
        20_000,
        300_000,
        900,
        1_024,
        channels=16,
        hidden=16,
        fan_outs=(5, 5),
        batch_size=256,
    ),
)
