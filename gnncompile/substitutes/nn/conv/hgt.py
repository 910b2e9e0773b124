"""HGT: attention over the edges of all types. See :class:`torch_geometric.nn.HGTConv`.

Nodes of all types stand behind each other in one table of queries. The tables of keys and values have a row for each
node and each type of edges that start there. One walk over all edges then serves all types, and one product per type of
nodes makes its part of a table: the weights of edges are applied to the weights of nodes, not to the nodes.
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
    # PyG takes its types as sorted, and takes other weights for edges that come in another order than the metadata's.
    order = [conv.edge_types_map[kind] for kind in edge_index_dict]
    return len(order) > 0 and order == sorted(order) and all(map(is_edge_list, edge_index_dict.values()))


def _checked(nodes: Tensor, x: Tensor, rows: int, first: Any) -> Tensor:
    """The row of each node in a table with some rows per node; -1, which is an error later, where there is no node."""
    nodes = to(nodes, torch.int64)
    return torch.where((nodes >= 0) & (nodes < x.size(0)), nodes * rows + first, -1)


class _Edges:
    """Which rows of the tables all edges join.

    Attributes:
        leaving: The types of edges that start at each type of nodes.
        first: The first row of each type of nodes in the table of queries.
        num_rows: How many rows that has.
        source: Rows of the tables of keys and values, ``[num_edges]``.
        destination: Rows of the table of queries, ``[num_edges]``.
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
    """The weights of some types of edges, ``[types, heads, channels, channels]``."""
    weight = layer.weight.view(conv.heads, len(conv.edge_types), *layer.weight.shape[1:])
    return torch.stack([weight[:, conv.edge_types_map[kind]] for kind in kinds])


def _scaled(conv: Any, weights: Tensor, kinds: list[Any]) -> Tensor:
    """Weights that make keys, times the prior of each type and head and what logits are divided by."""
    priors = torch.stack([conv.p_rel["__".join(kind)].view(-1, 1, 1) for kind in kinds])
    return weights * (priors / math.sqrt(weights.size(-1)))


def _rows(conv: Any, x: Tensor, layer: Any, part: int, weights: Tensor | None = None) -> Tensor:
    """Rows of a table, ``[num_nodes * types, heads, channels]``.

    Args:
        conv: The layer of the model.
        x: The nodes of one type.
        layer: Their linear layer.
        part: Which third of its results.
        weights: What these are multiplied with, ``[types, heads, channels, channels]``; nothing if left out.
    """
    heads, width = conv.heads, conv.out_channels
    weight, bias = (p[part * width : (part + 1) * width] for p in (layer.weight, layer.bias))
    if weights is not None:
        joined = torch.cat([weight, bias.unsqueeze(1)], 1).view(heads, width // heads, -1)
        joined = (weights.transpose(2, 3) @ joined).flatten(0, 2)
        weight, bias = joined[:, :-1].contiguous(), joined[:, -1]
    return F.linear(x, weight, bias).view(-1, heads, width // heads)


def _attend(conv: Any, x_dict: dict[str, Tensor], edges: _Edges) -> Tensor:
    """What arrives at the nodes of all types, ``[num_rows, out_channels]``."""
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
