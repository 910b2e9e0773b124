"""PyG's layers with typed edges, without their loop over boolean masks (whose sizes depend on data).

The edges of relation r between source j and destination i are the edges from row ``j * R + r`` of a table with a row
per node and relation, or to row ``i * R + r`` of such a table: one walk over all edges serves all relations, and one
matrix product makes the table. Which edge belongs to which row is graph structure, worked out once per graph.

Relations are taken in groups, so that a row of a table stays within :data:`TABLE_WIDTH` channels per node; a group's
walk skips the edges of other groups. What is not PyG's own layer on a plain edge list (a subclass with another message,
an explainer, a sparse matrix) is traced as written.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import FastRGCNConv, FiLMConv, Linear, RGCNConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

_mark_dead: Callable[[Tensor, Tensor], Tensor] = torch.ops.gnncompile.mark_dead
_segment_reduce: Callable[[Tensor, Tensor, int, str], Tensor] = torch.ops.gnncompile.segment_reduce

TABLE_WIDTH = 512
"""Channels per node in one table: 8 relations of 128 channels take two tables, each 340 MiB for 169,000 nodes in
float32, of which one at a time is alive."""

_REDUCTIONS = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}


def copy_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same code as another function object: Dynamo substitutes by object, so this one is traced as written."""
    return types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


_rgcn_forward = copy_of(RGCNConv.forward)
_fast_rgcn_forward = copy_of(FastRGCNConv.forward)
_film_forward = copy_of(FiLMConv.forward)


@torch.compiler.assume_constant_result
def _overrides(kind: type, base: type) -> bool:
    names = ("message", "aggregate", "update", "message_and_aggregate", "edge_update")
    return any(getattr(kind, name) is not getattr(base, name) for name in names)


def _is_plain(conv: Any, base: type, edge_index: Any, edge_type: Any) -> bool:
    """Whether propagate() does no more than the class says (PyG runs no hooks of it under a compiler)."""
    if _overrides(type(conv), base) or conv._explain or type(conv.aggr_module) not in _REDUCTIONS:
        return False
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided or edge_index.dim() != 2:
        return False
    return isinstance(edge_type, Tensor) and edge_type.dim() == 1 and not _is_float(edge_type)


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex() or x.dtype == torch.bool


