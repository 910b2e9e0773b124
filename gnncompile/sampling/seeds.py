"""The seeds of mini-batches of PyG's loaders, without the neighbourhoods. PyG itself draws negative links."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
import torch_geometric.sampler
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import SamplerOutput

FOUND = ("edge_index", "n_id", "e_id", "batch", "num_nodes")
"""Attributes of a mini-batch that follow from the neighbourhoods."""

REPLACED = ("batch", "input_id", "num_sampled_nodes", "num_sampled_edges")
"""Attributes that every loader sets or removes, whether the graph has them or not."""

LABELS = ("edge_label_index", "edge_label", "edge_label_time")
"""Attributes that a loader of links sets or removes."""

TRIPLETS = ("edge_label_index", "edge_label_time", "src_index", "dst_pos_index", "dst_neg_index", "seed_time")
"""Attributes that a loader of links with triplets sets or removes."""


class Seeds(NamedTuple):
    """The seeds of a mini-batch, on the host.

    Attributes:
        node: The nodes to start from, int64 ``[num_seeds]``.
        time: The time of each seed, an integer, ``[num_seeds]``, or None.
        input_id: The position of each seed in the input of a loader of nodes, int64 ``[num_seeds]``. None for links.
        labels: What a loader of links says of a mini-batch: PyG's attributes, by name.
        groups: For disjoint subgraphs of links: seeds with the same remainder by this number share a subgraph's index.
    """

    node: Tensor
    time: Tensor | None
    input_id: Tensor | None
    labels: dict[str, Tensor]
    groups: int | None


class SeedsOf:
    """Makes the seeds of mini-batches.

    Args:
        source: A loader of nodes or of links, of a graph with one node type.

    Attributes:
        are_nodes: Whether the seeds are the nodes of a loader of nodes.
        most: The most seeds of a mini-batch; None if it has no bound.
        time: The times of the loader's input, or None.
    """

    def __init__(self, source: NodeLoader | LinkLoader) -> None:
        self._source = source
        self.are_nodes = isinstance(source, NodeLoader)
        self.time: Tensor | None = source.input_data.time
        self.most: int | None = None
        if type(source.batch_sampler) is BatchSampler:  # others may yield mini-batches of any size
            self.most = source.batch_sampler.batch_size
            if type(source.sampler) in (SequentialSampler, RandomSampler):  # others may have no length
                self.most = min(self.most, max(len(source.sampler), 1))
        if self.are_nodes:
            return
        negatives = source.neg_sampling
        if self.most is not None:
            more = 0 if negatives is None else math.ceil(self.most * negatives.amount)
            self.most = 2 * self.most + (2 * more if negatives is None or negatives.is_binary() else more)
        self._links = copy.copy(source)
        self._links.link_sampler = self._sampler = _OnlySeeds.like(source.link_sampler)
        self._links.data, self._links.transform = Data(edge_index=torch.empty(2, 0, dtype=torch.int64)), None
        self._links.data.num_nodes = 0

    @property
    def replaced(self) -> tuple[str, ...]:
        """The attributes of the graph that mini-batches do not have, unless the seeds bring them."""
        if self.are_nodes:
            return *REPLACED, "seed_time", "batch_size"
        negatives = self._source.neg_sampling
        return *REPLACED, *(LABELS if negatives is None or negatives.is_binary() else TRIPLETS)

    def __call__(self, index: list[int]) -> Seeds:
        """Returns the seeds of the mini-batch of these positions in the loader's input."""
        given = self._source.input_data[index]
        if self.are_nodes:
            return Seeds(given.node, given.time, given.input_id, {}, None)
        out = self._sampler.sample_from_edges(given, neg_sampling=self._source.neg_sampling)
        made = self._links.filter_fn(out)
        labels = {key: value for key, value in made.to_dict().items() if key not in FOUND and value is not None}
        node, time = self._sampler.found
        return Seeds(node, time, None, labels, len(index) if self._sampler.disjoint else None)


class _OnlySeeds(torch_geometric.sampler.NeighborSampler):
    """A sampler that keeps the seeds, and finds nothing around them.

    Attributes:
        found: The seeds and their times.
    """

    found: tuple[Tensor, Tensor | None]

    @classmethod
    def like(cls, sampler: torch_geometric.sampler.NeighborSampler) -> _OnlySeeds:
        """Returns a sampler of the same graph with the same settings."""
        made = cls.__new__(cls)
        made.__dict__.update(sampler.__dict__)
        return made

    def _sample(self, seed: Tensor, seed_time: Tensor | None = None, **_: Any) -> SamplerOutput:
        self.found = seed, seed_time
        nothing = seed.new_empty(0)
        batch = torch.arange(seed.numel()) if self.disjoint else None
        return SamplerOutput(node=seed, row=nothing, col=nothing, edge=nothing, batch=batch)
