"""Loaders that yield mini-batches as other engines do: what they carry, what they lack, and where it lies.

Written after the public sources of torch_geometric.distributed (PyG 2.8), cugraph-pyg (2026), and dgl.graphbolt (2.5).
None of these is imported. The neighbours are sampled by gnncompile, so that each mini-batch can be compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader

from gnncompile import testing
from gnncompile.sampling.pyg import NeighborSampler

CLASSES, HOPS, SEEDS = 5, [4, 3], 30


def graph() -> Data:
    """Returns a graph with a hub, repeated edges, self loops, and nodes without edges."""
    data = testing.power_law(300, 1200, max_degree=60, channels=6, seed=2)
    loops = torch.arange(0, 40, 4).repeat(2, 1)
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :50], loops], 1)
    data.edge_attr = torch.arange(data.num_edges).float().view(-1, 1)
    data.x, data.y = data.x.double(), torch.arange(300) % CLASSES
    return data


def sampled(batch_size: int = SEEDS, seeds: int = 100) -> list[Data]:
    """Returns mini-batches of PyG's loader; a seed repeats them."""
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
        sampler = NeighborSampler(graph(), HOPS)
        nodes = torch.arange(0, 3 * seeds, 3)
        return list(NeighborLoader(graph(), HOPS, nodes, neighbor_sampler=sampler, batch_size=batch_size))


class Distributed(NodeLoader):
    """``torch_geometric.distributed.DistNeighborLoader``: a ``NodeLoader`` whose sampler hands its result to a channel.

    Worker processes return None, and the main process takes the result off the channel and builds the mini-batch. The
    graph is a pair of stores. Edges come partition by partition, so their destinations are not sorted.
    """

    def __init__(self, batch_size: int = SEEDS, num_workers: int = 0) -> None:
        self.found = sampled(batch_size)
        super().__init__(
            stores(),
            node_sampler=DistNeighborSampler(self.found),
            input_nodes=torch.arange(100),
            transform_sampler_output=self.channel_get,
            batch_size=batch_size,
            num_workers=num_workers,
        )

    def channel_get(self, out: Any) -> Any:
        return self.node_sampler.channel.pop(0)


def stores() -> Any:
    from torch_geometric.testing import MyFeatureStore, MyGraphStore

    features, edges = MyFeatureStore(), MyGraphStore()
    features.put_tensor(graph().x, group_name=None, attr_name="x", index=None)
    edges.put_edge_index(graph().edge_index, edge_type=None, layout="coo", size=(300, 300))
    return features, edges


class DistNeighborSampler:
    """A sampler of PyG's name, by which ``NodeLoader`` knows that features come in the metadata."""

    edge_permutation = None

    def __init__(self, found: list[Data]) -> None:
        self.found, self.at, self.channel = found, 0, list[Any]()

    def sample_from_nodes(self, index: Any) -> None:
        from torch_geometric.sampler import SamplerOutput

        batch = self.found[self.at % len(self.found)]
        self.at += 1
        order = torch.randperm(batch.num_edges, generator=torch.Generator().manual_seed(self.at))
        row, col = batch.edge_index[:, order]
        out = SamplerOutput(batch.n_id, row, col, batch.e_id[order], num_sampled_nodes=batch.num_sampled_nodes)
        out.metadata = (batch.input_id, None, batch.x, batch.y, batch.edge_attr[order])
        self.channel.append(out)


class CuGraph:
    """``cugraph_pyg.loader.NeighborLoader``: iterable, not a ``DataLoader``, and without a length.

    Args:
        device: Where mini-batches lie. cuGraph has them on the GPU.
        dtype: The type of the indices.
    """

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.int64) -> None:
        self.device, self.dtype = device, dtype
        self.found = sampled()

    def __iter__(self) -> Iterator[Data]:
        for batch in self.found:
            made = Data(edge_index=batch.edge_index.to(self.device, self.dtype))
            made.num_nodes = batch.num_nodes
            made.x, made.y = batch.x.to(self.device), batch.y.to(self.device)
            made.edge_attr = batch.edge_attr.to(self.device)
            made.n_id, made.e_id = batch.n_id.to(self.device), batch.e_id.to(self.device)
            made.batch = None
            made.num_sampled_nodes = torch.tensor(batch.num_sampled_nodes)
            made.num_sampled_edges = torch.tensor(batch.num_sampled_edges, device=self.device)
            made.input_id = batch.input_id.to(self.device)
            made.batch_size = made.input_id.size(0)
            made.seed_time = None
            yield made


@dataclass
class MiniBatch:
    """``dgl.graphbolt.MiniBatch``: ``to_pyg_data`` drops repeated edges, sorts by source, and has labels of seeds."""

    found: Data

    def to_pyg_data(self) -> Data:
        edge_index = torch.unique(self.found.edge_index, dim=1)
        seeds = self.found.batch_size
        return Data(self.found.x, edge_index, y=self.found.y[:seeds], batch_size=seeds, n_id=self.found.n_id)


class _Stages(IterableDataset[MiniBatch]):
    def __init__(self) -> None:
        self.found = sampled()

    def __iter__(self) -> Iterator[MiniBatch]:
        return map(MiniBatch, self.found)


def graphbolt(converted: bool) -> Any:
    """Returns ``dgl.graphbolt.DataLoader``: stages that yield ``MiniBatch``, converted by a last stage or not."""
    stages: Any = DataLoader(_Stages(), batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]
    return _Converted(stages) if converted else stages


def _as_it_is(item: Any) -> Any:
    return item


class _Converted:
    def __init__(self, stages: Any) -> None:
        self.stages = stages

    def __iter__(self) -> Iterator[Data]:
        return (item.to_pyg_data() for item in self.stages)


LOADERS: dict[str, Callable[[], Any]] = {
    "distributed": Distributed,
    "cugraph": CuGraph,
    "cugraph int32": lambda: CuGraph(dtype=torch.int32),
    "graphbolt": lambda: graphbolt(False),
    "graphbolt converted": lambda: graphbolt(True),
}
