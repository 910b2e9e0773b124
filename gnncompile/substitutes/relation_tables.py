"""Edges of several relations as rows of tables with a row per node and relation.

The edges of relation r between source j and destination i are the edges from row ``j * R + r`` of a table with a row
per node and relation, or to row ``i * R + r`` of such a table: one walk over all edges serves all relations, and one
matrix product makes the table. Which edge belongs to which row is graph structure, worked out once per graph.

Relations are taken in groups, so that a row of a table stays within :data:`TABLE_WIDTH` channels per node; a group's
walk skips the edges of other groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from gnncompile.substitutes.message_hooks import refuse_hooks

_mark_dead: Callable[[Tensor, Tensor], Tensor] = torch.ops.gnncompile.mark_dead
segment_reduce: Callable[[Tensor, Tensor, int, str], Tensor] = torch.ops.gnncompile.segment_reduce
segment_softmax: Callable[[Tensor, Tensor, int], Tensor] = torch.ops.gnncompile.segment_softmax


def sizes_and_starts(index: Tensor, num_segments: int) -> tuple[Tensor, Tensor]:
    """How many items each segment has, and how many all those before it have, both ``[num_segments]``."""
    sizes = segment_reduce(torch.ones_like(index), index, num_segments, "sum")
    return sizes, sizes.cumsum(0) - sizes


TABLE_WIDTH = 512
"""Channels per node in one table: 8 relations of 128 channels take two tables, each 340 MiB for 169,000 nodes in
float32, of which one at a time is alive."""

REDUCTIONS = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}


@torch.compiler.assume_constant_result
def _overrides(kind: type, base: type) -> bool:
    names = ("message", "aggregate", "update", "message_and_aggregate", "edge_update")
    return any(getattr(kind, name) is not getattr(base, name) for name in names)


def is_own(conv: Any, base: type, reductions: tuple[str, ...] = ("sum", "mean", "max", "min")) -> bool:
    """Whether propagate() does no more than the class says.

    Raises:
        _compat.HookedLayer: See :func:`gnncompile.substitutes.message_hooks.refuse_hooks`.
    """
    return is_unchanged(conv, base) and REDUCTIONS.get(type(conv.aggr_module)) in reductions


def is_unchanged(conv: Any, base: type) -> bool:
    """Whether a layer's messages are those of its class, however they are reduced; raises as :func:`is_own` does."""
    refuse_hooks(conv)
    return not _overrides(type(conv), base)


def is_edge_list(edge_index: Any) -> bool:
    """Whether it is a plain ``[2, num_edges]``."""
    return type(edge_index) is Tensor and edge_index.layout == torch.strided and edge_index.dim() == 2


def is_typed(edge_index: Any, edge_type: Any) -> bool:
    """Whether it is a plain edge list with a type per edge."""
    if not is_edge_list(edge_index) or not isinstance(edge_type, Tensor):
        return False
    return edge_type.dim() == 1 and not is_float(edge_type)


def is_float(x: Tensor) -> bool:
    """Whether it holds anything else than integers."""
    return x.is_floating_point() or x.is_complex() or x.dtype == torch.bool


def to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A conversion, and no operation where there is nothing to convert."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class Group:
    """The edges of some relations.

    Attributes:
        count: How many relations.
        relation: Of each edge, counted from the group's first, ``[num_edges]``; 0 for edges of other groups.
        alive: Whether an edge is in the group, bool ``[num_edges]``; None where all are.
        source: The end that messages come from, ``[num_edges]``.
        destination: The end where they are reduced, ``[num_edges]``.
        known: Whether an edge's type is one of the layer's, bool ``[num_edges]``; None where other types are nobody's.
    """

    alive: Tensor | None

    def __init__(self, conv: Any, edge_index: Tensor, edge_type: Tensor, first: int, count: int, counted: bool) -> None:
        forward = conv.flow == "source_to_target"
        self.count = count
        self.relation, self.alive = to(edge_type, torch.int64), None
        if not counted or count < conv.num_relations:
            self.alive = (edge_type >= first) & (edge_type < first + count)
            self.relation = torch.where(self.alive, self.relation - first, 0)
        self.source = to(edge_index[0 if forward else 1], torch.int64)
        self.destination = to(edge_index[1 if forward else 0], torch.int64)
        # PyG counts the edges of each type in some layers, and raises for a type too many.
        self.known = (edge_type >= 0) & (edge_type < conv.num_relations) if counted else None

    def rows(self, nodes: Tensor) -> Tensor:
        """Rows of a table ``[num_nodes * count, ...]``."""
        rows = nodes * self.count + self.relation
        if self.known is not None:
            rows = torch.where(self.known, rows, -1)  # an error where the layout is built
        return self.mark(rows)

    def nodes(self, nodes: Tensor) -> Tensor:
        """Rows of a table ``[num_nodes, ...]``."""
        return self.mark(nodes)

    def mark(self, rows: Tensor) -> Tensor:
        """The same rows, those of other groups' edges marked dead."""
        return rows if self.alive is None else _mark_dead(rows, self.alive)

    def share(self, num_nodes: int, like: Tensor) -> Tensor:
        """1 / (number of edges of the same relation to the same destination), ``[num_edges, 1]``."""
        ones = torch.ones(self.source.size(0), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        rows = self.rows(self.destination)
        count = segment_reduce(ones, rows, num_nodes * self.count, "sum")
        rows = rows.clamp(0, num_nodes * self.count - 1)
        return count.clamp(min=1).reciprocal().index_select(0, rows).view(-1, 1)


def groups(num_relations: int, channels: int) -> list[tuple[int, int]]:
    """(first relation, how many) of each group."""
    most = max(TABLE_WIDTH // channels, 1)
    return [(first, min(most, num_relations - first)) for first in range(0, num_relations, most)]


def products(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight[r]`` for all r: ``[num_nodes * relations, out_channels]``.

    Args:
        x: ``[num_nodes, in_channels]``.
        weight: ``[relations, in_channels, out_channels]``.
    """
    relations, inner, outer = weight.shape
    made = x @ weight.transpose(0, 1).reshape(inner, relations * outer)
    return made.view(x.size(0) * relations, outer)


def dense(weight: Tensor) -> Tensor:
    """Blocks ``[relations, blocks, in / blocks, out / blocks]`` on the diagonals of ``[relations, in, out]``.

    The zeros beside them are multiplied as well; products of single blocks would have to be put in order afterwards,
    which takes a walk over the whole table.
    """
    relations, blocks, inner, outer = weight.shape
    diagonal = torch.eye(blocks, dtype=weight.dtype, device=weight.device).view(1, blocks, 1, blocks, 1)
    return (weight.unsqueeze(3) * diagonal).view(relations, blocks * inner, blocks * outer)
