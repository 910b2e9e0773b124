"""PyG's ``NeighborSampler`` without pyg-lib: PyG builds inputs, negatives and results, and our sampler samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch_geometric.sampler
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.sampler.base import SubgraphType

from gnncompile.exc import ArgumentError, ArgumentTypeError
from gnncompile.sampling.cpu import prefer_huge_pages
from gnncompile.sampling.neighborhood import EdgeType
from gnncompile.sampling.neighbors import sample_neighbors, sample_neighbors_hetero

WEIGHTS = (torch.float32, torch.float64)
"""The dtypes of weights that the sampler reads; others are converted once."""


class NeighborSampler(torch_geometric.sampler.NeighborSampler):
    """:class:`torch_geometric.sampler.NeighborSampler` that samples with gnncompile instead of pyg-lib.

    :func:`gnncompile.loader` makes one from the sampler of a loader. Without pyg-lib, PyG refuses to make a sampler
    with weights or with times of edges. Then make this one, and hand it to the loader::

        sampler = NeighborSampler(data, num_neighbors=[10, 5], weight_attr="edge_weight")
        loader = gnncompile.loader(NeighborLoader(data, [10, 5], neighbor_sampler=sampler, batch_size=512))

    Each call draws its seed from torch's generator, so ``torch.manual_seed`` repeats a run. Seeds that are given twice
    stay two nodes, each with its own neighbours. Induced subgraphs respect weights.

    Args:
        data: The graph: ``Data``, ``HeteroData``, or a feature store and a graph store.
        num_neighbors: For each hop, the most neighbours of a node (-1: all); or such a list for each edge type.
        *args: The further arguments of PyG's class.
        **kwargs: The further arguments of PyG's class.

    Raises:
        TypeError: Times are not integers.
        ValueError: The neighbours of a node are not sorted by time.
    """

    def __init__(self, data: Any, num_neighbors: Any, *args: Any, **kwargs: Any) -> None:
        given = _Arguments(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
            try:
                super().__init__(data, num_neighbors, *args, **kwargs)
            except ImportError:
                # PyG refuses weights and times of edges. It does so after all that it reads off the graph.
                if not hasattr(self, "edge_weight"):
                    raise
                self.num_neighbors = num_neighbors
                self.replace, self.disjoint = given.replace, given.disjoint
                self.subgraph_type = SubgraphType(given.subgraph_type if given.directed else "induced")
                self.temporal_strategy = given.temporal_strategy
                self.keep_orig_edges = False
        self._prepare()

    @classmethod
    def like(cls, sampler: torch_geometric.sampler.NeighborSampler) -> NeighborSampler:
        """Returns a sampler of the same graph with the same settings."""
        made = cls.__new__(cls)
        made.__dict__.update(sampler.__dict__)
        made._prepare()
        return made

    def _prepare(self) -> None:
        """Does once what each call would have to do: converts the graph, times and weights, and checks the order."""
        self.colptr: Any
        self.row: Any
        self.colptr_dict: Any
        self.row_dict: Any
        self._node_time: Any
        self._edge_time: Any
        self._weight: Any
        if self.is_hetero:
            self._node_time = _each(self.node_time, lambda name, time: _time(time))
            self._edge_time = _each(self.edge_time, lambda name, time: _time(time))
            self._weight = _each(self.edge_weight, lambda name, weight: _weight(weight))
            for name, kind in self.to_edge_type.items():
                node_time, edge_time = (self._node_time or {}).get(kind[0]), (self._edge_time or {}).get(name)
                _check_sorted(self.colptr_dict[name], self.row_dict[name], node_time, edge_time)
            self.colptr_dict = {name: _narrow(colptr) for name, colptr in self.colptr_dict.items()}
            self.row_dict = {name: _narrow(row) for name, row in self.row_dict.items()}
            return
        self._node_time, self._edge_time = (
            None if time is None else _time(time) for time in (self.node_time, self.edge_time)
        )
        self._weight = None if self.edge_weight is None else _weight(self.edge_weight)
        _check_sorted(self.colptr, self.row, self._node_time, self._edge_time)
        self.colptr, self.row = _narrow(self.colptr), _narrow(self.row)

    def _sample(
        self,
        seed: Tensor | dict[str, Tensor],
        seed_time: Tensor | dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Samples around seeds; PyG's loaders call this method."""
        is_directed = self.subgraph_type != SubgraphType.induced
        if self.disjoint and not is_directed:
            raise ArgumentError(
                "subgraph_type: found 'induced' for disjoint subgraphs, expected 'directional' or 'bidirectional'; "
                "choose one of these, or disjoint=False without times."
            )
        how: dict[str, Any] = {
            "replace": self.replace,
            "disjoint": self.disjoint,
            "temporal_strategy": self.temporal_strategy,
            "directed": is_directed,
            "seed": int(torch.randint(2**63 - 1, ())),
        }
        if isinstance(seed, dict):
            return self._sample_types(seed, seed_time, how)
        found = sample_neighbors(
            self.colptr,
            self.row,
            seed,
            self.num_neighbors.get_mapped_values(),
            node_time=self._node_time,
            edge_time=self._edge_time,
            seed_time=_time(seed_time) if isinstance(seed_time, Tensor) and self.is_temporal else None,
            weight=self._weight,
            **how,
        )
        row, col = (found.col, found.row) if self._is_backward else (found.row, found.col)
        return SamplerOutput(
            node=found.node,
            row=row,
            col=col,
            edge=found.edge,
            batch=found.batch,
            num_sampled_nodes=found.num_sampled_nodes if is_directed else None,
            num_sampled_edges=found.num_sampled_edges,
        )

    @property
    def _is_backward(self) -> bool:
        return getattr(self, "sample_direction", "forward") == "backward"

    def _sample_types(self, seed: dict[str, Tensor], seed_time: Any, how: dict[str, Any]) -> HeteroSamplerOutput:
        fan_outs = self.num_neighbors.get_mapped_values(self.edge_types)
        found = sample_neighbors_hetero(
            self._by_type(self.colptr_dict),
            self._by_type(self.row_dict),
            seed,
            self._by_type(fan_outs),
            self.edge_types,
            self.node_types,
            node_time_dict=self._node_time,
            edge_time_dict=None if self._edge_time is None else self._by_type(self._edge_time),
            seed_time_dict=_each(seed_time, lambda name, time: _time(time)) if self.is_temporal else None,
            weight_dict=None if self._weight is None else self._by_type(self._weight),
            num_nodes_dict={name: number for name, number in self.num_nodes.items() if number is not None},
            **how,
        )
        edges: tuple[Any, ...] = (found.row, found.col, found.edge, found.num_sampled_edges)
        if self._is_backward:
            edges = tuple(self._forward(value) for value in (found.col, found.row, *edges[2:]))
        row, col, edge, per_hop = edges
        return HeteroSamplerOutput(
            node=found.node,
            row=row,
            col=col,
            edge=edge,
            batch=found.batch,
            num_sampled_nodes=found.num_sampled_nodes if per_hop is not None else None,
            num_sampled_edges=per_hop,
        )

    def _by_type(self, values: Mapping[str, Any]) -> dict[EdgeType, Any]:
        """Returns values by edge type. PyG's samplers name edge types by strings."""
        return {kind: values[name] for name, kind in self.to_edge_type.items() if name in values}

    def _forward(self, values: dict[EdgeType, Any] | None) -> dict[EdgeType, Any] | None:
        return None if values is None else {self.to_restored_edge_type[kind]: value for kind, value in values.items()}


