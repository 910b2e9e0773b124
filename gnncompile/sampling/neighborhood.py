"""What samplers return: a sampled subgraph of a graph with one node type, or with several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

EdgeType = tuple[str, str, str]


def steps(ends: Sequence[int]) -> list[int]:
    """Returns how many each step has found, from the number after each step."""
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Neighborhood:
    """A sampled subgraph of a graph with one node type. All tensors are int64.

    Attributes:
        node: The nodes of the graph, ``[num_nodes]``: the seeds, then each hop in order of discovery. A seed that is
            given twice stands there twice.
        row: The local source of each edge, ``[num_edges]``. The source is the sampled neighbour.
        col: The local destination of each edge, ``[num_edges]``. Edges follow their destinations.
        edge: The position of each edge in CSC order, ``[num_edges]``; None if the sampler does not say.
        batch: For disjoint subgraphs, the seed's position for each node, ``[num_nodes]``; otherwise None.
        num_sampled_nodes: The number of seeds, then of nodes that each hop has found.
        num_sampled_edges: The number of edges that each hop has sampled; None for induced subgraphs.
    """

    node: Tensor
    row: Tensor
    col: Tensor
    edge: Tensor | None
    batch: Tensor | None
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int] | None


@dataclass(frozen=True)
class HeteroNeighborhood:
    """A sampled subgraph of a graph with several node types. All tensors are int64.

    Attributes:
        node: As in :class:`Neighborhood`, for each node type.
        row: As in :class:`Neighborhood`, for each edge type.
        col: As in :class:`Neighborhood`, for each edge type.
        edge: As in :class:`Neighborhood`, for each edge type.
        batch: As in :class:`Neighborhood`, for each node type. Seeds are counted on from type to type.
        num_sampled_nodes: As in :class:`Neighborhood`, for each node type.
        num_sampled_edges: As in :class:`Neighborhood`, for each edge type.
    """

    node: dict[str, Tensor]
    row: dict[EdgeType, Tensor]
    col: dict[EdgeType, Tensor]
    edge: dict[EdgeType, Tensor] | None
    batch: dict[str, Tensor] | None
    num_sampled_nodes: dict[str, list[int]]
    num_sampled_edges: dict[EdgeType, list[int]] | None