def _to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A conversion, and no operation where there is nothing to convert."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class _Group:
    """The edges of some relations.

    Attributes:
        count: How many relations.
        relation: Of each edge, counted from the group's first, ``[num_edges]``; 0 for edges of other groups.
        alive: Whether an edge is in the group, bool ``[num_edges]``.
        source: The end that messages come from, ``[num_edges]``.
        destination: The end where they are reduced, ``[num_edges]``.
        known: Whether an edge's type is one of the layer's, bool ``[num_edges]``; None where other types are nobody's.
    """

    def __init__(self, conv: Any, edge_index: Tensor, edge_type: Tensor, first: int, count: int, counted: bool) -> None:
        forward = conv.flow == "source_to_target"
        self.count = count
        self.alive = (edge_type >= first) & (edge_type < first + count)
        self.relation = torch.where(self.alive, _to(edge_type, torch.int64) - first, 0)
        self.source = _to(edge_index[0 if forward else 1], torch.int64)
        self.destination = _to(edge_index[1 if forward else 0], torch.int64)
        # PyG counts the edges of each type in some layers, and raises for a type too many.
        self.known = (edge_type >= 0) & (edge_type < conv.num_relations) if counted else None

    def rows(self, nodes: Tensor) -> Tensor:
        """Rows of a table ``[num_nodes * count, ...]``."""
        rows = nodes * self.count + self.relation
        if self.known is not None:
            rows = torch.where(self.known, rows, -1)  # an error where the layout is built
        return _mark_dead(rows, self.alive)

    def nodes(self, nodes: Tensor) -> Tensor:
        """Rows of a table ``[num_nodes, ...]``."""
        return _mark_dead(nodes, self.alive)

    def share(self, num_nodes: int, like: Tensor) -> Tensor:
        """1 / (number of edges of the same relation to the same destination), ``[num_edges, 1]``."""
        ones = torch.ones(self.alive.size(0), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        rows = self.rows(self.destination)
        count = _segment_reduce(ones, rows, num_nodes * self.count, "sum")
        rows = rows.clamp(0, num_nodes * self.count - 1)
        return count.clamp(min=1).reciprocal().index_select(0, rows).view(-1, 1)


def _groups(num_relations: int, channels: int) -> list[tuple[int, int]]:
    """(first relation, how many) of each group."""
    most = max(TABLE_WIDTH // channels, 1)
    return [(first, min(most, num_relations - first)) for first in range(0, num_relations, most)]


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight[r]`` for all r: ``[num_nodes * relations, out_channels]``.

    Args:
        x: ``[num_nodes, in_channels]``.
        weight: ``[relations, in_channels, out_channels]``.
    """
    relations, inner, outer = weight.shape
    made = x @ weight.transpose(0, 1).reshape(inner, relations * outer)
    return made.view(x.size(0) * relations, outer)


def _dense(weight: Tensor) -> Tensor:
    """Blocks ``[relations, blocks, in / blocks, out / blocks]`` on the diagonals of ``[relations, in, out]``.

    The zeros beside them are multiplied as well; products of single blocks would have to be put in order afterwards,
    which takes a walk over the whole table.
    """
    relations, blocks, inner, outer = weight.shape
    diagonal = torch.eye(blocks, dtype=weight.dtype, device=weight.device).view(1, blocks, 1, blocks, 1)
    return (weight.unsqueeze(3) * diagonal).view(relations, blocks * inner, blocks * outer)


def _relational(
    conv: Any, x: Tensor, weight: Tensor, edge_index: Tensor, edge_type: Tensor, num_rows: int, reduce: str
) -> Tensor:
    """``sum_r reduce_{j in N_r(i)} x_j @ weight[r]``: ``[num_rows, out_channels]``.

    Sums and means are linear, so products come first: their gradient needs none of what was gathered, and nothing is
    kept for it. Where rows are much narrower before the product, or the reduction is not linear, they are reduced
    first.
    """
    out: Tensor | None = None
    inner, outer = conv.in_channels_l, conv.out_channels
    linear = reduce in ("sum", "mean")
    first_products = linear and outer <= 2 * inner
    for first, count in _groups(conv.num_relations, outer if first_products else inner):
        group = _Group(conv, edge_index, edge_type, first, count, conv.num_blocks is None)
        part = weight[first : first + count]
        if first_products:
            messages = _products(x, part).index_select(0, group.rows(group.source))
            if reduce == "mean":
                messages = _to(messages * group.share(num_rows, x), messages.dtype)
            part_sum = _segment_reduce(messages, group.nodes(group.destination), num_rows, "sum")
        else:
            messages = x.index_select(0, group.nodes(group.source))
            rows = group.rows(group.destination)
            reduced = _segment_reduce(messages, rows, num_rows * count, reduce)
            part_sum = reduced.view(num_rows, count * inner) @ part.reshape(count * inner, outer)
        out = part_sum if out is None else out + part_sum
    assert out is not None, "a layer has at least one relation"
    return out


def _relational_embedding(
    conv: Any, nodes: Tensor, weight: Tensor, edge_index: Tensor, edge_type: Tensor, num_rows: int, reduce: str
) -> Tensor:
    """``sum_r reduce_{j in N_r(i)} weight[r, nodes_j]``: the table is the weight itself."""
    relations, inner, outer = weight.shape
    group = _Group(conv, edge_index, edge_type, 0, relations, counted=True)
    rows = _mark_dead(group.relation * inner + nodes.index_select(0, group.source), group.alive)
    messages = weight.reshape(relations * inner, outer).index_select(0, rows)
    if reduce in ("sum", "mean"):
        if reduce == "mean":
            messages = _to(messages * group.share(num_rows, weight), messages.dtype)
        return _segment_reduce(messages, group.nodes(group.destination), num_rows, "sum")
    reduced = _segment_reduce(messages, group.rows(group.destination), num_rows * relations, reduce)
    return reduced.view(num_rows, relations, outer).sum(1)


def _rgcn(conv: Any, x: Any, edge_index: Tensor, edge_type: Tensor) -> Tensor:
    """See :class:`torch_geometric.nn.RGCNConv`."""
    x_l = x[0] if isinstance(x, tuple) else x
    if x_l is None:
        x_l = torch.arange(conv.in_channels_l, device=conv.weight.device)
    x_r = x[1] if isinstance(x, tuple) else x_l
    weight = conv.weight
    if conv.num_bases is not None:
        weight = (conv.comp @ weight.view(conv.num_bases, -1)).view(
            conv.num_relations, conv.in_channels_l, conv.out_channels
        )
    elif conv.num_blocks is not None:
        weight = _dense(weight)
    num_rows = x_r.size(0) if conv.flow == "source_to_target" else x_l.size(0)
    reduce = _REDUCTIONS[type(conv.aggr_module)]
    layer = _relational if x_r.is_floating_point() else _relational_embedding
    out = layer(conv, x_l, weight, edge_index, edge_type, num_rows, reduce)
    # PyG adds to zeros of the default type.
    out = _to(out, torch.promote_types(out.dtype, torch.get_default_dtype()))
    if conv.root is not None:
        out = out + (x_r @ conv.root if x_r.is_floating_point() else conv.root[x_r])
    return out if conv.bias is None else out + conv.bias


def _takes(conv: Any, x: Any) -> bool:
    """Whether features are a matrix, or indices of embeddings, at both ends of an edge."""
    ends = x if isinstance(x, tuple) else (x, x)
    if len(ends) != 2 or ends[1] is None:
        return ends[0] is None and ends[1] is None and conv.num_blocks is None and not isinstance(x, tuple)
    if ends[0] is None:
        return False
    if ends[0].is_floating_point() and ends[1].is_floating_point():
        return bool(ends[0].dim() == 2 and ends[1].dim() == 2)
    if _is_float(ends[0]) or _is_float(ends[1]) or conv.num_blocks is not None:
        return False
    return bool(ends[0].dim() == 1 and ends[1].dim() == 1)


def rgcn_forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.RGCNConv.forward`."""
    if not _is_plain(self, RGCNConv, edge_index, edge_type) or not _takes(self, x):
        return _rgcn_forward(self, x, edge_index, edge_type)
    return _rgcn(self, x, edge_index, edge_type)


def fast_rgcn_forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.FastRGCNConv.forward`."""
    # Given indices it reads the embedding of the edge's node, whatever the index says.
    plain = _is_plain(self, FastRGCNConv, edge_index, edge_type) and _takes(self, x)
    features = x[0] if isinstance(x, tuple) else x
    indices = features is not None and not features.is_floating_point()
    if not plain or self.aggr not in ("add", "sum", "mean") or indices:
        return _fast_rgcn_forward(self, x, edge_index, edge_type)
    self.fuse = False
    return _rgcn(self, x, edge_index, edge_type)


def _tables(layers: Any, x: Tensor, channels: int) -> list[Tensor]:
    """What layers (one per relation) make of `x`, as tables ``[num_nodes * relations, channels]``: one, or several from
    layers with several times as many outputs. Linear layers are one product per table.
    """
    wide = [len(layers) * x.size(0), channels]
    if all(type(one) is Linear and not one._forward_hooks and not one._forward_pre_hooks for one in layers):
        made = []
        for at in range(0, layers[0].out_channels, channels):
            weight = torch.cat([one.weight[at : at + channels] for one in layers])
            bias = None if layers[0].bias is None else torch.cat([one.bias[at : at + channels] for one in layers])
            made.append(F.linear(x, weight, bias).view(wide))
        return made
    parts = [one(x).split(channels, dim=-1) for one in layers]
    return [torch.stack(table, 1).view(wide) for table in zip(*parts, strict=True)]


def film_forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.FiLMConv.forward`."""
    ends = x if isinstance(x, tuple) else (x, x)
    plain = self.num_relations > 1 and _is_plain(self, FiLMConv, edge_index, edge_type) and self.node_dim == -2
    if not plain or len(ends) != 2 or ends[0].dim() != 2 or ends[1].dim() != 2:
        return _film_forward(self, x, edge_index, edge_type)
    num_rows, channels = ends[1].size(0), self.out_channels
    beta, gamma = self.film_skip(ends[1]).split(channels, dim=-1)
    out = gamma * self.lin_skip(ends[1]) + beta
    if self.act is not None:
        out = self.act(out)
    for first, count in _groups(self.num_relations, channels):
        group = _Group(self, edge_index, edge_type, first, count, counted=False)
        (table,) = _tables(self.lins[first : first + count], ends[0], channels)
        beta, gamma = _tables(self.films[first : first + count], ends[1], channels)
        source, rows = group.rows(group.source), group.rows(group.destination)
        messages = gamma.index_select(0, rows) * table.index_select(0, source) + beta.index_select(0, rows)
        if self.act is not None:
            messages = self.act(messages)
        reduced = _segment_reduce(messages, rows, num_rows * count, _REDUCTIONS[type(self.aggr_module)])
        out = out + reduced.view(num_rows, count, channels).sum(1)
    return out


def typed_linear(layers: Any, x: Tensor, kind: Tensor) -> Tensor:
    """``layers[kind[i]](x[i])`` for every row i, by layers with equal numbers of outputs.

    Args:
        layers: One linear layer per kind.
        x: ``[num_nodes, in_channels]``.
        kind: ``[num_nodes]``, from 0 up to the number of layers.
    """
    out: Tensor | None = None
    channels = layers[0].out_channels
    place = torch.arange(x.size(0), device=x.device)
    for first, count in _groups(len(layers), channels):
        (table,) = _tables(layers[first : first + count], x, channels)
        inside = (kind >= first) & (kind < first + count)
        rows = place * count + torch.where(inside, kind - first, 0)
        part = torch.where(inside.view(-1, 1), table.index_select(0, rows), 0)
        out = part if out is None else out + part
    assert out is not None, "there is at least one layer"
    return out


METHODS: dict[Callable[..., Any], Callable[..., Any]] = {
    RGCNConv.forward: rgcn_forward,
    FastRGCNConv.forward: fast_rgcn_forward,
    FiLMConv.forward: film_forward,
}
"""What is traced in place of PyG's methods."""
