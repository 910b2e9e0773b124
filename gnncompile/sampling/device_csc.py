"""A graph in CSC order on a GPU, as the kernels that sample read it: its checks, and the errors of the kernels. Imports
Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnncompile.codegen.triton.launcher import runs_on
from gnncompile.exc import ArgumentError, IndexOutOfRangeError, UnsupportedSampling
from gnncompile.sampling import kernels
from gnncompile.sampling.arguments import UNKNOWN, check_exclusive, check_strategy, vector

MOST_DRAWS = 1024
"""The largest fan-out besides "all". A program keeps the draws of a node in registers."""

LARGEST_TABLE = 2**28
"""The most nodes of a graph for which a table has an entry per node; 1 GiB. Larger graphs use a hash table."""


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph in CSC order on a GPU, and how its neighbours are drawn. :func:`checked` makes it.

    Attributes:
        colptr: The first edge of each destination, ``[num_nodes + 1]``.
        row: The source of each edge, ``[num_edges]``.
        node_time: The time of each node, ``[num_nodes]``, or None.
        edge_time: The time of each edge, ``[num_edges]``, or None.
        weight: The weight of each edge, ``[num_edges]``, or None.
        replace: Whether a neighbour may be drawn several times.
        disjoint: Whether each seed gets a subgraph of its own.
        last: Whether the latest neighbours are taken, not any earlier ones.
        name: What errors call an argument of this graph, with ``{}`` in the place of the argument.
        num_sources: The number of nodes that may be sources.
    """

    colptr: Tensor
    row: Tensor
    node_time: Tensor | None
    edge_time: Tensor | None
    weight: Tensor | None
    replace: bool
    disjoint: bool
    last: bool
    name: str
    num_sources: int

    @property
    def num_nodes(self) -> int:
        """The number of nodes that may be destinations. In a graph of one node type these are all nodes."""
        return self.colptr.numel() - 1

    @property
    def is_temporal(self) -> bool:
        """Whether neighbours have times."""
        return self.node_time is not None or self.edge_time is not None

    @cached_property
    def time(self) -> Tensor:
        """The times; any tensor if there are none."""
        found = self.edge_time if self.node_time is None else self.node_time
        return self.colptr if found is None else found

    @property
    def time_of(self) -> str:
        """What the times belong to: "none", "node" or "edge"."""
        return "node" if self.node_time is not None else "none" if self.edge_time is None else "edge"

    @cached_property
    def types(self) -> str:
        """The dtypes of the tensors, for which kernels are compiled."""
        weight = "" if self.weight is None else self.weight.dtype
        return f"{self.colptr.dtype} {self.row.dtype} {self.time.dtype} {weight}"

    @cached_property
    def slot_dtype(self) -> torch.dtype:
        """The dtype of the positions of edges while they are in slots."""
        return torch.int32 if self.row.numel() < 2**31 else torch.int64


def can_sample(device: torch.device) -> bool:
    """Whether the kernels run on a device: a GPU, or a CPU with Triton's interpreter."""
    return runs_on(kernels.start, device)


def checked(
    colptr: Tensor,
    row: Tensor,
    *,
    node_time: Tensor | None,
    edge_time: Tensor | None,
    weight: Tensor | None,
    replace: bool,
    disjoint: bool,
    temporal_strategy: str,
    directed: bool,
    name: str = "{}",
    num_sources: int | None = None,
) -> Graph:
    """Returns the graph. Raises an error for arguments that do not fit together, without a look at their values.

    `name` is that of :class:`Graph`. `num_sources` is given if sources and destinations are of two node types; a
    negative number is an unknown one.
    """
    if not can_sample(colptr.device):
        raise ArgumentError(
            f"{name.format('colptr')}: found a tensor on {colptr.device}, expected one on a GPU; move the graph there "
            "with .cuda(), or sample on the CPU with gnncompile.sampling.neighbors."
        )
    if not directed:
        raise UnsupportedSampling("directed=False: induced subgraphs are sampled on the CPU only")
    check_strategy(temporal_strategy)
    check_exclusive(node_time, edge_time, weight, disjoint)
    integers, device = (torch.int32, torch.int64), colptr.device
    colptr = vector(name.format("colptr"), colptr, integers, None, device)
    row = vector(name.format("row"), row, integers, None, device)
    if colptr.numel() < 1:
        raise ArgumentError(f"{name.format('colptr')}: found no entry, expected the number of nodes plus 1.")
    edges, times = row.numel(), (torch.int64,)
    sources = colptr.numel() - 1 if num_sources is None else num_sources
    known = None if sources < 0 else sources
    return Graph(
        colptr,
        row,
        None if node_time is None else vector(name.format("node_time"), node_time, times, known, device),
        None if edge_time is None else vector(name.format("edge_time"), edge_time, times, edges, device),
        None
        if weight is None
        else vector(name.format("weight"), weight, (torch.float32, torch.float64), edges, device),
        replace,
        disjoint,
        temporal_strategy == "last",
        name,
        UNKNOWN if known is None else known,
    )


def fan_outs_of(num_neighbors: Sequence[int]) -> tuple[int, ...]:
    """Returns the fan-outs. -1 takes all neighbours."""
    found = tuple(max(int(number), -1) for number in num_neighbors)
    if max(found, default=0) > MOST_DRAWS:
        raise UnsupportedSampling(
            f"num_neighbors: found {max(found)}, expected at most {MOST_DRAWS} on a GPU, or -1 for all neighbours"
        )
    return found


def complain(flags: int, graph: Graph) -> None:
    """Raises the error for the problems that the kernels have found."""
    name = graph.name
    if flags & kernels.BAD_SEED.value:
        complain_of_seeds("seeds", graph.num_nodes)
    if flags & kernels.BAD_GRAPH.value:
        raise IndexOutOfRangeError(
            f"{name.format('row')} or {name.format('colptr')}: found a source outside of 0 to {graph.num_sources - 1}, "
            f"or edges outside of 0 to {graph.row.numel()}, expected a graph in CSC order; check edge_index and "
            "num_nodes."
        )
    if flags & kernels.NOT_SORTED.value:
        raise ArgumentError(
            f"{name.format(f'{graph.time_of}_time')}: found neighbours that are not sorted by time, expected ascending "
            "times within each neighbourhood; sort the edges by destination, then by time."
        )
    if flags & kernels.BAD_WEIGHT.value:
        raise ArgumentError(
            f"{name.format('weight')}: found a negative, infinite or NaN weight, or with replace=True only zeros for a "
            "node; expected finite numbers of 0 or more; change the weights."
        )


def complain_of_seeds(name: str, num_nodes: int) -> None:
    """Raises the error for seeds outside the graph."""
    raise IndexOutOfRangeError(
        f"{name}: found a node outside the graph, expected 0 to {num_nodes - 1}; -1 only after the last seed."
    )


def needs_hash(graph: Graph) -> bool:
    """Whether a hash table maps nodes to local ids, rather than a table with an entry per node."""
    return graph.disjoint or graph.num_nodes > LARGEST_TABLE
