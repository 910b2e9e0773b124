"""What one mini-batch draws on a device, of a graph with one node type or with several: into memory of a fixed size
for :class:`gnncompile.sampling.ahead.SamplesAhead`, or into new memory. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnncompile.device import device_of
from gnncompile.sampling.bounded import BoundedNeighborhood, BoundedSampler, bounds, seed_tensor
from gnncompile.sampling.device import sample_neighbors
from gnncompile.sampling.device_csc import checked
from gnncompile.sampling.device_graph import DeviceGraph, HeteroDeviceGraph
from gnncompile.sampling.hetero_device import HeteroSampling
from gnncompile.sampling.hetero_launch import HeteroBuffers, NodeType, Sizes, hetero_bounds
from gnncompile.sampling.launch import NODES
from gnncompile.sampling.neighborhood import Neighborhood
from gnncompile.sampling.sampled import FoundEdges, FoundNodes, Sampled, Seeds


class Ids(NamedTuple):
    """The rows that a mini-batch reads of a node type or an edge type.

    Attributes:
        row: The rows, int64. Valid rows come first.
        end: The number of valid rows, int64 ``[1]``, on the device.
    """

    row: Tensor
    end: Tensor


class OneType:
    """Draws mini-batches of a graph with one node type into memory of a fixed size.

    Args:
        graph: The graph.
        batch_size: The largest number of seeds.
        has_times: Whether seeds have times.

    Attributes:
        size: The numbers that :meth:`pack` writes.
        state_size: The numbers that :meth:`state` returns.
        sizes: The most nodes of each node type, and the most edges of each edge type.
    """

    def __init__(self, graph: DeviceGraph, batch_size: int, has_times: bool) -> None:
        self._sampler = BoundedSampler(graph.colptr, graph.row, graph.fan_outs, batch_size, seed=0, **graph.how)
        self._graph, self._batch_size, self._has_times = graph, batch_size, has_times
        self._has_limits = has_times and graph.is_temporal
        self.size, self.state_size = 1 + 3 * batch_size, self._sampler.state.numel() + 1
        self.sizes = [self._sampler.max_nodes], [self._sampler.max_edges]
        self._found: BoundedNeighborhood | None = None
        self._last = torch.zeros(1, dtype=torch.int64, device=graph.colptr.device)

    @staticmethod
    def most_edges(graph: DeviceGraph, batch_size: int) -> int | None:
        """Returns the most edges of a mini-batch; None if there is no bound.

        Raises:
            ValueError: Times, weights and other settings exclude each other.
        """
        plain = checked(graph.colptr, graph.row, directed=True, **graph.how)
        return bounds(plain, batch_size, graph.fan_outs).edges if min(graph.fan_outs) >= 0 else None

    def pack(self, host: Tensor, seeds: Seeds) -> None:
        """Writes the seeds to ``host[1:]``, int64 ``[size]``, which :meth:`draw` gets on the device."""
        _pack(host[1:], self._batch_size, [seeds.node], [self._batch_size], seeds)

    def draw(self, given: Tensor) -> None:
        """Launches the kernels. The first number of `given` is the random seed."""
        size = self._batch_size
        self._sampler.seed.copy_(given[:1])
        self._found = self._sampler(given[1 : 1 + size], given[1 + 2 * size :] if self._has_limits else None)
        self._last = self._found.edge_index[1][(self._found.edge_ends[-1:] - 1).clamp_(min=0)]

    def state(self) -> tuple[Tensor, ...]:
        """Returns the numbers that :meth:`sampled` gets on the host."""
        return self._sampler.state, self._last

    def ids(self, are_nodes: bool, at: int) -> Ids:
        """Returns the rows that the mini-batch reads of the node type or the edge type at a position."""
        assert self._found is not None
        found, order = self._found, self._graph.order
        if are_nodes:
            return Ids(found.node, found.node_ends[-1:])
        return Ids(found.edge if order is None else order[found.edge], found.edge_ends[-1:])

    def sampled(self, state: list[int], given: Tensor, seeds: Seeds, more: dict[str, Any]) -> Sampled:
        """Returns the mini-batch. `more` are further fields of it.

        Raises:
            IndexError: A seed or a source is outside the graph.
            ValueError: Weights are no weights, or times are not sorted.
        """
        *numbers, last = state
        node_ends, edge_ends = self._sampler.read(numbers)
        assert self._found is not None
        found, hops = self._found, len(self._graph.fan_outs)
        row, col = found.edge_index
        first = NODES + 1
        return Sampled(
            (FoundNodes(found.node, found.batch, node_ends, [first + k for k in range(hops + 1)]),),
            (_edges(row, col, found.edge, edge_ends, [first + hops + 2 + k for k in range(hops)], node_ends, last),),
            self._sampler.state,
            *_inputs(given, 1, self._batch_size, seeds, self._has_times),
            **more,
        )


def drawn_now(graph: DeviceGraph, seeds: Seeds, random_seed: int) -> Sampled:
    """Draws a mini-batch of a graph with one node type into new memory. Waits for the device."""
    device = graph.colptr.device
    time = None if seeds.time is None else seeds.time.to(device, torch.int64)
    limit = time if graph.is_temporal else None
    found = sample_neighbors(
        graph.colptr, graph.row, seeds.node.to(device), graph.fan_outs, seed_time=limit, seed=random_seed, **graph.how
    )
    return _of_neighborhood(found, seeds, time)


def _of_neighborhood(found: Neighborhood, seeds: Seeds, time: Tensor | None) -> Sampled:
    assert found.edge is not None and found.num_sampled_edges is not None
    nodes, edges = list(accumulate(found.num_sampled_nodes)), list(accumulate(found.num_sampled_edges))
    device = found.node.device
    last = int(found.col[-1]) if found.col.numel() else -1
    return Sampled(
        (FoundNodes(found.node, found.batch, nodes, list(range(len(nodes)))),),
        (_edges(found.row, found.col, found.edge, edges, [len(nodes) + k for k in range(len(edges))], nodes, last),),
        torch.tensor([*nodes, *edges], device=device),
        None if seeds.input_id is None else seeds.input_id.to(device),
        time,
        **of_seeds(seeds, device),
        place=None,
    )


def _edges(
    row: Tensor, col: Tensor, edge: Tensor, ends: list[int], at: list[int], node_ends: list[int], last: int
) -> FoundEdges:
    # The node that was found last is a source.
    highest = node_ends[-1] if node_ends[-1] > node_ends[0] else None
    return FoundEdges(row, col, edge, ends, at, (highest, last + 1) if ends[-1] else (0, 0))


class SeveralTypes:
    """Draws mini-batches of a graph with several node types into memory of a fixed size; see :class:`OneType`.

    Args:
        graph: The graph.
        most: The largest number of seeds of each node type.
        has_times: Whether seeds have times.
    """

    def __init__(self, graph: HeteroDeviceGraph, most: dict[str, int], has_times: bool) -> None:
        self._graph, self._has_times = graph, has_times
        self._most = [most.get(name, 0) for name in graph.node_types]
        types = _types(graph, self._most)
        self._bounds = hetero_bounds(types, graph.relations, graph.disjoint)
        device = graph.device
        self._seed = torch.zeros(1, dtype=torch.int64, device=device)
        self._buffers = HeteroBuffers(types, graph.relations, graph.disjoint, self._bounds, self._seed)
        draws = [
            rows * graph.relations[at].fan_outs[hop]
            for hop, steps in enumerate(self._bounds.hops)
            for at, rows in steps
        ]
        self._buffers.slots.reserve(max([1, *draws]))
        self._total = sum(self._most)
        self.size = 1 + len(types) + 3 * self._total
        self.state_size = self._buffers.state.numel()
        self.sizes = (
            [found.node.numel() for found in self._buffers.nodes],
            [row.numel() for row, _, _ in self._buffers.edges],
        )

    @staticmethod
    def most_edges(graph: HeteroDeviceGraph, most: dict[str, int]) -> int | None:
        """See :meth:`OneType.most_edges`."""
        if any(min(one.fan_outs) < 0 for one in graph.relations):
            return None
        types = _types(graph, [most.get(name, 0) for name in graph.node_types])
        return sum(hetero_bounds(types, graph.relations, graph.disjoint).edges)

    def pack(self, host: Tensor, seeds: Seeds) -> None:
        """See :meth:`OneType.pack`."""
        nodes, firsts = _by_type(self._graph, seeds)
        types = len(self._most)
        host[1 : 1 + types] = torch.tensor(firsts)
        _pack(host[1 + types :], self._total, nodes, self._most, seeds)

    def draw(self, given: Tensor) -> None:
        """See :meth:`OneType.draw`."""
        types, buffers = len(self._most), self._buffers
        self._seed.copy_(given[:1])
        first = 1 + types
        limit = given[first + 2 * self._total :]
        seeds = given[first : first + self._total].split(self._most)
        buffers.start(list(seeds), [given[1 + at : 2 + at] for at in range(types)])
        for hop, steps in enumerate(self._bounds.hops):
            for at, rows in steps:
                fan_out, one = self._graph.relations[at].fan_outs[hop], buffers.hop_of(at)
                one.draw(fan_out, rows, limit)
                buffers.finish(at, one, rows * fan_out)
            buffers.end_hop()

    def state(self) -> tuple[Tensor, ...]:
        """See :meth:`OneType.state`."""
        return (self._buffers.state,)

    def ids(self, are_nodes: bool, at: int) -> Ids:
        """See :meth:`OneType.ids`."""
        buffers = self._buffers
        last = (buffers.node_at if are_nodes else buffers.edge_at)[at][-1]
        end = buffers.state[last : last + 1]
        if are_nodes:
            return Ids(buffers.nodes[at].node, end)
        edge, order = buffers.edges[at][2], self._graph.orders[at]
        # What follows the valid edges may be any number.
        return Ids(edge if order is None else order[edge.clamp(0, max(order.numel() - 1, 0))], end)

    def sampled(self, state: list[int], given: Tensor, seeds: Seeds, more: dict[str, Any]) -> Sampled:
        """See :meth:`OneType.sampled`."""
        sizes = self._buffers.read(state)
        inputs = _inputs(given, 1 + len(self._most), self._total, seeds, self._has_times)
        return _of_buffers(self._buffers, sizes, *inputs, more)


def types_drawn_now(graph: HeteroDeviceGraph, seeds: Seeds, random_seed: int) -> Sampled:
    """Draws a mini-batch of a graph with several node types into new memory. Waits for the device."""
    device = graph.device
    nodes, firsts = _by_type(graph, seeds)
    sampling = HeteroSampling(
        _types(graph, [given.numel() for given in nodes]),
        graph.relations,
        graph.disjoint,
        seed_tensor(random_seed, device),
    )
    limit = seeds.time if seeds.limit is None else seeds.limit
    moved = None if limit is None or not graph.is_temporal else limit.to(device, torch.int64)
    first_batch = torch.tensor(firsts, device=device)
    sizes = sampling.run(
        [given.to(device) for given in nodes], [first_batch[at : at + 1] for at in range(len(nodes))], moved
    )
    input_id = None if seeds.input_id is None else seeds.input_id.to(device)
    time = None if seeds.time is None else seeds.time.to(device, torch.int64)
    more = {**of_seeds(seeds, device), "place": None}
    return _of_buffers(sampling.buffers, sizes, input_id, time, more)


def _of_buffers(
    buffers: HeteroBuffers, sizes: Sizes, input_id: Tensor | None, time: Tensor | None, more: dict[str, Any]
) -> Sampled:
    nodes = tuple(
        FoundNodes(found.node, found.batch if buffers.disjoint else None, ends, at)
        for found, ends, at in zip(buffers.nodes, sizes.node_ends, buffers.node_at, strict=True)
    )
    edges = tuple(
        FoundEdges(*columns, ends, at, highest)
        for columns, ends, at, highest in zip(
            buffers.edges, sizes.edge_ends, buffers.edge_at, sizes.highest, strict=True
        )
    )
    return Sampled(nodes, edges, buffers.state, input_id, time, **more)


def _types(graph: HeteroDeviceGraph, most: Sequence[int]) -> list[NodeType]:
    return [
        NodeType(name, number, seeds)
        for name, number, seeds in zip(graph.node_types, graph.num_nodes, most, strict=True)
    ]


def _by_type(graph: HeteroDeviceGraph, seeds: Seeds) -> tuple[list[Tensor], list[int]]:
    """Returns the seeds of each node type, and the subgraph of the first of them."""
    assert seeds.types is not None
    numbers = [number for _, number in seeds.types]
    starts = accumulate(numbers, initial=0)
    parts = zip(seeds.types, seeds.node.split(numbers), starts, strict=False)
    given = {name: (nodes, start) for (name, _), nodes, start in parts}
    none = seeds.node.new_empty(0)
    found = [given.get(name, (none, 0)) for name in graph.node_types]
    return [nodes for nodes, _ in found], [start for _, start in found]


def _pack(host: Tensor, total: int, nodes: Sequence[Tensor], most: Sequence[int], seeds: Seeds) -> None:
    """Writes seeds, their positions in the input, and their times: `total` numbers each, the seeds by type."""
    start = 0
    for given, size in zip(nodes, most, strict=True):
        number = given.numel()
        host[start : start + number], host[start + number : start + size] = given, -1
        start += size
    number = seeds.node.numel()
    limit = seeds.time if seeds.limit is None else seeds.limit
    if seeds.input_id is not None:
        host[total : total + number] = seeds.input_id
    if limit is not None:
        host[2 * total : 2 * total + number] = limit


def _inputs(
    given: Tensor, first: int, total: int, seeds: Seeds, has_times: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the positions of seeds in the input, and their times, as :func:`_pack` has written them."""
    input_id, time = given[first + total : first + 2 * total], given[first + 2 * total :]
    return None if seeds.input_id is None else input_id, time if has_times else None


def of_seeds(seeds: Seeds, device: torch.device) -> dict[str, Any]:
    """Returns the fields of a mini-batch that its seeds tell. Labels are copied to the device without a wait."""
    labels = seeds.labels.items()
    pins = device_of(device).has_streams
    moved = {key: (value.pin_memory() if pins else value).to(device, non_blocking=True) for key, value in labels}
    return {"seeds": seeds.node.numel(), "labels": moved, "groups": seeds.groups}