class _Arguments:
    """The arguments of PyG's constructor that it stores last, in its order."""

    def __init__(
        self,
        subgraph_type: Any = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        **others: Any,
    ) -> None:
        self.subgraph_type, self.directed = subgraph_type, directed
        self.replace, self.disjoint, self.temporal_strategy = replace, disjoint, temporal_strategy


def replaced(sampler: Any) -> Any:
    """Returns a sampler that does the same with gnncompile; None if there is none."""
    if isinstance(sampler, NeighborSampler):
        return sampler
    if type(sampler) is torch_geometric.sampler.NeighborSampler:
        return NeighborSampler.like(sampler)
    both_ways = getattr(torch_geometric.sampler, "BidirectionalNeighborSampler", None)
    if both_ways is not None and type(sampler) is both_ways:
        made = copy.copy(sampler)
        made.forward_sampler, made.backward_sampler = (
            NeighborSampler.like(one) for one in (sampler.forward_sampler, sampler.backward_sampler)
        )
        return made
    return None


def _each(values: Mapping[Any, Tensor] | None, change: Any) -> dict[Any, Tensor] | None:
    return None if values is None else {name: change(name, value) for name, value in values.items()}


def _narrow(index: Tensor) -> Tensor:
    """Returns indices as int32 if all fit, in huge pages: random reads of them then miss the caches less often."""
    low, high = map(int, index.aminmax()) if index.numel() else (0, 0)
    # Entries that are no nodes stay as they are, for the error that names them.
    found = index.to(torch.int32) if low >= 0 and high <= torch.iinfo(torch.int32).max else index
    prefer_huge_pages(found)
    return found


def _time(time: Tensor) -> Tensor:
    if time.is_floating_point() or time.is_complex():
        raise ArgumentTypeError(
            f"time_attr: found times of {time.dtype}, expected integers; convert them, e.g. to seconds."
        )
    return time.to(torch.int64).contiguous()


def _weight(weight: Tensor) -> Tensor:
    return (weight if weight.dtype in WEIGHTS else weight.to(torch.float32)).contiguous()


def _check_sorted(colptr: Tensor, row: Tensor, node_time: Tensor | None, edge_time: Tensor | None) -> None:
    """Checks that the neighbours of each node are sorted by time, which a binary search relies on."""
    if node_time is None and edge_time is None:
        return
    times = edge_time if edge_time is not None else node_time[row] if node_time is not None else row
    is_earlier = times[1:] < times[:-1]
    # The first edge of a node may be earlier than the last edge of the node before.
    is_earlier[colptr[(colptr > 0) & (colptr < row.numel())] - 1] = False
    if bool(is_earlier.any()):
        position = int(is_earlier.nonzero()[0]) + 1
        raise ArgumentError(
            f"time_attr: found time {int(times[position - 1])} before {int(times[position])} among the neighbours of "
            "a node, expected ascending times; leave is_sorted at False, or sort edges by destination, then by time."
        )
