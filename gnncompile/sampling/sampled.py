"""A mini-batch that was sampled on a device, and the seeds that it starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class Seeds(NamedTuple):
    """The seeds of a mini-batch, on the host.

    Attributes:
        node: The nodes to start from, int64 ``[num_seeds]``. Seeds of several node types follow each other.
        time: The time of each seed, an integer, ``[num_seeds]``, or None.
        input_id: The position of each seed in the input of a loader of nodes, int64 ``[num_seeds]``. None for links.
        labels: What a loader of links says of a mini-batch: PyG's attributes, by store and name. The store of a graph
            with one node type is None.
        groups: For disjoint subgraphs of links: seeds with the same remainder by this number share a subgraph's index.
        types: The node types of seeds and their numbers, in the order of the seeds; None for one node type.
        limit: The time of each seed by which neighbours are chosen; None if `time` is it, or if there is none.
    """

    node: Tensor
    time: Tensor | None
    input_id: Tensor | None
    labels: dict[tuple[Any, str], Tensor]
    groups: int | None
    types: tuple[tuple[str, int], ...] | None = None
    limit: Tensor | None = None


class FoundNodes(NamedTuple):
    """The nodes of one type.

    Attributes:
        node: As in :class:`gnncompile.sampling.neighborhood.Neighborhood`.
        batch: For disjoint subgraphs, the seed's position for each node, int64; otherwise None.
        ends: The valid nodes up to the seeds and up to each hop.
        at: The entries of `state` with these numbers.
    """

    node: Tensor
    batch: Tensor | None
    ends: list[int]
    at: list[int]


class FoundEdges(NamedTuple):
    """The edges of one type.

    Attributes:
        row: The local source of each edge, int64.
        col: The local destination of each edge, int64, ascending.
        edge: The position of each edge in CSC order, int64.
        ends: The valid edges up to each hop.
        at: The entries of `state` with these numbers.
        highest: One more than the last source, or None if the host does not know it; and one more than the last
            destination. Both are 0 if there is no edge.
    """

    row: Tensor
    col: Tensor
    edge: Tensor
    ends: list[int]
    at: list[int]
    highest: tuple[int | None, int]


@dataclass(frozen=True, eq=False)
class Sampled:
    """A sampled mini-batch, on the device. Tensors may be longer than the valid rows, which come first.

    Attributes:
        nodes: The nodes of each node type.
        edges: The edges of each edge type.
        state: Numbers of valid rows, int64.
        input_id: As in :class:`Seeds`, int64, or None.
        time: As in :class:`Seeds`, int64, or None.
        seeds: The number of seeds.
        labels: As in :class:`Seeds`.
        groups: As in :class:`Seeds`.
        place: Which memory the tensors are in, if the sampler uses it again; else None.
        rows: The rows of attributes that were gathered ahead: by whether they are of nodes, the position of the type,
            and the name. Valid rows come first.
    """

    nodes: tuple[FoundNodes, ...]
    edges: tuple[FoundEdges, ...]
    state: Tensor
    input_id: Tensor | None
    time: Tensor | None
    seeds: int
    labels: dict[tuple[Any, str], Tensor]
    groups: int | None
    place: int | None
    rows: dict[tuple[bool, int, str], Tensor] = field(default_factory=dict)
