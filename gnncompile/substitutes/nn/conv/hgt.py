"""HGT: attention over the edges of all types. See :class:`torch_geometric.nn.HGTConv`.

One table of queries holds the nodes of all types, one type after another. The tables of keys and values have a row per
node and edge type that starts at the node's type. So one walk over all edges serves all edge types. One product per
node type makes its part of a table: the weights of edge types multiply the weights of node types, not the nodes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HeteroDictLinear, HeteroLinear, HGTConv, Linear

from gnncompile._compat import copy_of
from gnncompile.substitutes.nn.conv.typed_linear import is_plain
from gnncompile.substitutes.registry import substitute
from gnncompile.substitutes.relation_tables import is_edge_list, is_own, segment_reduce, segment_softmax, to

_hgt_forward = copy_of(HGTConv.forward)

_KEYS, _QUERIES, _VALUES = range(3)


@torch.compiler.assume_constant_result
def _own_tables(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(HGTConv, name) for name in ("_cat", "_construct_src_node_feat"))


def _plain_layers(conv: Any) -> bool:
    edges, nodes = (conv.k_rel, conv.v_rel), conv.kqv_lin
    if not all(is_plain(layer, HeteroLinear) for layer in edges) or not is_plain(nodes, HeteroDictLinear):
        return False
    return all(is_plain(layer, Linear) for layer in nodes.lins.values())


def _takes(conv: Any, edge_index_dict: Any) -> bool:
    own = is_own(conv, HGTConv, ("sum",)) and _own_tables(type(conv)) and conv.flow == "source_to_target"
    if not own or not _plain_layers(conv):
        return False
    # PyG assumes that edge types come in the order of the metadata, and uses other weights for any other order.
    order = [conv.edge_types_map[kind] for kind in edge_index_dict]
    return len(order) > 0 and order == sorted(order) and all(map(is_edge_list, edge_index_dict.values()))


def _checked(nodes: Tensor, x: Tensor, rows: int, first: Any) -> Tensor:
    """The row of each node in a table with `rows` rows per node, after `first` rows.

    A node index out of range gives -1, which raises an error when the layout is built.
    """
    nodes = to(nodes, torch.int64)
    return torch.where((nodes >= 0) & (nodes < x.size(0)), nodes * rows + first, -1)


class _Edges:
    """The edges of all types, as rows of the tables.

    Attributes:
        leaving: By node type: the edge types that start there.
        first: By node type: its first row in the table of queries.
        num_rows: The number of rows of the table of queries.
        source: The row of each edge in the tables of keys and values, ``[num_edges]``.
        destination: The row of each edge in the table of queries, ``[num_edges]``.
    """

    def __init__(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> None:
        self.leaving = {key: [kind for kind in edge_index_dict if kind[0] == key] for key in x_dict}
        self.first: dict[str, Any] = {}
        first_source: dict[str, Any] = {}
        self.num_rows, sources = 0, 0
        for key, x in x_dict.items():
            self.first[key], first_source[key] = self.num_rows, sources
            self.num_rows = self.num_rows + x.size(0)
            sources = sources + x.size(0) * len(self.leaving[key])
        ends: list[tuple[Tensor, Tensor]] = []
        for kind, edge_index in edge_index_dict.items():
            among = self.leaving[kind[0]]
            source = _checked(edge_index[0], x_dict[kind[0]], len(among), first_source[kind[0]] + among.index(kind))
            ends.append((source, _checked(edge_index[1], x_dict[kind[-1]], 1, self.first[kind[-1]])))
        self.source, self.destination = (torch.cat(rows) for rows in zip(*ends, strict=True))


def _weights(conv: Any, layer: Any, kinds: list[Any]) -> Tensor:
    """The weights of some edge types in `layer`, ``[types, heads, channels, channels]``."""
    weight = layer.weight.view(conv.heads, len(conv.edge_types), *layer.weight.shape[1:])
    return torch.stack([weight[:, conv.edge_types_map[kind]] for kind in kinds])


def _scaled(conv: Any, weights: Tensor, kinds: list[Any]) -> Tensor:
    """The weights of keys, times the prior of each edge type and head, divided by ``sqrt(channels per head)``."""
    priors = torch.stack([conv.p_rel["__".join(kind)].view(-1, 1, 1) for kind in kinds])
    return weights * (priors / math.sqrt(weights.size(-1)))


def _rows(conv: Any, x: Tensor, layer: Any, part: int, weights: Tensor | None = None) -> Tensor:
    """The rows of one node type in a table, ``[num_nodes * types, heads, channels]``.

    Args:
        conv: The layer of the model.
        x: The nodes of one type, ``[num_nodes, in_channels]``.
        layer: The linear layer of this node type, which makes keys, queries and values.
        part: The third of the layer's results: keys, queries or values.
        weights: The weights of edge types that multiply the result, ``[types, heads, channels, channels]``; None for
            queries.
    """
    heads, width = conv.heads, conv.out_channels
    weight, bias = (p[part * width : (part + 1) * width] for p in (layer.weight, layer.bias))
    if weights is not None:
        joined = torch.cat([weight, bias.unsqueeze(1)], 1).view(heads, width // heads, -1)
        joined = (weights.transpose(2, 3) @ joined).flatten(0, 2)
        weight, bias = joined[:, :-1].contiguous(), joined[:, -1]
    return F.linear(x, weight, bias).view(-1, heads, width // heads)


def _attend(conv: Any, x_dict: dict[str, Tensor], edges: _Edges) -> Tensor:
    """The reduced messages of the nodes of all types, ``[num_rows, out_channels]``."""
    tables: tuple[list[Tensor], ...] = ([], [], [])
    for key, x in x_dict.items():
        layer, kinds = conv.kqv_lin.lins[key], edges.leaving[key]
        tables[_QUERIES].append(_rows(conv, x, layer, _QUERIES))
        if kinds:
            of_keys = _scaled(conv, _weights(conv, conv.k_rel, kinds), kinds)
            tables[_KEYS].append(_rows(conv, x, layer, _KEYS, of_keys))
            tables[_VALUES].append(_rows(conv, x, layer, _VALUES, _weights(conv, conv.v_rel, kinds)))
    k, q, v = (torch.cat(table) for table in tables)
    logits = (q.index_select(0, edges.destination) * k.index_select(0, edges.source)).sum(-1)
    logits = to(logits, torch.promote_types(logits.dtype, conv.k_rel.weight.dtype))
    alpha = segment_softmax(logits, edges.destination, edges.num_rows)
    messages = v.index_select(0, edges.source) * alpha.unsqueeze(-1)
    return segment_reduce(messages, edges.destination, edges.num_rows, "sum").flatten(1)


@substitute(HGTConv.forward)
def hgt_forward(self: Any, x_dict: Any, edge_index_dict: Any) -> Any:
    """See :meth:`torch_geometric.nn.HGTConv.forward`."""
    if not _takes(self, edge_index_dict):
        return _hgt_forward(self, x_dict, edge_index_dict)
    nodes = {key: x_dict[key] for key in self.kqv_lin.lins.keys() if key in x_dict}  # noqa: SIM118
    edges = _Edges(nodes, edge_index_dict)
    received = _attend(self, nodes, edges)
    out_dict = {}
    for key, first in edges.first.items():
        if key in self.dst_node_types:
            out_dict[key] = received[first : first + nodes[key].size(0)]
    a_dict = self.out_lin({key: F.gelu(out) for key, out in out_dict.items()})
    for key in out_dict:
        out = a_dict[key]
        if out.size(-1) == x_dict[key].size(-1):
            alpha = self.skip[key].sigmoid()
            out = alpha * out + (1 - alpha) * x_dict[key]
        out_dict[key] = out
    return out_dict
