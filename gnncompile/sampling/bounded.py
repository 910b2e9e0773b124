"""Samples neighbourhoods on a GPU into memory of a fixed size, without a wait of the host, as CUDA graphs need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError
from gnncompile.sampling.arguments import vector
from gnncompile.sampling.device_csc import MOST_DRAWS, Graph, checked, complain, needs_hash
from gnncompile.sampling.launch import NODES, Buffers
from gnncompile.sampling.neighborhood import Neighborhood, steps

PADDED_NODES = 2
"""The least number of padded nodes. Padded edges join them in a ring without self loops."""


class Bounds(NamedTuple):
    """The largest sizes of a sampling with fixed fan-outs.

    Attributes:
        rows: The most destinations of each hop.
        nodes: The most nodes.
        edges: The most edges.
    """

    rows: tuple[int, ...]
    nodes: int
    edges: int


def bounds(graph: Graph, batch_size: int, fan_outs: Sequence[int]) -> Bounds:
    """Returns the largest sizes. A hop finds each node of the graph at most once in each subgraph."""
    most = graph.num_nodes * (batch_size if graph.disjoint else 1)
    found = list(accumulate(fan_outs, lambda rows, fan_out: min(rows * fan_out, most), initial=batch_size))
    edges = sum(rows * fan_out for rows, fan_out in zip(found, fan_outs, strict=False))
    return Bounds(tuple(found[:-1]), batch_size + min(sum(found[1:]), most), edges)


@dataclass(frozen=True, eq=False)
class BoundedNeighborhood:
    """A sampled subgraph in memory of a fixed size. The next call of its sampler overwrites it.

    The valid nodes and edges come first. They are those of a :class:`gnncompile.sampling.neighborhood.Neighborhood`.
    The other rows are padding, by the rules of padded mini-batches (:mod:`gnncompile.batches.prepare`):

    - Padded nodes repeat the first 1,024 nodes or fewer, so that features of padded nodes are features of the
      mini-batch. There are at least two padded nodes.
    - Padded edges join padded nodes in a ring, spread evenly (:class:`gnncompile.batches.padding_edges.Ring`). Their
      positions repeat those of the first edges; they are 0 if there is no edge.
    - For disjoint subgraphs, padded subgraphs share the padded nodes evenly. The index of a padded subgraph is at least
      the number of seeds, and at most `batch_size`.

    Attributes:
        node: The nodes of the graph, int64 ``[max_nodes]``.
        edge_index: The local sources and destinations, int64 ``[2, max_edges]``. Edges follow their destinations.
        edge: The positions of edges in CSC order, int64 ``[max_edges]``.
        batch: For disjoint subgraphs, the seed's position for each node, int64 ``[max_nodes]``; otherwise None.
        node_ends: The number of valid nodes up to the seeds and up to each hop, int64 ``[hops + 1]``, on the device.
        edge_ends: The number of valid edges up to each hop, int64 ``[hops]``, on the device.
    """

    node: Tensor
    edge_index: Tensor
    edge: Tensor
    batch: Tensor | None
    node_ends: Tensor
    edge_ends: Tensor

    def unpad(self) -> Neighborhood:
        """Returns the valid nodes and edges as views. Waits for the device."""
        node_ends, edge_ends = self.node_ends.tolist(), self.edge_ends.tolist()
        return narrowed(self.node, self.edge_index, self.edge, self.batch, node_ends, edge_ends)


def narrowed(
    node: Tensor, edge_index: Tensor, edge: Tensor, batch: Tensor | None, node_ends: list[int], edge_ends: list[int]
) -> Neighborhood:
    """Returns the valid nodes and edges as views. The ends are those of :class:`BoundedNeighborhood`."""
    nodes, edges = node_ends[-1], edge_ends[-1] if edge_ends else 0
    row, col = edge_index[:, :edges]
    return Neighborhood(
        node=node[:nodes],
        row=row,
        col=col,
        edge=edge[:edges],
        batch=None if batch is None else batch[:nodes],
        num_sampled_nodes=steps(node_ends),
        num_sampled_edges=steps(edge_ends),
    )


class BoundedSampler:
    """Samples neighbourhoods with fixed fan-outs on a GPU. Calls never wait for the device.

    A call can be captured in a CUDA graph. Each replay reads the captured `seeds` and `seed_time` anew. It draws anew,
    because each call adds 1 to :attr:`seed`. Call the sampler once before the capture: this compiles its kernels. The
    meaning is that of ``torch.ops.pyg.neighbor_sample``; see :func:`gnncompile.sampling.device.sample_neighbors`.

    Kernels report seeds and sources outside the graph, times out of order and weights that are no weights, and
    :meth:`check` raises the error. The results of such a call mean nothing; no memory outside a tensor is read.

    All calls write to the same memory, so make them on one stream.

    Example::

        from gnncompile.sampling.bounded import BoundedSampler
        from gnncompile.sampling.gather import gather

        graph = testing.uniform(10_000, 100_000).to("cuda")
        col, order = graph.edge_index[1].sort(stable=True)
        colptr = torch.searchsorted(col, torch.arange(10_001, device="cuda"))
        seeds = torch.arange(1024, device="cuda")
        sampler = BoundedSampler(colptr, graph.edge_index[0][order], [15, 10], batch_size=1024, seed=0)
        sampler(seeds)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            batch = sampler(seeds)
            x = gather(graph.x, batch.node)
        for epoch in range(3):
            seeds.copy_(torch.randperm(10_000, device="cuda")[:1024])
            recorded.replay()

    Args:
        colptr: The first edge of each destination in CSC order, int32 or int64 ``[num_nodes + 1]``.
        row: The source of each edge, int32 or int64 ``[num_edges]``.
        num_neighbors: For each hop, the most neighbours of a node, 0 to 1024.
        batch_size: The largest number of seeds, at least 1.
        node_time: The time of each node, int64 ``[num_nodes]``, or None.
        edge_time: The time of each edge, int64 ``[num_edges]``, or None. It needs a `seed_time` in each call.
        weight: The weight of each edge, float32 or float64 ``[num_edges]``, or None.
        replace: Whether a neighbour may be drawn several times.
        disjoint: Whether each seed gets a subgraph of its own. Times need this.
        temporal_strategy: With times, ``"uniform"`` draws from all earlier neighbours, ``"last"`` takes the latest.
        seed: The seed of the random numbers.

    Attributes:
        seed: The seed of the next call, int64 ``[1]``, on the device.
        max_nodes: The number of nodes, padding included.
        max_edges: The number of edges, padding included.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A size does not fit, a hop takes all neighbours, or arguments exclude each other.
    """

    def __init__(
        self,
        colptr: Tensor,
        row: Tensor,
        num_neighbors: Sequence[int],
        batch_size: int,
        *,
        node_time: Tensor | None = None,
        edge_time: Tensor | None = None,
        weight: Tensor | None = None,
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        seed: int,
    ) -> None:
        self.graph = checked(
            colptr, row, node_time=node_time, edge_time=edge_time, weight=weight, replace=replace, disjoint=disjoint,
            temporal_strategy=temporal_strategy, directed=True,
        )  # fmt: skip
        self.fan_outs, self.batch_size = tuple(int(number) for number in num_neighbors), batch_size
        if not all(0 <= fan_out <= MOST_DRAWS for fan_out in self.fan_outs):
            raise ArgumentError(
                f"num_neighbors: found {list(self.fan_outs)}, expected numbers from 0 to {MOST_DRAWS}, as a hop that "
                "takes all neighbours has no bound; lower them, or use gnncompile.sampling.device.sample_neighbors."
            )
        if batch_size < 1 or self.graph.num_nodes < 1:
            raise ArgumentError(
                f"batch_size: found {batch_size} seeds of a graph of {self.graph.num_nodes} nodes, expected at least 1."
            )
        device, self.bounds = colptr.device, bounds(self.graph, batch_size, self.fan_outs)
        self.max_nodes = self.bounds.nodes + PADDED_NODES
        self.seed = seed_tensor(seed, device)
        self._buffers = Buffers(
            self.graph,
            batch_size,
            len(self.fan_outs),
            self.max_nodes,
            self.bounds.edges,
            self.seed,
            needs_hash(self.graph),
        )
        self.max_edges = self._buffers.edge.numel()
        self._buffers.slots.reserve(max([1, *(r * f for r, f in zip(self.bounds.rows, self.fan_outs, strict=True))]))
        self._seeds = torch.empty(batch_size, dtype=torch.int64, device=device)
        self._times = torch.empty(batch_size, dtype=torch.int64, device=device)

    def __call__(self, seeds: Tensor, seed_time: Tensor | None = None) -> BoundedNeighborhood:
        """Samples the neighbourhood of seeds.

        Args:
            seeds: The nodes to start from, int32 or int64, ``[batch_size]`` or fewer. A node may be given twice. The
                last entries may be -1, which is no node.
            seed_time: The time of each seed, int64, as many as seeds; None takes `node_time` at the seeds.
        """
        limit = limits(self.graph, seeds, seed_time)
        if seeds.numel() > self.batch_size:
            raise ArgumentError(f"seeds: found {seeds.numel()} seeds, expected at most batch_size, {self.batch_size}.")
        if seeds.numel() < self.batch_size:
            number = seeds.numel()
            self._seeds[number:].fill_(-1)
            self._seeds[:number].copy_(seeds)
            seeds = self._seeds
            if limit is not None:
                self._times[number:].fill_(0)
                self._times[:number].copy_(limit)
                limit = self._times
        buffers = self._buffers
        buffers.start(seeds)
        for hop, (rows, fan_out) in enumerate(zip(self.bounds.rows, self.fan_outs, strict=True)):
            buffers.draw(hop, fan_out, rows, self._times if limit is None else limit)
        buffers.pad()
        batch = buffers.batch if self.graph.disjoint else None
        return BoundedNeighborhood(
            buffers.node, buffers.edge_index, buffers.edge, batch, buffers.node_ends, buffers.edge_ends
        )

    @property
    def state(self) -> Tensor:
        """What :meth:`read` understands: the problems and the sizes that calls have found, int64, on the device."""
        return self._buffers.state

    def read(self, state: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns `node_ends` and `edge_ends` of the call whose :attr:`state` was copied to the host.

        Args:
            state: The copy.

        Raises:
            IndexError: A seed or a source is outside the graph.
            ValueError: Weights are no weights, or times are not sorted.
        """
        if state[0]:
            self.check()
        hops = len(self.fan_outs)
        return list(state[NODES + 1 : NODES + 2 + hops]), list(state[NODES + 3 + hops :])

    def check(self) -> None:
        """Raises an error if a call since the last check has found a problem. Waits for the device.

        Raises:
            IndexError: A seed or a source is outside the graph.
            ValueError: Weights are no weights, or times are not sorted.
        """
        flags = int(self._buffers.state[0])
        self._buffers.state[0] = 0
        complain(flags, self.graph)


def seed_tensor(seed: int, device: torch.device) -> Tensor:
    """Returns the random seed on the device, int64 ``[1]``. Does not wait for the device."""
    return torch.full((1,), seed % 2**63, dtype=torch.int64, device=device)


def limits(graph: Graph, seeds: Tensor, seed_time: Tensor | None) -> Tensor | None:
    """Checks the seeds and their times; returns the time limit of each seed's subgraph, or None without times."""
    vector("seeds", seeds, (torch.int32, torch.int64), None, graph.colptr.device)
    if not graph.is_temporal:
        return None
    if seed_time is not None:
        return vector("seed_time", seed_time, (torch.int64,), seeds.numel(), graph.colptr.device)
    if graph.node_time is None:
        raise ArgumentError("seed_time: found None, expected the time of each seed, as edge_time is given.")
    return graph.node_time[seeds.clamp(0, graph.num_nodes - 1)]
