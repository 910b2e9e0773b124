"""The memory of a sampling of a graph with several node types on a GPU, and the launches that fill it. Imports Triton.

In each hop and for each edge type, four kernels draw the edges to the nodes that the hop before has found, count them,
number new sources, and number the sources of edges. The sources of two edge types may be of one node type. The kernels
run one edge type after the other, so local ids follow the order of the edge types.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gnncompile.sampling import kernels
from gnncompile.sampling.device_csc import Graph, complain, complain_of_seeds
from gnncompile.sampling.launch import (
    EMPTY,
    NOBODY,
    Hop,
    Nodes,
    Slots,
    bits_of,
    check_sizes,
    grown,
    restore,
    rounded,
    start,
    table,
)

LARGEST_TABLE = 2**25
"""The most nodes of a type for which a table has an entry per node. Each sampling clears 128 MiB at most."""

_HEADER = 4
"""The entries of `state` before its numbers of nodes and edges. Each node type and each edge type has such a header."""

_STREAM = 0x9E3779B97F4A7C15 - 2**64
"""The difference between the random seeds of two edge types."""


class Relation(NamedTuple):
    """The edges of one edge type, and how many of them each hop draws.

    Attributes:
        source: The position of the sources' node type.
        target: The position of the destinations' node type.
        graph: The edges.
        fan_outs: For each hop, the most neighbours of a node. A negative number takes all.
    """

    source: int
    target: int
    graph: Graph
    fan_outs: tuple[int, ...]


class NodeType(NamedTuple):
    """A node type.

    Attributes:
        name: The name of the type.
        num_nodes: The number of its nodes, or an upper bound.
        seeds: The most seeds of this type.
    """

    name: str
    num_nodes: int
    seeds: int


class Sizes(NamedTuple):
    """The numbers that a sampling has found, on the host.

    Attributes:
        node_ends: For each node type, the nodes up to the seeds and up to each hop.
        edge_ends: For each edge type, the edges up to each hop.
        highest: For each edge type, one more than the last source and than the last destination. 0 without an edge.
    """

    node_ends: list[list[int]]
    edge_ends: list[list[int]]
    highest: list[tuple[int, int]]


class HeteroBounds(NamedTuple):
    """The largest sizes of the first hops of a sampling.

    Attributes:
        hops: For each hop, the edge types that are drawn, and the most destinations of each.
        nodes: For each node type, the most nodes.
        edges: For each edge type, the most edges.
    """

    hops: list[list[tuple[int, int]]]
    nodes: list[int]
    edges: list[int]


def hetero_bounds(
    types: Sequence[NodeType], relations: Sequence[Relation], disjoint: bool, most_draws: int | None = None
) -> HeteroBounds:
    """Returns the largest sizes of all hops, or of the first hops that draw at most `most_draws` edges of each type.

    Hops from the first on that takes all neighbours are left out.
    """
    hops = len(relations[0].fan_outs) if relations else 0
    subgraphs = sum(kind.seeds for kind in types) if disjoint else 1
    most = [kind.num_nodes * subgraphs for kind in types]
    rows, found, edges = [kind.seeds for kind in types], [0] * len(types), [0] * len(relations)
    drawn: list[list[tuple[int, int]]] = []
    for hop in range(hops):
        steps = [(at, one, one.fan_outs[hop]) for at, one in enumerate(relations) if rows[one.target]]
        least = min((fan_out for _, _, fan_out in steps), default=0)
        draws = max((rows[one.target] * fan_out for _, one, fan_out in steps), default=0)
        if least < 0 or (most_draws is not None and draws > most_draws):
            break
        new = [0] * len(types)
        drawn.append([(at, rows[one.target]) for at, one, fan_out in steps if fan_out])
        for at, one, fan_out in steps:
            edges[at] += rows[one.target] * fan_out
            new[one.source] += rows[one.target] * fan_out
        rows = [min(number, bound) for number, bound in zip(new, most, strict=True)]
        found = [number + more for number, more in zip(found, rows, strict=True)]
    nodes = [kind.seeds + min(number, bound) for kind, number, bound in zip(types, found, most, strict=True)]
    return HeteroBounds(drawn, nodes, edges)


class HeteroBuffers:
    """The memory of one sampling, and the launches that fill it.

    Args:
        types: The node types.
        relations: The edge types.
        disjoint: Whether each seed gets a subgraph of its own.
        bounds: The sizes to begin with.
        seed: The random seed, int64 ``[1]``.

    Attributes:
        state: See :mod:`gnncompile.sampling.kernels`. :meth:`read` understands it.
        nodes: The nodes that were found, for each node type.
        edges: The local sources, the local destinations and the positions of edges, for each edge type.
        node_at: For each node type, the entries of `state` with its numbers of nodes: up to the seeds, and to each hop.
        edge_at: For each edge type, the entries of `state` with its numbers of edges up to each hop.
    """

    def __init__(
        self,
        types: Sequence[NodeType],
        relations: Sequence[Relation],
        disjoint: bool,
        bounds: HeteroBounds,
        seed: Tensor,
    ) -> None:
        self.types, self.relations, self.disjoint, self.seed = types, relations, disjoint, seed
        device, hops = seed.device, len(relations[0].fan_outs) if relations else 0
        check_sizes(max(bounds.nodes, default=0), max(bounds.edges, default=0))
        self.nodes = [self._nodes(kind, size) for kind, size in zip(types, bounds.nodes, strict=True)]
        self.edges = [self._edges(torch.empty(3, rounded(max(size, 1)), dtype=torch.int64, device=device))
                      for size in bounds.edges]  # fmt: skip
        is_wide = any(one.graph.slot_dtype == torch.int64 for one in relations)
        self.slots = Slots(torch.int64 if is_wide else torch.int32, device)
        lengths = [2 + hops * sum(one.source == at for one in relations) for at in range(len(types))]
        lengths += [1 + hops] * len(relations)
        headers = _HEADER * len(lengths)
        *firsts, self._highest = accumulate(lengths, initial=headers)
        self._first_nodes, self._first_edges = firsts[: len(types)], firsts[len(types) :]
        values = [0] * (self._highest + 2 * len(relations))
        for at, kind in enumerate(types):
            values[_HEADER * at + kernels.NUM_NODES.value] = kind.num_nodes
        for at, one in enumerate(relations):
            header = self._header(at)
            values[header + kernels.NUM_NODES.value] = one.graph.num_sources
            values[header + kernels.NUM_EDGES.value] = one.graph.row.numel()
        self.state = torch.tensor(values, device=device)
        # Two entries for each edge type, since kernels are compiled for pointers to 16 bytes.
        self._streams = torch.arange(len(relations), device=device)[:, None].expand(-1, 2) * _STREAM
        self._seeds = torch.empty_like(self._streams)
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)
        self.begin()

    def _nodes(self, kind: NodeType, size: int) -> Nodes:
        device = self.seed.device
        node = torch.empty(max(size, 1), dtype=torch.int64, device=device)
        batch = torch.empty_like(node) if self.disjoint else node
        bits = bits_of(size) if self.disjoint or kind.num_nodes > LARGEST_TABLE else 0
        return Nodes(node, batch, *table(bits, kind.num_nodes if size else 1, device), bits)

    @staticmethod
    def _edges(memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        row, col, edge = memory
        return row, col, edge

    def _header(self, relation: int) -> int:
        return _HEADER * (len(self.types) + relation)

    def begin(self) -> None:
        """Forgets what was found."""
        self._node, self._edge = [at + 1 for at in self._first_nodes], list(self._first_edges)
        self._spans = [(at, at + 1) for at in self._first_nodes]
        self.node_at: list[list[int]] = [[at] for at in self._node]
        self.edge_at: list[list[int]] = [[] for _ in self.relations]

    def start(self, seeds: Sequence[Tensor | None], first_batch: Sequence[Tensor | None]) -> None:
        """Gives the seeds of each type their local ids; see :func:`gnncompile.sampling.launch.start`.

        Args:
            seeds: int32 or int64 for each node type, of which the last may be -1; None for a type without seeds.
            first_batch: The subgraph of the first seed of each type, int64 on the device. None is 0.
        """
        self.begin()
        self.state[self._highest :].zero_()
        torch.add(self._streams, self.seed, out=self._seeds)
        for at, (found, given) in enumerate(zip(self.nodes, seeds, strict=True)):
            found.first.fill_(EMPTY)
            found.keys.fill_(NOBODY)
            count = self.state[_HEADER * at :], self._node[at] - _HEADER * at
            first = first_batch[at]
            if given is not None and given.numel():
                start(found, given, given.numel(), count, self._zero if first is None else first, self.disjoint)
            else:
                self.state[self._node[at]].zero_()

    def hop_of(self, relation: int) -> Hop:
        """Returns the hop of an edge type, before it is drawn."""
        one, header = self.relations[relation], self._header(relation)
        begin, end = self._spans[one.target]
        addresses = (at - header for at in (begin, end, self._node[one.source], self._edge[relation]))
        return Hop(
            one.graph, self._seeds[relation], self.state[header:], self.nodes[one.target], self.nodes[one.source],
            self.edges[relation], self.slots, *addresses,
        )  # fmt: skip

    def finish(self, relation: int, hop: Hop, slots: int) -> None:
        """Numbers the sources of a hop of an edge type, after the hop was drawn into at most `slots` slots."""
        hop.number_sources(slots, self._highest + 2 * relation - self._header(relation))
        self._node[self.relations[relation].source] += 1
        self._edge[relation] += 1

    def end_hop(self) -> None:
        """Ends a hop of all edge types: the nodes that it has found draw their neighbours next."""
        self._spans = [(end, at) for (_, end), at in zip(self._spans, self._node, strict=True)]
        for entries, at in zip([*self.node_at, *self.edge_at], [*self._node, *self._edge], strict=True):
            entries.append(at)

    def span(self, kind: int) -> tuple[int, int]:
        """Returns the entries of `state` with the first and one more than the last node of a type that draws next."""
        return self._spans[kind]

    def grow(self, relation: int, nodes: int, edges: int) -> None:
        """Makes room for so many nodes and edges before an edge type is drawn, and keeps those that are there."""
        check_sizes(nodes, edges)
        at = self.relations[relation].source
        found, kind = self.nodes[at], self.types[at]
        row, col, edge = self.edges[relation]
        self.edges[relation] = grown(row, rounded(edges)), grown(col, rounded(edges)), grown(edge, rounded(edges))
        node = grown(found.node, nodes)
        batch = grown(found.batch, nodes) if self.disjoint else node
        made = found._replace(node=node, batch=batch)
        if made.hash_bits and bits_of(nodes) > made.hash_bits:
            first, keys = table(bits_of(nodes), kind.num_nodes, node.device)
            made = made._replace(first=first, keys=keys, hash_bits=bits_of(nodes))
            restore(made, found.node.numel(), (self.state, self._node[at]), self.disjoint)
        elif not made.hash_bits and made.first.numel() < kind.num_nodes:
            first, keys = table(0, kind.num_nodes, node.device)
            made = made._replace(first=first, keys=keys)
            restore(made, found.node.numel(), (self.state, self._node[at]), self.disjoint)
        self.nodes[at] = made

    def read(self, state: Sequence[int]) -> Sizes:
        """Returns the sizes in a copy of :attr:`state`.

        Raises:
            IndexError: A seed or a source is outside the graph.
            ValueError: Weights are no weights, or times are not sorted.
        """
        for at, kind in enumerate(self.types):
            if state[_HEADER * at]:
                self._clear()
                complain_of_seeds(f"seed_dict[{kind.name!r}]", kind.num_nodes)
        for at, one in enumerate(self.relations):
            if state[self._header(at)]:
                self._clear()
                complain(state[self._header(at)], one.graph)
        highest = [self._highest + 2 * at for at in range(len(self.relations))]
        return Sizes(
            [[state[at] for at in entries] for entries in self.node_at],
            [[state[at] for at in entries] for entries in self.edge_at],
            [(state[at], state[at + 1]) for at in highest],
        )

    def _clear(self) -> None:
        for at in range(len(self.types) + len(self.relations)):
            self.state[_HEADER * at] = 0
