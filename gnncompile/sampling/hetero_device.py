"""Samples neighbourhoods of a graph with several node types on a GPU. The host waits once for the sizes, and once more
for each hop of an edge type without a small bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnncompile.exc import ArgumentError, UnsupportedSampling
from gnncompile.sampling.arguments import (
    UNKNOWN,
    check_exclusive,
    check_hops,
    check_types,
    numbers_of_nodes,
    vector,
)
from gnncompile.sampling.bounded import seed_tensor
from gnncompile.sampling.device import SMALL
from gnncompile.sampling.device_csc import checked, fan_outs_of
from gnncompile.sampling.hetero_launch import (
    HeteroBuffers,
    NodeType,
    Relation,
    Sizes,
    hetero_bounds,
)
from gnncompile.sampling.neighborhood import EdgeType, HeteroNeighborhood, steps


def sample_neighbors_hetero(
    colptr_dict: Mapping[EdgeType, Tensor],
    row_dict: Mapping[EdgeType, Tensor],
    seed_dict: Mapping[str, Tensor],
    num_neighbors_dict: Mapping[EdgeType, Sequence[int]],
    edge_types: Sequence[EdgeType],
    node_types: Sequence[str],
    *,
    node_time_dict: Mapping[str, Tensor] | None = None,
    edge_time_dict: Mapping[EdgeType, Tensor] | None = None,
    seed_time_dict: Mapping[str, Tensor] | None = None,
    weight_dict: Mapping[EdgeType, Tensor] | None = None,
    num_nodes_dict: Mapping[str, int] | None = None,
    replace: bool = False,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    directed: bool = True,
    seed: int,
) -> HeteroNeighborhood:
    """Samples the neighbourhood of seeds in a graph with several node types, with the meaning of
    ``torch.ops.pyg.hetero_neighbor_sample``.

    The arguments are those of :func:`gnncompile.sampling.neighbors.sample_neighbors_hetero`. All tensors are on one
    GPU, fan-outs are at most 1024, and `directed` is True. Each hop of an edge type launches four kernels.

    Raises:
        IndexError: A seed or a source is outside the graph.
        TypeError: A tensor has another dtype.
        ValueError: A size does not fit, weights are no weights, times are not sorted, a type is unknown or missing, or
            arguments exclude each other.
    """
    check_exclusive(node_time_dict, edge_time_dict, weight_dict, disjoint, "_dict")
    needed = {"colptr_dict": colptr_dict, "row_dict": row_dict, "num_neighbors_dict": num_neighbors_dict}
    check_types(seed_dict, node_types, edge_types, needed)
    how = dict(replace=replace, disjoint=disjoint, temporal_strategy=temporal_strategy, directed=directed)
    times = dict(node_time=node_time_dict, edge_time=edge_time_dict, weight=weight_dict)
    number = numbers_of_nodes(node_types, edge_types, colptr_dict, num_nodes_dict or {})
    relations = relations_of(colptr_dict, row_dict, num_neighbors_dict, edge_types, node_types, number, times, how)
    device = next(iter(row_dict.values())).device
    for name, given in seed_dict.items():
        vector(f"seed_dict[{name!r}]", given, (torch.int32, torch.int64), None, device)
    types = [NodeType(name, number[name], seed_dict[name].numel() if name in seed_dict else 0) for name in node_types]
    is_temporal = node_time_dict is not None or edge_time_dict is not None
    limit = _limits(seed_dict, seed_time_dict, node_time_dict, number, device) if is_temporal else None
    firsts, total = {}, 0
    for name, given in seed_dict.items():
        firsts[name], total = torch.tensor([total], device=device), total + given.numel()
    sampling = HeteroSampling(types, relations, disjoint, seed_tensor(seed, device))
    found = sampling.run([seed_dict.get(name) for name in node_types], [firsts.get(name) for name in node_types], limit)
    return neighborhood(sampling.buffers, found, node_types, edge_types)


def relations_of(
    colptr_dict: Mapping[EdgeType, Tensor],
    row_dict: Mapping[EdgeType, Tensor],
    num_neighbors_dict: Mapping[EdgeType, Sequence[int]],
    edge_types: Sequence[EdgeType],
    node_types: Sequence[str],
    number: Mapping[str, int],
    times: Mapping[str, Mapping[Any, Tensor] | None],
    how: Mapping[str, Any],
) -> list[Relation]:
    """Returns the edge types with their checked graphs.

    `times` has the dictionaries for ``node_time``, ``edge_time`` and ``weight``; `how` the other settings of
    :func:`gnncompile.sampling.device_csc.checked`.
    """
    place = {name: at for at, name in enumerate(node_types)}
    found = []
    for kind in edge_types:
        source, _, target = kind
        graph = checked(
            colptr_dict[kind],
            row_dict[kind],
            node_time=(times["node_time"] or {}).get(source),
            edge_time=(times["edge_time"] or {}).get(kind),
            weight=(times["weight"] or {}).get(kind),
            name=f"{{}}_dict[{kind}]",
            num_sources=-1 if number[source] == UNKNOWN else number[source],
            **how,
        )
        if graph.num_nodes != number[target]:
            raise ArgumentError(
                f"colptr_dict[{kind}]: found {graph.num_nodes + 1} entries, expected {number[target] + 1}: one more "
                "than nodes of the destination's type."
            )
        found.append(Relation(place[source], place[target], graph, fan_outs_of(num_neighbors_dict[kind])))
    check_hops(one.fan_outs for one in found)
    if not found:
        raise UnsupportedSampling("a graph without an edge type is sampled on the CPU only")
    return found


def _limits(
    seeds: Mapping[str, Tensor],
    seed_time: Mapping[str, Tensor] | None,
    node_time: Mapping[str, Tensor] | None,
    number: Mapping[str, int],
    device: torch.device,
) -> Tensor:
    """Returns the time limit of each subgraph, in the order of the seeds."""
    found = [torch.empty(0, dtype=torch.int64, device=device)]
    for name, nodes in seeds.items():
        given = (seed_time or {}).get(name)
        if given is None and seed_time is None and node_time is not None and name in node_time:
            given = node_time[name][nodes.clamp(0, max(number[name] - 1, 0))] if number[name] else None
        if given is None:
            raise ArgumentError(f"seed_time_dict: found no times of {name!r}, expected the time of each of its seeds.")
        found.append(vector(f"seed_time_dict[{name!r}]", given, (torch.int64,), nodes.numel(), device))
    return torch.cat(found)


def neighborhood(
    buffers: HeteroBuffers, sizes: Sizes, node_types: Sequence[str], edge_types: Sequence[EdgeType]
) -> HeteroNeighborhood:
    """Returns the valid nodes and edges as views."""
    nodes = {name: (buffers.nodes[at], sizes.node_ends[at]) for at, name in enumerate(node_types)}
    edges = {kind: (buffers.edges[at], sizes.edge_ends[at]) for at, kind in enumerate(edge_types)}
    columns = [
        {kind: held[part][: ends[-1] if ends else 0] for kind, (held, ends) in edges.items()} for part in range(3)
    ]
    return HeteroNeighborhood(
        node={name: found.node[: ends[-1]] for name, (found, ends) in nodes.items()},
        row=columns[0],
        col=columns[1],
        edge=columns[2],
        batch={name: found.batch[: ends[-1]] for name, (found, ends) in nodes.items()} if buffers.disjoint else None,
        num_sampled_nodes={name: steps(ends) for name, (_, ends) in nodes.items()},
        num_sampled_edges={kind: steps(ends) for kind, (_, ends) in edges.items()},
    )


class HeteroSampling:
    """One sampling. Its memory grows hop by hop, if bounds are not known or not small.

    Args:
        types: The node types.
        relations: The edge types.
        disjoint: Whether each seed gets a subgraph of its own.
        seed: The random seed, int64 ``[1]``.

    Attributes:
        buffers: What was found.
    """

    def __init__(self, types: Sequence[NodeType], relations: Sequence[Relation], disjoint: bool, seed: Tensor) -> None:
        self._relations = relations
        bounds = hetero_bounds(types, relations, disjoint, SMALL)
        self.buffers = HeteroBuffers(types, relations, disjoint, bounds, seed)
        subgraphs = sum(kind.seeds for kind in types) if disjoint else 1
        self._most = [kind.num_nodes * subgraphs for kind in types]
        self._rows = [kind.seeds for kind in types]
        self._nodes, self._edges = list(self._rows), [0] * len(relations)
        self._found = [0] * len(types)
        self._none = torch.empty(0, dtype=torch.int64, device=seed.device)

    def run(self, seeds: Sequence[Tensor | None], first_batch: Sequence[Tensor | None], limit: Tensor | None) -> Sizes:
        """Samples all hops. Waits for the device.

        Args:
            seeds: See :meth:`gnncompile.sampling.hetero_launch.HeteroBuffers.start`.
            first_batch: The same.
            limit: The time limit of each subgraph, int64, or None.
        """
        buffers = self.buffers
        buffers.start([None if given is None else given.contiguous() for given in seeds], first_batch)
        for hop in range(len(self._relations[0].fan_outs)):
            self._found = [0] * len(self._found)
            for at, one in enumerate(self._relations):
                if self._rows[one.target] and one.fan_outs[hop]:
                    self._draw(at, one.fan_outs[hop], self._none if limit is None else limit)
            self._rows = [min(number, most) for number, most in zip(self._found, self._most, strict=True)]
            buffers.end_hop()
        return buffers.read(buffers.state.tolist())

    def _draw(self, at: int, fan_out: int, limit: Tensor) -> None:
        target = self._relations[at].target
        rows = self._rows[target]
        if fan_out > 0:
            if rows * fan_out > SMALL:
                first, last = (int(self.buffers.state[entry]) for entry in self.buffers.span(target))
                rows = self._rows[target] = last - first
            slots = rows * fan_out
            self._grow(at, slots)
            hop = self.buffers.hop_of(at)
            hop.draw(fan_out, rows, limit)
        else:
            begin, size = self.buffers.hop_of(at).ranges(rows, limit)
            ends = size.cumsum(0)
            slots = int(ends[-1])
            self._grow(at, slots)
            dest = torch.repeat_interleave(torch.arange(rows, device=size.device), size, output_size=slots)
            edge = torch.arange(slots, device=size.device) + (begin - ends + size)[dest]
            hop = self.buffers.hop_of(at)
            hop.take(edge, dest)
        self.buffers.finish(at, hop, slots)

    def _grow(self, at: int, slots: int) -> None:
        """Makes room for the edges in so many slots of an edge type."""
        source = self._relations[at].source
        found = min(slots, self._most[source])
        self._found[source] += found
        self._nodes[source], self._edges[at] = self._nodes[source] + found, self._edges[at] + slots
        self.buffers.grow(at, self._nodes[source], self._edges[at])
