"""Samples neighbourhoods on a GPU. The host waits once for the sizes, and once more for each hop without a small
bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnncompile.exc import IndexOutOfRangeError
from gnncompile.sampling.bounded import bounds, limits, narrowed, seed_tensor
from gnncompile.sampling.device_csc import Graph, checked, complain, fan_outs_of, needs_hash
from gnncompile.sampling.launch import NODES, Buffers
from gnncompile.sampling.neighborhood import Neighborhood

SMALL = 2**22
"""The most edges of a hop for which memory is allocated by the bound. For more, the host reads the number of nodes."""


def sample_neighbors(
    colptr: Tensor,
    row: Tensor,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    *,
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    weight: Tensor | None = None,
    replace: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    directed: bool = True,
    seed: int,
) -> Neighborhood:
    """Samples the neighbourhood of seeds hop by hop (Hamilton et al., Inductive representation learning on large
    graphs, 2017), with the meaning of ``torch.ops.pyg.neighbor_sample``.

    The same `seed` gives the same subgraph. All tensors are on one GPU.

    Args:
        colptr: The first edge of each destination in CSC order, int32 or int64 ``[num_nodes + 1]``.
        row: The source of each edge, int32 or int64 ``[num_edges]``.
        seeds: The nodes to start from, int32 or int64 ``[num_seeds]``. A node may be given twice.
        num_neighbors: For each hop, the most neighbours of a node, at most 1024; a negative number takes all.
        node_time: The time of each node, int64 ``[num_nodes]``. Neighbours later than the seed are left out. The
            neighbours of a node are sorted by time.
        edge_time: The same by the time of each edge, int64 ``[num_edges]``. It needs `seed_time`.
        seed_time: The time of each seed, int64 ``[num_seeds]``; None takes `node_time` at the seeds.
        weight: The weight of each edge, float32 or float64 ``[num_edges]``. Neighbours are drawn in proportion to it:
            with replacement, or one after the other without (Efraimidis and Spirakis, Weighted random sampling with a
            reservoir, 2006). Edges of weight 0 are taken only where a node has too few others.
        replace: Whether a neighbour may be drawn several times.
        disjoint: Whether each seed gets a subgraph of its own. Times need this.
        temporal_strategy: With times, ``"uniform"`` draws from all earlier neighbours, ``"last"`` takes the latest.
        directed: Whether edges are those that were sampled; False is not supported on a GPU.
        seed: The seed of the random numbers.

    Raises:
        IndexError: A seed or a source is outside the graph.
        TypeError: A tensor has another dtype.
        ValueError: A size does not fit, weights are no weights, times are not sorted, or arguments exclude each other.
    """
    graph = checked(
        colptr, row, node_time=node_time, edge_time=edge_time, weight=weight, replace=replace, disjoint=disjoint,
        temporal_strategy=temporal_strategy, directed=directed,
    )  # fmt: skip
    fan_outs, number = fan_outs_of(num_neighbors), seeds.numel()
    if number and not graph.num_nodes:
        raise IndexOutOfRangeError(f"seeds: found {number} seeds of a graph without nodes, expected none.")
    limit = limits(graph, seeds, seed_time) if number else None
    sampling = _Sampling(graph, seeds.contiguous(), fan_outs, colptr.new_empty(0) if limit is None else limit, seed)
    return sampling.run()


class _Sampling:
    """One sampling. Its memory grows hop by hop, if bounds are not known or not small."""

    def __init__(self, graph: Graph, seeds: Tensor, fan_outs: tuple[int, ...], limit: Tensor, seed: int) -> None:
        self.graph, self.seeds, self.fan_outs, self.limit = graph, seeds, fan_outs, limit
        known = bounds(graph, seeds.numel(), self._small_hops())
        self.nodes, self.edges, self.rows = seeds.numel(), 0, seeds.numel()
        self.buffers = Buffers(
            graph,
            seeds.numel(),
            len(fan_outs),
            max(known.nodes, 1),
            max(known.edges, 1),
            seed_tensor(seed, seeds.device),
            needs_hash(graph),
        )

    def run(self) -> Neighborhood:
        """Samples all hops."""
        buffers, graph = self.buffers, self.graph
        if self.seeds.numel():
            buffers.start(self.seeds)
        for hop, fan_out in enumerate(self.fan_outs):
            if fan_out < 0:
                self._take_all(hop)
            else:
                self._draw(hop, fan_out)
        buffers.finish()
        state = buffers.state.tolist()
        complain(state[0], graph)
        node_ends, edge_ends = state[NODES + 1 : NODES + 2 + buffers.hops], state[NODES + 3 + buffers.hops :]
        batch = buffers.batch if graph.disjoint else None
        return narrowed(buffers.node, buffers.edge_index, buffers.edge, batch, node_ends, edge_ends)

    def _small_hops(self) -> tuple[int, ...]:
        """Returns the fan-outs of the first hops whose bounds are known and small."""
        found, rows = [], self.seeds.numel()
        for fan_out in self.fan_outs:
            if fan_out < 0 or rows * fan_out > SMALL:
                break
            found.append(fan_out)
            rows *= fan_out
        return tuple(found)

    def _draw(self, hop: int, fan_out: int) -> None:
        if self.rows * fan_out > SMALL:
            begin, end = self.buffers.state[NODES + hop : NODES + hop + 2].tolist()
            self.rows = end - begin
        self._grow(self.rows * fan_out, hop)
        self.buffers.draw(hop, fan_out, self.rows, self.limit)
        self.rows = self._found(self.rows * fan_out)

    def _take_all(self, hop: int) -> None:
        begin, size = self.buffers.ranges(hop, self.rows, self.limit)
        ends = size.cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        self._grow(total, hop)
        dest = torch.repeat_interleave(torch.arange(self.rows, device=size.device), size, output_size=total)
        edge = torch.arange(total, device=size.device) + (begin - ends + size)[dest]
        self.buffers.take(hop, edge, dest)
        self.rows = self._found(total)

    def _grow(self, edges: int, hop: int) -> None:
        """Makes room for so many edges of a hop."""
        self.nodes, self.edges = self.nodes + self._found(edges), self.edges + edges
        self.buffers.grow(self.nodes, self.edges, hop)

    def _found(self, edges: int) -> int:
        """Returns the most nodes that a hop of so many edges finds."""
        return min(edges, self.graph.num_nodes * (self.seeds.numel() if self.graph.disjoint else 1))
