"""Plain references for samplers of neighbourhoods: one node after the other, in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnncompile.sampling.neighborhood import EdgeType, Neighborhood

Choose = Callable[[list[int], int], list[int]]


def csc(edge_index: Tensor, num_nodes: int, by: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The graph in CSC order, with neighbours sorted by `by` if it is given; and the edge at each position."""
    order = torch.arange(edge_index.size(1)) if by is None else torch.argsort(by, stable=True)
    order = order[torch.argsort(edge_index[1][order], stable=True)]
    colptr = torch.zeros(num_nodes + 1, dtype=torch.long)
    colptr[1:] = torch.bincount(edge_index[1], minlength=num_nodes).cumsum(0)
    return colptr, edge_index[0][order].contiguous(), order


def all_of(edges: list[int], count: int) -> list[int]:
    """Chooses all edges. Where there are more than `count`, a reference does not know which ones are sampled."""
    assert count <= 0 or len(edges) <= count
    return edges if count else []


def last_of(edges: list[int], count: int) -> list[int]:
    """Chooses the last edges."""
    return edges if count < 0 else edges[len(edges) - min(count, len(edges)) :]


@dataclass
class Reference:
    """Samples as PyG's samplers do, with one dictionary per node type.

    Attributes:
        node: The sampled nodes of each type, as (batch, node).
        edges: The sampled edges of each type, as (local source, local destination, position).
    """

    colptr: Mapping[EdgeType, Tensor]
    row: Mapping[EdgeType, Tensor]
    fan_outs: Mapping[EdgeType, Sequence[int]]
    edge_types: Sequence[EdgeType]
    node_types: Sequence[str]
    choose: Choose = all_of
    disjoint: bool = False
    node_time: Mapping[str, Tensor] | None = None
    edge_time: Mapping[EdgeType, Tensor] | None = None
    seed_time: list[int] | None = None
    node: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    edges: dict[EdgeType, list[tuple[int, int, int]]] = field(default_factory=dict)
    nodes_per_hop: dict[str, list[int]] = field(default_factory=dict)
    edges_per_hop: dict[EdgeType, list[int]] = field(default_factory=dict)

    def run(self, seeds: Mapping[str, Tensor]) -> Reference:
        self.node = {name: [] for name in self.node_types}
        local: dict[str, dict[tuple[int, int], int]] = {name: {} for name in self.node_types}
        self.edges = {kind: [] for kind in self.edge_types}
        self.edges_per_hop = {kind: [] for kind in self.edge_types}
        batch = 0
        for name, nodes in seeds.items():
            for node in nodes.tolist():
                key = (batch if self.disjoint else 0, node)
                local[name].setdefault(key, len(self.node[name]))
                self.node[name].append(key)
                batch += 1
        frontier = {name: (0, len(self.node[name])) for name in self.node_types}
        self.nodes_per_hop = {name: [len(self.node[name])] for name in self.node_types}
        for hop in range(max((len(counts) for counts in self.fan_outs.values()), default=0)):
            for kind in self.edge_types:
                source, _, target = kind
                before = len(self.edges[kind])
                for at in range(*frontier[target]):
                    in_batch, node = self.node[target][at]
                    for edge in self.choose(self.allowed(kind, node, in_batch), self.fan_outs[kind][hop]):
                        key = (in_batch, int(self.row[kind][edge]))
                        if key not in local[source]:
                            local[source][key] = len(self.node[source])
                            self.node[source].append(key)
                        self.edges[kind].append((local[source][key], at, edge))
                self.edges_per_hop[kind].append(len(self.edges[kind]) - before)
            frontier = {name: (frontier[name][1], len(self.node[name])) for name in self.node_types}
            for name, (begin, end) in frontier.items():
                self.nodes_per_hop[name].append(end - begin)
        return self

    def allowed(self, kind: EdgeType, node: int, batch: int) -> list[int]:
        """The edges of a node that its seed's time allows."""
        edges = list(range(int(self.colptr[kind][node]), int(self.colptr[kind][node + 1])))
        if self.edge_time is not None and kind in self.edge_time:
            assert self.seed_time is not None
            return [edge for edge in edges if self.edge_time[kind][edge] <= self.seed_time[batch]]
        if self.node_time is not None and kind[0] in self.node_time:
            assert self.seed_time is not None
            times = self.node_time[kind[0]]
            return [edge for edge in edges if times[self.row[kind][edge]] <= self.seed_time[batch]]
        return edges


