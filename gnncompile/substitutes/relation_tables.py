"""Turns message passing over R relations into gathers from, and reductions to, tables with a row per node and relation.

An edge of relation r from source j gathers row ``j * R + r`` of a table of sources. An edge to destination i reduces to
row ``i * R + r`` of a table of destinations. So one walk over all edges serves all relations, and one matrix product
makes a table. The rows of each edge are graph structure, computed once per graph.

Relations are split into groups, so that a table stays within :data:`TABLE_WIDTH` channels per node. The walk of a group
skips the edges of other groups.
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
    """The number of items in each segment, and in all segments before it, both ``[num_segments]``."""
    sizes = segment_reduce(torch.ones_like(index), index, num_segments, "sum")
    return sizes, sizes.cumsum(0) - sizes


TABLE_WIDTH = 512
"""Most channels per node in one table.

8 relations of 128 channels take two tables; one at a time is alive. For 169,000 nodes in float32, a table takes
340 MiB.
"""

REDUCTIONS = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}


@torch.compiler.assume_constant_result
def _overrides(kind: type, base: type) -> bool:
    names = ("message", "aggregate", "update", "message_and_aggregate", "edge_update")
    return any(getattr(kind, name) is not getattr(base, name) for name in names)


def is_own(conv: Any, base: type, reductions: tuple[str, ...] = ("sum", "mean", "max", "min")) -> bool:
    """Whether a layer inherits the messages of `base` unchanged, and has one of these reductions.

    Raises:
        _compat.Recapture: See :func:`gnncompile.substitutes.message_hooks.refuse_hooks`.
    """
    return is_unchanged(conv, base) and REDUCTIONS.get(type(conv.aggr_module)) in reductions


def is_unchanged(conv: Any, base: type) -> bool:
    """Whether a layer inherits the messages of `base` unchanged, with any reduction; raises as :func:`is_own` does."""
    refuse_hooks(conv)
    return not _overrides(type(conv), base)


def is_edge_list(edge_index: Any) -> bool:
    """Whether `edge_index` is a plain, strided tensor with two dimensions, as ``[2, num_edges]``."""
    return type(edge_index) is Tensor and edge_index.layout == torch.strided and edge_index.dim() == 2


def is_typed(edge_index: Any, edge_type: Any) -> bool:
    """Whether `edge_index` is a plain edge list and `edge_type` an integer type per edge."""
    if not is_edge_list(edge_index) or not isinstance(edge_type, Tensor):
        return False
    return edge_type.dim() == 1 and not is_float(edge_type)


def is_float(x: Tensor) -> bool:
    """Whether a tensor holds anything else than integers: floating, complex or bool."""
    return x.is_floating_point() or x.is_complex() or x.dtype == torch.bool


def to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a tensor to a dtype; adds no operation to the graph if the tensor has the dtype already."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class Group:
    """The edges of a group of consecutive relations.

    Attributes:
        count: The number of relations in the group.
        relation: The relation of each edge, counted from the group's first, ``[num_edges]``; 0 for other groups' edges.
        alive: Whether an edge is in the group, bool ``[num_edges]``; None if all edges are.
        source: The end that messages come from, ``[num_edges]``.
        destination: The end where messages are reduced, ``[num_edges]``.
        known: Whether an edge's type is one of the layer's, bool ``[num_edges]``; None if edges of other types are
            ignored.
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
        # Some of PyG's layers count the edges of each type, and raise for a type out of range.
        self.known = (edge_type >= 0) & (edge_type < conv.num_relations) if counted else None

    def rows(self, nodes: Tensor) -> Tensor:
        """The row of each edge in a table ``[num_nodes * count, ...]``, by one of its ends `nodes`."""
        rows = nodes * self.count + self.relation
        if self.known is not None:
            rows = torch.where(self.known, rows, -1)  # -1 raises an error when the layout is built
        return self.mark(rows)

    def nodes(self, nodes: Tensor) -> Tensor:
        """The row of each edge in a table ``[num_nodes, ...]``, by one of its ends `nodes`."""
        return self.mark(nodes)

    def mark(self, rows: Tensor) -> Tensor:
        """The same rows, marked dead for the edges of other groups."""
        return rows if self.alive is None else _mark_dead(rows, self.alive)

    def share(self, num_nodes: int, like: Tensor) -> Tensor:
        """Each edge's weight in a mean per relation and destination, 1 / (number of such edges), ``[num_edges, 1]``."""
        ones = torch.ones(self.source.size(0), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        rows = self.rows(self.destination)
        count = segment_reduce(ones, rows, num_nodes * self.count, "sum")
        rows = rows.clamp(0, num_nodes * self.count - 1)
        return count.clamp(min=1).reciprocal().index_select(0, rows).view(-1, 1)


def groups(num_relations: int, channels: int) -> list[tuple[int, int]]:
    """The groups of a layer's relations, each as (first relation, number of relations)."""
    most = max(TABLE_WIDTH // channels, 1)
    return [(first, min(most, num_relations - first)) for first in range(0, num_relations, most)]


def products(x: Tensor, weight: Tensor) -> Tensor:
    """The table of ``x @ weight[r]`` for all nodes and all r, ``[num_nodes * relations, out_channels]``.

    Args:
        x: ``[num_nodes, in_channels]``.
        weight: ``[relations, in_channels, out_channels]``.
    """
    relations, inner, outer = weight.shape
    made = x @ weight.transpose(0, 1).reshape(inner, relations * outer)
    return made.view(x.size(0) * relations, outer)


def dense(weight: Tensor) -> Tensor:
    """Puts blocks ``[relations, blocks, in / blocks, out / blocks]`` on the diagonals of ``[relations, in, out]``.

    A product then also multiplies the zeros beside the blocks. Products of single blocks would have to be reordered
    afterwards, which takes a walk over all rows of the table.
    """
    relations, blocks, inner, outer = weight.shape
    diagonal = torch.eye(blocks, dtype=weight.dtype, device=weight.device).view(1, blocks, 1, blocks, 1)
    return (weight.unsqueeze(3) * diagonal).view(relations, blocks * inner, blocks * outer)
