"""Graphs like those of node classification at scale, from which mini-batches are sampled for whole epochs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE

from benchmarks.cases.graphs import power_law
from benchmarks.cases.minibatches import NeighbourSampler

TESTED = 8
"""Mini-batches of nodes without labels, by which the accuracy of a model is measured."""


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
        dtype: the dtype of the features. The model computes in float32.
        signal: how far the features of classes are apart, in units of the noise.
        accuracy: the share of other nodes that a trained model must classify right.
        share: the index of a process and the number of processes, if they share the seeds of an epoch.
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
    dtype: torch.dtype = torch.float32
    signal: float = 0.5
    accuracy: float = 0.8
    share: tuple[int, int] = (0, 1)

    @property
    def label(self) -> str:
        """A label that is unique among the cases."""
        return self.name

    def __str__(self) -> str:
        fan_outs = ", ".join(map(str, self.fan_outs))
        return (
            f"{self.name}: {self.source}, {self.num_nodes:,} nodes, {self.num_edges:,} edges, {self.train:,} seeds in "
            f"mini-batches of {self.batch_size:,}, {fan_outs} neighbours, {self.channels} features of {self.dtype}, "
            f"GraphSAGE, {self.hidden} wide"
        )

    def model(self) -> nn.Module:
        """Returns the model on the CPU."""
        return Classifier(self)


class Classifier(nn.Module):
    """GraphSAGE in float32, or in the dtype of its parameters, for features of any dtype."""

    def __init__(self, case: SampledCase) -> None:
        super().__init__()
        self.gnn = GraphSAGE(case.channels, case.hidden, num_layers=len(case.fan_outs), out_channels=case.classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Returns the scores of the classes, ``[num_nodes, classes]``."""
        out: Tensor = self.gnn(x.to(self.gnn.convs[0].lin_l.weight.dtype), edge_index)
        return out


def graph(case: SampledCase) -> Data:
    """Returns the graph of a case, the same object for all shares of its seeds: see :func:`_graph`."""
    return _graph(replace(case, share=(0, 1)))


@lru_cache(maxsize=1)
def _graph(case: SampledCase) -> Data:
    """Returns the graph with features, labels, ``train_index`` and ``test_index``, all random, from fixed seeds.

    The edges are sorted by destination, then by source. The features of a node are those of its class, with noise, so a
    model can learn the classes. The graph is made on a GPU if there is one, and returned on the CPU.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    row, col = power_law(case.num_nodes, case.num_edges, max_degree=case.max_degree, device=device)
    key, _ = (col * case.num_nodes + row).sort()
    del row, col
    y = torch.randint(case.classes, (case.num_nodes,), generator=generator, device=device)
    centres = torch.randn(case.classes, case.channels, generator=generator, device=device)
    x = torch.empty(case.num_nodes, case.channels, dtype=case.dtype)
    for rows, classes in zip(x.split(2**22), y.split(2**22), strict=True):
        noise = torch.randn(rows.shape, generator=generator, device=device)
        rows.copy_((noise + case.signal * centres[classes]).to(case.dtype))
    edge_index = torch.stack([key % case.num_nodes, key // case.num_nodes])
    order = torch.randperm(case.num_nodes, generator=generator, device=device)
    data = Data(edge_index=edge_index.cpu(), x=x, y=y.cpu())
    data.train_index, data.test_index = order[: case.train].cpu(), order[case.train :][: TESTED * case.batch_size].cpu()
    return data


@lru_cache(maxsize=1)
def known_edges(case: SampledCase) -> tuple[Tensor, Tensor]:
    """Returns the ascending keys of the edges, ``destination * num_nodes + source``, and the in-degrees."""
    row, col = graph(case).edge_index
    return col * case.num_nodes + row, torch.bincount(col, minlength=case.num_nodes)


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
    how: dict[str, Any] = dict(collate_fn=_Gather(case), num_workers=workers, sampler=_own_seeds(case, seeds))
    return torch.utils.data.DataLoader(seeds, case.batch_size, **how)


def _own_seeds(case: SampledCase, seeds: Any) -> DistributedSampler[Any] | None:
    """Returns what gives a process its share of the seeds, of the same size in all processes; None for all seeds."""
    process, processes = case.share
    return DistributedSampler(seeds, processes, process, shuffle=False) if processes > 1 else None


def neighbour_loader(case: SampledCase, workers: int, **more: Any) -> NeighborLoader:
    """Returns PyG's loader; `more` are further arguments."""
    data = graph(case)
    plain = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    seeds: Tensor = data.train_index
    how: dict[str, Any] = dict(input_nodes=seeds, batch_size=case.batch_size, num_workers=workers, is_sorted=True)
    if "input_nodes" not in more:
        how["sampler"] = _own_seeds(case, seeds)
    return NeighborLoader(plain, list(case.fan_outs), **{**how, **more})


CASES = (
    SampledCase("products-10th", "a tenth of ogbn-products in size", 244_903, 12_371_828, 1_748, 19_662, hidden=64),
    SampledCase("products", "the size of ogbn-products", 2_449_029, 123_718_280, 17_481, 196_615),
    SampledCase(
        "papers-quarter",
        "a quarter of ogbn-papers100M in size",
        28_000_000,
        400_000_000,
        60_000,
        300_000,
        channels=128,
        classes=172,
        dtype=torch.bfloat16,
    ),
    SampledCase(
        "small",
        "a power law",
        20_000,
        300_000,
        900,
        1_024,
        channels=16,
        hidden=16,
        classes=8,
        fan_outs=(5, 5),
        batch_size=256,
        signal=2.0,
        accuracy=0.5,
    ),
)