KIND = ("node", "to", "node")


def reference(colptr: Tensor, row: Tensor, seeds: Tensor, fan_outs: Sequence[int], **how: Any) -> Reference:
    """The reference of a graph with one node type."""
    node_time, edge_time = how.pop("node_time", None), how.pop("edge_time", None)
    return Reference(
        {KIND: colptr},
        {KIND: row},
        {KIND: fan_outs},
        [KIND],
        ["node"],
        node_time=None if node_time is None else {"node": node_time},
        edge_time=None if edge_time is None else {KIND: edge_time},
        **how,
    ).run({"node": seeds})


def same(found: Neighborhood, expected: Reference) -> None:
    """Compares everything that a sampler returns, order included."""
    batch, node = zip(*expected.node["node"], strict=True) if expected.node["node"] else ((), ())
    assert found.node.tolist() == list(node)
    assert found.batch is None or found.batch.tolist() == list(batch)
    assert (found.batch is not None) == expected.disjoint
    assert found.edge is not None
    edges = zip(found.row.tolist(), found.col.tolist(), found.edge.tolist(), strict=True)
    assert list(edges) == expected.edges[KIND]
    assert found.num_sampled_nodes == expected.nodes_per_hop["node"]
    assert found.num_sampled_edges == expected.edges_per_hop[KIND]
    assert all(value.dtype == torch.int64 for value in (found.node, found.row, found.col, found.edge))


def check(
    found: Neighborhood, colptr: Tensor, row: Tensor, seeds: Tensor, fan_outs: Sequence[int], replace: bool = False
) -> None:
    """Checks that a sample is one that PyG could have drawn: edges are there, fan-outs hold, hops follow each other."""
    assert found.edge is not None and found.num_sampled_edges is not None
    assert found.node[: len(seeds)].tolist() == seeds.tolist()
    assert torch.equal(row[found.edge].long(), found.node[found.row])
    target = torch.bucketize(found.edge, colptr.long(), right=True) - 1
    assert torch.equal(target, found.node[found.col])
    ends = torch.tensor(found.num_sampled_nodes).cumsum(0).tolist()
    assert ends[-1] == len(found.node) and len(found.num_sampled_edges) == len(fan_outs)
    keys = found.node if found.batch is None else found.batch * len(colptr) + found.node
    assert len(set(keys[len(seeds) :].tolist())) == len(keys) - len(seeds)
    start = at = 0
    for hop, (count, edges) in enumerate(zip(fan_outs, found.num_sampled_edges, strict=True)):
        col, row_ids = found.col[at : at + edges], found.row[at : at + edges]
        drawn = Counter(col.tolist())
        assert col.tolist() == sorted(col.tolist())
        for local in range(start, ends[hop]):
            node = int(found.node[local])
            degree = int(colptr[node + 1] - colptr[node])
            full = count if replace and degree else min(count, degree)
            assert drawn[local] == (degree if count < 0 else full)
        assert sum(drawn.values()) == edges
        new = [local for local in dict.fromkeys(row_ids.tolist()) if local >= ends[hop]]
        assert new == list(range(ends[hop], ends[hop + 1]))
        if not replace:
            assert len(set(zip(col.tolist(), found.edge[at : at + edges].tolist(), strict=True))) == edges
        start, at = ends[hop], at + edges
    assert at == len(found.row)
