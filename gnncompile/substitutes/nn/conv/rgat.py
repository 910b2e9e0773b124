"""RGAT: attention over edges with types. See :class:`torch_geometric.nn.RGATConv`.

A logit is the sum or product of two entries per head. The first comes from a table of queries, with a row per
destination and relation. The second comes from a table of keys, with a row per source and relation. Both tables have
one channel per head, so one table holds all relations. A layer with several queries per head computes that many
attentions over the same values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import RGATConv

from gnncompile._compat import copy_of
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import (
    Group,
    dense,
    groups,
    is_own,
    is_typed,
    products,
    segment_reduce,
    segment_softmax,
)

_rgat_forward = copy_of(RGATConv.forward)


def _weight(conv: Any) -> Any:
    """The layer's weight of each relation, ``[relations, in_channels, heads * channels]``."""
    if conv.num_bases is not None:
        made = conv.att @ conv.basis.view(conv.num_bases, -1)
        return made.view(conv.num_relations, conv.in_channels, conv.heads * conv.out_channels)
    return dense(conv.weight) if conv.num_blocks is not None else conv.weight


def _of_query(conv: Any, weight: Tensor, query: int) -> Tensor:
    """The columns of the parameter `q`, `k` or `e` for one query per head, ``[heads * channels, heads]``."""
    return weight.view(-1, conv.heads, conv.dim)[:, :, query]


def _logits(conv: Any, x: Tensor, weight: Tensor, group: Group, edge_attr: Tensor | None, query: int) -> Tensor:
    """The attention logits of one query per head, ``[num_edges, heads]``; `group` holds all relations."""
    additive = conv.attention_mode == "additive-self-attention"
    q, k = (products(x, weight @ _of_query(conv, w, query)) for w in (conv.q, conv.k))
    q_i = q.index_select(0, group.rows(group.destination))
    k_j = k.index_select(0, group.rows(group.source))
    logits = q_i + k_j if additive else q_i * k_j
    if edge_attr is not None:
        weight_e = conv.lin_edge.weight.t() @ _of_query(conv, conv.e, query)
        # With one input channel, torch's matmul would compare the number of rows.
        of_edges = edge_attr * weight_e if edge_attr.size(1) == 1 else edge_attr @ weight_e
        logits = logits + of_edges if additive else logits * of_edges
    return F.leaky_relu(logits, conv.negative_slope) if additive else logits


def _attention(conv: Any, logits: Tensor, group: Group, num_nodes: int) -> Tensor:
    """The softmax of logits, over all edges to a node, or over its edges of one relation."""
    if conv.attention_mechanism == "within-relation":
        return segment_softmax(logits, group.rows(group.destination), num_nodes * conv.num_relations)
    return segment_softmax(logits, group.destination, num_nodes)


def _factors(conv: Any, alpha: Tensor) -> Any:
    """The factors of the values, ``[num_edges, heads, channels]`` or ``[num_edges, heads, 1]``.

    Factors that depend on the destination alone are left to :func:`_scaled`.
    """
    if conv.mod == "additive":
        return alpha.unsqueeze(-1) + conv.w
    if conv.mod == "f-additive":
        alpha = torch.where(alpha > 0, alpha + 1, alpha)
    elif conv.mod not in ("scaled", "f-scaled"):
        alpha = F.dropout(alpha, conv.dropout, conv.training)
    return alpha.unsqueeze(-1)


def _scaled(conv: Any, out: Tensor, destination: Tensor) -> Tensor:
    """Scales `out` ``[num_nodes, ..., channels]`` by each node's number of incoming edges, or by a network of it."""
    if conv.mod not in ("scaled", "f-scaled"):
        return out
    degree = segment_reduce(out.new_ones(destination.size(0)), destination, out.size(0), "sum").view(-1, 1)
    if conv.mod == "scaled":
        degree = conv.activation(degree @ conv.l1 + conv.b1) @ conv.l2 + conv.b2
    return out * degree.view(degree.size(0), *[1] * (out.dim() - 2), -1)


def _values(conv: Any, x: Tensor, weight: Tensor, typed: tuple[Tensor, Tensor], factors: list[Tensor]) -> Tensor:
    """Sums over each node's edges of values times the factors of each query.

    ``[num_nodes, heads, channels]``; with several queries, ``[num_nodes, heads, queries, channels]``.
    """
    sums: list[Tensor] = []
    for first, count in groups(conv.num_relations, conv.heads * conv.out_channels):
        group = Group(conv, *typed, first, count, counted=True)
        table = products(x, weight[first : first + count]).view(-1, conv.heads, conv.out_channels)
        v_j = table.index_select(0, group.rows(group.source))
        index = group.nodes(group.destination)
        parts = [segment_reduce(v_j * factor, index, x.size(0), "sum") for factor in factors]
        sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
    return sums[0] if len(sums) == 1 else torch.stack(sums, 2)


def _update(conv: Any, out: Tensor) -> Tensor:
    out = (out if conv.concat else out.mean(1)).flatten(1)
    return out if conv.bias is None else out + conv.bias


def _takes(conv: Any, x: Tensor, edge_attr: Any) -> bool:
    if x.dim() != 2 or not x.is_floating_point():
        return False
    if edge_attr is None:
        return True
    return conv.lin_edge is not None and edge_attr.is_floating_point() and edge_attr.dim() in (1, 2)


@substitute(RGATConv.forward)
def rgat_forward(
    self: Any,
    x: Any,
    edge_index: Any,
    edge_type: Any = None,
    edge_attr: Any = None,
    size: Any = None,
    return_attention_weights: Any = None,
) -> Any:
    """See :meth:`torch_geometric.nn.RGATConv.forward`."""
    own = is_own(self, RGATConv, ("sum",)) and is_typed(edge_index, edge_type) and size is None
    if not own or not _takes(self, x, edge_attr):
        return _rgat_forward(self, x, edge_index, edge_type, edge_attr, size, return_attention_weights)
    if edge_attr is not None and edge_attr.dim() == 1:
        edge_attr = edge_attr.view(-1, 1)
    weight = _weight(self)
    opaque = Group(self, edge_index, edge_type, 0, self.num_relations, counted=True)
    logits = [_logits(self, x, weight, opaque, edge_attr, query) for query in range(self.dim)]
    alphas = [_attention(self, one, opaque, x.size(0)) for one in logits]
    out = _values(self, x, weight, (edge_index, edge_type), [_factors(self, alpha) for alpha in alphas])
    out = _update(self, _scaled(self, out, opaque.destination))
    if not isinstance(return_attention_weights, bool):
        return out
    return out, (edge_index, torch.stack(alphas, -1).flatten(1))
