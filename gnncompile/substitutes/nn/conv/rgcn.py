"""RGCN: a weight per relation. See :class:`torch_geometric.nn.RGCNConv`, :class:`torch_geometric.nn.FastRGCNConv`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import FastRGCNConv, RGCNConv
from torch_geometric.nn.aggr import (
    MulAggregation,
    PowerMeanAggregation,
    SoftmaxAggregation,
    StdAggregation,
    VarAggregation,
)

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import (
    REDUCTIONS,
    Group,
    dense,
    groups,
    is_float,
    is_own,
    is_typed,
    is_unchanged,
    products,
    segment_reduce,
    to,
)

_rgcn_forward = copy_of(RGCNConv.forward)
_fast_rgcn_forward = copy_of(FastRGCNConv.forward)

_ROW_BY_ROW = (MulAggregation, VarAggregation, StdAggregation, SoftmaxAggregation, PowerMeanAggregation)
"""Aggregations that reduce each destination by its own rows alone, and return as many features as a message has.

``MedianAggregation`` is excluded: it raises an error if the last destinations have no edge.
"""

_OWN = "own"
"""The reduction of a layer with one of these aggregations: its own module reduces."""


def _sums(group: Group, messages: Tensor, num_rows: int, reduce: str, like: Tensor) -> Tensor:
    """The sum of the messages to each node, or the sum of the messages' means per relation.

    Args:
        group: The edges.
        messages: ``[num_edges, out_channels]``.
        num_rows: The number of nodes.
        reduce: ``"sum"`` or ``"mean"``.
        like: A tensor with the device and dtype for the shares of a mean.
    """
    if reduce == "mean":
        messages = to(messages * group.share(num_rows, like), messages.dtype)
    return segment_reduce(messages, group.nodes(group.destination), num_rows, "sum")


def _relational(
    conv: Any, x: Tensor, weight: Tensor, edge_index: Tensor, edge_type: Tensor, num_rows: int, reduce: str
) -> Tensor:
    """``sum_r reduce_{j in N_r(i)} x_j @ weight[r]``: ``[num_rows, out_channels]``.

    Sums and means are linear, so the products come first: then the gradient needs no gathered rows, and none are kept.
    Rows are reduced first if they are much narrower before the product, or if the reduction is not linear. For
    :data:`_OWN`, the layer's aggregation module reduces.
    """
    out: Tensor | None = None
    inner, outer = conv.in_channels_l, conv.out_channels
    linear = reduce in ("sum", "mean")
    first_products = linear and outer <= 2 * inner
    for first, count in groups(conv.num_relations, outer if first_products else inner):
        group = Group(conv, edge_index, edge_type, first, count, conv.num_blocks is None)
        part = weight[first : first + count]
        if first_products:
            messages = products(x, part).index_select(0, group.rows(group.source))
            part_sum = _sums(group, messages, num_rows, reduce, like=x)
        else:
            messages = x.index_select(0, group.nodes(group.source))
            rows = group.rows(group.destination)
            if reduce == _OWN:
                reduced: Tensor = conv.aggr_module(messages, rows, dim_size=num_rows * count)
            else:
                reduced = segment_reduce(messages, rows, num_rows * count, reduce)
            part_sum = reduced.view(num_rows, count * inner) @ part.reshape(count * inner, outer)
        out = part_sum if out is None else out + part_sum
    assert out is not None, "a layer has at least one relation"
    return out


def _is_aggregated(conv: Any) -> bool:
    """Whether a layer has an aggregation of :data:`_ROW_BY_ROW`, and relations that fit into one table."""
    single = len(groups(conv.num_relations, conv.in_channels_l)) == 1 and conv.num_blocks is None
    return single and type(conv.aggr_module) in _ROW_BY_ROW and is_unchanged(conv, RGCNConv)


def _relational_embedding(
    conv: Any, nodes: Tensor, weight: Tensor, edge_index: Tensor, edge_type: Tensor, num_rows: int, reduce: str
) -> Tensor:
    """``sum_r reduce_{j in N_r(i)} weight[r, nodes_j]``: ``[num_rows, out_channels]``. The table is the weight."""
    relations, inner, outer = weight.shape
    group = Group(conv, edge_index, edge_type, 0, relations, counted=True)
    rows = group.mark(group.relation * inner + nodes.index_select(0, group.source))
    messages = weight.reshape(relations * inner, outer).index_select(0, rows)
    if reduce in ("sum", "mean"):
        return _sums(group, messages, num_rows, reduce, like=weight)
    reduced = segment_reduce(messages, group.rows(group.destination), num_rows * relations, reduce)
    return reduced.view(num_rows, relations, outer).sum(1)


def _rgcn(conv: Any, x: Any, edge_index: Tensor, edge_type: Tensor) -> Tensor:
    """The forward of :class:`torch_geometric.nn.RGCNConv`, by tables."""
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
        weight = dense(weight)
    num_rows = x_r.size(0) if conv.flow == "source_to_target" else x_l.size(0)
    reduce = REDUCTIONS.get(type(conv.aggr_module), _OWN)
    layer = _relational if x_r.is_floating_point() else _relational_embedding
    out = layer(conv, x_l, weight, edge_index, edge_type, num_rows, reduce)
    # PyG adds messages to zeros of the default dtype.
    out = to(out, torch.promote_types(out.dtype, torch.get_default_dtype()))
    if conv.root is not None:
        out = out + (x_r @ conv.root if x_r.is_floating_point() else conv.root[x_r])
    return out if conv.bias is None else out + conv.bias


def _takes(conv: Any, x: Any) -> bool:
    """Whether the features at both ends of an edge are matrices, or both are indices of embeddings."""
    ends = x if isinstance(x, tuple) else (x, x)
    if len(ends) != 2 or ends[1] is None:
        return ends[0] is None and ends[1] is None and conv.num_blocks is None and not isinstance(x, tuple)
    if ends[0] is None:
        return False
    if ends[0].is_floating_point() and ends[1].is_floating_point():
        return bool(ends[0].dim() == 2 and ends[1].dim() == 2)
    if is_float(ends[0]) or is_float(ends[1]) or conv.num_blocks is not None:
        return False
    return bool(ends[0].dim() == 1 and ends[1].dim() == 1)


def _has_features(x: Any) -> bool:
    """Whether the sources have features, not indices of embeddings; for `x` that :func:`_takes` accepts."""
    ends = x if isinstance(x, tuple) else (x,)
    return ends[0] is not None and bool(ends[0].is_floating_point())


@substitute(RGCNConv.forward)
def rgcn_forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.RGCNConv.forward`."""
    plain = is_typed(edge_index, edge_type) and _takes(self, x)
    if not plain or not (is_own(self, RGCNConv) or (_is_aggregated(self) and _has_features(x))):
        return _rgcn_forward(self, x, edge_index, edge_type)
    return _rgcn(self, x, edge_index, edge_type)


@substitute(FastRGCNConv.forward)
def fast_rgcn_forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
    """See :meth:`torch_geometric.nn.FastRGCNConv.forward`."""
    # Given indices, FastRGCNConv reads the embedding of the edge's node, and ignores the index.
    plain = is_own(self, FastRGCNConv) and is_typed(edge_index, edge_type) and _takes(self, x)
    features = x[0] if isinstance(x, tuple) else x
    indices = features is not None and not features.is_floating_point()
    if not plain or self.aggr not in ("add", "sum", "mean") or indices:
        return _fast_rgcn_forward(self, x, edge_index, edge_type)
    self.fuse = False
    return _rgcn(self, x, edge_index, edge_type)
