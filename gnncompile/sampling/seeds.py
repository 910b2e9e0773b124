"""The seeds of mini-batches of PyG's loaders, without the neighbourhoods. PyG itself draws negative links."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch_geometric.sampler
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from gnncompile.exc import ArgumentError
from gnncompile.sampling.sampled import Seeds

FOUND = ("edge_index", "n_id", "e_id", "batch", "num_nodes")
"""Attributes of a mini-batch that follow from the neighbourhoods."""

REPLACED = ("batch", "input_id", "num_sampled_nodes", "num_sampled_edges")
"""Attributes that every loader sets or removes, whether the graph has them or not."""

LABELS = ("edge_label_index", "edge_label", "edge_label_time")
"""Attributes that a loader of links sets or removes."""

TRIPLETS = ("edge_label_index", "edge_label_time", "src_index", "dst_pos_index", "dst_neg_index", "seed_time")
"""Attributes that a loader of links with triplets sets or removes."""


class SeedsOf:
    """Makes the seeds of mini-batches.

    Args:
        source: A loader of nodes or of links.

    Attributes:
        are_nodes: Whether the seeds are the nodes of a loader of nodes.
        most: The most seeds of each node type of a mini-batch, by its name; of a graph with one node type by None. None
            if they have no bound.
        time: The times of the loader's input, or None.
        input_type: The node type or the edge type of the loader's input; None in a graph with one node type.
    """

    def __init__(self, source: NodeLoader | LinkLoader) -> None:
        self._source = source
        self.are_nodes = isinstance(source, NodeLoader)
        self.time: Tensor | None = source.input_data.time
        self.input_type: Any = source.input_data.input_type
        number: int | None = None
        if type(source.batch_sampler) is BatchSampler:  # others may yield mini-batches of any size
            number = source.batch_sampler.batch_size
            if type(source.sampler) in (SequentialSampler, RandomSampler):  # others may have no length
                number = min(number, max(len(source.sampler), 1))
        self.most: dict[str | None, int] | None = None if number is None else self._most(number)
        if self.are_nodes:
            return
        self._links = copy.copy(source)
        self._links.link_sampler = self._sampler = _OnlySeeds.like(source.link_sampler)
        self._links.transform = None
        if self.input_type is None:
            self._links.data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=0)
        else:
            self._links.data = HeteroData()

    def _most(self, number: int) -> dict[str | None, int]:
        """Returns the most seeds of each node type, given the most nodes or links of the input."""
        if self.are_nodes:
            return {self.input_type: number}
        negatives = self._source.neg_sampling
        more = 0 if negatives is None else math.ceil(number * negatives.amount)
        sources = number + more if negatives is None or negatives.is_binary() else number
        ends = (None, None) if self.input_type is None else (self.input_type[0], self.input_type[-1])
        found: dict[str | None, int] = {ends[0]: sources}
        found[ends[1]] = found.get(ends[1], 0) + number + more
        return found

    def every(self) -> dict[str | None, Tensor]:
        """Returns the nodes that seeds are drawn from, by their node type; of a graph with one node type by None.

        Negative links are drawn from all nodes and left out.
        """
        given = self._source.input_data
        if self.are_nodes:
            return {self.input_type: given.node}
        ends = (None, None) if self.input_type is None else (self.input_type[0], self.input_type[-1])
        found: dict[str | None, Tensor] = {ends[0]: given.row}
        found[ends[1]] = torch.cat([found[ends[1]], given.col]) if ends[1] in found else given.col
        return found

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
            if self.input_type is None:
                return Seeds(given.node, given.time, given.input_id, {}, None)
            limit = self._limit(self._source.node_sampler, {self.input_type: given.node}, given.time)
            number = given.node.numel()
            return Seeds(given.node, given.time, given.input_id, {}, None, ((self.input_type, number),), limit)
        sampler = copy.copy(self._sampler)  # iterators in several threads must not share what it finds
        out = sampler.sample_from_edges(given, neg_sampling=self._source.neg_sampling)
        made = self._links.filter_fn(out)
        labels = {
            (getattr(store, "_key", None), key): value
            for store in made.stores
            for key, value in store.items()
            if key not in FOUND and value is not None
        }
        node, time = sampler.found
        groups = len(index) if sampler.disjoint else None
        if not isinstance(node, dict):
            return Seeds(node, time, None, labels, groups)
        types = tuple((name, nodes.numel()) for name, nodes in node.items())
        joined = None if time is None else torch.cat([time[name] for name, _ in types])
        limit = self._limit(sampler, node, joined)
        return Seeds(torch.cat(list(node.values())), joined, None, labels, groups, types, limit)

    @staticmethod
    def _limit(sampler: Any, nodes: dict[str, Tensor], time: Tensor | None) -> Tensor | None:
        """Returns the times by which the neighbours of seeds are chosen, if they are not the times of the input."""
        if time is not None or not sampler.is_temporal:
            return None
        known = sampler.node_time or {}
        missing = [name for name in nodes if name not in known]
        if missing:
            raise ArgumentError(
                f"input_time: found None, expected the time of each seed, as nodes of type {missing[0]!r} have no "
                "times; give input_time, or edge_label_time for links."
            )
        return torch.cat([known[name][given] for name, given in nodes.items()])


class _OnlySeeds(torch_geometric.sampler.NeighborSampler):
    """A sampler that keeps the seeds, and finds nothing around them.

    Attributes:
        found: The seeds and their times; of a graph with several node types by node type.
    """

    found: tuple[Any, Any]

    @classmethod
    def like(cls, sampler: torch_geometric.sampler.NeighborSampler) -> _OnlySeeds:
        """Returns a sampler of the same graph with the same settings."""
        made = cls.__new__(cls)
        made.__dict__.update(sampler.__dict__)
        return made

    def _sample(self, seed: Any, seed_time: Any = None, **_: Any) -> SamplerOutput | HeteroSamplerOutput:
        self.found = seed, seed_time
        if isinstance(seed, dict):
            batches = {name: torch.arange(nodes.numel()) for name, nodes in seed.items()} if self.disjoint else None
            return HeteroSamplerOutput(node=dict(seed), row={}, col={}, edge={}, batch=batches)
        nothing = seed.new_empty(0)
        batch = torch.arange(seed.numel()) if self.disjoint else None
        return SamplerOutput(node=seed, row=nothing, col=nothing, edge=nothing, batch=batch)
